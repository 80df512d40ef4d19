"""
What people see, kept in `docs/img` and `examples/notebook.ipynb`: the report in a terminal of 80 and of 120
columns, its page, and the notebook.

`python tests/screens.py` runs the notebook, less than a minute, and writes them again. The pictures of pages need
`chromium`; without one they stay as they are.
"""

from __future__ import annotations

import ast
import contextlib
import html
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console

from self_healing import HealingReport
from self_healing.report.output import show
from self_healing.report.page.rendering import page_of
from self_healing.report.reading import read_run


ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
IMAGES = ROOT / "docs" / "img"
# Name, width and height in pixels, and whether the screen is dark.
PAGES = (
    ("report-1600-light", 1600, 1560, False),
    ("report-1600-dark", 1600, 1560, True),
    ("report-400-light", 400, 1780, False),
    ("report-400-dark", 400, 1780, True),
)


def cells_of(notebook: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return cells


def run_cells(cells: list[dict[str, Any]]) -> list[Any]:
    """Runs cells in order and in one namespace, and returns what each has shown: the value of its last line."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for number, cell in enumerate(cells):
        if cell["cell_type"] != "code":
            shown.append(None)
            continue
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"cell {number}", "exec"), namespace)
        value = None if last is None else ast.Expression(last.value)  # type: ignore[attr-defined]
        shown.append(None if value is None else eval(compile(value, f"cell {number}", "eval"), namespace))
    return shown


def outputs_of(value: Any, place: str) -> list[dict[str, Any]]:
    """What a notebook keeps of a value that has a form of its own for it."""
    if not hasattr(value, "_repr_html_"):
        return []
    data = {"text/html": value._repr_html_().replace(f"{place}/", ""), "text/plain": f"<{type(value).__name__}>"}
    return [{"output_type": "execute_result", "data": data, "metadata": {}, "execution_count": None}]


def write_notebook(place: Path) -> list[str]:
    """Runs the notebook in a directory, and keeps its outputs; returns what was shown."""
    content = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    with contextlib.chdir(place):
        values = run_cells(content["cells"])
    found = []
    for cell, value in zip(content["cells"], values, strict=True):
        if cell["cell_type"] == "code":
            cell["outputs"] = outputs_of(value, str(place.resolve()))
            source = "".join(cell["source"])
            found.append(f"<pre>{html.escape(source)}</pre>")
            found += [each["data"]["text/html"] for each in cell["outputs"]]
    NOTEBOOK.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return found


def write_terminal(run: Path, columns: int) -> None:
    """The report of a run in a terminal of some width, as SVG."""
    console = Console(record=True, width=columns, force_terminal=True, file=io.StringIO(), highlight=False)
    show(read_run(run), HealingReport.from_run_dir(run), console)
    svg = console.export_svg(title="self-healing report outputs/notebook", unique_id=f"report{columns}")
    place = str(run.resolve().parent.parent)
    (IMAGES / f"report-{columns}-columns.svg").write_text(svg.replace(f"{place}/", ""), encoding="utf-8")


def photograph(page: Path, name: str, width: int, height: int, dark: bool) -> None:
    """A picture of a page as a browser shows it."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print(f"There is no chromium: {name}.png stays as it is.")
        return
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--virtual-time-budget=4000",
    ]
    command += ["--blink-settings=preferredColorScheme=" + ("0" if dark else "1")]
    command += [f"--window-size={width},{height}", f"--screenshot={IMAGES / name}.png", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True)
    picture = Image.open(IMAGES / f"{name}.png").convert("RGB")
    picture.quantize(128, dither=Image.Dither.NONE).save(IMAGES / f"{name}.png", optimize=True)


NOTEBOOK_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 1rem 1.5rem; }
body > pre { background: #f5f5f5; border: 1px solid #ddd; padding: 0.5rem 0.8rem; font-size: 13px; }
td, th { padding: 0.3rem 0.6rem; text-align: right; border: 0; } tr:nth-child(even) { background: #f5f5f5; }
table { border-collapse: collapse; font-size: 12px; margin: 0.5rem 0; }
"""


def main() -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    sys.path.insert(0, str(NOTEBOOK.parent))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder).resolve()
        told = write_notebook(place)
        run = place / "outputs" / "notebook"
        for columns in (80, 120):
            write_terminal(run, columns)
        page = page_of(read_run(run)).replace(f"{place}/", "")
        (place / "report.html").write_text(page, encoding="utf-8")
        for name, width, height, dark in PAGES:
            photograph(place / "report.html", name, width, height, dark)
        body = "\n".join(told)
        (place / "notebook.html").write_text(
            f"<!doctype html><meta charset=utf-8><style>{NOTEBOOK_STYLE}</style>{body}"
        )
        photograph(place / "notebook.html", "notebook", 900, 1400, False)


if __name__ == "__main__":
    main()
