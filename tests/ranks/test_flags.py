"""What a callback asks for on one rank alone, all ranks do, or none: as it is asked for on the first one."""

from __future__ import annotations

import logging
import logging.handlers
from pathlib import Path
from typing import Any

import pytest
from conftest import TEXTS, build_tokenizer, sft_trainer, text_rows
from forked_pairs import run_pair
from transformers import TrainerCallback, set_seed
from two_processes import digest

from self_healing import SelfHealingCallback


class Asks(TrainerCallback):
    """Sets a flag in an event of one step, as one does that goes by a clock of its own."""

    def __init__(self, event: str, flag: str, step: int) -> None:
        def ask(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step:
                setattr(control, flag, True)

        setattr(self, event, ask)


# By name: the flags that are set on one rank alone, by event, rank and step.
ASKED: dict[str, list[tuple[str, str, int, int]]] = {
    "saved": [("should_save", "on_step_end", 0, 2), ("should_save", "on_step_end", 1, 3)],
    "evaluated": [("should_evaluate", "on_step_begin", 0, 2), ("should_evaluate", "on_step_end", 1, 4)],
    "stopped": [("should_training_stop", "on_step_end", 1, 2), ("should_training_stop", "on_step_end", 0, 4)],
    "stopped in a log": [("should_training_stop", "on_log", 1, 2), ("should_training_stop", "on_log", 0, 3)],
}


def asked(directory: Path, rank: int) -> dict[str, Any]:
    tokenizer, results, told = build_tokenizer(), dict[str, Any](), logging.handlers.BufferingHandler(1000)
    logging.getLogger("self_healing").addHandler(told)
    for name, flags in ASKED.items():
        set_seed(1234)
        # Callbacks that only one rank has are common: they write logs.
        callbacks = [Asks(event, flag, step) for flag, event, on, step in flags if on == rank]
        trainer = sft_trainer(
            directory / name,
            tokenizer,
            callbacks=[SelfHealingCallback(), *callbacks],
            trainer_kwargs={"eval_dataset": text_rows(*TEXTS[:4])},
            ddp_backend="gloo",
            max_steps=5,
            gradient_accumulation_steps=1,
        )
        trainer.train()
        evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
        results[name] = {"steps": trainer.state.global_step, "evaluated": evaluated, "weights": digest(trainer)}
    results["told"] = [record.getMessage() for record in told.buffer if "on rank 0" in record.getMessage()]
    return results


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("flags") / "pair"
    found = run_pair(directory, asked)
    assert found["hung"] == []
    assert [each.get("error") for each in found["ranks"]] == [None, None]
    return directory, found["ranks"]


@pytest.mark.parametrize(
    ("name", "steps", "evaluated", "saved"),
    [
        ("saved", 5, [], ["checkpoint-2"]),
        ("evaluated", 5, [3], []),
        ("stopped", 4, [], []),
        ("stopped in a log", 3, [], []),
    ],
)
def test_all_ranks_do_what_is_asked_for_on_the_first_one(
    pair: Any, name: str, steps: int, evaluated: list[int], saved: list[str]
) -> None:
    directory, ranks = pair
    assert [(rank[name]["steps"], rank[name]["evaluated"]) for rank in ranks] == [(steps, evaluated)] * 2
    assert sorted(path.name for path in (directory / name).glob("checkpoint-*")) == saved
    assert ranks[0][name]["weights"] == ranks[1][name]["weights"]


def test_the_first_difference_is_told_of(pair: Any) -> None:
    _, (first, second) = pair
    assert first["told"][0].startswith("Step 2: should_save is True on rank 0, and not on rank 1: a callback decides")
    # In each run once.
    assert (len(first["told"]), second["told"]) == (len(ASKED), [])
