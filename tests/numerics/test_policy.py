"""Which rung next: ladders, budgets, and what counts as the same failure again."""

from __future__ import annotations

from pathlib import Path

import pytest

from self_healing import (
    FAILURE_RECIPES,
    Action,
    HealingConfig,
    HealingContext,
    Incident,
    SelfHealingCallback,
)
from self_healing.failures.recipes import IN_PLACE
from self_healing.healers.assembly import assemble


def test_every_action_of_every_recipe_is_carried_out(tmp_path: Path) -> None:
    offered = assemble(HealingConfig(), tmp_path).remedies.offered
    assert {action for recipe in FAILURE_RECIPES.values() for action in recipe.ladder} <= set(Action)
    assert offered | IN_PLACE == set(Action)
    assert not offered & IN_PLACE


def test_actions_that_were_taken_earlier_act_on_the_run_that_goes_on(tmp_path: Path) -> None:
    healing = SelfHealingCallback()
    actions, waited = healing.actions, list[float]()
    with pytest.raises(RuntimeError, match="not attached"):
        actions.apply(Action.WAIT_AND_RESUME, HealingContext(Incident("a", 1, "mine")), None)  # type: ignore[arg-type]
    for name in ("first", "second"):
        healing.run = assemble(HealingConfig(), tmp_path / name, sleep=waited.append)
        incident = healing.run.journal.open(1, "mine", {})
        actions.apply(Action.WAIT_AND_RESUME, HealingContext(incident), None)  # type: ignore[arg-type]
        assert incident.actions == [Action.WAIT_AND_RESUME]
    assert len(waited) == 2
