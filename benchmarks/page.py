"""
Writes what the benchmarks have measured (`benchmarks/results`) into the tables of `docs/benchmarks.md`.

```bash
python benchmarks/page.py
```
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import detectors
import goodput
import recovery
import survival
from jobs import TRAINERS

from self_healing.rollback.snapshots import OVERHEAD_BUDGET


RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
PLOT = PAGE.parent / "img" / "detector-power.svg"
NAMES = {
    "plain": "plain, started again",
    "options": "transformers' options",
    "arc-training": "arc-training",
    "sdcguard": "sdcguard",
    "callback": "callback",
    "wrapper": "wrapper",
}


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Renders rows of cells as Markdown."""
    columns = list(header)
    lines = [columns, ["---"] * len(columns), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measured_on(setting: dict[str, Any]) -> str:
    """Names the machine, the versions and the day of a result."""
    versions = ", ".join(f"{name} {version}" for name, version in setting["versions"].items())
    return f"Measured on {setting['day']}, {setting['machine']}; {versions}."


def survived(found: dict[str, Any] | None) -> str:
    """Tells in a cell what became of a run."""
    if found is None:
        return "–"
    if not found["finished"]:
        return f"❌ {found['why'].partition(':')[0].rpartition('.')[2]}"
    exact = "bitwise" if found["bitwise"] else "finished" if found["loss"] is None else f"loss {found['loss']:+.3f}"
    # More than its steps: begun anew with weights that were trained already.
    named = {"missing": found["missing"], "too many": -found["missing"], "again": found["again"]}
    parts = [exact, *(f"{number} {name}" for name, number in named.items() if number > 0)]
    return f"✅ {', '.join(parts)}, {found['seconds']:+.1f} s"


def survival_tables() -> str:
    result = read("survival")
    cells, parts = result["cells"], list[str]()
    for trainer in TRAINERS:
        tools = [
            tool for tool in NAMES if any(key.startswith(f"{trainer}/{tool}/") and key[-1] != "/" for key in cells)
        ]
        if not tools:
            continue
        rows = [
            [what, *(survived(survival.row(cells, trainer, tool, fault)) for tool in tools)]
            for fault, what in survival.FAULTS.items()
        ]
        parts.append(table([trainer.upper(), *(NAMES[tool] for tool in tools)], rows))
    return "\n\n".join([*parts, measured_on(result["setting"])])


def survives(trainer: str, tool: str) -> int:
    """Counts the faults with which a tool has come to the end."""
    cells = read("survival")["cells"]
    rows = [survival.row(cells, trainer, tool, fault) for fault in survival.FAULTS]
    return sum(bool(row and row["finished"]) for row in rows)


def goes_on(tool: str) -> tuple[int, int]:
    """Counts the kill points from which a tool has come to the end of the run that was not killed, and all of them."""
    killed = read("kill_points")["tools"][tool]["killed"].values()
    return sum(each["became"] == "same" for each in killed), len(killed)


def trains(tool: str, kind: str, rate: int) -> str:
    """The share of the time that trains while faults strike, as the README quotes it."""
    return f"{100 * statistics.mean(goodput.shares(read('goodput')['cells'], tool, kind, rate)):.0f} %"


def kill_points_table() -> str:
    result = read("kill_points")
    rows = []
    for tool, found in result["tools"].items():
        became = Counter(each["became"] for each in found["killed"].values())
        same, other = became.pop("same", 0), became.pop("other", 0)
        rows.append([NAMES[tool], str(len(found["killed"])), str(same), str(other), str(became.total())])
    header = ["trainer", "kill points tried", "bitwise the same end", "another end", "does not start again"]
    return f"{table(header, rows)}\n\n{measured_on(result['setting'])}"


def goodput_table() -> str:
    result = read("goodput")
    cells, rows = result["cells"], list[list[str]]()
    for kind in goodput.KINDS:
        for rate in goodput.RATES:
            row = [f"{kind}, one in {rate} steps"]
            for tool in ("plain", "wrapper"):
                found = goodput.shares(cells, tool, kind, rate)
                row.append(f"{statistics.mean(found):.3f} ({min(found):.3f} to {max(found):.3f})" if found else "–")
            rows.append(row)
    return f"{table(['faults', 'plain, started again', 'wrapper'], rows)}\n\n{measured_on(result['setting'])}"


def lost(strikes: list[dict[str, float]] | None) -> str:
    """Tells in a cell what a fault took, by the median of its strikes."""
    if strikes is None:
        return "–"
    found = recovery.medians(strikes)
    again = f", {found['again']:.0f} again" if found["again"] else ""
    return f"{found['seconds']:.1f} s = {found['steps']:.1f} steps{again}"


def recovery_table() -> str:
    result = read("recovery")
    names = {fault.partition("@")[0].partition("*")[0]: what for fault, what in survival.FAULTS.items()}
    names["network_error"] = "a call that loses its connection"
    rows = []
    for fault, what in names.items():
        cells = {tool: result["strikes"].get(f"{tool}/{fault}") for tool in ("wrapper", "plain", "options")}
        if cells["wrapper"] is not None:
            plain = "weights are NaN" if cells["plain"] is None else lost(cells["plain"])
            rows.append([what, str(len(cells["wrapper"])), lost(cells["wrapper"]), plain, lost(cells["options"])])
    header = ["fault", "strikes", "wrapper", "plain, started again", "`auto_find_batch_size`"]
    return f"{table(header, rows)}\n\n{bounds_table(result)}\n\n{measured_on(result['setting'])}"


def bounds_table(result: dict[str, Any]) -> str:
    """What was promised of recovery, beside what was measured."""
    strikes, snapshots = result["strikes"], read("snapshots_cpu")
    small, large = (each["tasks"]["sft"] for each in (read("memory_throughput_cpu"), result["limited"]))
    ratios = [(each["in_processor_time"]["ratio"], each["ms_per_step"]["by_hand"]) for each in (large, small)]
    rows = [
        (
            f"{survival.FAULTS[f'{fault}@30']}, in step times",
            recovery.medians(strikes[f"wrapper/{fault}"])["steps"],
            1.3,
            1,
        )
        for fault in ("nan_loss", "nan_gradient")
    ]
    rows += [
        (
            f"rows per second after out of memory, over the largest batch set by hand, steps of {ms:.0f} ms",
            ratio,
            0.95,
            -1,
        )
        for ratio, ms in ratios
    ]
    put_back = recovery.medians(strikes["wrapper/corrupted_weights"])["restore_steps"]
    rows.append(("a state put back from memory, in step times", put_back, 1.0, 1))
    of_100m = snapshots["seconds"]["restore"] / snapshots["step_seconds"]
    rows.append((f"the same, {snapshots['parameters'] / 1e6:.0f}M parameters", of_100m, 1.0, 1))
    cells = [
        [
            what,
            f"{'at most' if sign > 0 else 'at least'} {bound}",
            f"{found:.3f}",
            "yes" if sign * (bound - found) >= 0 else "**no**",
        ]
        for what, found, bound, sign in rows
    ]
    return table(["", "wanted", "measured", "met"], cells)


# Llama 3 405B ("The Llama 3 Herd of Models", 3.3.4): unexpected interruptions, days, GPUs, and the share of hardware.
INTERRUPTIONS, DAYS, OF_GPUS, HARDWARE = 419, 54, 16_384, 0.78
# Assumed, in seconds: a step, what a checkpoint holds training up, and of a restart what both have and the load.
STEP, SAVE, START, LOAD = 10.0, 60.0, 300.0, 60.0


def scale_table() -> str:
    """Goodput by arithmetic, at numbers of GPUs where nothing was measured."""
    sizes = read("restarts_cpu")["sizes"]
    faster = sizes[-1]["times_as_long_as_from_memory"]["state, disk, cold"]
    again, rows = recovery.medians(read("recovery")["strikes"]["wrapper/sigkill"])["again"], list[list[str]]()
    for gpus in (8, 64, 512, 2_048, 16_384):
        a_day = INTERRUPTIONS / DAYS / OF_GPUS * gpus
        apart = 86_400 / a_day
        interval = math.sqrt(2 * SAVE * apart)
        from_disk, from_memory = START + LOAD + interval / 2, START + LOAD / faster + again * STEP
        cells = [f"{gpus:,}", f"{a_day:.2g}", f"{interval / 60:.0f} min"]
        for disk, snapshots in ((1.0, 0.0), (HARDWARE, OVERHEAD_BUDGET), (0.0, OVERHEAD_BUDGET)):
            waste = SAVE / interval + snapshots + (disk * from_disk + (1 - disk) * from_memory) / apart
            cells.append(f"{1 / (1 + waste):.3f}")
        rows.append(cells)
    header = ["GPUs", "interruptions a day", "a checkpoint every", "plain, started again"]
    return table([*header, f"ours, {HARDWARE:.0%} lose their memory".replace("%", " %"), "ours, none does"], rows)


def power_plot() -> str:
    """Power by the size of the fault, a panel for each kind: SVG."""
    parts, colours = list[str](), ("#1f77b4", "#d95f02")
    for number, (name, found) in enumerate(read("detectors")["power_curves"].items()):
        left, top, width, height = 60 + number % 2 * 370, 50 + number // 2 * 240, 290, 150
        places = [left + width * at / (len(found["sizes"]) - 1) for at in range(len(found["sizes"]))]
        parts.append(f'<text x="{left}" y="{top - 12}" font-weight="bold">{name}: {found["unit"]}</text>')
        for share in (0, 50, 100):
            y = top + height * (1 - share / 100)
            parts.append(f'<path d="M{left} {y:g}h{width}" stroke="#ccc"/>')
            parts.append(f'<text x="{left - 6}" y="{y + 4:g}" text-anchor="end">{share} %</text>')
        for x, size in zip(places, found["sizes"], strict=True):
            parts.append(f'<text x="{x:.1f}" y="{top + height + 18}" text-anchor="middle">{size:g}</text>')
        for colour, line in zip(colours, found["power"].values(), strict=True):
            points = " ".join(f"{x:.1f},{top + height * (1 - y):.1f}" for x, y in zip(places, line, strict=True))
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for at, (colour, who) in enumerate(zip(colours, found["power"], strict=True)):
        parts.append(f'<text x="{60 + 150 * at}" y="18" fill="{colour}" font-weight="bold">{who}</text>')
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 510" font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="740" height="510" fill="#fff"/>', *parts, "</svg>\n"])


def cost_table() -> str:
    """Time of a healthy step over the plain one, from the benchmarks of each."""
    rows = []
    for name, what in (
        ("overhead_cpu", "one process"),
        ("overhead_accumulated_cpu", "one process, accumulation 8"),
        ("ranks_ddp", "two ranks, DDP"),
        ("ranks_fsdp2", "two ranks, FSDP2"),
        ("ranks_zero2", "two ranks, ZeRO-2"),
    ):
        found = read(name)
        low, high = found["ratio_ci95"]
        rows.append(
            [f"CPU, {what}", f"{found['plain_ms_per_step']:.0f} ms", f"{found['ratio']:.3f} ({low:.3f} to {high:.3f})"]
        )
    return table(["healthy run, everything on", "plain step", "healed / plain (95 %)"], rows)


def growth_table() -> str:
    result, rows = read("growth"), list[list[str]]()
    for part in ("length", "training", "model_size", "ranks"):
        for series in result[part]:
            sizes = [*series["values"]]
            if len(sizes) < 2 or not series.get("should_be_flat"):
                continue
            first, last = (f"{series['values'][size]:.4g}" for size in (sizes[0], sizes[-1]))
            grown = f"{first} to {last} {series['unit']}"
            rows.append(
                [
                    series["series"],
                    series["per"],
                    f"{sizes[0]} to {sizes[-1]}",
                    grown,
                    "yes" if series["within"] else "**no**",
                ]
            )
    header = ["cost", "of each", "from the smallest to the largest", "grows from", "flat"]
    return f"{table(header, rows)}\n\nMeasured on {result['date']}, {result['machine']}, torch {result['torch']}."


BLOCKS: dict[str, Callable[[], str]] = {
    "survival": survival_tables,
    "kill points": kill_points_table,
    "goodput": goodput_table,
    "recovery": recovery_table,
    "scale": scale_table,
    "cost": cost_table,
    "growth": growth_table,
}


def page_with_tables(page: str) -> str:
    """The page with the text between its marks replaced by the tables."""
    for mark, render in BLOCKS.items():
        begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n\n{render()}\n\n{end}{after}"
    return detectors.page_with_tables(page, read("detectors"))


if __name__ == "__main__":
    PLOT.write_text(power_plot(), encoding="utf-8")
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
