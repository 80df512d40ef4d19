"""Which rung next: ladders, budgets, and what counts as the same failure again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from self_healing import (
    FAILURE_RECIPES,
    Action,
    FailureType,
    HealingConfig,
    HealingContext,
    Incident,
    SelfHealingCallback,
)
from self_healing.failures.recipes import IN_PLACE
from self_healing.healers.assembly import assemble
from self_healing.healers.numerics.ladder import Decision, RollbackLadder, StepPolicy
from self_healing.rollback.rollback import Target
from self_healing.run.run import RecoveryBudget


BACK = (Action.ROLL_BACK, Action.REPLAY_STEPS)
SLOWER = (Action.ROLL_BACK, Action.SKIP_STEP, Action.REDUCE_LEARNING_RATE)
ANEW = (Action.ROLL_BACK, Action.SKIP_STEP, Action.RESET_MOMENTS)


def climb(failure: FailureType, times: int, early: bool = False, **settings: int) -> list[Decision]:
    """As many failures of a kind, one after the other in the same place."""
    config = HealingConfig(**{"max_recovery_attempts": 100, **settings})
    ladder = RollbackLadder(config, RecoveryBudget(config))
    decisions, reductions = [], 0
    for step in range(times):
        decision = ladder.next(failure, 100 + step, early, reductions < config.max_lr_reductions, "1e-3")
        reductions += Action.REDUCE_LEARNING_RATE in decision.actions
        decisions.append(decision)
    return decisions


def rungs(decisions: list[Decision]) -> list[tuple[Target | None, tuple[Action, ...]]]:
    return [(decision.target, decision.actions) for decision in decisions if not decision.stops]


def test_corrupted_state_goes_back_further_each_time_and_keeps_its_rate() -> None:
    decisions = climb(FailureType.CORRUPTED_STATE, 4)
    assert [target for target, _ in rungs(decisions)] == [Target.NEWEST, Target.OLDER, Target.DISK]
    assert decisions[-1].stops
    assert not any(Action.REDUCE_LEARNING_RATE in decision.actions for decision in decisions)


def test_a_divergence_first_goes_on_with_fresh_data_then_slower_then_with_new_moments() -> None:
    decisions = climb(FailureType.DIVERGENCE, 5, max_lr_reductions=3)
    assert rungs(decisions) == [
        (Target.NEWEST, BACK),
        (Target.NEWEST, SLOWER),
        (Target.OLDER, SLOWER),
        (Target.NEWEST, SLOWER),
        (Target.NEWEST, ANEW),
    ]
    assert climb(FailureType.DIVERGENCE, 6, max_lr_reductions=3)[-1].failure is FailureType.LEARNING_RATE


def test_a_run_that_has_only_begun_goes_back_to_its_beginning_and_is_slower_at_once() -> None:
    decisions = climb(FailureType.DIVERGENCE, 3, early=True, max_lr_reductions=2)
    assert rungs(decisions) == [(Target.INITIAL, SLOWER)] * 2
    assert decisions[-1].failure is FailureType.LEARNING_RATE
    assert "learning rate" in decisions[-1].verdict


def test_what_overflows_goes_back_further_and_slower_each_time() -> None:
    decisions = climb(FailureType.NONFINITE_NUMERICAL, 4, max_lr_reductions=3)
    assert rungs(decisions) == [(Target.NEWEST, SLOWER), (Target.OLDER, SLOWER), (Target.DISK, SLOWER)]
    assert decisions[-1].stops


def test_without_reductions_what_overflows_still_goes_back() -> None:
    decisions = climb(FailureType.NONFINITE_NUMERICAL, 4, max_lr_reductions=0)
    assert [target for target, _ in rungs(decisions)] == [Target.NEWEST, Target.OLDER, Target.DISK]


@pytest.mark.parametrize("failure", [FailureType.CORRUPTED_STATE, FailureType.DIVERGENCE, FailureType.RED_FLAG])
@pytest.mark.parametrize("attempts", [0, 1, 2])
def test_the_budget_ends_every_ladder(failure: FailureType, attempts: int) -> None:
    decisions = climb(failure, attempts + 1, max_recovery_attempts=attempts)
    assert [decision.stops for decision in decisions] == [False] * attempts + [True]
    assert f"budget of {attempts} attempts" in decisions[-1].verdict


def test_progress_begins_the_ladder_and_the_budget_anew() -> None:
    config = HealingConfig(max_recovery_attempts=2, budget_refund_steps=50)
    ladder = RollbackLadder(config, RecoveryBudget(config))

    def target(step: int) -> Target | None:
        return ladder.next(FailureType.CORRUPTED_STATE, step, False, True, "1e-3").target

    assert [target(step) for step in (100, 110, 160, 165)] == [Target.NEWEST, Target.OLDER] * 2
    assert ladder.next(FailureType.CORRUPTED_STATE, 170, False, True, "1e-3").stops


def test_ladder_and_budget_are_kept_in_checkpoints() -> None:
    config = HealingConfig(max_recovery_attempts=3)
    budget = RecoveryBudget(config)
    ladder = RollbackLadder(config, budget)
    ladder.next(FailureType.DIVERGENCE, 100, False, True, "1e-3")
    again = RecoveryBudget(config)
    again.load_state_dict(budget.state_dict())
    other = RollbackLadder(config, again)
    other.load_state_dict(ladder.state_dict())
    assert other.next(FailureType.DIVERGENCE, 110, False, True, "1e-3").actions == SLOWER


def test_a_rung_that_has_cost_nothing_is_not_counted() -> None:
    config = HealingConfig()
    ladder = RollbackLadder(config, RecoveryBudget(config))
    ladder.healed(FailureType.CORRUPTED_STATE)
    for _ in range(3):
        assert ladder.next(FailureType.CORRUPTED_STATE, 100, False, True, "1e-3").rung == 1
        ladder.healed(FailureType.CORRUPTED_STATE)


def test_what_was_left_out_is_kept_in_checkpoints() -> None:
    config = HealingConfig(nan_patience=3)
    policy, resumed = StepPolicy(config), StepPolicy(config)
    for _ in range(2):
        assert policy.note(skipped=True, explained=False) is None
    resumed.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert resumed.note(skipped=True, explained=False) is not None
    assert resumed.out_of_patience


def test_every_end_saves_the_state_that_was_gone_back_to() -> None:
    end = climb(FailureType.DIVERGENCE, 1, max_recovery_attempts=0)[0].actions
    assert end == (Action.ROLL_BACK, Action.SKIP_STEP, Action.EMERGENCY_CHECKPOINT, Action.STOP)
    looked = climb(FailureType.DIVERGENCE, 1, early=True, max_lr_reductions=0)[0].actions
    assert looked[2:4] == (Action.CHECK_MODEL_INIT, Action.CHECK_DATA_QUALITY)


def test_every_action_of_every_recipe_is_carried_out(tmp_path: Path) -> None:
    offered = assemble(HealingConfig(), tmp_path).context.remedies.offered
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
