"""
With which versions the tests passed: `docs/compatibility.json`, and the table of it in a page.

`make test-oldest` and `make test-newest` run this in their own environment, once their tests have passed:
`python tests/compatibility.py oldest`. Without a name it writes the table from what is on record.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from matrix import with_table


ROOT = Path(__file__).parent.parent
RECORD = ROOT / "docs" / "compatibility.json"
# The page with the two comments that the table stands between; the second one is that of every table.
PAGE = ROOT / "docs" / "getting-started.md"
BEGIN = "<!-- What follows is written by `make test-oldest` and `make test-newest`. -->"
# The name of a column, and the command behind it.
ENVIRONMENTS = {"oldest": "make test-oldest", "newest": "make test-newest"}
LIBRARIES = ("torch", "transformers", "trl", "accelerate", "datasets", "peft")

Record = Mapping[str, Mapping[str, str]]


def read_record() -> Record:
    found: Record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    return found


def here() -> dict[str, str]:
    """The versions of this environment."""
    versions = {name: version(name) for name in LIBRARIES}
    return {"passed": datetime.now(UTC).date().isoformat(), "python": platform.python_version(), **versions}


def table(record: Record) -> str:
    columns = [name for name in ENVIRONMENTS if name in record]
    rows = [
        f"| {name} | " + " | ".join(record[each][name] for each in columns) + " |" for name in ("python", *LIBRARIES)
    ]
    heads = " | ".join(f"{each}, `{ENVIRONMENTS[each]}`, {record[each]['passed']}" for each in columns)
    return "\n".join([f"| tests passed with | {heads} |", "|---" * (len(columns) + 1) + "|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", nargs="?", choices=ENVIRONMENTS, help="whose tests have passed")
    record, chosen = read_record(), parser.parse_args().environment
    if chosen is not None:
        record = {**record, chosen: here()}
        RECORD.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if record:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table(record), BEGIN), encoding="utf-8")


if __name__ == "__main__":
    main()
