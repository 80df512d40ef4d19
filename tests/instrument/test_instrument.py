"""An instrument tells its hooks of a step in the step's order, and a window runs on whatever engine it is given."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from conftest import assert_same_weights, logged, sft_trainer, weights
from transformers import TrainerCallback

from self_healing.failures.recipes import TrainingFault
from self_healing.hf import trainer_state
from self_healing.hf.adapter import Instrument
from self_healing.hf.batches import Layout
from self_healing.hf.dataloader import DataPosition
from self_healing.hf.engine import StepEngine
from self_healing.hf.experiments import EarlierSteps, StepExperiments
from self_healing.hf.hooks import Hooks
from self_healing.hf.objective import objective_named
from self_healing.hf.step import Window
from self_healing.hf.trainer_state import Bookkeeper


_T = TypeVar("_T")


class Told(Hooks):
    """Notes what it is told of."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_success(self) -> None:
        self.events.append("computed")

    def judge(self, window: Window) -> None:
        self.events.append("judge")

    def before_optimizer_step(self) -> None:
        self.events.append("before optimizer step")

    def about_to_step(self) -> None:
        self.events.append("about to step")

    def stepped(self) -> None:
        self.events.append("stepped")

    def metrics(self, training: bool, summary: bool) -> dict[str, float]:
        self.events.append("summary" if summary else "logged")
        return {}


class Attaching(TrainerCallback):
    """Attaches an instrument, and passes the Trainer's events on to it."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks
        self.trainer: Any = None
        self.instrument: Instrument | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.instrument = Instrument(self.trainer, self.hooks, heals_exceptions=False, started_at=time.time())
        self.instrument.attach()

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        assert self.instrument is not None
        self.instrument.epoch_begins()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        assert self.instrument is not None
        self.instrument.detach()


def test_hooks_are_told_in_the_order_of_a_step_and_change_nothing(tmp_path: Path, tokenizer: Any) -> None:
    plain = sft_trainer(tmp_path / "plain", tokenizer, max_steps=2, gradient_accumulation_steps=2, logging_steps=1)
    plain.train()
    told = Told()
    attaching = Attaching(told)
    watched = sft_trainer(
        tmp_path / "watched",
        tokenizer,
        max_steps=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        callbacks=[attaching],
    )
    attaching.trainer = watched
    watched.train()

    assert_same_weights(weights(watched), weights(plain))
    assert logged(watched) == logged(plain)
    step = ["computed", "computed", "judge", "before optimizer step", "about to step", "stepped", "logged"]
    assert told.events == [*step, *step, "summary"]
    assert attaching.instrument is not None
    assert not attaching.instrument.attached


class Engine(StepEngine):
    """Keeps gradients to itself, as an engine that owns the backward pass does; rows that are NaN are not finite."""

    def __init__(self, trainer: Any, view: Any) -> None:
        super().__init__(trainer, view)
        self.sums: list[float] = []
        self.calls: list[str] = []
        self.divided_by: list[int] = []
        self.fails_once = False

    def attach(self) -> None:
        self.calls.append("attach")

    def detach(self) -> None:
        self.calls.append("detach")

    def state_put(self) -> None:
        self.calls.append("state put")

    def compute(
        self,
        call: tuple[Any, Any, tuple[Any, ...], dict[str, Any]],
        last: bool,
        on_nonfinite: Callable[[], None],
        synchronise: bool = True,
    ) -> torch.Tensor:
        if self.fails_once:
            self.fails_once = False
            raise TrainingFault(ValueError("once"))
        batch = self.trainer._prepare_inputs(call[1])
        self.sums.append(float(batch["x"].sum()))
        self.calls.append("last" if last else "compute")
        self.divided_by.append(self.trainer.current_gradient_accumulation_steps)
        return torch.tensor(self.sums[-1])

    def prepare_inputs(self, inputs: Any) -> Any:
        return inputs

    def is_fatal(self, error: Exception) -> bool:
        return False

    def until_it_fits(self, compute: Callable[[], _T], discard: Callable[[], None]) -> _T:
        try:
            return compute()
        except TrainingFault:
            discard()
            return compute()

    def experiment(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def discard(self) -> None:
        self.sums.clear()
        self.calls.append("discard")

    scaler_active = False

    def gradients(self) -> list[torch.Tensor]:
        return [torch.tensor(self.sums)]

    def gradients_are_finite(self) -> bool:
        return bool(torch.isfinite(torch.tensor(self.sums)).all())

    def scale_gradients(self, factor: float) -> None:
        self.sums = [each * factor for each in self.sums]

    def rates_in_force(self, scale: float | None = None) -> list[Any]:
        return [1.0 if scale is None else scale]

    def group_options(self) -> list[dict[str, Any]]:
        return [{}]

    def step_again(
        self, rates: Sequence[Any], scaled_by: float = 1.0, options: Sequence[Mapping[str, Any]] = ()
    ) -> float | None:
        self.calls.append(f"step at {rates[0]}")
        return None

    def leave_out(self, overflowed: bool) -> None:
        self.calls.append("leave out")

    @contextlib.contextmanager
    def full_precision(self) -> Iterator[bool]:
        yield False


def step_of(*batches: list[float]) -> tuple[Window, Engine]:
    """A step that has been computed, of these micro-batches."""
    objective = objective_named("generic")
    state = SimpleNamespace(global_step=3, epoch=0.5, num_input_tokens_seen=0, total_flos=0.0, log_history=[])
    device = torch.device("cpu")
    trainer: Any = SimpleNamespace(
        state=state,
        args=SimpleNamespace(device=device),
        model=torch.nn.Linear(1, 1),
        accelerator=SimpleNamespace(device=device),
        current_gradient_accumulation_steps=len(batches),
        _tr_loss=torch.tensor(0.0),
        _prepare_inputs=lambda batch: batch,
        _get_num_items_in_batch=lambda batches, device: None,
    )
    view: Any = SimpleNamespace(
        device=device, world_size=1, objective=objective, autocast_dtype=None, shares_rows=False
    )
    engine, ledger = Engine(trainer, view), Bookkeeper(trainer)
    window = Window(engine, ledger, DataPosition(trainer, objective), len(batches))
    window.begin(ledger.capture())
    for batch in batches:
        inputs = {"x": torch.tensor(batch)}
        window.add_call(trainer.model, inputs, (), {})
        window.add_loss(engine.compute((trainer.model, inputs, (), {}), False, window.note_exception), 0)
    window.measured_by(lambda: torch.tensor(engine.sums).norm())
    engine.calls.clear()
    engine.divided_by.clear()
    return window, engine


def test_a_step_is_discarded_before_it_is_computed_again() -> None:
    window, engine = step_of([1.0], [2.0])
    window.reexecute()
    assert engine.calls == ["discard", "compute", "last"]
    assert window.signals().loss == 3.0


def test_a_step_is_computed_again_on_the_rows_that_stay() -> None:
    window, engine = step_of([1.0, float("nan")], [2.0, 4.0])
    window.reexecute()
    assert not window.signals().finite
    window.reexecute({0: [0]})
    assert window.signals().loss == 7.0
    assert engine.trainer.current_gradient_accumulation_steps == 2


def test_a_micro_batch_without_rows_is_not_computed_and_not_divided_by() -> None:
    window, engine = step_of([1.0], [2.0, 4.0])
    window.reexecute()
    window.reexecute({0: []})
    assert window.signals().loss == 6.0
    assert engine.calls[-2:] == ["discard", "last"]
    assert engine.divided_by[-1] == 1


def test_a_step_without_some_rows_is_not_recorded() -> None:
    window, _ = step_of([1.0, 2.0])
    control = window.control(3.0, largest=100)
    assert control is not None
    window.reexecute()
    assert window.recording(control) is not None
    window.reexecute({0: [1]})
    assert window.recording(control) is None


def test_a_probe_tells_rows_that_are_finite_and_leaves_no_gradient() -> None:
    window, engine = step_of([1.0, float("nan")])
    window.reexecute()
    assert StepExperiments(window).probe(0, [0])
    assert not StepExperiments(window).probe(0, [1])
    assert not engine.sums


def test_rows_of_which_each_process_has_a_part_are_not_told_apart() -> None:
    window, engine = step_of([1.0, 2.0])
    window.reexecute()
    assert window.layout(0) is not None
    engine.view.shares_rows = True
    assert window.layout(0) is None


def test_a_row_is_tried_twice_where_there_is_memory_for_two() -> None:
    assert Layout("rows", 3).alone(2) == [2, 2]
    assert Layout("rows", 1).alone(0) == [0]


def test_an_attempt_that_fails_is_discarded_and_repeated_by_the_engine() -> None:
    window, engine = step_of([1.0])
    engine.fails_once = True
    assert window.compute_again().finite
    assert engine.calls == ["discard", "discard", "discard", "last"]


def test_a_skipped_step_is_left_out_by_the_engine() -> None:
    window, engine = step_of([float("nan")])
    window.skip(substitute_loss=0.5)
    assert engine.calls == ["discard", "leave out"]
    assert float(engine.trainer._tr_loss) == 0.5


def test_an_experiment_steps_at_another_rate_and_rewinds() -> None:
    window, engine = step_of([1.0])
    control = window.control(1.0, largest=100)
    assert control is not None
    assert EarlierSteps(window).train_on(control, scale=0.25) == 1.0
    assert engine.calls == ["discard", "last", "step at 0.25", "discard"]


def test_an_earlier_step_that_is_not_finite_is_not_applied_again() -> None:
    window, engine = step_of([float("nan")])
    control = window.control(1.0, largest=100)
    assert control is not None
    recording = window.recording(control)
    assert recording is not None
    assert not EarlierSteps(window).replay(recording).finite
    assert engine.calls == ["discard", "last", "discard"]


def test_a_step_that_repeats_is_counted_once() -> None:
    window, engine = step_of([1.0], [2.0])
    found = StepExperiments(window).repeatability()
    assert found is not None
    assert found.bitwise
    assert engine.calls == ["discard", "compute", "last"]
    assert float(engine.trainer._tr_loss) == 3.0


def test_metrics_are_put_back_whole_or_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = {"train": {"reward": [1.0]}, "eval": {"reward": [0.5]}}
    mark, put_back = trainer_state._mark(metrics), trainer_state._unmark
    metrics["train"]["reward"].append(2.0)

    def interrupted(mark: Any) -> Any:
        raise TimeoutError

    monkeypatch.setattr(trainer_state, "_unmark", interrupted)
    with pytest.raises(TimeoutError):
        put_back(mark)
    monkeypatch.undo()
    assert metrics["train"]["reward"] == [1.0, 2.0]
    assert put_back(mark) == {"train": {"reward": [1.0]}, "eval": {"reward": [0.5]}}
