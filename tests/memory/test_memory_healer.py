"""The ladder for memory that runs out, asked rung by rung, without a trainer or a model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_up_run import MadeUpRun, MadeUpWindow

from self_healing import Action, FailureType, UnrecoverableTrainingError
from self_healing.healers.oom.healer import MemoryHealer
from self_healing.healers.oom.sizes import SIZES_FILE, KnownSizes, MemoryRemedies, MemoryState, SizesFile
from self_healing.hf.batches import CallShape
from self_healing.hf.memory import OutOfMemory


FIGURES = {"host_used": 10**9, "host_available": 10**9}


def ran_out(place: Any = "forward", error: Exception | None = None) -> OutOfMemory:
    return OutOfMemory(place, error or RuntimeError("out of memory"), None, FIGURES, "model.py:1 in forward")


class Window(MadeUpWindow):
    discarded = 0

    def discard(self) -> None:
        self.discarded += 1

    def shapes(self) -> list[Any]:
        return []


class Memory:
    """A run at one step, whose calls are of 8 rows, and its healer of memory."""

    def __init__(self, directory: Path, first: bool = True, **settings: Any) -> None:
        self.run = run = MadeUpRun(directory, **settings)
        view = run.instrument.view
        view.models, view.can_split_calls, view.may_compute_in_passes = list, True, False
        view.sharded, view.why_not_split = False, ""
        view.fingerprint = lambda: "the same model"
        self.can_checkpoint = True
        run.instrument.activation_checkpointing = SimpleNamespace(switch_on=self._checkpoint)
        run.instrument.retry = SimpleNamespace(experimenting=False)
        self.why_not_here = "a gradient has been added to"
        run.instrument.one_rank = SimpleNamespace(
            possible=False, meets_in_forward=None, why_not=lambda place: self.why_not_here
        )
        run.instrument.release_calls = lambda models: None
        run.instrument.objective = SimpleNamespace(paired=False, name="sft")
        run.instrument.trainer.accelerator = SimpleNamespace(device=view.device)
        self.state = MemoryState(KnownSizes(10))
        remedies: Any = MemoryRemedies(self.state)
        applied, made_up = run.actions.applied, run.actions.apply

        def apply(actions: Any, context: Any, args: Any) -> dict[str, Any]:
            carry_out = remedies.table().get(actions)
            if carry_out is None:
                return made_up(actions, context, args)
            applied.append(actions)
            return carry_out(context, args)

        run.actions.apply = apply  # type: ignore[method-assign]
        self.recomputed: list[Any] = []
        self.gone_back: list[Any] = []
        made: Any = run
        self.healer = MemoryHealer(
            made, self.state, lambda on_host: 0, self.recomputed.append, lambda context: self.gone_back.append(context)
        )
        self.healer.attach(first)
        self.at(3)

    def _checkpoint(self) -> bool:
        could, self.can_checkpoint = self.can_checkpoint, False
        return could

    def at(self, step: int) -> None:
        self.window: Any = self.run.at(Window(step))
        self.state.sizes.begin_step(step)

    def attempt(self, rows: int, place: Any = "forward") -> bool:
        """A call of these rows begins, and does not fit. Returns whether it is to be tried again."""
        self.state.sizes.begins(CallShape("train", rows, 16))
        return self.healer.handle_oom(ran_out(place), self.window)

    @property
    def applied(self) -> list[Action]:
        return self.run.actions.applied


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    return Memory(tmp_path)


def test_the_first_time_memory_is_freed_and_the_same_is_tried_again(memory: Memory) -> None:
    assert memory.attempt(8)
    assert memory.applied == [Action.FREE_MEMORY]
    assert memory.window.discarded == 1
    assert not memory.state.sizes.limits
    memory.healer.on_success()
    assert memory.run.incidents == [("out_of_memory", "resolved")]
    assert memory.recomputed == memory.run.journal.incidents
    assert memory.recomputed[0].figures[-1] == "the second attempt, at full size, went through"


def test_the_second_time_the_size_is_split_and_written_down(memory: Memory, tmp_path: Path) -> None:
    assert memory.attempt(8)
    assert memory.attempt(8)
    assert memory.applied == [Action.FREE_MEMORY, Action.SPLIT_BATCH]
    assert memory.state.sizes.known_rows(CallShape("train", 8, 16)) == 4
    memory.healer.on_success()
    assert memory.recomputed == []
    assert json.loads((tmp_path / SIZES_FILE).read_text())["sizes"]["train"]["fails"] == [[8, 16]]


def test_a_size_is_split_once_in_an_incident(memory: Memory) -> None:
    memory.attempt(8)
    memory.attempt(8)
    # What was split does not fit whole: the pieces are not taken any more.
    assert memory.attempt(8)
    assert memory.applied[-1] is Action.CHECKPOINT_ACTIVATIONS
    assert memory.state.checkpointing_activations


def test_sizes_are_split_down_to_one_row(memory: Memory) -> None:
    memory.attempt(8)
    for rows in (8, 4, 2):
        assert memory.attempt(rows)
        assert memory.applied[-1] is Action.SPLIT_BATCH
    assert memory.attempt(1)
    assert memory.applied[-1] is Action.CHECKPOINT_ACTIVATIONS


def test_after_the_last_rung_the_run_ends_and_says_what_did_not_fit(memory: Memory, tmp_path: Path) -> None:
    memory.can_checkpoint = False
    memory.attempt(1)
    with pytest.raises(UnrecoverableTrainingError, match=r"out of memory in forward: .*cannot be split any further"):
        memory.attempt(1)
    assert memory.applied[-2:] == [Action.EMERGENCY_CHECKPOINT, Action.STOP]
    assert "Halve per_device_train_batch_size" in memory.run.journal.incidents[0].evidence["remedy"]
    assert (tmp_path / SIZES_FILE).exists()


def test_calls_that_are_not_split_say_so(memory: Memory) -> None:
    view = memory.run.instrument.view
    view.can_split_calls, view.why_not_split = False, "nn.DataParallel makes replicas"
    memory.can_checkpoint = False
    memory.attempt(1)
    with pytest.raises(UnrecoverableTrainingError, match=r"nn.DataParallel makes replicas"):
        memory.attempt(1)


@pytest.mark.parametrize("first", ["earlier start", "this one"])
def test_a_model_whose_calls_are_made_whole_says_why(
    memory: Memory, first: str, caplog: pytest.LogCaptureFixture
) -> None:
    view = memory.run.instrument.view
    view.sharded, view.can_split_calls, view.why_not_split = True, False, "FSDP1 has flat parameters"
    if first == "this one":
        memory.run.instrument.trainer.args.process_index = 1
        memory.state.sizes.begins(CallShape("train", 8, 4))
        memory.healer.oom_on_one_rank(ran_out("forward"))
    else:
        memory.state.sizes.failed(CallShape("train", 8, 4))
        memory.healer.attach(first=True)
    (warning,) = (record.getMessage() for record in caplog.records)
    assert "FSDP1 has flat parameters" in warning
    assert "lower per_device_train_batch_size" in warning


def test_an_experiment_does_without(memory: Memory) -> None:
    memory.run.instrument.retry.experimenting = True
    memory.attempt(1)
    assert not memory.attempt(1)
    assert memory.applied == [Action.FREE_MEMORY]


def test_an_evaluation_changes_nothing_of_training(memory: Memory) -> None:
    memory.window = None
    memory.attempt(1, "evaluation")
    with pytest.raises(UnrecoverableTrainingError):
        memory.attempt(1, "evaluation")
    assert Action.CHECKPOINT_ACTIVATIONS not in memory.applied
    assert "per_device_eval_batch_size" in memory.run.journal.incidents[0].evidence["remedy"]


def test_a_size_that_was_to_be_tried_is_no_incident(memory: Memory) -> None:
    sizes = memory.state.sizes
    sizes.failed(CallShape("train", 8, 16))
    assert sizes.rows_for(CallShape("train", 8, 16)) == 4
    assert memory.attempt(4)
    assert memory.run.incidents == []
    assert memory.window.discarded == 1
    assert sizes.known_rows(CallShape("train", 8, 16)) == 2


def test_one_row_is_no_size_that_was_to_be_tried(memory: Memory) -> None:
    sizes = memory.state.sizes
    sizes.failed(CallShape("train", 2, 16))
    assert sizes.rows_for(CallShape("train", 2, 16)) == 1
    memory.attempt(1)
    assert len(memory.run.incidents) == 1


def test_what_passes_again_and_again_is_split_at_once(memory: Memory) -> None:
    for step in (3, 4, 5):
        memory.at(step)
        memory.attempt(8)
        memory.healer.on_success()
    memory.at(6)
    memory.attempt(8)
    assert memory.applied == [Action.FREE_MEMORY] * 4 + [Action.SPLIT_BATCH]


def test_what_passes_now_and_then_is_not(memory: Memory) -> None:
    for step in (3, 4, 5, 54):
        memory.at(step)
        memory.attempt(8)
        memory.healer.on_success()
    assert Action.SPLIT_BATCH not in memory.applied


@pytest.mark.parametrize(
    ("first", "same", "recalled"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_the_next_process_knows_what_did_not_fit(tmp_path: Path, first: bool, same: bool, recalled: bool) -> None:
    before = Memory(tmp_path)
    before.attempt(8)
    before.attempt(8)
    before.healer.on_success()
    path = tmp_path / SIZES_FILE
    if not same:
        path.write_text(path.read_text().replace("the same model", "another"))
    assert Memory(tmp_path, first).state.sizes.limits is recalled


def test_what_fitted_on_another_rank_is_weighed_against_what_failed_on_this_one(tmp_path: Path) -> None:
    """Though the file of the other rank comes first."""
    ranks = [Memory(tmp_path), Memory(tmp_path)]
    for rank, (memory, fits, fails) in enumerate(zip(ranks, (8, 2), (16, 4), strict=True)):
        memory.run.journal.rank = rank
        memory.state.sizes.failed(CallShape("train", fails, 480))
        memory.state.sizes.ran(CallShape("train", fits, 400))
        memory.state.sizes.on_success()
        memory.healer.on_success()
    for rank, known in ((0, 8), (1, 2)):
        started = Memory(tmp_path, first=False)
        started.run.journal.rank = rank
        started.healer.attach(first=True)
        assert started.state.sizes.known_rows(CallShape("train", 16, 400)) == known


def test_other_ranks_are_told_of_a_size_that_was_tried_in_vain(memory: Memory) -> None:
    told: list[str] = []
    memory.run.news.tell = lambda subject, record: told.append(subject)  # type: ignore[method-assign]
    sizes = memory.state.sizes
    sizes.failed(CallShape("train", 8, 16))
    assert sizes.rows_for(CallShape("train", 8, 16)) == 4
    assert memory.attempt(4)
    assert told == ["sizes"]


@pytest.mark.parametrize("meets", [False, True])
def test_what_another_rank_tells_is_split_here(tmp_path: Path, meets: bool) -> None:
    here, there = Memory(tmp_path), Memory(tmp_path)
    takers: dict[str, Any] = {}
    here.run.news.on = takers.__setitem__  # type: ignore[method-assign]
    here.healer.attach(first=False)
    here.run.instrument.one_rank.meets_in_forward = meets
    there.state.sizes.failed(CallShape("train", 8, 16))
    takers["sizes"](1, SizesFile(there.healer.run, there.state).content())
    assert here.state.sizes.known_rows(CallShape("train", 8, 16)) == 4
    # A forward that was seen to be a meeting of ranks is not split.
    assert here.state.sizes.made_together == meets
    assert json.loads((tmp_path / SIZES_FILE).read_text())["sizes"]["train"]["fails"] == [[8, 16]]


def test_a_file_that_cannot_be_read_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / SIZES_FILE).write_text("{")
    assert not Memory(tmp_path).state.sizes.limits
    assert "cannot be read and is not used" in caplog.text


def test_on_one_rank_of_several_it_is_written_down_for_the_next_start(memory: Memory, tmp_path: Path) -> None:
    memory.state.sizes.begins(CallShape("train", 8, 16))
    memory.run.instrument.trainer.args.process_index = 1
    memory.healer.oom_on_one_rank(ran_out())
    assert Memory(tmp_path).state.sizes.known_rows(CallShape("train", 8, 16)) < 8


def test_the_step_after_the_update_is_the_next_one_for_sizes_too(memory: Memory) -> None:
    memory.healer.about_to_step()
    assert memory.state.sizes.step == 4


@pytest.mark.parametrize(
    ("place", "expected"), [("forward", ("train", 6, 1)), ("generation", ("generate", 12, 1)), ("vLLM", None)]
)
def test_before_its_calls_are_watched_a_rank_goes_by_its_batch(memory: Memory, place: Any, expected: Any) -> None:
    args = memory.run.instrument.trainer.args
    args.process_index, args.per_device_train_batch_size, args.generation_batch_size = 1, 6, 12
    memory.healer.oom_on_one_rank(ran_out(place))
    sizes = memory.state.sizes
    if expected is None:
        assert not sizes.limits
    else:
        assert sizes.state_dict()[expected[0]]["fails"] == [expected[1:]]


def test_an_evaluation_that_ends_the_job_says_nothing_about_training(memory: Memory) -> None:
    args = memory.run.instrument.trainer.args
    args.process_index, args.per_device_eval_batch_size = 1, 16
    memory.healer.oom_on_one_rank(ran_out("evaluation"))
    sizes = memory.state.sizes
    assert sizes.known_rows(CallShape("forward", 16, 4)) < 16
    assert sizes.known_rows(CallShape("train", 16, 4)) == 16


def test_an_update_that_ends_the_job_says_nothing_about_sizes(
    memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    memory.run.instrument.trainer.args.process_index = 1
    memory.healer.oom_on_one_rank(ran_out("optimizer step"))
    assert not memory.state.sizes.limits
    assert "optimizer with smaller state" in caplog.text


def test_what_to_do_about_the_memory_of_one_rank_is_in_the_incident_of_its_exception(memory: Memory) -> None:
    args = memory.run.instrument.trainer.args
    args.process_index, args.per_device_train_batch_size = 1, 8
    memory.healer.oom_on_one_rank(ran_out("backward"))
    assert memory.healer.claim(ValueError("another one")) is None
    memory.healer.oom_on_one_rank(ran_out("backward"))
    claim = memory.healer.claim(torch.OutOfMemoryError("CUDA out of memory"))
    assert claim is not None
    assert claim.incident.evidence["remedy"].endswith("the next start of the job splits it.")
    memory.healer.oom_on_one_rank(ran_out("backward"))
    memory.healer.on_success()
    assert memory.healer.claim(torch.OutOfMemoryError("CUDA out of memory")) is None


@pytest.mark.parametrize("refused", [False, True])
def test_a_job_that_ends_says_why_it_was_not_healed_here_and_what_the_next_start_does(
    memory: Memory, refused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    memory.run.instrument.trainer.args.process_index = 1
    memory.run.instrument.one_rank.meets_in_forward = refused
    memory.run.instrument.view.why_not_split = "its rows depend on each other" if refused else ""
    memory.state.sizes.begins(CallShape("train", 8, 16))
    memory.healer.oom_on_one_rank(ran_out("backward"))
    (warning,) = (record.getMessage() for record in caplog.records)
    assert "not computed again here alone: a gradient has been added to" in warning
    assert ("cannot split it: its rows depend on each other" if refused else "start of the job splits it") in warning
    assert memory.state.sizes.made_together == refused


def test_on_one_rank_alone_nothing_is_done_that_takes_the_others(memory: Memory) -> None:
    memory.run.instrument.trainer.args.process_index = 1
    memory.state.sizes.begins(CallShape("train", 1, 16))
    alone = replace(ran_out(), alone=True)
    assert memory.healer.handle_oom(alone, memory.window)
    memory.state.sizes.begins(CallShape("train", 1, 16))
    assert not memory.healer.handle_oom(alone, memory.window)
    assert memory.run.incidents == [("out_of_memory", "unresolved")]
    assert memory.applied == [Action.FREE_MEMORY]
    assert memory.window.discarded == 0


@pytest.mark.parametrize("idle", [False, True])
def test_an_engine_that_lacks_memory_on_one_rank_alone_stops_nothing(memory: Memory, idle: bool) -> None:
    memory.run.instrument.trainer.args.process_index = 1
    memory.run.instrument.view.engine_is_free_of_requests = lambda: idle
    alone = replace(ran_out("vLLM"), alone=True)
    assert memory.healer.handle_oom(alone, None) is idle
    if idle:
        assert not memory.healer.handle_oom(alone, None)
    assert memory.applied == [Action.FREE_MEMORY]


def test_what_is_tried_after_the_last_step_is_closed_with_the_run(memory: Memory) -> None:
    memory.attempt(4)
    memory.healer.run_ends(1)
    (incident,) = memory.run.journal.incidents
    assert incident.outcome == "unresolved"
    memory.healer.run_ends(1)
    assert len(memory.run.journal.incidents) == 1


class TestOptimizerStep:
    def prepare(self, memory: Memory, untouched: bool = False, one_by_one: bool = True) -> None:
        memory.run.instrument.optimizer_step = SimpleNamespace(
            can_be_taken_again=True, undo=lambda: untouched, update_one_by_one=lambda: one_by_one, undone=lambda: None
        )

    def test_one_that_has_used_up_the_gradient_is_left_to_raise(self, memory: Memory) -> None:
        self.prepare(memory, untouched=True)
        memory.run.instrument.optimizer_step.can_be_taken_again = False
        assert not memory.healer.handle_oom_in_optimizer_step(ran_out("optimizer"), memory.window)

    def test_one_that_changed_nothing_is_taken_again(self, memory: Memory) -> None:
        self.prepare(memory, untouched=True)
        assert memory.healer.handle_oom_in_optimizer_step(ran_out("optimizer"), memory.window)
        assert memory.gone_back == []
        # Its gradients are needed.
        assert memory.window.discarded == 0
        memory.healer.stepped()
        assert memory.run.journal.incidents[0].evidence["weights"].startswith("untouched")
        assert memory.run.journal.incidents[0].failure is FailureType.OUT_OF_MEMORY

    @pytest.mark.parametrize("untouched", [True, False])
    def test_on_one_rank_alone_it_is_taken_again_once_if_it_changed_nothing(
        self, memory: Memory, untouched: bool
    ) -> None:
        self.prepare(memory, untouched=untouched)
        memory.run.instrument.trainer.args.process_index = 1
        alone = replace(ran_out("optimizer step"), alone=True)
        assert memory.healer.handle_oom_in_optimizer_step(alone, memory.window) is untouched
        if untouched:
            assert not memory.healer.handle_oom_in_optimizer_step(alone, memory.window)
        assert memory.gone_back == []
        assert Action.STOP not in memory.applied
        assert memory.run.incidents == [("out_of_memory", "unresolved")]

    def test_one_that_may_have_is_gone_back_from(self, memory: Memory) -> None:
        self.prepare(memory)
        assert memory.healer.handle_oom_in_optimizer_step(ran_out("optimizer"), memory.window)
        assert len(memory.gone_back) == 1

    def test_the_third_time_weights_are_updated_one_by_one_and_then_the_run_ends(self, memory: Memory) -> None:
        self.prepare(memory, untouched=True)
        for _ in range(3):
            assert memory.healer.handle_oom_in_optimizer_step(ran_out("optimizer"), memory.window)
        assert Action.STOP not in memory.applied
        assert "updated one by one" in memory.run.journal.incidents[0].figures[-1]
        with pytest.raises(UnrecoverableTrainingError, match=r"in optimizer.step\(\), 4 times"):
            memory.healer.handle_oom_in_optimizer_step(ran_out("optimizer"), memory.window)

    def test_while_steps_are_applied_again_nothing_else_is_healed(self, memory: Memory) -> None:
        self.prepare(memory, untouched=True)
        memory.healer.handle_oom_in_optimizer_step(ran_out("optimizer"), memory.window)
        assert not memory.attempt(8)
