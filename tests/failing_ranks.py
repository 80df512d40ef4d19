"""
Run by test_failing_ranks.py: pairs of processes that train together, on one of which something fails that the other
knows nothing of.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from conftest import (
    POISON_WORD,
    TEXTS,
    PoisonToken,
    build_tokenizer,
    losses,
    sft_trainer,
)
from forked_pairs import run_pair
from transformers import TrainerCallback, set_seed
from two_processes import digest_of
from two_sharded_processes import whole

from self_healing import HealingConfig, SelfHealingCallback, SelfHealingTrainer
from self_healing.hf.reentry import Reentry
from self_healing.hf.state import local
from self_healing.hf.step import Window
from self_healing.ranks import votes as consensus
from self_healing.rollback import rollback
from self_healing.rollback.ring import SnapshotRing
from self_healing.rollback.trusted import TrustedStates


STEPS = 10
# After so many finished steps, weights of the second rank turn NaN.
CORRUPTED_AFTER = 7


class Corrupting(TrainerCallback):
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == CORRUPTED_AFTER and self._rank == 1:
            local(next(model.parameters()).data).view(-1)[0] = float("nan")


def build(
    directory: Path,
    *callbacks: TrainerCallback,
    poisoned: Iterable[int] = (),
    **settings: Any,
) -> tuple[Any, SelfHealingCallback]:
    set_seed(1234)
    healing = SelfHealingCallback(HealingConfig(**{"snapshot_interval": 3, "snapshot_verify_steps": 2, **settings}))
    trainer = sft_trainer(
        directory,
        build_tokenizer(),
        dropout=0.0,
        texts=[f"{text} {POISON_WORD}" if index in set(poisoned) else text for index, text in enumerate(TEXTS)],
        callbacks=[healing, *callbacks],
        ddp_backend="gloo",
        max_steps=STEPS,
        gradient_accumulation_steps=1,
        save_strategy="steps",
        save_steps=5,
    )
    return trainer, healing


def result_of(trainer: Any, healing: SelfHealingCallback) -> dict[str, Any]:
    run = healing.run
    incidents = [] if run is None else run.journal.incidents
    weights = {name: whole(value) for name, value in trainer.model.state_dict().items()}
    return {
        "weights": digest_of(weights),
        "finite": all(bool(torch.isfinite(value).all()) for value in weights.values()),
        "steps": trainer.state.global_step,
        "losses": losses(trainer),
        "broken": run is None or run.broken,
        "failures": [str(incident.failure) for incident in incidents],
        "lost": [incident.steps_lost for incident in incidents],
    }


def poison_of(trainer: Any) -> PoisonToken:
    return PoisonToken(trainer.model, trainer.processing_class.convert_tokens_to_ids(POISON_WORD))


# ---- votes ----


def votes(directory: Path, rank: int) -> dict[str, Any]:
    """What is asked, and what is given on both ranks where one of them raises, or asks something else."""
    cpu, mine = torch.device("cpu"), [3.0, -7.0][rank]
    found: dict[str, Any] = {
        "sum": consensus.sum_over_ranks("sum", [mine, float("nan"), 0.5], cpu)[:1],
        "any": consensus.any_rank("any", rank == 1, cpu),
        "all": consensus.all_ranks("all", rank == 1, cpu),
        "largest": consensus.largest("largest", [mine, -mine], cpu),
        "smallest": consensus.smallest("smallest", mine, cpu),
        "first": consensus.from_first_rank("first", lambda: {"rank": rank, "text": "x" * 1000}, cpu),
    }

    def told(ask: Callable[[], Any]) -> str:
        try:
            return str(ask())
        except (consensus.RankRaised, consensus.RanksDisagree) as failure:
            return type(failure).__name__

    if rank == 0:
        found["raises"] = told(lambda: consensus.from_first_rank("raises", lambda: 1, cpu))
    else:
        found["raises"] = told(lambda: consensus.tell_raised(cpu))
    cast = consensus._cast.__self__._cast  # type: ignore[attr-defined]
    with mock.patch.object(consensus, "_cast", cast):
        found["apart"] = told(lambda: consensus.any_rank(f"the question of rank {rank}", True, cpu))
    found["still"] = consensus.sum_over_ranks("still", [1.0], cpu)[0]
    return found


# ---- one thing that fails on the second rank ----


def failing(holder: Any, name: str, when: Callable[[Any], bool], error: Exception) -> Any:
    """Patches a method: it raises in front of its work, once it is called with what `when` waits for."""
    original = getattr(holder, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if when(self):
            raise error
        return original(self, *args, **kwargs)

    return mock.patch.object(holder, name, method)


def plain(directory: Path, rank: int) -> dict[str, Any]:
    """The run without this library."""
    trainer, healing = build(directory)
    trainer.remove_callback(healing)
    trainer.train()
    return result_of(trainer, healing)


def code_of_ours(directory: Path, rank: int, holder: Any, name: str) -> dict[str, Any]:
    """Code of this library fails after five finished steps, in a step that needs no healing."""
    trainer, healing = build(directory)
    with failing(holder, name, lambda _: rank == 1 and trainer.state.global_step == 5, RuntimeError("a bug")):
        trainer.train()
    return result_of(trainer, healing)


def between_steps(directory: Path, rank: int) -> dict[str, Any]:
    return code_of_ours(directory, rank, Reentry, "events_begin")


def before_the_vote(directory: Path, rank: int) -> dict[str, Any]:
    return code_of_ours(directory, rank, Window, "loss_and_norm")


def snapshot_without_memory(directory: Path, rank: int) -> dict[str, Any]:
    """Memory runs out while a state is copied."""
    trainer, healing = build(directory)
    with failing(SnapshotRing, "take", lambda _: rank == 1 and trainer.state.global_step > 0, MemoryError()):
        trainer.train()
    return result_of(trainer, healing)


def _two_of_a_kind(rows: torch.Tensor) -> bool:
    """Computed in an experiment only: a row beside itself."""
    return rows.shape[0] == 2 and torch.equal(rows[0], rows[1])


def experiment_raises(directory: Path, rank: int) -> dict[str, Any]:
    """Training code raises in an experiment, past its collectives."""
    trainer, healing = build(directory, poisoned=(5, 17))
    poison_of(trainer)
    original = trainer.compute_loss

    def compute_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = original(model, inputs, *args, **kwargs)
        if rank == 1 and _two_of_a_kind(inputs["input_ids"]):
            raise ValueError("two of a kind")
        return loss

    trainer.compute_loss = compute_loss
    trainer.train()
    return result_of(trainer, healing)


def checkpoint_elsewhere(directory: Path, rank: int) -> dict[str, Any]:
    """The only states to go back to are on the disk of another node."""
    trainer, healing = build(directory, Corrupting(rank), snapshots=False)
    loaded: list[str] = []

    class Elsewhere(type(Path())):  # type: ignore[misc]
        def is_dir(self, **kwargs: Any) -> bool:
            return rank == 0 and super().is_dir(**kwargs)

    patched = mock.patch.object(rollback, "Path", Elsewhere, create=True)
    reloaded = mock.patch.object(rollback, "reload_checkpoint", lambda _, path: loaded.append(path))
    ended = ""
    with patched, reloaded:
        try:
            trainer.train()
        except Exception as error:
            ended = type(error).__name__
    return result_of(trainer, healing) | {"loaded": loaded, "ended": ended}


def draws_from_nan(directory: Path, rank: int, ranks: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    """What says that it cannot draw from NaN is raised once."""
    trainer, healing = build(directory)
    original, calls = trainer.compute_loss, 0

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == CORRUPTED_AFTER and rank in ranks:
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        return original(*args, **kwargs)

    trainer.compute_loss = compute_loss
    trainer.train()
    return result_of(trainer, healing)


def draws_from_nan_alone(directory: Path, rank: int) -> dict[str, Any]:
    return draws_from_nan(directory, rank, ranks=(1,))


# ---- where ranks meet: the job ends, and is started again ----


class FirstStep(TrainerCallback):
    step = -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step


def started_twice(directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The first time a snapshot cannot be trusted on one rank, for a bug; and what a launcher starts after that."""
    for start in ("first", "second"):

        def run(path: Path, rank: int, start: str = start) -> dict[str, Any]:
            began = FirstStep()
            trainer, healing = build(path, began)

            def struck(_: Any) -> bool:
                return rank == 1 and start == "first" and trainer.state.global_step > 5

            with failing(TrustedStates, "promote", struck, RuntimeError("a bug")):
                # It sees by itself that a launcher has made the second start.
                SelfHealingTrainer(trainer).train()
            return result_of(trainer, healing) | {"began": began.step}

        restarts = {"TORCHELASTIC_RESTART_COUNT": str(int(start == "second"))}
        launcher = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_MAX_RESTARTS": "3", **restarts}
        yield start, run_pair(directory, run, launcher=launcher)
        (directory / "log.0.txt").rename(directory.with_name(f"{start}.txt"))


def main(directory: Path, scenario: str) -> None:
    run = globals()[scenario]
    outcome = dict(run(directory)) if run is started_twice else run_pair(directory, run)
    directory.with_suffix(".json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
