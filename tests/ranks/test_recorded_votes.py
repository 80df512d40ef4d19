"""What several ranks are asked is compared in every test that has several."""

from __future__ import annotations

import re
from pathlib import Path


TESTS = Path(__file__).parents[1]
# By which a script is one rank of several, and by which it compares its votes with those of the others.
HAS_RANKS = re.compile(r"init_process_group|get_rank\(|[\"']RANK[\"']|RANK=|run_pair\(")
COMPARES = re.compile(r"leave_together\(\)|run_pair\(|VOTES\.compare\(\)")
# Meets the other ranks by itself, without any vote.
WITHOUT_VOTES = {"looked_at_job.py"}


def test_every_script_with_ranks_compares_what_they_are_asked() -> None:
    scripts = {path.name: path.read_text() for path in TESTS.rglob("*.py") if not path.name.startswith("test_")}
    ranks = {name for name, text in scripts.items() if '"__main__"' in text and HAS_RANKS.search(text)}
    assert {"two_processes.py", "struck_job.py", "chaos_on_ranks.py"} <= ranks
    assert {name for name in ranks if not COMPARES.search(scripts[name])} == WITHOUT_VOTES
