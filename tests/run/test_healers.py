"""Events go to the healers that take part in them, in their order, and to nobody else."""

from __future__ import annotations

from self_healing.run.healer import Healer, Healers


class Taking(Healer):
    """Takes part in an event, and has a metric."""

    def __init__(self, told: list[str], name: str) -> None:
        self.told, self.name = told, name

    def stepped(self) -> None:
        self.told.append(self.name)

    def metrics(self, training: bool, summary: bool) -> dict[str, float]:
        return {self.name: 1.0}


class Scaling(Healer):
    """Answers a question."""

    def rate_scale(self, step: int) -> float:
        return 0.5


def test_an_event_that_several_take_part_in_goes_to_each_in_their_order() -> None:
    told = list[str]()
    healers = Healers((Taking(told, "first"), Scaling(), Taking(told, "second")))
    healers.stepped()
    assert told == ["first", "second"]
    assert healers.metrics(True, False) == {"first": 1.0, "second": 1.0}


def test_one_that_is_for_one_healer_is_that_healers_own_method() -> None:
    scaling = Scaling()
    healers = Healers((Taking([], "first"), scaling))
    # Nothing of ours is called in between, in each step of a healthy run.
    assert healers.rate_scale == scaling.rate_scale
    assert healers.rate_scale(3) == 0.5


def test_one_that_nobody_takes_part_in_does_nothing() -> None:
    healers = Healers((Scaling(),))
    healers.stepped()
    assert not healers.checkpoints_wait()
    assert healers.claims(ValueError()) == []
