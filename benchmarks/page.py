"""
Writes what the benchmarks have measured (`benchmarks/results`) into the tables of `docs/benchmarks.md`.

```bash
python benchmarks/page.py
```
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import detectors
import goodput
import survival
from jobs import TRAINERS


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
