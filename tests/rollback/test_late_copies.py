"""Copies of the state that are under way when it is overwritten: completed as late as a stream may."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_same_weights, journal, sft_trainer, weights
from test_memory import HalfWay
from torch import nn
from transformers import TrainerCallback

from self_healing import HealingConfig, SelfHealingCallback
from self_healing.healers.numerics.diagnosis import diagnose_rise, diagnose_stillness
from self_healing.healers.numerics.healer import try_older_checkpoints
from self_healing.healers.numerics.learning_rate import try_rates
from self_healing.hf.experiments import EarlierSteps
from self_healing.hf.state import LiveState
from self_healing.hf.step import Window
from self_healing.rollback.ring import SnapshotRing
from self_healing.rollback.rollback import Rollback, Target
from self_healing.rollback.snapshots import Snapshot


class LateTransfer:
    """Copies what is there when somebody waits for it, or has the device wait."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work

    @property
    def complete(self) -> bool:
        return self._work is None

    def wait(self) -> float:
        if self._work is not None:
            self._work()
        self._work = None
        return 0.0

    def join(self) -> None:
        self.wait()


class LateCopies:
    """A device that does what it is given beside computing only when it is waited for."""

    def __init__(self) -> None:
        self.started: list[LateTransfer] = []

    def stream(self, device: torch.device) -> LateCopies:
        return self

    def start(self, work: Callable[[], None]) -> LateTransfer:
        self.started.append(LateTransfer(work))
        return self.started[-1]

    def pin(self, address: int, nbytes: int) -> bool:
        return False

    def unpin(self, address: int) -> None:
        raise AssertionError("nothing was pinned")


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateCopies:
    late = LateCopies()
    monkeypatch.setattr("self_healing.rollback.snapshots.copies_of", {"cpu": late}.get)
    return late


def training() -> tuple[nn.Module, torch.optim.Optimizer, LiveState]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    scaler = {"_scale": torch.tensor(8.0)}
    return model, optimizer, LiveState(dict(model.named_parameters()), dict(model.named_buffers()), optimizer, scaler)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def content(live: LiveState) -> list[torch.Tensor]:
    states = [] if live.optimizer is None else live.optimizer.state.values()
    moments = [value for state in states for value in state.values()]
    own = [*live.parameters.values(), *live.buffers.values(), *live.scaler.values()]
    return [tensor.detach().clone() for tensor in [*own, *moments]]


def assert_holds(ring: SnapshotRing, snapshot: Snapshot, live: LiveState, expected: list[torch.Tensor]) -> None:
    ring.restore(snapshot, live)
    assert all(torch.equal(one, other) for one, other in zip(content(live), expected, strict=True))


def stays(ring: SnapshotRing) -> None:
    """It is the candidate."""


@pytest.mark.parametrize("becomes", [stays, SnapshotRing.promote, SnapshotRing.begin_with_candidate])
def test_an_optimizer_step_comes_after_the_copy(late: LateCopies, becomes: Callable[[SnapshotRing], None]) -> None:
    model, optimizer, live = training()
    ring = SnapshotRing()
    snapshot = ring.take(live, 1, {})
    expected = content(live)
    becomes(ring)
    assert not late.started[-1].complete

    ring.join()
    step(model, optimizer)

    assert_holds(ring, snapshot, live, expected)


def test_a_state_is_put_back_after_what_it_overwrites_was_copied(late: LateCopies) -> None:
    model, optimizer, live = training()
    ring = SnapshotRing()
    trusted = ring.take(live, 1, {})
    ring.promote()
    ring.join()
    step(model, optimizer)
    aside = ring.take(live, 2, {})
    expected = content(live)

    ring.restore(trusted, live)

    assert_holds(ring, aside, live, expected)


def test_what_was_put_back_stays_when_its_memory_is_written_to_again(late: LateCopies) -> None:
    model, optimizer, live = training()
    ring = SnapshotRing()
    snapshot, expected = ring.take(live, 1, {}), content(live)
    ring.join()
    step(model, optimizer)
    ring.restore(snapshot, live)

    for place in snapshot.pool.values():
        place.tensor.fill_(7)

    assert all(torch.equal(one, other) for one, other in zip(content(live), expected, strict=True))


def test_a_forward_pass_and_the_scaler_need_not_wait(late: LateCopies) -> None:
    model, _, live = training()
    ring = SnapshotRing()
    snapshot, expected = ring.take(live, 1, {}), content(live)

    model(torch.randn(8, 4))
    live.scaler["_scale"].mul_(0.5)

    assert not late.started[-1].complete
    assert_holds(ring, snapshot, live, expected)


def test_optimizer_state_that_is_cleared_is_kept_until_it_is_copied(late: LateCopies) -> None:
    model, optimizer, live = training()
    moments = weakref.ref(optimizer.state[model[0].weight]["exp_avg"])
    untyped = moments().untyped_storage().data_ptr()
    ring = SnapshotRing()
    snapshot, expected = ring.take(live, 1, {}), content(live)

    optimizer.state.clear()
    gc.collect()
    taken = [torch.empty(4, 4) for _ in range(50)]

    assert untyped not in [each.untyped_storage().data_ptr() for each in taken], "the memory was given to others"
    assert_holds(ring, snapshot, live, expected)


def test_memory_is_used_again_only_once_the_copy_into_it_is_complete(late: LateCopies) -> None:
    model, optimizer, live = training()
    ring = SnapshotRing()
    ring.take(live, 1, {})
    ring.take(live, 2, {})
    expected = content(live)
    assert [transfer.complete for transfer in late.started] == [True, False]

    ring.join()
    step(model, optimizer)

    assert ring.candidate is not None
    assert_holds(ring, ring.candidate, live, expected)


@pytest.mark.parametrize("release", [SnapshotRing.release, SnapshotRing.discard])
def test_memory_is_given_back_after_the_copy(late: LateCopies, release: Callable[[SnapshotRing], None]) -> None:
    _, _, live = training()
    ring = SnapshotRing()
    ring.take(live, 1, {})
    release(ring)
    assert all(transfer.complete for transfer in late.started)


def test_a_copy_that_cannot_be_started_leaves_none_under_way(
    late: LateCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, live = training()

    class Failing(LateCopies):
        def start(self, work: Callable[[], None]) -> LateTransfer:
            raise RuntimeError("CUDA out of memory")

    ring = SnapshotRing()
    ring._streams = {torch.device("meta"): Failing()}
    monkeypatch.setattr("self_healing.rollback.snapshots.copies_of", {"cpu": late, "meta": late}.get)
    live.parameters["elsewhere"] = torch.empty(3, device="meta")
    with pytest.raises(RuntimeError, match="out of memory"):
        ring.take(live, 1, {})
    assert all(transfer.complete for transfer in late.started)
    assert ring.candidate is None


# ---- in a run ----


class InTheMiddle(TrainerCallback):
    """Does something with a step that has been judged, between its backward and `optimizer.step()`."""

    def __init__(self, healing: SelfHealingCallback, what: Callable[[Window, Rollback], Any], step: int = 4) -> None:
        self.healing, self.what, self.step = healing, what, step
        self.found: Any = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            run = self.healing.run
            self.found = self.what(run.instrument.window, run.rollback)


def diagnosed_as_harder_data(window: Window, rollback: Rollback) -> None:
    found = diagnose_rise(window, rollback.trials, loss=6.0, level=1.0, scale=0.1)
    assert found.cause == "harder data"


def diagnosed_for_stillness(window: Window, rollback: Rollback) -> None:
    found = diagnose_stillness(window, rollback.trials, window.signals(), first=100.0, scale=0.1)
    assert len(found.evidence["same_batch"]) == 1


def learning_rates_tried(window: Window, rollback: Rollback) -> None:
    assert rollback.trials.begin(window.step)
    start = rollback.states.generations()[-1]
    steps = rollback.batches.first_steps
    tried = try_rates(window, rollback.trials, start, steps, 1.0, lowest=0.1, limit=99.0, adaptive=True)
    assert len(tried.losses) > 1
    rollback.trials.end()
    window.compute_again()


def older_checkpoints_tried(window: Window, rollback: Rollback) -> None:
    directory = Path(window._trainer.args.output_dir)
    newest, *older = (str(directory / f"checkpoint-{number}") for number in (3, 2, 1))
    trial = try_older_checkpoints(window, rollback.trials, newest, older, scale=1.0, rise=-9.0, unmoved=False)
    assert len(trial.tried) > 1
    window.reexecute()


def gone_back_and_replayed(window: Window, rollback: Rollback) -> None:
    assert rollback.go_back(Target.NEWEST, window.step, "incident") is not None
    assert rollback.replay(window, lambda signals: True).steps == window.step


def gone_back_to_disk_and_forward_again(window: Window, rollback: Rollback) -> None:
    directory = Path(window._trainer.args.output_dir)
    assert rollback.trials.begin(window.step)
    assert rollback.trials.try_checkpoint(str(directory / "checkpoint-2"))
    rollback.trials.end()
    window.begin_from_here()
    window.compute_again()


def set_aside_under_an_update(window: Window, rollback: Rollback) -> None:
    assert rollback.trials.begin(window.step)
    control = window.control(1.0, 2**30)
    assert control is not None
    EarlierSteps(window).train_on(control, 1.0)
    rollback.trials.end()
    window.compute_again()


ARGUMENTS = {"max_steps": 7, "save_strategy": "steps", "save_steps": 1, "save_total_limit": None}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[str, torch.Tensor]:
    """The weights of a run that nothing is done to."""
    trainer = sft_trainer(tmp_path_factory.mktemp("plain"), tokenizer, **ARGUMENTS)
    trainer.train()
    return weights(trainer)


@pytest.mark.parametrize(
    "what",
    [
        diagnosed_as_harder_data,
        diagnosed_for_stillness,
        learning_rates_tried,
        older_checkpoints_tried,
        gone_back_and_replayed,
        gone_back_to_disk_and_forward_again,
        set_aside_under_an_update,
    ],
)
def test_nothing_is_left_of_an_experiment(
    late: LateCopies, tmp_path: Path, tokenizer: Any, plain: Any, what: Callable[[Window, Rollback], None]
) -> None:
    healing = SelfHealingCallback(HealingConfig(on_spike="warn"))
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[healing, InTheMiddle(healing, what)], **ARGUMENTS)
    trainer.train()

    assert late.started
    assert_same_weights(weights(trainer), plain)


class NansAt(TrainerCallback):
    """Weights that turn NaN once a step is finished."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self.step:
            model.lm_head.weight.detach()[:3] = float("nan")
            self.step = -1


def test_snapshots_taken_while_training_hold_what_was_there(late: LateCopies, tmp_path: Path, tokenizer: Any) -> None:
    arguments = {"max_steps": 18, "gradient_accumulation_steps": 1}
    plain = sft_trainer(tmp_path / "plain", tokenizer, **arguments)
    plain.train()
    healing = SelfHealingCallback(HealingConfig(snapshot_interval=1, snapshot_verify_steps=2))
    healed = sft_trainer(tmp_path / "healed", tokenizer, callbacks=[healing, NansAt(15)], **arguments)
    healed.train()

    (back,) = [event for event in journal(tmp_path / "healed", "action") if event["action"] == "roll_back"]
    assert (back["state"], back["to_step"]) == ("newest", 13)
    assert_same_weights(weights(healed), weights(plain))


def test_a_state_that_is_written_to_while_it_is_copied_is_not_trusted(
    late: LateCopies, tmp_path: Path, tokenizer: Any
) -> None:
    def trained(directory: str, *callbacks: TrainerCallback) -> Any:
        arguments = {"max_steps": 18, "gradient_accumulation_steps": 1, "learning_rate": 1e-2}
        trainer = sft_trainer(tmp_path / directory, tokenizer, callbacks=list(callbacks), **arguments)
        head = trainer.model.lm_head.weight

        def clamp(*_: Any) -> None:
            with torch.no_grad():
                head.clamp_(-0.02, 0.02)

        trainer.model.register_forward_pre_hook(clamp)
        trainer.train()
        return trainer

    plain = trained("plain")
    config = HealingConfig(snapshot_interval=1, snapshot_verify_steps=2)
    healed = trained("healed", SelfHealingCallback(config), NansAt(15))

    (refused,) = journal(tmp_path / "healed", "snapshot_refused")
    assert refused["tensors"] == ["written to while they were copied"]
    (back,) = [event for event in journal(tmp_path / "healed", "action") if event["action"] == "roll_back"]
    assert (back["state"], back["to_step"]) == ("newest", 13)
    assert_same_weights(weights(healed), weights(plain))


def test_an_update_that_failed_half_way_is_undone(late: LateCopies, tmp_path: Path, tokenizer: Any) -> None:
    def trained(directory: str, times: int) -> dict[str, torch.Tensor]:
        healing = SelfHealingCallback(HealingConfig(optimizer_step_backup=True, snapshot_interval=1))
        trainer = sft_trainer(tmp_path / directory, tokenizer, callbacks=[healing], max_steps=7)
        trainer.optimizer = HalfWay(trainer.model.parameters(), lr=1e-3, fails_at=4, times=times)
        trainer.train()
        return weights(trainer)

    healed = trained("healed", times=1)
    assert journal(tmp_path / "healed", "outcome")[0]["steps_lost"] == 0
    assert_same_weights(healed, trained("plain", times=0))


def test_the_state_a_run_begins_with_is_complete_before_it_begins(
    late: LateCopies, tmp_path: Path, tokenizer: Any
) -> None:
    class Evaluating(TrainerCallback):
        """For an evaluation, or whatever else comes before the first step, some optimizers swap the weights."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.complete = [transfer.complete for transfer in late.started]

    seen = Evaluating()
    sft_trainer(tmp_path, tokenizer, callbacks=[SelfHealingCallback(), seen], max_steps=1).train()
    assert seen.complete == [True]
