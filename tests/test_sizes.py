"""What is remembered of sizes that fitted and sizes that did not, and what may run by it."""

from __future__ import annotations

import json

import pytest

from self_healing.microbatch import CallShape, Kind, SizeMemory


def train(rows: int, length: int = 512) -> CallShape:
    return CallShape("train", rows, length)


def begun(probe_steps: int = 10) -> SizeMemory:
    sizes = SizeMemory(probe_steps)
    sizes.begin_step(1)
    return sizes


class Device:
    """Runs calls as a trainer does, and has room for so many tokens of each kind."""

    def __init__(self, sizes: SizeMemory, **room: int) -> None:
        self.sizes, self.room, self.step, self.failures = sizes, room, 0, 0

    def train_step(self, *shapes: CallShape) -> list[list[int]]:
        """One optimizer step; for each call the rows of its chunks. What fails is tried again, smaller."""
        self.step += 1
        self.sizes.begin_step(self.step)
        for _ in range(40):
            ran = self._attempt(shapes)
            if ran is not None:
                self.sizes.came_through()
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
                self.sizes.ran(chunk)
            ran.append(chunks)
        return ran


def test_everything_is_allowed_before_anything_has_failed() -> None:
    sizes = begun()
    assert sizes.rows_for(train(10**6)) == 10**6
    assert not sizes.limits
    sizes.ran(train(8))
    sizes.came_through()
    assert not sizes.changed


def test_one_row_is_allowed_where_nothing_is_known_to_fit() -> None:
    sizes = begun()
    sizes.failed(train(8))
    assert sizes.limits
    assert sizes.changed
    assert sizes.rows_for(train(8)) == 1
    assert sizes.rows_for(train(2, 64)) == 1


def test_what_has_fitted_is_allowed_for_what_is_no_longer() -> None:
    sizes = begun()
    sizes.failed(train(8, 512))
    sizes.ran(train(4, 512))
    sizes.came_through()
    assert [sizes.rows_for(train(8, length)) for length in (256, 512, 513)] == [4, 4, 1]
    assert sizes.rows_for(train(3, 512)) == 3


def test_a_size_fits_once_its_step_came_through() -> None:
    sizes = begun()
    sizes.failed(train(8))
    sizes.ran(train(4))
    assert sizes.rows_for(train(8)) == 1
    sizes.forget_attempt()
    sizes.came_through()
    assert sizes.rows_for(train(8)) == 1
    sizes.ran(train(4))
    sizes.failed(train(4))
    sizes.came_through()
    assert sizes.rows_for(train(8)) == 1


def test_what_failed_takes_back_what_had_fitted() -> None:
    sizes = begun()
    sizes.failed(train(8))
    sizes.ran(train(4))
    sizes.came_through()
    sizes.failed(train(3))
    assert sizes.rows_for(train(8)) == 1


def test_a_larger_size_is_tried_after_a_while_and_more_rarely_when_it_fails() -> None:
    sizes = SizeMemory(probe_steps=4)
    device = Device(sizes, train=4 * 512)
    most = [max(device.train_step(train(8))[0]) for _ in range(60)]
    assert most[0] == 1
    assert max(most) == 4
    # Of 8 rows there are chunks of 1, 2, 4 and 8: from 1 to 4 in two tries, and then 8 at ever longer intervals.
    assert most.index(2) == 4
    assert most.index(4) == 5
    assert most[5:] == [4] * 55
    # At first; and one try each after 1 step, 8, 16 and 32 more.
    assert device.failures == 1 + 3


def test_the_next_try_is_half_way_to_what_failed() -> None:
    sizes = begun(probe_steps=1)
    sizes.failed(train(14))
    sizes.ran(train(8))
    sizes.came_through()
    sizes.begin_step(3)
    # 64 rows fall into chunks of 8, 10, 11, 13, 16, ...
    assert sizes.rows_for(train(64)) == 11


def test_after_a_try_that_went_well_the_wait_is_short_again() -> None:
    sizes = begun(probe_steps=2)
    sizes.failed(train(64))
    sizes.begin_step(3)
    assert sizes.rows_for(train(64)) == 2
    sizes.failed(train(2))
    sizes.begin_step(7)
    assert sizes.rows_for(train(64)) == 2
    sizes.ran(train(2))
    sizes.came_through()
    sizes.begin_step(8)
    sizes.failed(train(4))
    sizes.begin_step(10)
    assert sizes.rows_for(train(64)) > 2


def test_what_did_not_fit_once_is_tried_again_in_the_end() -> None:
    """Another process held the memory, say."""
    sizes = SizeMemory(probe_steps=2)
    device = Device(sizes, train=4 * 512)
    for _ in range(20):
        device.train_step(train(8))
    device.room["train"] = 8 * 512
    assert max(max(device.train_step(train(8))[0]) for _ in range(40)) == 8
    assert device.train_step(train(8)) == [[8]]


@pytest.mark.parametrize("rows", [2, 3, 5, 6, 7, 8, 13, 64])
@pytest.mark.parametrize("room", [1, 2, 3, 5, 7, 40])
def test_the_size_of_chunks_goes_up_to_what_fits(rows: int, room: int) -> None:
    """To the largest that the batch falls into evenly."""
    sizes = SizeMemory(probe_steps=1)
    device = Device(sizes, train=room * 512)
    best = max(size for size in (-(-rows // pieces) for pieces in range(1, rows + 1)) if size <= room)
    most = [max(device.train_step(train(rows))[0]) for _ in range(64)]
    assert max(most) == best
    assert most[-1] == best


@pytest.mark.parametrize("kind", ["train", "forward", "generate"])
def test_each_kind_of_call_is_tried(kind: Kind) -> None:
    """Failing tries of one kind do not keep the others from theirs."""
    sizes = SizeMemory(probe_steps=2)
    room = {"train": 512, "forward": 512, "generate": 512, kind: 4 * 512}
    device = Device(sizes, **room)
    calls = [CallShape(each, 8, 512) for each in ("generate", "forward", "train")]
    most = dict.fromkeys(room, 0)
    for _ in range(40):
        for call, chunks in zip(calls, device.train_step(*calls), strict=True):
            most[call.kind] = max(most[call.kind], *chunks)
    # What fits with gradients fits without.
    assert most == {each: 4 if each == kind else 1 for each in room} | ({"forward": 1} if kind == "train" else {})


def test_one_larger_size_is_tried_at_a_time() -> None:
    sizes = begun(probe_steps=0)
    sizes.failed(train(8))
    sizes.failed(CallShape("generate", 8, 512))
    assert sizes.rows_for(train(8)) == 2
    assert sizes.is_probe()
    assert sizes.rows_for(train(8)) == 1
    assert sizes.rows_for(CallShape("generate", 8, 512)) == 4


def test_a_try_that_does_not_take_place_is_forgotten() -> None:
    """A call that is not split after all, or sequences that do not fill a chunk."""
    sizes = begun(probe_steps=1)
    sizes.failed(train(8))
    sizes.ran(train(2))
    sizes.came_through()
    sizes.begin_step(3)
    assert sizes.rows_for(train(8)) == 4
    sizes.ran(train(2))
    sizes.came_through()
    assert not sizes.is_probe()
    sizes.begin_step(4)
    assert sizes.rows_for(train(8)) == 4


def test_nothing_that_failed_is_tried_but_as_a_try() -> None:
    sizes = SizeMemory(probe_steps=7)
    device = Device(sizes, train=2000)
    for step in range(300):
        rows, length = 1 + (step * 7) % 16, 32 * (1 + (step * 5) % 9)
        before = device.failures
        sizes.begin_step(device.step + 1)
        device.train_step(train(rows, length))
        assert device.failures - before <= 2 + (step == 0)
    assert device.failures < 25


def test_a_call_without_gradients_goes_by_what_fits_with_them_until_it_has_failed_itself() -> None:
    sizes = begun()
    sizes.failed(train(8))
    sizes.ran(train(4))
    sizes.came_through()
    forward = CallShape("forward", 8, 512)
    assert sizes.rows_for(forward) == 4
    sizes.failed(CallShape("forward", 4, 512))
    assert sizes.rows_for(CallShape("forward", 4, 512)) == 3
    sizes.failed(CallShape("forward", 3, 512))
    sizes.failed(CallShape("forward", 2, 512))
    assert sizes.rows_for(forward) == 1
    assert sizes.rows_for(train(8)) == 4
    assert sizes.rows_for(CallShape("generate", 8, 512)) == 8


def test_what_fails_without_gradients_is_not_tried_with_them() -> None:
    sizes = begun()
    sizes.failed(CallShape("forward", 8, 512))
    assert sizes.rows_for(train(8)) == 1


def test_a_flattened_batch_counts_by_its_tokens() -> None:
    sizes = SizeMemory(probe_steps=2)
    sizes.begin_step(1)
    sizes.failed(train(4096, 1))
    assert sizes.rows_for(train(4096, 1)) == 1
    sizes.ran(train(1024, 1))
    sizes.came_through()
    assert sizes.rows_for(train(4096, 1)) == 1024
    assert sizes.rows_for(train(900, 1)) == 900
    sizes.begin_step(3)
    assert sizes.rows_for(train(4096, 1)) == 2048
    assert str(train(4096, 1)) == "4096 tokens"


def test_with_more_room_what_failed_is_tried_again_from_what_fits() -> None:
    sizes = begun(probe_steps=100)
    sizes.failed(train(8))
    sizes.ran(train(1))
    sizes.came_through()
    sizes.more_room()
    assert sizes.limits
    assert sizes.rows_for(train(8)) == 1
    sizes.begin_step(2)
    assert sizes.rows_for(train(8)) == 2
    sizes.ran(train(2))
    sizes.came_through()
    sizes.begin_step(3)
    assert sizes.rows_for(train(8)) == 4


def test_what_is_known_goes_on_in_the_next_process() -> None:
    sizes = begun()
    sizes.failed(train(8))
    sizes.ran(train(4))
    sizes.came_through()
    later = SizeMemory(probe_steps=10)
    later.load_state_dict(json.loads(json.dumps(sizes.state_dict())))
    later.begin_step(5000)
    assert later.state_dict() == json.loads(json.dumps(sizes.state_dict())) or later.limits
    assert later.rows_for(train(8)) == 4
    later.begin_step(5009)
    assert later.rows_for(train(8)) == 4
    later.begin_step(5010)
    assert later.rows_for(train(8)) == 8
    assert later.is_probe()


def test_which_call_has_begun_is_known_for_each_kind() -> None:
    sizes = begun()
    sizes.begins(train(8))
    sizes.begins(CallShape("forward", 2, 64))
    assert sizes.begun["train"] == train(8)
    assert sizes.last_begun == CallShape("forward", 2, 64)


def test_generation_and_evaluation_are_halved_until_they_fit() -> None:
    sizes = begun()
    for failed, left in ((64, 32), (32, 16)):
        shape = CallShape("generate", failed, 512)
        sizes.failed(shape)
        assert sizes.rows_for(CallShape("generate", 64, 512)) == left
        sizes.failed(CallShape("forward", failed, 512), with_gradients=False)
        assert sizes.rows_for(CallShape("forward", 64, 512)) == left
    assert sizes.rows_for(train(8)) == 8
