"""Writes `report.json` and `agent.md` beside the journal, for programs, assistants and colleagues."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from ..files import replace_file
from ..own_files import BRIEFING_FILE, REPORT_FILE, is_foreign_report
from .briefing import briefing_of
from .reading import read_run
from .records import RunReport


logger = logging.getLogger("self_healing")


def write_report_files(directory: Path, run: str) -> RunReport | None:
    """
    Writes the report of a run beside its journal. Files of these names that are not ours stay; what goes wrong is
    logged and stops nothing.

    Args:
        directory (`Path`), run (`str`):
            Where the journal lies, and the name of the run.

    Returns:
        [`RunReport`]: What was read; `None` if nothing could be.
    """
    try:
        report = read_run(directory, run)
        # Without every step: a program asks `--json` for that, and an assistant had better not read it.
        texts = {
            REPORT_FILE: json.dumps(report.to_dict(series=False), indent=1) + "\n",
            BRIEFING_FILE: briefing_of(report),
        }
        for name, text in texts.items():
            if is_foreign_report(directory / name):
                logger.info(
                    "%s was not written by self_healing, and stays as it is: `self-healing report` shows it.",
                    directory / name,
                )
                continue
            replace_file(directory / name, text, make_directory=False)
    except Exception:
        logger.warning("The report of run %s in %s could not be written.", run, directory, exc_info=True)
        return None
    return report
