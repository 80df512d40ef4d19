"""State that an earlier process has written: what fits is taken, what does not stays as it is and is named."""

from __future__ import annotations

from typing import Any

import pytest

from self_healing.system.files import completed, take_over, take_over_whole


TEMPLATE = {"count": 0, "rate": 1.0, "on": False, "name": "", "seen": [], "by_name": {}, "any": None}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("count", 3),
        ("rate", 0.5),
        ("rate", 2),
        ("on", True),
        ("name", "a"),
        ("seen", [1]),
        ("by_name", {"a": 1}),
        ("any", 3),
        ("any", "a"),
        ("any", None),
    ],
)
def test_a_value_of_its_kind_is_taken(key: str, value: Any) -> None:
    odd: list[str] = []
    assert completed(TEMPLATE, {**TEMPLATE, key: value}, "part", odd) == {**TEMPLATE, key: value}
    assert odd == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("count", 3.5),
        ("count", "3"),
        ("count", True),
        ("rate", "fast"),
        ("rate", True),
        ("rate", None),
        ("on", 1),
        ("name", 3),
        ("seen", "text"),
        ("seen", {}),
        ("by_name", []),
    ],
)
def test_a_value_of_another_kind_is_named(key: str, value: Any) -> None:
    odd: list[str] = []
    assert completed(TEMPLATE, {**TEMPLATE, key: value}, "part", odd) == TEMPLATE
    assert odd == [f"part.{key}"]


def test_what_is_missing_is_named_and_what_is_new_is_left() -> None:
    odd: list[str] = []
    assert completed({"count": 0, "rate": 1.0}, {"count": 3, "of a later version": 1}, "part", odd) == {
        "count": 3,
        "rate": 1.0,
    }
    assert odd == ["part.rate"]


@pytest.mark.parametrize("saved", [None, [], "text", 3])
def test_what_is_no_record_is_named_as_a_whole(saved: Any) -> None:
    odd: list[str] = []
    assert completed({"count": 0}, saved, "part", odd) == {"count": 0}
    assert odd == ["part"]


class Part:
    """Takes two numbers that are not negative, and notes the first before it looks at the second."""

    def __init__(self) -> None:
        self.first, self.second = 1, 2

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first, "second": self.second}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["first"]
        if state["first"] < 0 or state["second"] < 0:
            raise ValueError("negative")
        self.second = state["second"]


def test_a_key_that_a_part_cannot_take_stays_as_it_is_in_the_part() -> None:
    part, odd = Part(), list[str]()
    take_over(part, {"first": -1, "second": 5}, "part", odd)
    assert part.state_dict() == {"first": 1, "second": 5}
    assert odd == ["part.first"]


def test_a_part_takes_a_state_as_a_whole_or_not_at_all() -> None:
    part = Part()
    assert take_over_whole(part, {"first": 3, "second": 4})
    assert part.state_dict() == {"first": 3, "second": 4}
    assert not take_over_whole(part, {"first": 7, "second": -1})
    assert part.state_dict() == {"first": 3, "second": 4}
    assert not take_over_whole(part, None)


def test_a_state_that_raises_only_when_it_is_saved_is_not_taken() -> None:
    class Lazy(Part):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.first = state["first"]

        def state_dict(self) -> dict[str, Any]:
            return {"first": self.first + 0}

    part = Lazy()
    assert not take_over_whole(part, {"first": "text"})
    assert part.first == 1
