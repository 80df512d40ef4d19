"""Which rung next: ladders, budgets, and what counts as the same failure again."""

from __future__ import annotations

from pathlib import Path

from self_healing import (
    FAILURE_RECIPES,
    Action,
    FailureType,
    HealingConfig,
    HealingContext,
    SelfHealingCallback,
)
from self_healing.failures.recipes import Given
from self_healing.healers.assembly import assemble
from self_healing.healers.numerics.ladder import LadderRunner
from self_healing.run.run import RecoveryBudget


# Part of the place where the failure is noticed (a data loader worker, a call that is made again, a thread that
# watches): they are written down, and cannot be asked for.
IN_PLACE = frozenset(
    {
        Action.RETRY_CALL,
        Action.QUARANTINE_SAMPLE,
        Action.REPLACE_SAMPLE,
        Action.GO_ON_WITHOUT,
        Action.REMOVE_PARTIAL_CHECKPOINT,
        Action.MAKE_ROOM,
        Action.WRITE_STACKS,
        Action.INTERRUPT,
        Action.RESUME,
        Action.SAVE_AND_LEAVE,
        Action.EXIT_FOR_RESTART,
    }
)


def test_every_action_of_every_recipe_is_carried_out(tmp_path: Path) -> None:
    offered = set(assemble(HealingConfig(), tmp_path).remedies.offered)
    assert {action for recipe in FAILURE_RECIPES.values() for action in recipe.actions} <= set(Action)
    assert offered | IN_PLACE == set(Action)
    assert not offered & IN_PLACE


def test_every_ladder_has_a_rung_whatever_holds_and_is_climbed_in_its_order() -> None:
    config = HealingConfig(max_recovery_attempts=6)
    runner = LadderRunner(config, RecoveryBudget(config))
    failure, given = FailureType.DIVERGENCE, {Given.LATE, Given.RATE_LEFT}
    assert runner.next(failure, {Given.CAUSE_UNKNOWN}).actions == (Action.HOLD_CHECKPOINTS,)
    climbed = [runner.climb(failure, 60, given)[0] for _ in range(4)]
    assert [rung.actions[-1] for rung in climbed] == ["replay_steps", *["reduce_learning_rate"] * 3]
    assert [rung.target for rung in climbed] == ["newest", "newest", "older", "newest"]
    assert runner.next(failure, {Given.CAUSE_UNKNOWN}).actions == (Action.HOLD_CHECKPOINTS,)
    assert runner.climb(failure, 60, {Given.LATE})[0].actions[-1] == "reset_moments"
    last, spent = runner.climb(failure, 60, {Given.LATE})
    assert (last.actions[-1], last.failure, spent) == ("stop", "learning_rate", "")
    runner.reset()
    for _ in range(6):
        runner.climb(failure, 60, given)
    last, spent = runner.climb(failure, 60, given)
    assert (last.actions[-1], last.failure) == ("stop", None)
    assert spent == "the budget of 6 attempts without progress is spent"
    for each, recipe in FAILURE_RECIPES.items():
        assert bool(runner.next(each, set()).actions) == bool(recipe.ladder)


def test_actions_that_were_taken_earlier_act_on_the_run_that_goes_on(tmp_path: Path) -> None:
    healing = SelfHealingCallback()
    actions, waited = healing.actions, list[float]()
    for name in ("first", "second"):
        healing.run = assemble(HealingConfig(), tmp_path / name, sleep=waited.append)
        incident = healing.run.journal.open(1, "mine", {})
        actions.apply(Action.WAIT_AND_RESUME, HealingContext(incident), None)  # type: ignore[arg-type]
        assert incident.actions == [Action.WAIT_AND_RESUME]
    assert len(waited) == 2
