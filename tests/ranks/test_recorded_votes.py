"""What several ranks are asked is compared in every test that has several."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from recorded_votes import RecordedVotes

from self_healing.ranks import votes as consensus


TESTS = Path(__file__).parents[1]
# By which a script is one rank of several, and by which it compares its votes with those of the others.
HAS_RANKS = re.compile(r"init_process_group|get_rank\(|[\"']RANK[\"']|RANK=|run_pair\(")
COMPARES = re.compile(r"leave_together\(\)|run_pair\(|VOTES\.compare\(\)")
# Meets the other ranks by itself, without any vote.
WITHOUT_VOTES = {"looked_at_job.py"}


@pytest.fixture
def votes() -> RecordedVotes:
    before = consensus._cast
    votes = RecordedVotes()
    consensus._cast = before
    votes.questions = ["the step", "a snapshot is taken"]
    return votes


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        (["the step", "the step"], "vote 1: 'a snapshot is taken' here, 'the step' on rank 1"),
        (["the step"], "2 votes here, 1 on rank 1"),
        (["the step", "a snapshot is taken", "the step"], "2 votes here, 3 on rank 1"),
    ],
    ids=["another question", "one less", "one more"],
)
def test_a_rank_that_was_asked_something_else_is_named(votes: RecordedVotes, theirs: list[str], told: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(told)):
        votes.hold_against([votes.questions, theirs])


def test_every_script_with_ranks_compares_what_they_are_asked() -> None:
    scripts = {path.name: path.read_text() for path in TESTS.rglob("*.py") if not path.name.startswith("test_")}
    ranks = {name for name, text in scripts.items() if '"__main__"' in text and HAS_RANKS.search(text)}
    assert {"two_processes.py", "struck_job.py", "chaos_on_ranks.py"} <= ranks
    assert {name for name in ranks if not COMPARES.search(scripts[name])} == WITHOUT_VOTES
