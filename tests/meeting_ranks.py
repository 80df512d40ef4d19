"""Run by test_meeting.py: pairs of ranks of which one alone heals, or by other settings; or that lose the store."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from conftest import OutputFault, build_tokenizer, sft_trainer
from forked_pairs import run_pair

from self_healing import HealingConfig, SelfHealingCallback, SelfHealingTrainer
from self_healing.ranks import votes as meeting


def build(directory: Path, *callbacks: Any, **arguments: Any) -> Any:
    return sft_trainer(
        directory,
        build_tokenizer(),
        dropout=0.0,
        callbacks=list(callbacks),
        gradient_accumulation_steps=1,
        **{"max_steps": 4, "ddp_backend": "gloo", **arguments},
    )


def healed_on_one(directory: Path, rank: int, wrapped: bool) -> dict[str, Any]:
    """As where the callback is added like one that logs: on the first rank alone."""
    healed = rank == 0
    callbacks = [SelfHealingCallback()] if healed and not wrapped else []
    trainer = build(directory, *callbacks, ddp_timeout=4)
    with mock.patch.object(meeting, "_PATIENCE", 1.0):
        (SelfHealingTrainer(trainer) if healed and wrapped else trainer).train()
    return {}


def callback_on_one(directory: Path, rank: int) -> dict[str, Any]:
    return healed_on_one(directory, rank, wrapped=False)


def wrapper_on_one(directory: Path, rank: int) -> dict[str, Any]:
    return healed_on_one(directory, rank, wrapped=True)


def other_settings(directory: Path, rank: int) -> dict[str, Any]:
    config = HealingConfig(snapshots=rank == 0, nan_patience=3 + rank, healing_dir=str(directory / f"of_rank_{rank}"))
    trainer = build(directory, SelfHealingCallback(config))
    try:
        trainer.train()
    except ValueError as error:
        return {"refused": str(error)}
    return {"steps": trainer.state.global_step}


def each_by_itself(directory: Path, rank: int) -> dict[str, Any]:
    """The program has made a group for something else, and the Trainer knows nothing of it."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)
    healing = SelfHealingCallback()
    trainer = build(directory / str(rank), healing, max_steps=3 + rank, ddp_backend=None)
    fault = OutputFault(trainer.model, lambda forward: forward == 2 and rank == 1)
    trainer.train()
    assert healing.run is not None
    return {
        "steps": trainer.state.global_step,
        "fired": fault.fired,
        "ranks": trainer.args.world_size,
        "failures": [str(incident.failure) for incident in healing.run.journal.incidents],
    }


SCENARIOS = (
    each_by_itself,
    callback_on_one,
    wrapper_on_one,
    other_settings,
)


def main(directory: Path, *names: str) -> None:
    wanted = [each for each in SCENARIOS if not names or each.__name__ in names]
    outcomes = {each.__name__: run_pair(directory / each.__name__, each, seconds=90) for each in wanted}
    (directory / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
