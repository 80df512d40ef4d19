"""Snapshots in files of shared memory, which another process can go on from whenever this one is killed."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from self_healing.healers.restarts.shared_memory import _states_of, steps_in_memory
from self_healing.hf.state import LiveState
from self_healing.hf.trainer_state import ResumeRecord
from self_healing.rollback import shared_memory
from self_healing.rollback.ring import SnapshotRing
from self_healing.rollback.shared_memory import (
    SUFFIX,
    SharedStates,
    SharedStep,
    StateFacts,
    StateUnusable,
    directory_of,
    is_own,
    open_state,
    read_facts,
    remove_states,
)
from self_healing.system.random_state import RandomState


pytestmark = pytest.mark.skipif(not shared_memory.ROOT.is_dir(), reason="the system has no shared memory as files")
CPU = torch.device("cpu")


class Run:
    """A small model that is trained, and whose states are kept in shared memory."""

    def __init__(self, output_dir: Path, width: int = 3, rank: int = 0, ranks: int = 1) -> None:
        torch.manual_seed(0)
        self.output_dir = str(output_dir)
        self.model = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.BatchNorm1d(width))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        # In no snapshot.
        self.frozen = {"frozen": torch.arange(5.0), "empty": torch.empty(0)}
        self.shared = SharedStates(self.output_dir, "run", rank, ranks)
        self.ring = SnapshotRing(shared=self.shared)
        self.shared.open(lambda: 1000)
        self.log: list[dict[str, Any]] = []
        self.step = 0

    @property
    def live(self) -> LiveState:
        model = self.model
        return LiveState(
            dict(model.named_parameters()), dict(model.named_buffers()), self.optimizer, {}, frozen=self.frozen
        )

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 2)).pow(2).sum().backward()
        self.optimizer.step()
        self.step += 1
        self.log.append({"step": self.step, "loss": 1.0 / self.step})

    def record(self) -> ResumeRecord:
        loss = torch.tensor(float(self.step))
        return ResumeRecord(
            self.step, {}, self.log, {}, None, [{}], RandomState.capture(), {"scalars": {}}, loss, 0.0, None
        )

    def take(self) -> None:
        """Takes a candidate, as [`TrustedStates`] does."""
        self.train()
        snapshot = self.ring.take(self.live, self.step, {})
        self.shared.prepare(snapshot, self.live, self.record)

    def moments(self) -> list[torch.Tensor]:
        return [value for state in self.optimizer.state.values() for value in state.values()]

    @property
    def files(self) -> list[Path]:
        return sorted(self.shared.directory.glob(f"*{SUFFIX}"), key=lambda path: int(path.stem.split("-")[1]))

    @property
    def steps(self) -> list[int]:
        return [each.step for each in steps_in_memory(self.output_dir, 0, CPU)]

    def everything(self) -> list[torch.Tensor]:
        return [each.detach().clone() for each in (*self.model.state_dict().values(), *self.moments())]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    yield Run(tmp_path)
    shutil.rmtree(directory_of(tmp_path), ignore_errors=True)


def test_a_state_is_put_into_another_model_and_its_new_optimizer_bitwise(run: Run, tmp_path: Path) -> None:
    run.train()
    run.take()
    wanted, drawn = run.everything(), torch.randn(4)
    run.train()
    other = Run(tmp_path)
    state = open_state(run.files[-1], CPU)
    assert not state.misfit(other.live)
    state.put(other.live)
    state.record.random.restore()
    assert all(map(torch.equal, other.everything(), wanted))
    assert torch.equal(torch.randn(4), drawn)
    assert (state.record.step, state.record.log_history) == (2, run.log[:2])
    assert float(state.record.running_loss) == 2.0


def test_a_killed_process_leaves_its_states(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        Run(tmp_path).take()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [each.step for each in steps_in_memory(str(tmp_path), 0, CPU)] == [1]
    assert remove_states(tmp_path) > 0
    assert not directory_of(tmp_path).exists()


@pytest.mark.slow
def test_whatever_a_process_is_killed_in_what_it_leaves_is_of_one_step(tmp_path: Path) -> None:
    later = random.Random(0)
    for _ in range(8):
        child = os.fork()
        if child == 0:
            # OpenMP's threads are not there in a forked process.
            torch.set_num_threads(1)
            run = Run(tmp_path, width=400_000)
            run.train()
            while True:
                run.step += 1
                for each in (*run.live.parameters.values(), *run.live.buffers.values(), *run.moments()):
                    each.data.fill_(run.step)
                snapshot = run.ring.take(run.live, run.step, {})
                run.shared.prepare(snapshot, run.live, run.record)
                run.ring.promote()
        try:
            deadline = time.monotonic() + 60
            while not _states_of(str(tmp_path), 0, 1) and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(later.uniform(0.02, 0.1))
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        states = _states_of(str(tmp_path), 0, 1)
        assert states
        for path, facts in states:
            again = Run(tmp_path / "again", width=400_000)
            open_state(path, CPU).put(again.live)
            for each in (*again.live.parameters.values(), *again.live.buffers.values(), *again.moments()):
                assert (each == facts.shared.step).all(), f"step {facts.shared.step}"
        remove_states(tmp_path)


def test_what_is_not_finite_is_not_stored(run: Run) -> None:
    with torch.no_grad():
        run.model[0].bias[0] = torch.nan
    run.take()
    assert run.steps == []


def test_a_state_that_is_not_what_was_written_is_refused(run: Run) -> None:
    run.take()
    (file,) = run.files
    os.truncate(file, file.stat().st_size - 20)
    with pytest.raises(StateUnusable, match="cannot be read"):
        open_state(file, CPU)
    os.truncate(file, 40)
    assert read_facts(file) is None
    assert run.steps == []
    # Of another version of this library, whose fields are read by their position.
    file.write_bytes(pickle.dumps(StateFacts("run", SharedStep(1, "run", ""))))  # type: ignore[arg-type]
    assert read_facts(file) is None


def test_a_model_of_other_sizes_does_not_fit(run: Run, tmp_path: Path) -> None:
    run.take()
    other = Run(tmp_path, width=4)
    wrong = "parameter '0.weight' was torch.float32 of (3, 2), and is torch.float32 of (4, 2)"
    assert open_state(run.files[-1], CPU).misfit(other.live) == wrong


@pytest.mark.parametrize("other", ["another value", "another name", "one more", "one less"])
def test_beside_other_frozen_weights_a_state_is_not_put(run: Run, tmp_path: Path, other: str) -> None:
    """Weights that are not trained come from the script: drawn anew (added tokens), or moved by a callback."""
    run.take()
    again = Run(tmp_path)
    state = open_state(run.files[-1], CPU)
    assert not state.misfit(again.live)
    if other == "another value":
        again.frozen["frozen"][3] += 1e-6
    elif other == "one more":
        again.frozen["more"] = torch.ones(1)
    elif other == "another name":
        again.frozen = {"renamed" if name == "frozen" else name: each for name, each in again.frozen.items()}
    else:
        del again.frozen["frozen"]
    assert "weights that are not trained" in state.misfit(again.live)


def test_only_the_user_can_read_what_is_there(run: Run) -> None:
    run.take()
    place = directory_of(run.output_dir)
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    place.chmod(0o777)
    assert run.steps == []
    place.chmod(0o700)


def test_neither_what_another_user_has_made_nor_a_link_is_trusted(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(directory_of(run.output_dir))
    assert is_own(directory_of(run.output_dir))
    assert not is_own(link)
    theirs = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: theirs)
    assert not is_own(directory_of(run.output_dir))
