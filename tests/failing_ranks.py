"""
Run by test_failing_ranks.py: pairs of processes that train together, on one of which something fails that the other
knows nothing of.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from conftest import (
    POISON_WORD,
    TEXTS,
    OutputFault,
    PoisonToken,
    RaisingForward,
    build_tokenizer,
    grpo_trainer,
    losses,
    prompts,
    sft_trainer,
)
from failing_call import BESIDE, FailingCall
from forked_pairs import run_pair
from transformers import TrainerCallback, set_seed
from two_processes import digest_of
from two_sharded_processes import sharded_on_the_cpu, whole

from self_healing import HealingConfig, SelfHealingCallback, SelfHealingTrainer, consensus
from self_healing.detectors.nonfinite import NonFiniteDetector
from self_healing.instrument.live_state import local
from self_healing.instrument.reentry import Reentry
from self_healing.instrument.step_record import StepRecord
from self_healing.instrument.view import TrainerView
from self_healing.numerics.judge import StepJudge
from self_healing.numerics.observer import StepObserver
from self_healing.rollback import in_place, kept_batches
from self_healing.rollback.ring import SnapshotRing


STEPS = 14
# After so many finished steps, weights of the second rank turn NaN.
CORRUPTED_AFTER = 10


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
    ddp_timeout: int = 1800,
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
        ddp_timeout=ddp_timeout,
        max_steps=STEPS,
        gradient_accumulation_steps=1,
        save_strategy="steps",
        save_steps=7,
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
    """What is asked, and what is given on both ranks where one of them fails, raises, or asks something else."""
    cpu, mine = torch.device("cpu"), [3.0, -7.0][rank]
    found: dict[str, Any] = {
        "sum": consensus.sum_over_ranks("sum", [mine, float("nan"), 0.5], cpu)[:1],
        "any": consensus.any_rank("any", rank == 1, cpu),
        "all": consensus.all_ranks("all", lambda: rank == 1, cpu),
        "largest": consensus.largest("largest", [mine, -mine], cpu),
        "smallest": consensus.smallest("smallest", mine, cpu),
        "first": consensus.from_first_rank("first", lambda: {"rank": rank, "text": "x" * 1000}, cpu),
    }

    def told(ask: Callable[[], Any]) -> str:
        try:
            return str(ask())
        except consensus.AgreedFailure as failure:
            return type(failure).__name__

    def answer() -> list[float]:
        return [1.0 / (1 - rank)]

    found["fails"] = told(lambda: consensus.sum_over_ranks("fails", answer, cpu))
    if rank == 0:
        found["raises"] = told(lambda: consensus.from_first_rank("raises", lambda: 1, cpu))
    else:
        found["raises"] = told(lambda: consensus.tell_raised("an experiment", cpu))
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


def code_of_ours(directory: Path, rank: int, holder: Any, name: str, after: int = 5) -> dict[str, Any]:
    """Code of this library fails after so many finished steps."""
    trainer, healing = build(directory)
    with failing(holder, name, lambda _: rank == 1 and trainer.state.global_step == after, RuntimeError("a bug")):
        trainer.train()
    return result_of(trainer, healing)


def between_steps(directory: Path, rank: int) -> dict[str, Any]:
    return code_of_ours(directory, rank, Reentry, "step_begins")


def before_the_vote(directory: Path, rank: int) -> dict[str, Any]:
    return code_of_ours(directory, rank, StepRecord, "_loss_and_norm")


def after_the_vote(directory: Path, rank: int) -> dict[str, Any]:
    return code_of_ours(directory, rank, StepObserver, "take_in")


def at_the_end(directory: Path, rank: int) -> dict[str, Any]:
    return code_of_ours(directory, rank, StepJudge, "last_step_taken", after=STEPS)


def snapshot_without_memory(directory: Path, rank: int) -> dict[str, Any]:
    """Memory runs out while a state is copied."""
    trainer, healing = build(directory)
    with failing(SnapshotRing, "take", lambda _: rank == 1 and trainer.state.global_step > 0, MemoryError()):
        trainer.train()
    return result_of(trainer, healing)


def batches_too_large(directory: Path, rank: int) -> dict[str, Any]:
    """Rows are longer than what is kept to be computed again."""
    trainer, healing = build(directory, Corrupting(rank))
    with mock.patch.multiple(kept_batches, _LARGEST_TAPE=0 if rank == 1 else 2**28):
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


def experiment_strands(directory: Path, rank: int) -> dict[str, Any]:
    """Training code raises in an experiment, while the other rank waits in a collective of the loss."""
    trainer, healing = build(directory, poisoned=(5, 17))
    poison_of(trainer)

    def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if rank == 1 and _two_of_a_kind(kwargs["input_ids"]):
            raise ValueError("two of a kind")

    trainer.model.register_forward_pre_hook(look, with_kwargs=True)
    trainer.train()
    return result_of(trainer, healing)


def checkpoint_elsewhere(directory: Path, rank: int) -> dict[str, Any]:
    """The only states to go back to are on the disk of another node."""
    trainer, healing = build(directory, Corrupting(rank), snapshots=False)
    loaded: list[str] = []

    class Elsewhere(type(Path())):  # type: ignore[misc]
        def is_dir(self, **kwargs: Any) -> bool:
            return rank == 0 and super().is_dir(**kwargs)

    patched = mock.patch.object(in_place, "Path", Elsewhere, create=True)
    reloaded = mock.patch.object(in_place, "reload_checkpoint", lambda _, path: loaded.append(path))
    ended = ""
    with patched, reloaded:
        try:
            trainer.train()
        except Exception as error:
            ended = type(error).__name__
    return result_of(trainer, healing) | {"loaded": loaded, "ended": ended}


def incident_of_a_thread(directory: Path, rank: int) -> dict[str, Any]:
    """A thread opens an incident of its own whenever a step is judged."""
    trainer, healing = build(directory)
    original = NonFiniteDetector.judge

    def judge(self: Any, *args: Any, **kwargs: Any) -> Any:
        if rank == 1:
            healing.run.journal.open(0, "hang", {})
        return original(self, *args, **kwargs)

    with mock.patch.object(NonFiniteDetector, "judge", judge):
        trainer.train()
    return result_of(trainer, healing)


class MeetingThenRaising(TrainerCallback):
    """Meets the other rank in an event, and then cannot reach a service; or the other way round."""

    def __init__(self, rank: int, meets: bool) -> None:
        self.calls, self._rank, self._meets = 0, rank, meets

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != CORRUPTED_AFTER:
            return
        self.calls += 1
        if self._meets:
            torch.distributed.barrier()
        if self._rank == 1 and self.calls == 1:
            raise ConnectionError("the storage went away")


def callback_raises(directory: Path, rank: int, meets: bool = False) -> dict[str, Any]:
    """A callback cannot reach a service for a moment."""
    callback = MeetingThenRaising(rank, meets)
    trainer, healing = build(directory, callback, retry_initial_seconds=0.01)
    trainer.train()
    return result_of(trainer, healing) | {"calls": callback.calls}


def callback_raises_past_a_collective(directory: Path, rank: int) -> dict[str, Any]:
    return callback_raises(directory, rank, meets=True)


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


def build_policy(directory: Path, *callbacks: TrainerCallback, **arguments: Any) -> tuple[Any, SelfHealingCallback]:
    """Generates what it trains on."""
    set_seed(1234)
    healing = SelfHealingCallback(HealingConfig(snapshot_interval=3, snapshot_verify_steps=2))
    arguments = {"max_steps": STEPS, "gradient_accumulation_steps": 1, "ddp_backend": "gloo", **arguments}
    callbacks = [healing, *callbacks]
    return grpo_trainer(directory, build_tokenizer(), dropout=0.0, callbacks=callbacks, **arguments), healing


def search_before_generation(directory: Path, rank: int) -> dict[str, Any]:
    """Weights cannot be searched before rows are generated."""
    trainer, healing = build_policy(directory)
    struck = failing(
        TrainerView, "nonfinite_weights", lambda _: rank == 1 and trainer.state.global_step == 5, RuntimeError("a bug")
    )
    with struck:
        trainer.train()
    return result_of(trainer, healing)


def search_in_an_experiment(directory: Path, rank: int) -> dict[str, Any]:
    """The same where a step is computed again."""
    trainer, healing = build_policy(directory)
    OutputFault(trainer.model, lambda forward: forward == CORRUPTED_AFTER and rank == 1)

    def judged(view: Any) -> bool:
        window = healing.run.instrument.window
        return rank == 1 and window is not None and window.judged

    with failing(TrainerView, "nonfinite_weights", judged, RuntimeError("a bug")):
        trainer.train()
    return result_of(trainer, healing)


def evaluated_policy(directory: Path, rank: int) -> dict[str, Any]:
    """Weights turn NaN before rows are generated for an evaluation."""
    evaluated = {"eval_strategy": "steps", "eval_steps": CORRUPTED_AFTER, "per_device_eval_batch_size": 4}
    rows = {"trainer_kwargs": {"eval_dataset": prompts().take(4)}}
    trainer, healing = build_policy(directory, Corrupting(rank), **evaluated, **rows)
    trainer.train()
    return result_of(trainer, healing)


SCENARIOS = (
    votes,
    between_steps,
    before_the_vote,
    after_the_vote,
    at_the_end,
    snapshot_without_memory,
    batches_too_large,
    experiment_raises,
    experiment_strands,
    checkpoint_elsewhere,
    incident_of_a_thread,
    callback_raises,
    callback_raises_past_a_collective,
    draws_from_nan,
    draws_from_nan_alone,
    search_before_generation,
    search_in_an_experiment,
    evaluated_policy,
)


# ---- any call of this library ----


# What ranks tell each other beside votes, and what one of them does alone: in the run in which a launcher would start
# the job again.
TOLD = (
    *("consensus.py", "meeting.py", "processes.py", "shared_memory.py", "ranks/", "hangs/", "run/news.py"),
    *("instrument/one_rank.py", "instrument/replicas.py", "numerics/replicas.py"),
    *("rollback/shared_states.py", "rollback/stored_state.py", "rollback/last_step.py"),
    *("restarts/memory_start.py", "restarts/outliving.py", "restarts/start.py", "data/quarantine.py"),
)
LAUNCHER = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3"}
# How long a rank waits for another one that has failed before it came to the meeting. Only there: the process group is
# made before, with half an hour.
MEETING_SECONDS = 45
# What a pair may take, beside what the recorded one did: in seconds, and that many times as long.
LEAST_SECONDS, TIMES_AS_LONG = 60.0, 4.0


def through_faults(
    strategy: str, failing_call: FailingCall, directory: Path, rank: int, ddp_timeout: int = 1800
) -> dict[str, Any]:
    """A run in which a NaN passes, rows are poison, weights turn NaN, and checkpoints are written."""
    if strategy == "fsdp2":
        sharded_on_the_cpu(strategy)
    trainer, healing = build(directory, Corrupting(rank), poisoned=(5, 17), ddp_timeout=ddp_timeout)
    OutputFault(trainer.model, lambda forward: forward == 4 and rank == 1)
    poison_of(trainer)
    if strategy == "told":
        out_of_memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        RaisingForward(trainer.model, lambda forward: forward == 12 and rank == 1, lambda: out_of_memory)
    wrapped = SelfHealingTrainer(trainer) if strategy in ("wrapper", "told") else trainer
    try:
        with failing_call:
            wrapped.train()
    finally:
        (directory / f"calls.{rank}.json").write_text(json.dumps(failing_call.counts))
    return result_of(trainer, healing) | {"fired": failing_call.fired}


def choose(seed: int, counts: list[dict[str, int]], strategy: str) -> tuple[int, str, int]:
    """A rank, a function that it calls, and one of its calls."""
    chance = random.Random(seed)
    rank = chance.randrange(2)
    wanted = TOLD if strategy == "told" else ("",)
    function = chance.choice(sorted(each for each in counts[rank] if each.removeprefix(BESIDE).startswith(wanted)))
    return rank, function, chance.randint(1, counts[rank][function])


def fuzz(directory: Path, strategy: str, seeds: Iterable[int]) -> dict[str, Any]:
    calls = FailingCall(), FailingCall()
    recorded, launcher = directory / "recorded", LAUNCHER if strategy == "told" else None
    outcomes = {
        "recorded": run_pair(
            recorded, lambda path, rank: through_faults(strategy, calls[rank], path, rank), launcher=launcher
        )
    }
    limit = LEAST_SECONDS + TIMES_AS_LONG * outcomes["recorded"]["seconds"]
    counts = [json.loads((recorded / f"calls.{rank}.json").read_text()) for rank in (0, 1)]
    for seed in seeds:
        struck, function, call = choose(seed, counts, strategy)

        def run(path: Path, rank: int, struck: int = struck, function: str = function, call: int = call) -> Any:
            calls = FailingCall(function, call) if rank == struck else FailingCall()
            return through_faults(strategy, calls, path, rank, MEETING_SECONDS)

        failed = f"seed {seed} ({function}, call {call}, rank {struck})"
        outcome = run_pair(directory / f"seed-{seed}", run, limit, launcher=launcher) | {"failed": failed}
        outcomes[str(seed)] = outcome | {"beside": function.startswith(BESIDE)}
        told = [each.get("error", each.get("weights", "")[:8])[:110] for each in outcome["ranks"]]
        fired = outcome["ranks"][struck].get("fired")
        print(f"{outcome['seconds']:.0f} s", failed, f"fired: {fired}", outcome["hung"], told, flush=True)
        for each in outcome["last"]:
            print("   ", each, flush=True)
    return outcomes


def main(directory: Path, part: str) -> None:
    strategy, _, seeds = part.partition(":")
    if seeds:
        outcomes = fuzz(directory, strategy, range(*map(int, seeds.split("-"))))
    else:
        wanted = [each for each in SCENARIOS if part in ("findings", each.__name__)]
        outcomes = {each.__name__: run_pair(directory / each.__name__, each) for each in wanted}
    (directory / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
