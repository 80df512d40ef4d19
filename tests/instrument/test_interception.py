"""Calls of one model that several parts of the library intercept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from self_healing.hf.patching import Interception, Replacements


def intercepted(replaced: Replacements, model: Any, called: list[str], name: str) -> Interception:
    def wrapper(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return original(*args, **kwargs)

    interception = Interception(model, "_call_impl", model._call_impl, wrapper)
    replaced.put(model, "_call_impl", interception)
    return interception


def test_two_interceptions_are_both_called_the_last_one_first() -> None:
    model, called, replaced = torch.nn.Linear(2, 2), list[str](), Replacements()
    for name in ("first", "second"):
        intercepted(replaced, model, called, name)
    model(torch.ones(2))
    assert called == ["second", "first"]


def test_one_of_them_is_taken_back_and_the_other_one_stays() -> None:
    model, called, replaced = torch.nn.Linear(2, 2), list[str](), Replacements()
    intercepted(replaced, model, called, "first")
    replaced.give_back([intercepted(replaced, model, called, "second")])
    model(torch.ones(2))
    replaced.give_back()
    model(torch.ones(2))
    assert called == ["first"]
    assert "_call_impl" not in vars(model)
