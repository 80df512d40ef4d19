"""What is remembered of sizes that fitted and sizes that did not, and what may run by it."""

from __future__ import annotations

import json

import pytest

from self_healing.healers.oom.calls import KnownSizes
from self_healing.hf.batches import CallShape


def train(rows: int, length: int = 512) -> CallShape:
    return CallShape("train", rows, length)


class Device:
    """Runs calls as a trainer does, and has room for so many tokens of each kind."""

    def __init__(self, sizes: KnownSizes, **room: int) -> None:
        self.sizes, self.room, self.step, self.failures = sizes, room, 0, 0

    def train_step(self, *shapes: CallShape) -> list[list[int]]:
        """One optimizer step; for each call the rows of its chunks. What fails is tried again, smaller."""
        self.step += 1
        self.sizes.step = self.step
        for _ in range(40):
            ran = self._attempt(shapes)
            if ran is not None:
                self.sizes.on_success()
                return ran
        raise AssertionError("never ends")

    def _attempt(self, shapes: tuple[CallShape, ...]) -> list[list[int]] | None:
        ran = []
        for shape in shapes:
            allowed = self.sizes.rows_for(shape)
            assert 1 <= allowed <= shape.rows
            count = -(-shape.rows // allowed)
            chunks = [shape.rows * (i + 1) // count - shape.rows * i // count for i in range(count)]
            for rows in chunks:
                chunk = CallShape(shape.kind, rows, shape.length)
                self.sizes.begins(chunk)
                if rows * shape.length > self.room[shape.kind]:
                    self.failures += 1
                    self.sizes.failed(chunk)
                    return None
            ran.append(chunks)
        return ran


def test_a_size_that_failed_is_tried_again_ever_more_rarely() -> None:
    sizes = KnownSizes(probe_steps=4)
    device = Device(sizes, train=4 * 512)
    most = [max(device.train_step(train(8))[0]) for _ in range(60)]
    # Of 8 rows there are chunks of 1, 2, 4 and 8.
    assert most == [4] * 60
    # At first; and one try each after 4 steps, 8, 16 and 32 more.
    assert device.failures == 1 + 3


def test_the_batch_is_halved_until_it_fits() -> None:
    device = Device(KnownSizes(), train=9 * 512)
    assert [max(device.train_step(train(64))[0]) for _ in range(12)] == [8] * 12
    assert device.failures == 3


def test_what_did_not_fit_once_is_tried_again_in_the_end() -> None:
    """Another process held the memory, say."""
    sizes = KnownSizes(probe_steps=2)
    device = Device(sizes, train=4 * 512)
    for _ in range(20):
        device.train_step(train(8))
    device.room["train"] = 8 * 512
    assert max(max(device.train_step(train(8))[0]) for _ in range(40)) == 8
    assert device.train_step(train(8)) == [[8]]


# ---- where a failure ends the job ----


def restarts(steps: int, room: int, rows: int = 8, ranks: int = 2) -> int:
    """How often a job of several processes has to be started again, where one of them has less memory."""
    left: dict[int, str] = {}
    step = count = 0
    while step < steps:
        known = [KnownSizes(probe_steps=50) for _ in range(ranks)]
        for sizes in known:
            sizes.failure_is_fatal = True
            for state in left.values():
                sizes.load_state_dict(json.loads(state))
        devices = [Device(sizes, train=(room if rank == 1 else 64) * 512) for rank, sizes in enumerate(known)]
        while step < steps:
            step += 1
            for rank, device in enumerate(devices):
                device.sizes.step = step
                if device._attempt((train(rows),)) is None:
                    break
                device.sizes.on_success()
                left[rank] = json.dumps(device.sizes.state_dict())
            else:
                continue
            left[rank] = json.dumps(device.sizes.state_dict())
            count += 1
            step -= 1
            break
        assert count < 20
    return count


@pytest.mark.parametrize(("room", "at_most"), [(1, 2), (2, 2), (3, 2), (4, 1), (7, 1), (8, 0)])
def test_a_job_of_several_processes_is_hardly_started_again_for_memory(room: int, at_most: int) -> None:
    assert restarts(170, room) <= at_most
