"""Rows are left out of a step on one of two ranks, by a trainer whose loss gathers a value of each row."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

from conftest import POISON_WORD, PoisonToken, build_tokenizer, dpo_trainer, journal, losses
from forked_pairs import run_pair
from transformers import set_seed

from self_healing import SelfHealingCallback


def _train_on_pairs(directory: Path, rank: int) -> dict[str, Any]:
    tokenizer = build_tokenizer()
    set_seed(1234)
    trainer = dpo_trainer(
        directory / "run",
        tokenizer,
        callbacks=[SelfHealingCallback()],
        poisoned=(5,),
        ddp_backend="gloo",
        max_steps=4,
    )
    fault = PoisonToken(trainer.model, tokenizer.convert_tokens_to_ids(POISON_WORD))
    trainer.train()
    content = b"".join(each.detach().numpy().tobytes() for each in trainer.model.parameters())
    return {
        "fired": fault.fired,
        "steps": trainer.state.global_step,
        "losses": losses(trainer),
        "weights": hashlib.sha256(content).hexdigest(),
    }


def test_a_pair_that_poisons_one_rank_is_left_out_of_dpo(tmp_path: Path) -> None:
    ranks = run_pair(tmp_path, _train_on_pairs)["ranks"]
    assert sorted(rank["fired"] > 0 for rank in ranks) == [False, True]
    assert [rank["steps"] for rank in ranks] == [4, 4]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert all(math.isfinite(loss) for loss in ranks[0]["losses"])
    (outcome,) = journal(tmp_path / "run", "outcome")
    assert (outcome["failure"], outcome["steps_lost"]) == ("nonfinite_poison_rows", 0)
