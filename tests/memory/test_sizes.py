"""What is remembered of sizes that fitted and sizes that did not, and what may run by it."""

from __future__ import annotations

import json

import pytest

from self_healing.healers.oom.sizes import KnownSizes
from self_healing.hf.batches import CallShape, Kind


def train(rows: int, length: int = 512) -> CallShape:
    return CallShape("train", rows, length)


def begun(probe_steps: int = 10) -> KnownSizes:
    sizes = KnownSizes(probe_steps)
    sizes.begin_step(1)
    return sizes


class Device:
    """Runs calls as a trainer does, and has room for so many tokens of each kind."""

    def __init__(self, sizes: KnownSizes, **room: int) -> None:
        self.sizes, self.room, self.step, self.failures = sizes, room, 0, 0

    def train_step(self, *shapes: CallShape) -> list[list[int]]:
        """One optimizer step; for each call the rows of its chunks. What fails is tried again, smaller."""
        self.step += 1
        self.sizes.begin_step(self.step)
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
                self.sizes.ran(chunk)
            ran.append(chunks)
        return ran


def test_everything_is_allowed_before_anything_has_failed() -> None:
    sizes = begun()
    assert sizes.rows_for(train(10**6)) == 10**6
    assert not sizes.limits
    sizes.ran(train(8))
    sizes.on_success()
    assert not sizes.changed


@pytest.mark.parametrize("kind", ["train", "forward", "generate"])
def test_what_failed_is_halved_until_it_fits(kind: Kind) -> None:
    sizes = begun()
    for failed, left in ((8, 4), (4, 2), (2, 1)):
        sizes.failed(CallShape(kind, failed, 512))
        assert sizes.limits
        assert sizes.changed
        assert sizes.rows_for(CallShape(kind, 8, 512)) == left


def test_half_of_what_failed_counts_in_tokens() -> None:
    """Shorter rows need no more each, longer ones may need more."""
    sizes = begun()
    sizes.failed(train(8, 512))
    assert [sizes.known_rows(train(64, length)) for length in (64, 256, 1024, 4096)] == [32, 8, 2, 1]


def test_where_a_failure_ends_the_job_one_row_is_allowed() -> None:
    sizes = begun()
    sizes.failure_is_fatal = True
    sizes.failed(train(8))
    assert sizes.rows_for(train(8)) == 1
    assert sizes.rows_for(train(2, 64)) == 1
    sizes.ran(train(1))
    sizes.on_success()
    sizes.begin_step(10)
    assert sizes.rows_for(train(8)) == 1
    sizes.begin_step(11)
    assert sizes.rows_for(train(8)) == 2


def test_what_has_fitted_is_allowed_for_what_is_no_longer() -> None:
    sizes = begun()
    sizes.failed(train(8, 512))
    sizes.ran(train(4, 512))
    sizes.on_success()
    assert [sizes.known_rows(train(8, length)) for length in (256, 512, 513)] == [4, 4, 3]
    assert sizes.rows_for(train(3, 512)) == 3


def test_a_size_fits_once_its_step_succeeded() -> None:
    sizes = begun()
    sizes.failed(train(32))
    sizes.ran(train(20))
    assert sizes.known_rows(train(32)) == 16
    sizes.forget_attempt()
    sizes.on_success()
    assert sizes.known_rows(train(32)) == 16
    sizes.ran(train(20))
    sizes.failed(train(20))
    sizes.on_success()
    assert sizes.known_rows(train(32)) == 10
    sizes.ran(train(8))
    sizes.on_success()
    assert sizes.known_rows(train(32)) == 8


def test_what_failed_takes_back_what_had_fitted() -> None:
    sizes = begun()
    sizes.failed(train(8))
    sizes.ran(train(4))
    sizes.on_success()
    sizes.failed(train(3))
    assert sizes.rows_for(train(8)) == 1


def test_a_size_that_failed_is_tried_again_ever_more_rarely() -> None:
    sizes = KnownSizes(probe_steps=4)
    device = Device(sizes, train=4 * 512)
    most = [max(device.train_step(train(8))[0]) for _ in range(60)]
    # Of 8 rows there are chunks of 1, 2, 4 and 8.
    assert most == [4] * 60
    # At first; and one try each after 4 steps, 8, 16 and 32 more.
    assert device.failures == 1 + 3


@pytest.mark.parametrize(("rows", "room"), [(8, 4), (8, 1), (64, 27), (64, 9), (13, 5)])
def test_the_largest_size_that_fits_is_found_within_a_few_steps(rows: int, room: int) -> None:
    sizes = KnownSizes(probe_steps=1_000)
    device = Device(sizes, train=room * 512)
    best = max(size for size in (-(-rows // pieces) for pieces in range(1, rows + 1)) if size <= room)
    most = [max(device.train_step(train(rows))[0]) for _ in range(12)]
    assert most[-1] == best
    # Those of halving, and those of the search between what fits and what does not.
    assert device.failures <= 2 * rows.bit_length()


def test_without_room_for_what_rows_hold_a_size_is_not_tried() -> None:
    class Full:
        """Every row holds 100 bytes a token, and so many are there."""

        now, total = 0, 10 * 100 * 512

        def held(self) -> int:
            return self.now

        def left(self) -> int:
            return self.total - self.now

    def ran(rows: int) -> None:
        sizes.begins(train(rows))
        room.now += rows * 100 * 512
        sizes.ran(train(rows))
        room.now = 0
        sizes.on_success()

    room = Full()
    sizes = KnownSizes(probe_steps=2, room=room)
    sizes.begin_step(1)
    sizes.failed(train(64))
    ran(8)
    for step in range(2, 20):
        sizes.begin_step(step)
        assert sizes.rows_for(train(64)) == 8
    # A longer row: half of what failed would be 16.
    assert sizes.known_rows(train(64, 1024)) == 4
    # Another process has left.
    room.total *= 2
    assert sizes.rows_for(train(64)) == 16


def test_the_next_try_is_half_way_to_what_failed() -> None:
    sizes = begun(probe_steps=1)
    sizes.failed(train(14))
    sizes.ran(train(8))
    sizes.on_success()
    sizes.begin_step(3)
    # 64 rows fall into chunks of 8, 10, 11, 13, 16, ...
    assert sizes.rows_for(train(64)) == 11


def test_after_a_try_that_went_well_the_wait_is_short_again() -> None:
    sizes = KnownSizes(probe_steps=2)
    device = Device(sizes, train=4 * 512)
    # It fails at the first step, then after 2, after 4, after 8 more.
    for _ in range(15):
        device.train_step(train(8))
    assert device.failures == 4
    device.room["train"] = 8 * 512
    for _ in range(16):
        device.train_step(train(8))
    assert (device.failures, device.train_step(train(8))) == (4, [[8]])
    device.room["train"] = 4 * 512
    for _ in range(2):
        assert device.train_step(train(8)) == [[4, 4]]
    device.room["train"] = 8 * 512
    assert device.train_step(train(8)) == [[8]]


def test_what_did_not_fit_once_is_tried_again_in_the_end() -> None:
    """Another process held the memory, say."""
    sizes = KnownSizes(probe_steps=2)
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
    sizes = KnownSizes(probe_steps=1)
    device = Device(sizes, train=room * 512)
    best = max(size for size in (-(-rows // pieces) for pieces in range(1, rows + 1)) if size <= room)
    most = [max(device.train_step(train(rows))[0]) for _ in range(64)]
    assert max(most) == best
    assert most[-1] == best


@pytest.mark.parametrize("kind", ["train", "forward", "generate"])
def test_each_kind_of_call_is_tried(kind: Kind) -> None:
    """Failing tries of one kind do not keep the others from theirs."""
    sizes = KnownSizes(probe_steps=2)
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
    sizes = begun()
    both: tuple[Kind, Kind] = ("train", "generate")
    for kind in both:
        sizes.failed(CallShape(kind, 64, 512))
    for kind in both:
        sizes.ran(CallShape(kind, 8, 512))
    sizes.on_success()
    sizes.begin_step(2)
    assert sizes.rows_for(train(64)) == 16
    assert sizes.is_tried(train(16))
    assert sizes.rows_for(train(64)) == 8
    assert sizes.rows_for(CallShape("generate", 64, 512)) == 8


def test_a_try_that_does_not_take_place_is_forgotten() -> None:
    """A call that is not split after all, or sequences that do not fill a chunk."""
    sizes = begun()
    sizes.failed(train(8))
    sizes.ran(train(2))
    sizes.on_success()
    sizes.begin_step(2)
    assert sizes.rows_for(train(8)) == 4
    assert sizes.is_tried(train(4))
    assert not sizes.is_tried(train(8))
    sizes.ran(train(2))
    sizes.on_success()
    assert not sizes.is_tried(train(4))
    sizes.begin_step(3)
    assert sizes.rows_for(train(8)) == 2
    sizes.begin_step(4)
    assert sizes.rows_for(train(8)) == 4


def test_a_try_that_never_takes_place_does_not_keep_what_failed_from_its_own() -> None:
    """Of 8 rows that come in pairs, 3 are never run at a time."""
    sizes = KnownSizes(probe_steps=4)
    sizes.begin_step(1)
    sizes.failed(train(8))
    sizes.failed(train(4))
    tried = set()
    for step in range(1, 10):
        sizes.begin_step(step)
        allowed = sizes.rows_for(train(8))
        tried.add(allowed)
        sizes.ran(train(allowed - allowed % 2))
        sizes.on_success()
    assert tried == {2, 3, 4, 8}


def test_nothing_that_failed_is_tried_but_as_a_try() -> None:
    sizes = KnownSizes(probe_steps=7)
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
    sizes.on_success()
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
    assert sizes.rows_for(train(8)) == 4


def test_a_flattened_batch_counts_by_its_tokens() -> None:
    sizes = KnownSizes(probe_steps=2)
    sizes.begin_step(1)
    sizes.failed(train(4096, 1))
    assert sizes.known_rows(train(4096, 1)) == 2048
    sizes.ran(train(1024, 1))
    sizes.on_success()
    assert sizes.known_rows(train(4096, 1)) == 1024
    assert sizes.rows_for(train(900, 1)) == 900
    sizes.begin_step(3)
    assert sizes.rows_for(train(4096, 1)) == 2048
    assert str(train(4096, 1)) == "4096 tokens"


def test_with_more_room_what_failed_is_tried_again_from_what_fits() -> None:
    sizes = begun(probe_steps=100)
    sizes.failed(train(8))
    sizes.ran(train(1))
    sizes.on_success()
    sizes.more_room()
    assert sizes.limits
    assert sizes.rows_for(train(8)) == 1
    sizes.begin_step(2)
    assert sizes.rows_for(train(8)) == 2
    sizes.ran(train(2))
    sizes.on_success()
    sizes.begin_step(3)
    assert sizes.rows_for(train(8)) == 4


def test_what_is_known_goes_on_in_the_next_process() -> None:
    sizes = begun()
    sizes.failed(train(8))
    sizes.ran(train(4))
    sizes.on_success()
    later = KnownSizes(probe_steps=10)
    later.load_state_dict(json.loads(json.dumps(sizes.state_dict())))
    later.begin_step(5000)
    assert later.state_dict() == json.loads(json.dumps(sizes.state_dict())) or later.limits
    assert later.rows_for(train(8)) == 4
    later.begin_step(5009)
    assert later.rows_for(train(8)) == 4
    later.begin_step(5010)
    assert later.rows_for(train(8)) == 8
    assert later.is_tried(train(8))


def test_the_next_process_tries_at_once_what_was_not_tried_yet() -> None:
    """A job that was killed right after a failure need not run row by row until what failed is tried again."""
    sizes = begun()
    sizes.failed(train(16))
    sizes.ran(train(1))
    sizes.on_success()
    later = KnownSizes(probe_steps=1_000)
    later.load_state_dict(json.loads(json.dumps(sizes.state_dict())))
    device = Device(later, train=8 * 512)
    assert max(device.train_step(train(16))[0]) == 1
    most = [max(device.train_step(train(16))[0]) for _ in range(4)]
    assert most[-1] == 8
    assert device.failures == 0


def test_which_call_has_begun_is_known_for_each_kind() -> None:
    sizes = begun()
    sizes.begins(train(8))
    sizes.begins(CallShape("forward", 2, 64))
    assert sizes.begun["train"] == train(8)
    assert sizes.last_begun == CallShape("forward", 2, 64)


def test_an_evaluation_that_failed_says_nothing_about_training() -> None:
    sizes = begun()
    sizes.failed(CallShape("forward", 64, 512), with_gradients=False)
    assert sizes.rows_for(CallShape("forward", 64, 512)) == 32
    assert sizes.rows_for(train(8)) == 8


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
                device.sizes.begin_step(step)
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
    assert restarts(3000, room) <= at_most + (room == 1)


def test_what_failed_on_one_rank_counts_on_all() -> None:
    one, other = begun(), begun()
    for sizes, fits, fails in ((one, 4, 8), (other, 2, 3)):
        sizes.failed(train(fails))
        sizes.ran(train(fits))
        sizes.on_success()
    for order in ((one, other), (other, one)):
        merged = begun()
        for sizes in order:
            merged.load_state_dict(json.loads(json.dumps(sizes.state_dict())), own=False)
        merged.begin_step(2)
        # Half of 3.
        assert merged.known_rows(train(8)) == 1


def test_what_fitted_on_another_rank_counts_up_to_half_of_what_failed_here() -> None:
    """That one may have more memory left."""
    roomy, short = begun(), begun()
    for sizes, fits, fails in ((roomy, train(8, 400), train(16, 480)), (short, train(2, 480), train(4, 480))):
        sizes.failed(fails)
        sizes.ran(fits)
        sizes.on_success()
    # It has been told what failed, and does not count on it for itself.
    roomy.load_state_dict(json.loads(json.dumps(short.state_dict())), own=False)
    assert [roomy.known_rows(train(8, length)) for length in (400, 480)] == [8, 2]
    short.load_state_dict(json.loads(json.dumps(roomy.state_dict())), own=False)
    assert [short.known_rows(train(8, length)) for length in (100, 400, 480)] == [2, 2, 2]
    same_rank = begun()
    same_rank.load_state_dict(json.loads(json.dumps(roomy.state_dict())))
    assert same_rank.known_rows(train(8, 400)) == 8


def test_what_has_failed_since_a_size_was_written_down_counts_more() -> None:
    sizes = begun()
    sizes.failed(train(16))
    sizes.ran(train(8))
    sizes.on_success()
    written = json.loads(json.dumps(sizes.state_dict()))
    sizes.failed(train(8))
    sizes.load_state_dict(written)
    assert sizes.known_rows(train(8)) == 4


def test_of_what_fitted_on_another_rank_half_a_row_is_none() -> None:
    here, other = begun(), begun()
    here.failed(train(2, 100))
    other.failed(train(8, 900))
    other.ran(train(4, 900))
    other.on_success()
    here.load_state_dict(json.loads(json.dumps(other.state_dict())), own=False)
    assert here.state_dict()["train"]["fits"] == []


def test_a_model_whose_calls_ranks_make_together_is_known_in_the_next_process() -> None:
    sizes, later = begun(), begun()
    sizes.made_together = True
    later.load_state_dict(json.loads(json.dumps(sizes.state_dict())), own=False)
    assert later.made_together


def test_how_long_is_waited_outlives_the_process() -> None:
    sizes = KnownSizes(probe_steps=4)
    device = Device(sizes, train=4 * 512)
    for _ in range(60):
        device.train_step(train(8))
    later = KnownSizes(probe_steps=4)
    later.load_state_dict(json.loads(json.dumps(sizes.state_dict())))
    again = Device(later, train=4 * 512)
    for _ in range(31):
        again.train_step(train(8))
    assert again.failures == 0
    on_another_rank = begun(probe_steps=4)
    on_another_rank.load_state_dict(json.loads(json.dumps(sizes.state_dict())), own=False)
    assert on_another_rank.state_dict()["train"]["wait"] == sizes.state_dict()["train"]["wait"] > 4


def test_the_longest_wait_of_all_ranks_counts() -> None:
    usual = begun().state_dict()
    long = {**usual, "train": {**usual["train"], "wait": 40, "try_wait": 8}}
    for states in ((usual, long), (long, usual)):
        merged = begun()
        for state in states:
            merged.load_state_dict(state, own=False)
        assert (merged.state_dict()["train"]["wait"], merged.state_dict()["train"]["try_wait"]) == (40, 8)
