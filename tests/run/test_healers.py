"""Events go to the healers that take part in them, in their order, and to nobody else."""

from __future__ import annotations

from self_healing.run.healer import Healer, Healers


class Taking(Healer):
    """Takes part in an event, and has a metric."""

    def __init__(self, told: list[str], name: str) -> None:
        self.told, self.name = told, name

    def fetched(self) -> None:
        self.told.append(self.name)

    def metrics(self, training: bool, summary: bool) -> dict[str, float]:
        return {self.name: 1.0}


class Owing(Healer):
    """Answers a question."""

    def owes_checkpoint(self) -> bool:
        return True


def test_an_event_that_several_take_part_in_goes_to_each_in_their_order() -> None:
    told = list[str]()
    healers = Healers((Taking(told, "first"), Owing(), Taking(told, "second")))
    healers.fetched()
    assert told == ["first", "second"]
    assert healers.metrics(True, False) == {"first": 1.0, "second": 1.0}


def test_one_that_is_for_one_healer_is_that_healers_own_method() -> None:
    owing = Owing()
    healers = Healers((Taking([], "first"), owing))
    # Nothing of ours is called in between, in each step of a healthy run.
    assert healers.owes_checkpoint == owing.owes_checkpoint
    assert healers.owes_checkpoint()


def test_one_that_nobody_takes_part_in_does_nothing() -> None:
    healers = Healers((Owing(),))
    healers.fetched()
    assert not healers.checkpoints_wait()
    assert healers.claims(ValueError()) == []
