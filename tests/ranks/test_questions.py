"""Ranks that come to different votes at the same time all learn it, whatever the sum of the votes' numbers is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
import torch

from self_healing.ranks import votes
from self_healing.ranks.votes import RanksDisagree, sum_over_ranks


CPU = torch.device("cpu")


def _cast_together(questions: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> list[list[float] | None]:
    """What becomes of ranks that ask these questions; `None` for one that learns that they are not the same."""
    ballots = [votes._ballot(question, [1.0], CPU) for question in questions]
    monkeypatch.setattr(votes, "world_size", lambda: len(questions))
    monkeypatch.setattr(votes.dist, "all_reduce", lambda ballot: ballot.copy_(torch.stack(ballots).sum(0)))
    found: list[list[float] | None] = []
    for question in questions:
        try:
            found.append(sum_over_ranks(question, [1.0], CPU)[:1])
        except RanksDisagree:
            found.append(None)
    return found


def _coincidence() -> tuple[str, str, str]:
    """Three questions, of which the number of the first is half the sum of the others'."""
    by_number = {votes._number_of(name): name for name in (f"question {each}" for each in range(100))}
    for one, other in combinations(by_number, 2):
        middle, odd = divmod(one + other, 2)
        if not odd and middle in by_number:
            return by_number[middle], by_number[one], by_number[other]
    raise AssertionError("there are some among so many")


def test_three_different_questions_are_told_apart_by_all_even_if_their_sum_is_what_one_expects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _cast_together(_coincidence(), monkeypatch) == [None, None, None]


def test_the_same_question_is_answered_on_some_thousand_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    # The one with the largest numbers: their sums are still exact.
    question = max((f"question {each}" for each in range(10_000)), key=votes._number_of)
    assert votes._number_of(question) > 4090
    ranks = 4000
    ballot = ranks * votes._ballot(question, [1.0], CPU)
    monkeypatch.setattr(votes, "world_size", lambda: ranks)
    monkeypatch.setattr(votes.dist, "all_reduce", lambda each: each.copy_(ballot))
    assert sum_over_ranks(question, [1.0], CPU)[0] == ranks
