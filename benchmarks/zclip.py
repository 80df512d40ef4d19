"""
What adaptive clipping is worth where the loss has spikes, or ends too high: no clipping, fixed clipping, ZClip.

A small Llama learns the docstrings of Python's standard library, with AdamW. First the learning rates are scanned with
fixed clipping at 1.0, the Trainer's default. The methods are then compared at the lowest rate, above the best one, at
which fixed clipping leaves spikes in the loss. The seed makes the weights and the order of the rows.

```bash
python benchmarks/zclip.py
python benchmarks/zclip.py --mild
python benchmarks/zclip.py --quick
```

This setting was searched with fixed clipping alone, for spikes of its loss, before another method had run in it. With
the second beta of the Trainer, 0.999, there were none: too high a rate makes this model worse, and gives spikes of the
gradient norm, but no loss stood more than 2.8 standard deviations above the average. Tried were single runs at rates
from 0.003 to 0.5, 256 to 3072 tokens a step, widths from 32 to 256, 2 and 4 layers, with and without a warm-up, and
with other betas: the second one 0.99 or 0.9999, the first one 0. It took betas of 0.98 and 0.9, which hardly anybody
trains with: the average of the gradients then outlives that of their squares, by which the updates are divided, and
updates can become very large. With the Trainer's betas, and all else as here, the run with fixed clipping, rate 0.003
and seed 0 has no spikes and ends at 3.207, about half a nat below the best method here. What the score then finds is
not training that blows up. The tallest spike was looked into (fixed clipping, rate 0.003, seed 0, step 568, a loss of
132): one row of the batch has 97% of it, by tokens that no earlier batch had and whose logits had sunk to thousands
below the others; that batch's loss was 118 already at step 450, while that of other batches fell as usual. Such a
spike is drift of the embeddings of unseen tokens, which the betas make and a batch brings to light, so the methods
have their spikes at mostly the same steps. No setting was found in which fixed clipping leaves spikes of the usual
kind. `--mild` is the other half: the betas of the Trainer, few rows to a step, no warm-up, and the lowest rate that
ends more than `UNSTABLE` nats of held-out loss above the best one.

The loop is plain torch, because so small a step would be lost in a trainer's own work; the clipping is that of
`self_healing.healers.numerics.clipping`. Reported are the held-out loss at the end and the spike scores of loss and
gradient norm.
OLMo 2 (arXiv:2501.00656, section 3) defines the spike score as the share of values that are at least seven standard
deviations away from the average of the last 1,000 values. Here only values above the average count, the value itself
is not in its average, and where there are less than 1,000 values before it, those there are; the first 25 are not
judged. In a run this short, one tall spike widens the deviation for all steps that follow and hides the next ones from
the score. `jumps` does not have that weakness: the share of losses at least a nat above the median of the last 100.
"""

import argparse
import json
import math
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import self_healing
from self_healing.healers.numerics.clipping import ZClip
from self_healing.hf.state import total_gradient_norm
from self_healing.tools.demo.model import DemoSize, small_llama, stdlib_docstrings, train_tokenizer


ROOT = Path(__file__).parent.parent
FIXED = 1.0
# Held-out loss, in nats above that of the best rate, from which a rate counts as unstable.
UNSTABLE = 0.3
CHOSEN = (
    "the lowest rate of the scan, above the best one, at which the loss has spikes under fixed clipping at 1.0; "
    f"if it has them nowhere, the lowest one that ends {UNSTABLE} nats of held-out loss above the best"
)
# Points that a curve is drawn from.
POINTS = 60

# What `--mild` sets, unless told otherwise.
MILD: dict[str, Any] = {
    "steps": 700,
    "rates": [1e-3, 3e-3, 6e-3, 1.2e-2],
    "rows": 2,
    "tokens": 64,
    "vocabulary": 1024,
    "width": 128,
    "beta1": 0.9,
    "beta2": 0.999,
    "warmup": 0,
    "orders": ["files", "shuffled"],
}

# Of the rows: as the files have them, or shuffled.
ORDERS = ("files", "shuffled")

Clipping = Callable[[nn.Module], tuple[float, bool]]


# ---- the methods: clip the gradients; their norm before, and whether they were clipped ----


def no_clipping() -> Clipping:
    return lambda model: (float(total_gradient_norm(model)), False)


def fixed_clipping() -> Clipping:
    def clip(model: nn.Module) -> tuple[float, bool]:
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), FIXED))
        return norm, norm > FIXED

    return clip


def zclip(ceiling: float | None) -> Clipping:
    clipper = ZClip(max_grad_norm=ceiling)

    def clip(model: nn.Module) -> tuple[float, bool]:
        result = clipper.update_and_clip(model)
        return result.norm, result.limit is not None

    return clip


METHODS: dict[str, tuple[str, Callable[[], Clipping]]] = {
    # Colours of Okabe and Ito, which colour-blind readers can tell apart.
    "no clipping": ("#999999", no_clipping),
    "fixed, 1.0": ("#d55e00", fixed_clipping),
    "ZClip": ("#0072b2", lambda: zclip(None)),
    "ZClip, ceiling 1.0": ("#56b4e9", lambda: zclip(FIXED)),
}


# ---- the runs ----


class Bench:
    """The text, cut into rows, and the training loop."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.size = DemoSize(
            rows=options.rows,
            tokens=options.tokens,
            vocabulary=options.vocabulary,
            width=options.width,
            layers=options.layers,
        )
        texts = stdlib_docstrings()
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
        # Whole docstrings are held out, before they are cut into rows.
        held_out = [texts[index] for index in order[: len(texts) // 10]]
        training = [texts[index] for index in sorted(order[len(texts) // 10 :])]
        self.tokenizer = train_tokenizer(training, options.vocabulary)
        self.training = self._rows(training)
        self.held_out = self._rows(held_out)[: options.held_out]

    def _rows(self, texts: Sequence[str]) -> Tensor:
        end = self.tokenizer.eos_token_id
        stream = [token for text in texts for token in (*self.tokenizer(text)["input_ids"], end)]
        tokens = self.options.tokens
        return torch.tensor(stream[: len(stream) // tokens * tokens]).view(-1, tokens)  # (rows, T)

    def order(self, kind: str, seed: int) -> Tensor:
        rows = len(self.training)
        if kind == "files":
            return torch.arange(rows).roll(-seed * (rows // 3))
        return torch.randperm(rows, generator=torch.Generator().manual_seed(seed))

    def train(self, kind: str, method: str, rate: float, seed: int) -> dict[str, Any]:
        options = self.options
        model = small_llama(self.tokenizer, self.size, seed)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=rate, betas=(options.beta1, options.beta2), weight_decay=0.0, fused=True
        )
        clip = METHODS[method][1]()
        order = self.order(kind, seed)
        losses, norms, clipped = [], [], 0
        began = time.process_time()
        for step in range(options.steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (step + 1) / max(1, options.warmup))
            picked = order[torch.arange(step * options.rows, (step + 1) * options.rows) % len(order)]
            batch = self.training[picked]
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            norm, was_clipped = clip(model)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            norms.append(norm)
            clipped += was_clipped
        seconds = time.process_time() - began
        return {
            "order": kind,
            "method": method,
            "rate": rate,
            "seed": seed,
            "held_out_loss": self.evaluate(model),
            "spike_score_loss": spike_score(losses),
            "spike_score_norm": spike_score(norms),
            "jumps": jumps(losses),
            "clipped": clipped / options.steps,
            "largest_loss_after_first_tenth": max(losses[options.steps // 10 :]),
            "cpu_ms_per_step": 1e3 * seconds / options.steps,
            "losses": losses,
            "norms": norms,
        }

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        losses = [float(model(input_ids=rows, labels=rows).loss) for rows in self.held_out.split(64)]
        sizes = [len(rows) for rows in self.held_out.split(64)]
        return sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)


def spike_score(values: Sequence[float], window: int = 1000, sigmas: float = 7.0, first: int = 25) -> float:
    """Share of the values that stand at least `sigmas` standard deviations above the mean of those before."""
    spikes = 0
    for index in range(first, len(values)):
        past = [value for value in values[max(0, index - window) : index] if math.isfinite(value)]
        spikes += not past or not values[index] < statistics.fmean(past) + sigmas * statistics.pstdev(past)
    return spikes / max(1, len(values) - first)


def jumps(losses: Sequence[float], window: int = 100) -> float:
    """Share of the losses that stand at least one nat above the median of the last `window`."""
    found = sum(
        not losses[index] < statistics.median(losses[index - window : index]) + 1
        for index in range(window, len(losses))
    )
    return found / max(1, len(losses) - window)


def compact(values: Sequence[float], combine: Callable[[Sequence[float]], float]) -> list[float]:
    """At most `POINTS` values, each from a stretch of the curve."""
    stretch = max(1, math.ceil(len(values) / POINTS))
    return [round(combine(values[start : start + stretch]), 3) for start in range(0, len(values), stretch)]


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    bench = Bench(options)
    began = time.perf_counter()

    def run(order: str, method: str, rate: float, seed: int) -> dict[str, Any]:
        result = bench.train(order, method, rate, seed)
        console.print(
            f"{time.perf_counter() - began:6.0f} s  {order:<8}  {method:<18}  rate {rate:g}, seed {seed}: "
            f"held-out loss {result['held_out_loss']:.3f}, spike score {result['spike_score_loss']:.2%}"
        )
        return result

    scan = [run(options.orders[0], "fixed, 1.0", rate, 0) for rate in options.rates]
    best = min(scan, key=lambda result: result["held_out_loss"])
    above = [result for result in scan if result["rate"] > best["rate"]]
    spiky = [result["rate"] for result in above if result["spike_score_loss"] > 0]
    worse = [result["rate"] for result in above if not result["held_out_loss"] <= best["held_out_loss"] + UNSTABLE]
    unstable = spiky or worse
    rate = options.rate or min(unstable, default=max(options.rates))
    known = {(result["order"], result["method"], result["rate"], result["seed"]): result for result in scan}
    runs = [
        known.get((order, method, rate, seed)) or run(order, method, rate, seed)
        for order in options.orders
        for seed in range(options.seeds)
        for method in METHODS
    ]
    curves = [
        {
            "order": result["order"],
            "method": result["method"],
            "seed": result["seed"],
            "mean_loss": compact(result["losses"], statistics.fmean),
            "largest_loss": compact(result["losses"], max),
            "largest_norm": compact(result["norms"], max),
        }
        for result in runs
    ]
    by_order = {order: [result for result in runs if result["order"] == order] for order in options.orders}
    return {
        "what": "small Llama where fixed clipping leaves loss spikes, or ends too high: held-out loss, spike scores",
        "command": shlex.join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
        "rate": rate,
        "best_rate_of_the_scan": best["rate"],
        "how_the_rate_was_chosen": CHOSEN,
        "rates_above_the_best_with_loss_spikes": spiky,
        "rates_above_the_best_that_end_worse": worse,
        "rate_is_unstable": rate in unstable,
        "methods": {
            order: {method: summary([r for r in of_order if r["method"] == method], of_order) for method in METHODS}
            for order, of_order in by_order.items()
        },
        "scan_with_fixed_clipping": [figures(result) for result in scan],
        "runs": [figures(result) for result in runs],
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(time.process_time(), 1),
        "setting": {
            "parameters": sum(p.numel() for p in small_llama(bench.tokenizer, bench.size, 0).parameters()),
            "layers": options.layers,
            "width": options.width,
            "vocabulary": options.vocabulary,
            "rows_per_step": options.rows,
            "tokens_per_row": options.tokens,
            "steps": options.steps,
            "training_rows": len(bench.training),
            "held_out_rows": len(bench.held_out),
            "optimizer": f"AdamW, betas {options.beta1}, {options.beta2}, no weight decay",
            "warmup_steps": options.warmup,
            "precision": "float32",
            "cpu": processor(),
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "self_healing": self_healing.__version__,
        },
        "curves": curves,
    }


def figures(result: dict[str, Any]) -> dict[str, Any]:
    rounded = {name: round(value, 5) if isinstance(value, float) else value for name, value in result.items()}
    return {name: value for name, value in rounded.items() if name not in ("losses", "norms")}


def summary(results: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds, and the difference to fixed clipping on the same seed, which takes out the seed's luck."""
    fixed = {result["seed"]: result["held_out_loss"] for result in runs if result["method"] == "fixed, 1.0"}
    losses = [result["held_out_loss"] for result in results]
    names = ("spike_score_loss", "spike_score_norm", "jumps", "clipped", "largest_loss_after_first_tenth")
    return {
        "held_out_loss": round(statistics.fmean(losses), 4),
        "held_out_loss_range": [round(min(losses), 4), round(max(losses), 4)],
        "minus_fixed_on_each_seed": [round(r["held_out_loss"] - fixed[r["seed"]], 4) for r in results],
        **{name: round(statistics.fmean(result[name] for result in results), 5) for name in names},
    }


def processor() -> str:
    """The CPU's name as its maker writes it, where the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# ---- what is shown ----


def show(result: dict[str, Any]) -> list[Table]:
    scan = Table(title="Fixed clipping at 1.0, by learning rate", header_style="bold")
    for column in ("rate", "held-out loss", "spike score, loss", "spike score, norm"):
        scan.add_column(column, justify="right")
    for run in result["scan_with_fixed_clipping"]:
        mark = " (best)" if run["rate"] == result["best_rate_of_the_scan"] else ""
        mark = " (taken)" if run["rate"] == result["rate"] else mark
        scan.add_row(
            f"{run['rate']:g}{mark}",
            f"{run['held_out_loss']:.3f}",
            f"{run['spike_score_loss']:.2%}",
            f"{run['spike_score_norm']:.2%}",
        )
    tables = [scan]
    for order, methods in result["methods"].items():
        table = Table(title=f"Rate {result['rate']:g}, rows in order: {order}; mean over seeds", header_style="bold")
        for column in ("", "held-out loss", "minus fixed, by seed", "spike score, loss", "norm", "steps clipped"):
            table.add_column(column, justify="right" if column else "left")
        for method, means in methods.items():
            table.add_row(
                method,
                f"{means['held_out_loss']:.3f}",
                " ".join(f"{difference:+.3f}" for difference in means["minus_fixed_on_each_seed"]),
                f"{means['spike_score_loss']:.2%}",
                f"{means['spike_score_norm']:.2%}",
                f"{means['clipped']:.0%}",
            )
        tables.append(table)
    return tables


def plot(result: dict[str, Any]) -> str:
    """
    Three panels as SVG. Left: the largest training loss of each stretch of steps in any of the seeds. Right of it, of
    each run and on average: the held-out loss at the end, and the spike score of the loss.
    """
    widths, height, left, top, gap, foot = (420, 300, 300), 300, 70, 70, 80, 50
    offsets = [left + sum(widths[:index]) + gap * index for index in range(3)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {offsets[2] + widths[2] + 30} {top + height + foot}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for position, (method, (colour, _)) in enumerate(METHODS.items()):
        x = left + 190 * position
        parts.append(f'<line x1="{x}" x2="{x + 24}" y1="20" y2="20" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 30}" y="24">{escape(method)}</text>')

    def frame(panel: int, title: str, values: Sequence[float], label: Callable[[float], str]) -> Callable[..., float]:
        low, high = min(values), max(values)
        low, high = low - 0.05 * ((high - low) or 1), high + 0.05 * ((high - low) or 1)
        offset, width = offsets[panel], widths[panel]
        parts.append(f'<text x="{offset}" y="{top - 12}" font-weight="bold">{escape(title)}</text>')
        for tick in range(5):
            y = top + height * (1 - tick / 4)
            text = label(low + (high - low) * tick / 4)
            parts.append(f'<line x1="{offset}" x2="{offset + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
            parts.append(f'<text x="{offset - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        return lambda value: top + height * (1 - (value - low) / (high - low))

    order = next(iter(result["methods"]))
    lines = {method: largest_losses(result, method, order) for method in METHODS}
    at = frame(
        0,
        f"Largest training loss (log scale), rate {result['rate']:g}, rows {order}",
        [math.log(value) for line in lines.values() for value in line],
        lambda value: f"{math.exp(value):.1f}",
    )
    for method, line in lines.items():
        points = " ".join(
            f"{left + widths[0] * (index + 0.5) / len(line):.1f},{at(math.log(value)):.1f}"
            for index, value in enumerate(line)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{METHODS[method][0]}" stroke-width="1.5"/>')
    for tick in range(5):
        x, step = left + widths[0] * tick / 4, round(result["setting"]["steps"] * tick / 4)
        parts.append(f'<text x="{x:.1f}" y="{top + height + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{left + widths[0] / 2}" y="{top + height + 38}" text-anchor="middle">step</text>')

    panels = (
        (1, "Held-out loss at the end", "held_out_loss", "{:.2f}"),
        (2, "Spike score of the loss", "spike_score_loss", "{:.2%}"),
    )
    for panel, title, name, form in panels:
        finite = [run for run in result["runs"] if math.isfinite(run[name])]
        at = frame(panel, f"{title}: runs and mean", [run[name] for run in finite], form.format)
        count = len(result["methods"])
        for part, order in enumerate(result["methods"]):
            for position, (method, (colour, _)) in enumerate(METHODS.items()):
                x = offsets[panel] + widths[panel] * (part + (position + 0.75) / (len(METHODS) + 0.5)) / count
                values = [run[name] for run in finite if (run["order"], run["method"]) == (order, method)]
                parts += [f'<circle cx="{x:.1f}" cy="{at(value):.1f}" r="4" fill="{colour}"/>' for value in values]
                if values:
                    y = at(statistics.fmean(values))
                    parts.append(
                        f'<line x1="{x - 14:.1f}" x2="{x + 14:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{colour}" '
                        'stroke-width="3"/>'
                    )
            x = offsets[panel] + widths[panel] * (part + 0.5) / count
            parts.append(f'<text x="{x:.1f}" y="{top + height + 18}" text-anchor="middle">rows {order}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def largest_losses(result: dict[str, Any], method: str, order: str) -> list[float]:
    """Of each stretch of steps, in any of the seeds."""
    curves = [c["largest_loss"] for c in result["curves"] if (c["method"], c["order"]) == (method, order)]
    finite = [[value for value in values if math.isfinite(value)] for values in zip(*curves, strict=True)]
    return [max(values) for values in finite if values]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps of a run")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each method")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3, 3e-3, 1e-2], help="learning rates of the scan"
    )
    parser.add_argument("--rate", type=float, help="learning rate of the comparison, instead of what the scan finds")
    parser.add_argument("--rows", type=int, default=16, help="rows of a step")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a row")
    parser.add_argument("--vocabulary", type=int, default=512, help="tokens that the tokenizer learns")
    parser.add_argument("--width", type=int, default=64, help="size of the hidden states")
    parser.add_argument("--layers", type=int, default=2, help="transformer blocks")
    parser.add_argument("--beta1", type=float, default=0.98, help="AdamW's; the Trainer's is 0.9")
    parser.add_argument("--beta2", type=float, default=0.9, help="AdamW's; the Trainer's is 0.999")
    parser.add_argument("--warmup", type=int, default=100, help="steps over which the rate rises from 0, linearly")
    parser.add_argument("--orders", choices=ORDERS, nargs="+", default=["shuffled"], help="orders of the rows")
    parser.add_argument("--held-out", type=int, default=512, help="rows of the evaluation at the end")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--mild", action="store_true", help="other defaults: the Trainer's betas, and no loss spikes")
    parser.add_argument("--quick", action="store_true", help="a smoke test that writes nothing unless told where")
    parser.add_argument(
        "--output", type=Path, help="JSON file; by default benchmarks/results/zclip.json, or zclip_mild.json"
    )
    parser.add_argument("--figure", type=Path, help="SVG file; by default docs/figures/zclip.svg; none with --mild")
    if parser.parse_args().mild:
        parser.set_defaults(**MILD)
    options = parser.parse_args()
    if options.quick:
        options.steps, options.seeds, options.rates, options.held_out = 40, 1, options.rates[:2], 64
    else:
        name = "zclip_mild" if options.mild else "zclip"
        options.output = options.output or ROOT / "benchmarks" / "results" / f"{name}.json"
        options.figure = options.figure or (None if options.mild else ROOT / "docs" / "figures" / "zclip.svg")

    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    console = Console(highlight=False)
    result = measure(options, console)
    for table in show(result):
        console.print(table)
    for path, text in ((options.output, dumped(result)), (options.figure, plot(result))):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            console.print(f"Written to {path}", soft_wrap=True)


def dumped(result: dict[str, Any]) -> str:
    """Indented JSON, with each run and each curve on lines of its own instead of a line for each number."""
    lists = {key: result[key] for key in ("scan_with_fixed_clipping", "runs", "curves")}
    text = json.dumps({**result, **{key: f"@{key}" for key in lists}}, indent=2)
    for key, entries in lists.items():
        rows = ",\n    ".join(json.dumps(entry) for entry in entries)
        text = text.replace(f'"@{key}"', f"[\n    {rows}\n  ]")
    return text + "\n"


if __name__ == "__main__":
    main()
