"""Which states of a run are trusted, gone back to and tried out: asked of one layer, without a Trainer."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from self_healing import HealingConfig
from self_healing.checkpoints.marker import load_marker, write_marker
from self_healing.checkpoints.retention import RunCheckpoints
from self_healing.hf.state import LiveState
from self_healing.hf.step import Control
from self_healing.rollback.rollback import Rollback, Target
from self_healing.rollback.snapshots import Snapshot, SnapshotInterval
from self_healing.rollback.trusted import EARLY_STEPS


VERIFY = 3


def standing_of(checkpoint: Path) -> str:
    marker = load_marker(checkpoint)
    assert marker is not None
    return str(marker["standing"])


class Events:
    """A journal of which only the events are looked at."""

    run_id = "run"

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def event(self, kind: str, step: int, **fields: Any) -> None:
        self.kinds.append(kind)


class SmallRun:
    """A layer that is trained: each step adds 1 to its weights."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        config = HealingConfig(**{"snapshot_interval": 5, "snapshot_verify_steps": VERIFY, **settings})
        self.layer = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.zeros_(self.layer.weight)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        self.state = SimpleNamespace(global_step=0)
        self.journal: Any = Events()
        self.recalled: list[dict[str, Any]] = []
        self.rollback = Rollback(config, self.journal, lambda: {"missing": 0}, self.recalled.append)
        arguments = SimpleNamespace(
            output_dir=str(directory), should_save=True, push_to_hub=False, device=torch.device("cpu")
        )
        device = torch.device("cpu")
        trainer = SimpleNamespace(
            state=self.state, args=arguments, optimizer=self.optimizer, accelerator=SimpleNamespace(device=device)
        )
        view = SimpleNamespace(live_state=self.live, nonfinite_tensors=self.nonfinite, can_reexecute=True)
        failsafe = SimpleNamespace(device_lost=False, tells_of_lost_device=lambda error: False)
        engine = SimpleNamespace(state_put=lambda: None)
        self.instrument: Any = SimpleNamespace(trainer=trainer, view=view, failsafe=failsafe, engine=engine)

    def live(self) -> LiveState:
        return LiveState({"weight": self.layer.weight}, {}, self.optimizer, {})

    def nonfinite(self) -> list[str]:
        return [] if math.isfinite(self.weight) else ["weight"]

    @property
    def weight(self) -> float:
        return float(self.layer.weight.detach()[0, 0])

    def enter(self, cold: bool = False) -> None:
        self.rollback.begin(self.instrument, cold, resumed_from=None)

    def train(self, steps: int, healthy: bool = True, vouched: Callable[[int], bool] = lambda _: True) -> list[str]:
        """Returns what the last of these steps has found to be not finite."""
        found: list[str] = []
        for _ in range(steps):
            step = self.state.global_step
            control = Control([], 1.0, 0)
            recording = SimpleNamespace(step=step, control=control)
            window = SimpleNamespace(
                step=step, control=lambda *_, kept=control: kept, recording=lambda _, kept=recording: kept
            )
            states, found = self.rollback.states, []
            if states.step_begins(step, calm=healthy):
                states.take_snapshot(step)
            if states.step_taken(step, healthy, states.keep_batch(window, 1.0), vouched):
                found = states.promote(step)
            states.verify_checkpoints(step)
            self.layer.weight.data += 1
            self.state.global_step += 1
        return found

    @property
    def trusted(self) -> list[int]:
        return [snapshot.step for snapshot in self.rollback.states.generations()]


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    run = SmallRun(tmp_path)
    run.enter()
    return run


class TestTrust:
    def test_comes_after_enough_healthy_steps(self, run: SmallRun) -> None:
        run.train(5 + VERIFY - 1)
        assert run.trusted == [0]
        run.train(1)
        assert run.trusted == [5]

    def test_waits_for_ranks_to_compare_their_weights(self, run: SmallRun) -> None:
        run.train(5 + VERIFY + 3, vouched=lambda step: False)
        assert run.trusted == [0]
        # As of the state that is waiting, and not of the step that is taken.
        run.train(1, vouched=lambda step: step == 5)
        assert run.trusted == [5]

    def test_waits_for_healthy_steps_in_a_row(self, run: SmallRun) -> None:
        run.train(5 + VERIFY - 1)
        run.train(1, healthy=False)
        run.train(VERIFY - 1)
        assert run.trusted == [0]
        run.train(1)
        assert run.trusted == [5]

    def test_is_refused_to_a_state_that_is_not_finite(self, run: SmallRun) -> None:
        run.train(5)
        run.layer.weight.data.fill_(math.nan)
        assert run.train(VERIFY) == ["weight"]
        assert run.trusted == [0]
        assert run.journal.kinds == ["snapshot_refused"]

    def test_takes_no_snapshot_while_the_loss_is_not_calm(self, run: SmallRun) -> None:
        run.train(9, healthy=False)
        assert run.rollback.ring.candidate is None

    def test_keeps_the_state_a_cold_run_began_with_while_it_is_early(self, tmp_path: Path) -> None:
        run = SmallRun(tmp_path)
        run.enter(cold=True)
        run.train(17)
        assert run.trusted == [10, 5, 0]

    def test_ends_with_the_steps_it_was_won_by(self, run: SmallRun) -> None:
        """Entered again at an earlier step, with the same model: states that are yet to come are forgotten."""
        run.train(15)
        assert run.trusted == [10, 5]
        run.state.global_step = 7
        run.enter()
        assert run.trusted == [5]
        assert run.rollback.states.streak == 0

    def test_leaves_nothing_of_the_steps_that_are_done_again(self, run: SmallRun) -> None:
        run.train(16)
        run.state.global_step = 12
        run.enter()
        assert run.rollback.trials.last_healthy() is None
        assert run.rollback.ring.candidate is None
        run.train(5 + VERIFY)
        assert run.trusted == [17, 10]

    def test_is_not_kept_in_a_state_the_run_has_gone_on_from_since(self, run: SmallRun) -> None:
        run.rollback.give_up_steps(0)
        run.rollback.go_back(Target.INITIAL, step=3, incident="run-001")
        run.rollback.give_up_steps(3)
        run.enter()
        assert run.trusted == []

    def test_is_left_to_checkpoints_where_steps_cannot_be_computed_again(self, tmp_path: Path) -> None:
        run = SmallRun(tmp_path)
        run.instrument.view.can_reexecute = False
        run.enter()
        assert run.trusted == []
        assert run.journal.kinds == []

    def test_gives_all_memory_back_at_the_end(self, run: SmallRun) -> None:
        run.train(15)
        assert run.rollback.batches.newest_healthy is not None
        run.rollback.release()
        assert run.rollback.ring.nbytes == 0
        assert run.rollback.batches.newest_healthy is None

    def test_begins_again_with_another_optimizer(self, run: SmallRun) -> None:
        run.train(15)
        run.optimizer = torch.optim.SGD(run.layer.parameters(), lr=0.1)
        run.enter()
        assert run.trusted == [15]


class TestHostMemory:
    def test_that_is_short_switches_snapshots_off(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("self_healing.rollback.ring.free_host_memory", lambda: 0)
        run = SmallRun(tmp_path)
        run.enter()
        run.train(10)
        assert run.journal.kinds == ["snapshots_off"]
        assert run.trusted == []
        assert not run.rollback.trials.begin(10)

    def test_that_runs_out_in_a_copy_switches_them_off(self, run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_memory(*_: Any) -> None:
            raise MemoryError("no memory for a snapshot")

        monkeypatch.setattr("self_healing.rollback.ring.SnapshotRing.take", no_memory)
        run.train(10)
        assert run.journal.kinds == ["snapshots_off"]
        assert run.trusted == []

    def test_that_runs_out_for_a_trial_ends_the_trial(self, run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_memory(*_: Any) -> None:
            raise MemoryError("no memory for a snapshot")

        run.train(9)
        monkeypatch.setattr("self_healing.rollback.ring.SnapshotRing.take", no_memory)
        assert not run.rollback.trials.begin(9)
        assert run.trusted == [5]


class TestKeptSteps:
    def test_are_those_since_the_newest_trusted_state(self, run: SmallRun) -> None:
        run.train(15)
        assert [recording.step for recording in run.rollback.batches.tape] == [10, 11, 12, 13, 14]

    def test_are_none_without_a_state_to_apply_them_to(self, tmp_path: Path) -> None:
        run = SmallRun(tmp_path, snapshots=False)
        run.enter()
        run.train(5)
        assert not run.rollback.batches.tape

    def test_of_the_beginning_go_when_the_run_is_past_it(self, tmp_path: Path) -> None:
        run = SmallRun(tmp_path)
        run.enter(cold=True)
        run.train(EARLY_STEPS)
        assert len(run.rollback.batches.first_steps) == 10
        run.train(1)
        assert run.rollback.batches.first_steps == []

    def test_of_the_beginning_are_none_in_a_run_that_is_warm(self, run: SmallRun) -> None:
        run.train(3)
        assert run.rollback.batches.first_steps == []


class TestGoingBack:
    def test_puts_the_newest_trusted_state_in_place(self, run: SmallRun) -> None:
        run.train(15)
        went = run.rollback.go_back(Target.NEWEST, step=15, incident="run-001")
        assert went is not None
        assert (went.step, went.target, went.steps_lost, went.trained) == (10, Target.NEWEST, 6, 10)
        assert run.weight == 10
        assert run.recalled[-1]["missing"] == 0

    def test_to_an_older_state_drops_the_newest(self, run: SmallRun) -> None:
        run.train(15)
        assert run.rollback.go_back(Target.OLDER, step=15, incident="run-001") is not None
        assert run.weight == 5
        assert run.trusted == [5]

    def test_counts_lost_steps_from_where_the_run_went_on(self, run: SmallRun) -> None:
        run.train(15)
        run.rollback.go_back(Target.NEWEST, step=15, incident="run-001")
        run.rollback.give_up_steps(15)
        went = run.rollback.go_back(Target.NEWEST, step=17, incident="run-002")
        assert went is not None
        assert went.steps_lost == 2

    def test_passes_by_a_state_with_which_the_run_is_not_finite(self, run: SmallRun) -> None:
        run.train(15)
        run.rollback.ring.trusted[-1].parameters["weight"].host.fill_(math.nan)
        went = run.rollback.go_back(Target.NEWEST, step=15, incident="run-001")
        assert went is not None
        assert went.step == 5

    def test_is_not_possible_without_any(self, tmp_path: Path) -> None:
        run = SmallRun(tmp_path, snapshots=False)
        run.enter()
        assert not run.rollback.can_go_back()
        assert run.rollback.go_back(Target.NEWEST, step=0, incident="run-001") is None

    def test_marks_checkpoints_of_the_time_since_as_suspect(self, run: SmallRun, tmp_path: Path) -> None:
        run.train(9)
        checkpoint = tmp_path / "checkpoint-9"
        checkpoint.mkdir()
        write_marker(checkpoint, "run", 9, {}, emergency=False, finite=True)
        run.rollback.checkpoints.saved(checkpoint, 9)
        assert run.rollback.checkpoints.has_good(9)
        went = run.rollback.go_back(Target.NEWEST, step=10, incident="run-001")
        assert went is not None
        assert went.suspects == (9,)
        assert standing_of(checkpoint) == "suspect"
        assert run.rollback.reinstate(went).suspects == ()
        assert standing_of(checkpoint) == "unverified"

    def test_spares_checkpoints_that_healthy_steps_have_verified(self, run: SmallRun, tmp_path: Path) -> None:
        run.train(9)
        checkpoint = tmp_path / "checkpoint-9"
        checkpoint.mkdir()
        write_marker(checkpoint, "run", 9, {}, emergency=False, finite=True)
        run.rollback.checkpoints.saved(checkpoint, 9)
        run.train(VERIFY)
        assert standing_of(checkpoint) == "verified"
        went = run.rollback.go_back(Target.NEWEST, step=12, incident="run-001")
        assert went is not None
        assert went.suspects == ()

    def test_is_over_with_the_next_step(self, run: SmallRun) -> None:
        run.train(15)
        run.rollback.go_back(Target.NEWEST, step=15, incident="run-001")
        assert run.rollback.in_place.displaced
        run.train(1)
        assert not run.rollback.in_place.displaced

    def test_after_healing_failed_the_run_has_its_own_state(self, run: SmallRun) -> None:
        run.train(15)
        run.rollback.trials.begin(15)
        run.rollback.trials.try_snapshot(run.rollback.ring.trusted[0])
        assert run.rollback.fall_back()
        assert run.weight == 15

    def test_after_healing_failed_without_it_a_trusted_one_is_in_place(self, run: SmallRun) -> None:
        run.train(15)
        run.layer.weight.data.fill_(math.nan)
        assert not run.rollback.fall_back()
        assert run.weight == 10


class TestTrial:
    def test_leaves_the_run_as_it_was(self, run: SmallRun) -> None:
        run.train(15)
        trials, in_place = run.rollback.trials, run.rollback.in_place
        assert trials.begin(15)
        control = trials.try_snapshot(run.rollback.ring.trusted[0])
        assert isinstance(control, Control)
        assert (run.weight, in_place.displaced) == (5, True)
        trials.end()
        assert (run.weight, in_place.displaced) == (15, False)
        assert run.rollback.ring.candidate is None

    def test_needs_a_state_to_try(self, tmp_path: Path) -> None:
        run = SmallRun(tmp_path, snapshots=False)
        run.enter()
        assert not run.rollback.trials.begin(0)
        assert not run.rollback.trials.begin_with_checkpoints(0, unmoved=False)
        assert run.rollback.trials.begin_with_checkpoints(0, unmoved=True)

    def test_drops_states_newer_than_the_better_one(self, run: SmallRun) -> None:
        run.train(15)
        run.rollback.trials.prefer(run.rollback.ring.trusted[0])
        assert run.trusted == [5]


class TestInterval:
    """Steps of a second, and copies that take a share of that."""

    @pytest.fixture
    def interval(self, monkeypatch: pytest.MonkeyPatch) -> SnapshotInterval:
        self.now = 0.0
        monkeypatch.setattr("self_healing.rollback.snapshots.time.perf_counter", lambda: self.now)
        interval = SnapshotInterval(HealingConfig(snapshot_overhead_budget=0.01))
        for step in range(20):
            interval.step_begins(step)
            self.now += 1.0
        return interval

    def chosen(self, interval: SnapshotInterval, seconds: float, allocated: bool = False) -> int | None:
        choice = interval.choose(interval.share_of_step(Snapshot(seconds=seconds, allocated=allocated)))
        return None if choice is None else choice.steps

    def test_keeps_copies_within_their_share(self, interval: SnapshotInterval) -> None:
        assert self.chosen(interval, 0.5) == 50
        assert not interval.step_begins(49)
        assert interval.step_begins(50)

    def test_is_five_steps_at_least(self, interval: SnapshotInterval) -> None:
        assert self.chosen(interval, 1e-4) == 5

    def test_changes_only_by_more_than_twice(self, interval: SnapshotInterval) -> None:
        self.chosen(interval, 0.5)
        assert self.chosen(interval, 0.8) is None
        assert interval.step_begins(50)

    def test_leaves_copies_into_new_memory_out(self, interval: SnapshotInterval) -> None:
        self.chosen(interval, 0.5)
        assert self.chosen(interval, 50.0, allocated=True) is None

    def test_grows_tenfold_at_most_at_a_time(self, interval: SnapshotInterval) -> None:
        assert [self.chosen(interval, 20.0) for _ in range(3)] == [50, 500, 2000]

    def test_is_not_spoiled_by_a_first_copy_that_was_held_up(self, interval: SnapshotInterval) -> None:
        assert self.chosen(interval, 100.0, allocated=True) == 50
        assert self.chosen(interval, 0.1, allocated=True) == 10

    def test_does_not_count_the_copy_as_part_of_the_step(self, interval: SnapshotInterval) -> None:
        for step in range(20, 40):
            interval.step_begins(step)
            self.now += 9.0
            interval.copied()
            self.now += 1.0
        assert self.chosen(interval, 0.5) == 50

    def test_does_not_count_the_time_between_two_entries(self, interval: SnapshotInterval) -> None:
        for step in range(20, 40):
            self.now += 9.0
            interval.entry_begins()
            interval.step_begins(step)
            self.now += 1.0
            interval.step_begins(step)
        assert self.chosen(interval, 0.5) == 50


class TestRunCheckpoints:
    @pytest.fixture
    def checkpoints(self, tmp_path: Path) -> RunCheckpoints:
        journal: Any = Events()
        checkpoints = RunCheckpoints(HealingConfig(), journal)
        arguments = SimpleNamespace(
            output_dir=str(tmp_path), should_save=True, push_to_hub=False, device=torch.device("cpu")
        )
        checkpoints.begin(arguments, resumed_from=None, step=0, finite=True)
        for step in (2, 4):
            self.save(checkpoints, tmp_path, step)
        return checkpoints

    def save(self, checkpoints: RunCheckpoints, directory: Path, step: int) -> None:
        checkpoint = directory / f"checkpoint-{step}"
        checkpoint.mkdir()
        write_marker(checkpoint, "run", step, {}, emergency=False, finite=True)
        checkpoints.note_search(step, finite=True)
        checkpoints.saved(checkpoint, step)

    def standings(self, directory: Path) -> list[str]:
        return [standing_of(directory / f"checkpoint-{step}") for step in (2, 4)]

    def test_are_verified_by_the_steps_after_them(self, checkpoints: RunCheckpoints, tmp_path: Path) -> None:
        checkpoints.verify_up_to(1)
        assert self.standings(tmp_path) == ["unverified", "unverified"]
        checkpoints.verify_up_to(3)
        assert self.standings(tmp_path) == ["verified", "unverified"]

    def test_are_known_to_be_finite_at_the_step_of_the_search_only(self, checkpoints: RunCheckpoints) -> None:
        assert (checkpoints.finite_at(4), checkpoints.finite_at(2)) == (True, None)

    def test_to_go_back_to_can_be_the_one_resumed_from(self, tmp_path: Path) -> None:
        journal: Any = Events()
        checkpoints = RunCheckpoints(HealingConfig(), journal)
        arguments = SimpleNamespace(
            output_dir=str(tmp_path), should_save=False, push_to_hub=False, device=torch.device("cpu")
        )
        checkpoints.begin(arguments, "elsewhere/checkpoint-8", 8, finite=True)
        assert checkpoints.newest() == "elsewhere/checkpoint-8"
        assert not checkpoints.has_good(8)
