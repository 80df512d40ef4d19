"""Snapshots in files of shared memory, which another process can go on from whenever this one is killed."""

from __future__ import annotations

import os
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
from forked_pairs import run_pair
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from self_healing.healers.restarts.shared_memory import _states_of, remove_other_states, steps_in_memory
from self_healing.hf.deepspeed import Partitioning
from self_healing.hf.state import LiveState
from self_healing.hf.trainer_state import ResumeRecord
from self_healing.rollback import shared_memory
from self_healing.rollback import shared_memory as shared_states
from self_healing.rollback.ring import SnapshotRing
from self_healing.rollback.shared_memory import (
    SUFFIX,
    SharedStates,
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
    state.check(other.live)
    state.put(other.live)
    state.record.random.restore()
    assert all(map(torch.equal, other.everything(), wanted))
    assert torch.equal(torch.randn(4), drawn)
    assert (state.record.step, state.record.log_history) == (2, run.log[:2])
    assert float(state.record.running_loss) == 2.0


def test_a_run_goes_back_to_the_state_that_it_was_resumed_from_without_a_copy(run: Run, tmp_path: Path) -> None:
    run.train()
    run.take()
    other = Run(tmp_path)
    state = open_state(run.files[-1], CPU)
    state.put(other.live)
    wanted = other.everything()
    assert state.snapshot_in(run.live) is None
    there = state.snapshot_in(other.live)
    assert there is not None
    other.ring.hold(there, other.live, {})
    other.ring.begin_with_candidate()
    # As once there is a trusted one: what is in use stays.
    remove_states(tmp_path)
    other.train()
    assert other.ring.initial is there
    other.ring.restore(there, other.live)
    assert all(map(torch.equal, other.everything(), wanted))
    assert other.ring.nbytes == 0


def test_a_killed_process_leaves_its_states(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        Run(tmp_path).take()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [each.step for each in steps_in_memory(str(tmp_path), 0, CPU)] == [1]
    assert remove_states(tmp_path) > 0
    assert not directory_of(tmp_path).exists()


def test_what_another_process_uses_is_not_removed_until_it_is_gone(tmp_path: Path) -> None:
    """In another container, which counts its processes itself, and has a directory of the same name."""
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        run = Run(tmp_path)
        run.take()
        os.write(tells, b".")
        signal.pause()
    try:
        os.read(told, 1)
        remove_other_states(str(tmp_path), "another", 1)
        assert [each.step for each in steps_in_memory(str(tmp_path), 0, CPU)] == [1]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    remove_other_states(str(tmp_path), "another", 1)
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
            for name, kept in open_state(path, CPU)._snapshot.copies():
                assert (kept.host == facts.step).all(), f"{name} of step {facts.step}"
        remove_states(tmp_path)


def test_a_state_is_gone_before_its_memory_is_used_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = torch._foreach_copy_
    for _ in range(2):
        run.take()
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda *args, **kwargs: (seen.append(run.steps), original(*args, **kwargs))
    )
    run.take()
    assert seen
    assert not any(seen)
    assert run.steps == [3]


def test_trusted_states_stay_beside_the_newest(run: Run) -> None:
    for _ in range(4):
        run.take()
        run.ring.promote()
    run.take()
    assert run.steps == [5, 4, 3]
    run.ring.distrust(run.ring.trusted[0])
    assert run.steps == [5]


def test_memory_is_used_again_and_given_back_when_it_is_not(run: Run) -> None:
    for _ in range(8):
        run.take()
        run.ring.promote()
    assert len(list(run.shared.directory.glob("*.block"))) == 3
    # As where `train()` is entered again with another optimizer.
    run.ring.release()
    run.take()
    assert len(list(run.shared.directory.glob("*.block"))) == 1
    assert run.steps == [9]


def test_what_is_not_finite_is_not_stored(run: Run) -> None:
    with torch.no_grad():
        run.model[0].bias[0] = torch.nan
    run.take()
    assert run.steps == []


@pytest.mark.parametrize(
    "damage",
    ["the file is cut off", "its end is cut off", "the file is changed", "a block is cut off", "a block is gone"],
)
def test_a_torn_state_is_as_if_there_were_none(run: Run, damage: str) -> None:
    run.take()
    (file,), (block,) = run.files, list(run.shared.directory.glob("*.block"))
    if damage == "the file is changed":
        content = bytearray(file.read_bytes())
        content[-20] ^= 1
        file.write_bytes(content)
        with pytest.raises(StateUnusable, match="not what was written"):
            open_state(file, CPU)
        return
    if damage == "a block is gone":
        block.unlink()
    elif damage == "its end is cut off":
        os.truncate(file, file.stat().st_size - 1)
    else:
        os.truncate(file if damage == "the file is cut off" else block, 40)
    assert read_facts(file) is None
    assert run.steps == []


@pytest.mark.parametrize("other", ["run", "machine", "ranks"])
def test_a_state_of_another_run_machine_or_number_of_ranks_is_not_taken(
    run: Run, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.take()
    if other == "run":
        run.shared.directory.rename(run.shared.directory.with_name("theirs-rank0-of-1"))
    elif other == "ranks":
        run.shared.directory.rename(run.shared.directory.with_name("run-rank0-of-2"))
    else:
        monkeypatch.setattr("self_healing.healers.restarts.shared_memory.this_boot", lambda: "another one")
    assert run.steps == []


def test_that_it_is_of_another_number_of_ranks_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, ranks=3)
    try:
        run.take()
        assert run.steps == []
    finally:
        shutil.rmtree(directory_of(tmp_path), ignore_errors=True)
    (line,) = caplog.messages
    assert line == ("The state in shared memory is that of 3 processes, and 1 train together now: going on from disk.")


class PartitionedRun(Run):
    """Its optimizer updates what ZeRO-3 has put together of several parameters, and has it in its step alone."""

    def __init__(self, output_dir: Path, kind: str = "ZeRO-3 in torch.float32", parts: str = "0e1f") -> None:
        super().__init__(output_dir)
        self.master = torch.nn.Parameter(torch.ones(6))
        self.optimizer = torch.optim.AdamW([self.master], lr=0.1)
        self.optimizer.param_groups[0]["params"] = []
        self.kind, self.parts = kind, parts

    @property
    def live(self) -> LiveState:
        partitioning = Partitioning(self.kind, [self.master], [self.parts])
        return LiveState({"master weights 0": self.master}, {}, self.optimizer, {}, partitioning=partitioning)

    def train(self) -> None:
        self.step += 1
        self.optimizer.param_groups[0]["params"] = [self.master]
        self.master.grad = torch.randn(6)
        self.optimizer.step()
        self.optimizer.param_groups[0]["params"] = []

    def everything(self) -> list[torch.Tensor]:
        return [each.detach().clone() for each in (self.master, *self.moments())]


def test_partitions_are_put_into_those_of_another_engine_bitwise(tmp_path: Path) -> None:
    run = PartitionedRun(tmp_path)
    try:
        run.take()
        wanted = run.everything()
        other = PartitionedRun(tmp_path)
        state = open_state(run.files[-1], CPU)
        state.check(other.live)
        state.put(other.live)
    finally:
        shutil.rmtree(directory_of(tmp_path), ignore_errors=True)
    assert len(wanted) == 4
    assert all(map(torch.equal, other.everything(), wanted))


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"kind": "ZeRO-2 in torch.float32"}, "under ZeRO-3 in torch.float32, and this one is under ZeRO-2"),
        ({"parts": "77ab"}, "parameter 0 of its optimizer .* 0e1f.* 77ab"),
    ],
    ids=["stage", "parameters"],
)
def test_partitions_of_the_same_size_that_are_other_ones_are_not_put(
    tmp_path: Path, other: dict[str, str], why: str
) -> None:
    run = PartitionedRun(tmp_path)
    try:
        run.take()
        with pytest.raises(StateUnusable, match=why):
            open_state(run.files[-1], CPU).check(PartitionedRun(tmp_path, **other).live)
    finally:
        shutil.rmtree(directory_of(tmp_path), ignore_errors=True)


def test_a_model_of_other_sizes_is_left_as_it_is(run: Run, tmp_path: Path) -> None:
    run.take()
    other = Run(tmp_path, width=4)
    before = other.everything()
    with pytest.raises(StateUnusable, match=r"'0\.weight' is torch\.float32 of \(3, 2\), .* of \(4, 2\)"):
        open_state(run.files[-1], CPU).check(other.live)
    assert all(map(torch.equal, other.everything(), before))


@pytest.mark.parametrize("other", ["another value", "another name", "one more", "one less"])
def test_beside_other_frozen_weights_a_state_is_not_put(run: Run, tmp_path: Path, other: str) -> None:
    """Weights that are not trained come from the script: drawn anew (added tokens), or moved by a callback."""
    run.take()
    again = Run(tmp_path)
    state = open_state(run.files[-1], CPU)
    state.check(again.live)
    if other == "another value":
        again.frozen["frozen"][3] += 1e-6
    elif other == "one more":
        again.frozen["more"] = torch.ones(1)
    elif other == "another name":
        again.frozen = {"renamed" if name == "frozen" else name: each for name, each in again.frozen.items()}
    else:
        del again.frozen["frozen"]
    with pytest.raises(StateUnusable, match="weights that are not trained"):
        state.check(again.live)


def test_only_the_user_can_read_the_files(run: Run) -> None:
    run.take()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in run.shared.directory.iterdir()}
    assert modes == {0o600}
    assert stat.S_IMODE(directory_of(run.output_dir).stat().st_mode) == 0o700


def test_a_directory_that_others_can_write_to_is_not_trusted(run: Run) -> None:
    run.take()
    run.shared.directory.chmod(0o777)
    assert run.steps == []


def test_neither_what_another_user_has_made_nor_a_link_is_trusted(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(run.shared.directory)
    assert is_own(run.shared.directory)
    assert not is_own(link)
    theirs = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: theirs)
    assert not is_own(run.shared.directory)


def test_nothing_is_put_where_others_can_write(tmp_path: Path) -> None:
    directory_of(tmp_path).mkdir()
    directory_of(tmp_path).chmod(0o777)
    try:
        run = Run(tmp_path)
        run.take()
        assert run.ring.candidate is not None
        assert list(directory_of(tmp_path).rglob("*")) == []
    finally:
        shutil.rmtree(directory_of(tmp_path))


def test_room_is_needed_for_all_ranks_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_states, "free_shared_memory", lambda: 100)
    for ranks, room in ((1, True), (4, False)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        shared = SharedStates(str(tmp_path), "run", 0, ranks)
        shared.open(lambda: 10)
        assert shared.active == room
    shutil.rmtree(directory_of(tmp_path))


def _states_of_two_ranks(directory: Path, rank: int) -> dict[str, Any]:
    run = Run(directory, rank=rank, ranks=2)
    for _ in range(3 if rank == 0 else 2):
        run.take()
        run.ring.promote()
    torch.distributed.barrier()
    common = [each.step for each in steps_in_memory(str(directory), rank, CPU)]
    if rank == 1:
        run.ring.release()
    torch.distributed.barrier()
    return {"common": common, "none": [each.step for each in steps_in_memory(str(directory), rank, CPU)]}


@pytest.mark.slow
def test_only_a_step_that_all_ranks_have_is_gone_on_from(tmp_path: Path) -> None:
    try:
        ranks = run_pair(tmp_path, _states_of_two_ranks)["ranks"]
        assert ranks == [{"common": [2], "none": []}] * 2
    finally:
        shutil.rmtree(directory_of(tmp_path), ignore_errors=True)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_a_part_of_the_same_size_that_is_another_part_is_not_taken(run: Run, tmp_path: Path, mesh: DeviceMesh) -> None:
    def split_by(dimension: int, run: Run) -> Run:
        for module in run.model:
            for name, each in list(module.named_parameters(recurse=False)):
                by = Shard(min(dimension, each.dim() - 1))
                setattr(module, name, torch.nn.Parameter(DTensor.from_local(each.data, mesh, [by])))
        run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.1)
        return run

    snapshot = split_by(0, run).ring.take(run.live, 1, {})
    run.shared.prepare(snapshot, run.live, run.record)
    state = open_state(run.files[-1], CPU)
    state.check(split_by(0, Run(tmp_path)).live)
    with pytest.raises(StateUnusable, match=r"parameter 0 .* split by \(Shard\(dim=0\),\) over the ranks \[0\], now "):
        state.check(split_by(1, Run(tmp_path)).live)


def test_without_room_snapshots_are_taken_in_ordinary_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_states, "free_shared_memory", lambda: 64 * 2**20)
    caplog.set_level("INFO", logger="self_healing")
    run = Run(tmp_path)
    run.shared = SharedStates(run.output_dir, "run", 0, 1)
    run.ring = SnapshotRing(shared=run.shared)
    for _ in range(2):
        run.shared.open(lambda: 30 * 2**20)
        run.take()
    assert run.ring.candidate is not None
    assert (run.ring.candidate.step, run.steps) == (2, [])
    assert caplog.text.count("Snapshots do not outlive this process") == 1
    assert "--shm-size" in caplog.text


def test_memory_that_turns_out_to_be_short_stops_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    run.take()
    assert run.ring.candidate is not None
    assert run.steps == []
    assert [file.name for file in run.shared.directory.iterdir()] == ["in-use"]


def test_a_long_log_is_not_pickled_again_for_each_state(run: Run) -> None:
    run.take()
    first = run.shared._writer._pickled[0]
    run.take()
    assert run.shared._writer._pickled[0] is first
    del run.log[1:]
    run.log.append({"step": 2, "loss": 5.0})
    run.take()
    assert open_state(run.files[-1], CPU).record.log_history == run.log


def test_states_of_earlier_runs_are_removed(run: Run) -> None:
    run.take()
    remove_other_states(run.output_dir, "run", 1)
    assert run.steps == [1]
    remove_other_states(run.output_dir, "run", 2)
    assert not directory_of(run.output_dir).exists()
