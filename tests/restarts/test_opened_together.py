"""A run begins on all ranks or on none: what fails on one before the first step reaches the others at once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from conftest import build_tokenizer, sft_trainer
from forked_pairs import run_pair

from self_healing import SelfHealingTrainer


# The store is served by it, and outlives the ranks.
LAUNCHER = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3"}


def _begin(directory: Path, rank: int, failing: str, on: int) -> dict[str, Any]:
    trainer = sft_trainer(directory / "run", build_tokenizer(), ddp_backend="gloo", max_steps=2)
    with patch(failing, side_effect=OSError("only here") if rank == on else None, return_value=False):
        SelfHealingTrainer(trainer).train()
    return {}


@pytest.mark.parametrize("on", [0, 1])
@pytest.mark.parametrize(
    ("failing", "question"),
    [
        ("self_healing.restarts.start.may_go_on_from_memory", "where the run begins"),
        ("self_healing.trainer.let_snapshots_outlive", None),
        ("self_healing.trainer.rows_per_step", "the run is opened"),
    ],
)
def test_what_fails_on_one_rank_ends_the_others_unless_training_needs_none_of_it(
    tmp_path: Path, failing: str, question: str | None, on: int
) -> None:
    outcome = run_pair(tmp_path, partial(_begin, failing=failing, on=on), seconds=60, launcher=LAUNCHER)
    assert not outcome["hung"], outcome["last"]
    errors = [rank.get("error") for rank in outcome["ranks"]]
    if question is None:
        assert errors == [None, None]
        return
    assert errors[on] == "OSError: only here"
    assert errors[1 - on] == f"RankFailed: {question}: code of self_healing has failed on a rank, whose log says how"
