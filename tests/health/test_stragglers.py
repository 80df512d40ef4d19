"""When a rank is called slower than the others: by made-up times of steps, with seeded noise."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from self_healing.health.stragglers import Straggler, StragglerWatch, Work


# Seconds of a step that is as it should be: in data, in forward, and in all.
DATA, FORWARD, STEP = 0.02, 0.3, 1.0
Noise = Callable[[random.Random, int], tuple[float, float]]


class Job:
    """Ranks whose steps take as long as is given, compared every so many steps."""

    def __init__(self, ranks: int, noise: Noise, seed: int = 0, **thresholds: float) -> None:
        self.works = {rank: Work(0, 0.0, 0.0, 0.0) for rank in range(ranks)}
        self.watch = StragglerWatch(**thresholds)  # type: ignore[arg-type]
        self._noise, self._random = noise, random.Random(seed)
        self.step, self.now = 0, 0.0

    def go_on(self, steps: int, slow: int | None = None, data: float = 0.0, forward: float = 1.0) -> None:
        """One rank may take so much longer in data, in seconds, and so many times as long in forward."""
        for _ in range(steps):
            spent = {rank: self._noise(self._random, rank) for rank in self.works}
            if slow is not None:
                spent[slow] = spent[slow][0] + data, spent[slow][1] * forward
            # All wait for the slowest.
            took = STEP - DATA - FORWARD + max(map(sum, spent.values()))
            for rank, (waited, computed) in spent.items():
                work = self.works[rank]
                assert work.data is not None
                assert work.forward is not None
                self.works[rank] = Work(
                    work.steps + 1, work.seconds + took, work.data + waited, work.forward + computed
                )
            self.step, self.now = self.step + 1, self.now + took

    def compare(self, times: int, **slow: float) -> tuple[list[Straggler], list[int]]:
        found, over = list[Straggler](), list[int]()
        for _ in range(times):
            self.go_on(8, **slow)  # type: ignore[arg-type]
            new, gone = self.watch.take_in(self.now, self.step, self.works)
            found, over = found + new, over + gone
        return found, over


def quiet(rng: random.Random, rank: int) -> tuple[float, float]:
    return DATA * rng.uniform(0.9, 1.1), FORWARD * rng.uniform(0.95, 1.05)


def lengths(rng: random.Random, rank: int) -> tuple[float, float]:
    """Batches of any length."""
    return DATA * rng.uniform(0.5, 2.0), FORWARD * rng.lognormvariate(0.0, 0.6)


def stalls(rng: random.Random, rank: int) -> tuple[float, float]:
    """A loader that stands still for five steps now and then."""
    return DATA if rng.random() > 0.05 else 5.0 * STEP, FORWARD


def bursts(rng: random.Random, rank: int) -> tuple[float, float]:
    """The machine is busy with something else for a while, whichever rank that hits."""
    return DATA * rng.paretovariate(1.2), FORWARD * rng.paretovariate(2.0)


@pytest.mark.parametrize("noise", [quiet, lengths, stalls, bursts])
@pytest.mark.parametrize("ranks", [2, 8])
def test_no_rank_of_a_healthy_run_is_one(noise: Noise, ranks: int) -> None:
    for seed in range(3):
        assert Job(ranks, noise, seed).compare(200) == ([], [])


@pytest.mark.parametrize("noise", [quiet, lengths])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_computes_slower_is_named_with_factor_part_and_step(noise: Noise, ranks: int) -> None:
    for seed in range(3):
        job = Job(ranks, noise, seed)
        job.compare(10)
        found, _ = job.compare(60, slow=1, forward=2.5)
        (straggler,) = found
        assert (straggler.rank, straggler.part) == (1, "forward")
        assert straggler.factor == pytest.approx(2.5, rel=0.25)
        # Not before it was, and later only where chance made up for it once.
        assert 72 <= straggler.since_step <= 400


def test_a_rank_that_waits_longer_for_its_batches_is_named() -> None:
    job = Job(4, quiet)
    (straggler,), _ = job.compare(60, slow=3, data=0.32)
    assert (straggler.rank, straggler.part) == (3, "data")
    assert straggler.factor == pytest.approx(2.0, rel=0.1)
    # Of a step that takes as much longer.
    assert straggler.share == pytest.approx(0.32 / 1.32, rel=0.1)


def test_one_that_is_slower_in_what_costs_nothing_is_not_named() -> None:
    # Twenty times as long for its batches, and a step takes 4 % longer.
    assert Job(4, lambda rng, rank: (0.002, 0.02)).compare(400, slow=0, data=0.04) == ([], [])


def test_a_slow_rank_is_told_of_once_and_again_only_after_it_was_as_fast_as_the_others() -> None:
    job = Job(2, quiet)
    assert len(job.compare(400, slow=1, forward=2.0)[0]) == 1
    # At the limit it does not come and go.
    assert job.compare(400, slow=1, forward=1.27) == ([], [])
    assert job.compare(19) == ([], [])
    assert job.compare(2) == ([], [1])
    assert len(job.compare(60, slow=1, forward=2.0)[0]) == 1


def test_it_takes_a_minute_though_steps_are_short() -> None:
    job = Job(2, lambda rng, rank: (0.0, 0.3), seconds=1000.0)
    assert job.compare(60, slow=1, forward=2.0) == ([], [])
    assert len(job.compare(60, slow=1, forward=2.0)[0]) == 1


def test_a_rank_that_begins_to_count_anew_is_not_compared_with_what_it_was() -> None:
    job = Job(2, quiet)
    job.compare(15, slow=1, forward=2.0)
    job.works = {rank: Work(0, 0.0, 0.0, 0.0) for rank in job.works}
    assert job.compare(18, slow=1, forward=2.0) == ([], [])
    job = Job(2, quiet)
    job.compare(30)
    job.works = {rank: Work(0, 0.0, 0.0, 0.0) for rank in job.works}
    assert len(job.compare(22, slow=1, forward=2.0)[0]) == 1


def test_parts_that_one_rank_does_not_measure_are_not_compared() -> None:
    job = Job(2, quiet)
    for _ in range(60):
        job.go_on(8, slow=1, data=0.01, forward=3.0)
        works = {rank: Work(each.steps, each.seconds, each.data, None) for rank, each in job.works.items()}
        assert job.watch.take_in(job.now, job.step, works) == ([], [])
