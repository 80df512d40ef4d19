"""Recipes say truly what is climbed: what the code decides, in any run, is on the declared ladder and in its order."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import off_the_ladder

from self_healing import FAILURE_RECIPES, Action, FailureType, HealingConfig
from self_healing.failures.recipes import INSPECTIONS, Cause, Symptom
from self_healing.healers.numerics.ladder import Decision, RollbackLadder, StepPolicy
from self_healing.run.incidents import Diagnosis
from self_healing.run.run import RecoveryBudget


# What ends an incident for which there is no patience left.
THE_END = (Action.EMERGENCY_CHECKPOINT, Action.STOP)
ROLLED_BACK_FOR = (
    FailureType.CORRUPTED_STATE,
    FailureType.NONFINITE_NUMERICAL,
    FailureType.DIVERGENCE,
    FailureType.RED_FLAG,
)
WATCHED = (
    FailureType.LOSS_SPIKE,
    FailureType.DIVERGENCE,
    FailureType.PLATEAU,
    FailureType.VANISHING_GRADIENT,
    FailureType.DEAD_LOSS,
    FailureType.NEVER_LEARNED,
    FailureType.SLOW_RISE,
)
SPIKES = (FailureType.GRADIENT_SPIKE, FailureType.SPIKE_TRANSIENT)
NOT_FINITE = (
    FailureType.NONFINITE_TRANSIENT,
    FailureType.NONFINITE_POISON_ROWS,
    FailureType.NONFINITE_NUMERICAL,
    FailureType.NONFINITE_UNDIAGNOSED,
)


def configs(**settings: tuple[Any, ...]) -> Iterator[HealingConfig]:
    """One for each combination."""
    for values in itertools.product(*settings.values()):
        yield HealingConfig(**dict(zip(settings, values, strict=True)))


def decided(failure: FailureType, config: HealingConfig, decisions: list[Decision]) -> Iterator[tuple[Any, ...]]:
    """What was decided about one failure that came again and again, by the failure it turned out to be."""
    for turned, those in itertools.groupby(decisions, lambda decision: decision.failure or failure):
        yield turned, config, [action for decision in those for action in decision.actions]


def rolled_back() -> Iterator[tuple[Any, ...]]:
    settings = {"max_lr_reductions": (0, 1, 2, 4), "max_recovery_attempts": (0, 1, 3, 100)}
    for config, failure, early in itertools.product(configs(**settings), ROLLED_BACK_FOR, (False, True)):
        ladder, reductions, decisions = RollbackLadder(config, RecoveryBudget(config)), 0, []
        if failure is FailureType.NONFINITE_NUMERICAL:
            # The steps before it, until there is no patience left.
            decisions.append(StepPolicy(config).decide(Diagnosis(failure, Cause.NUMERICAL)))
        while not decisions or not decisions[-1].stops:
            may_reduce = reductions < config.max_lr_reductions
            decisions.append(ladder.next(failure, 100 + len(decisions), early, may_reduce, "1e-3"))
            reductions += Action.REDUCE_LEARNING_RATE in decisions[-1].actions
        yield from decided(failure, config, decisions)


def watched() -> Iterator[tuple[Any, ...]]:
    for config in configs(on_divergence=("heal", "warn", "stop"), on_dead_loss=("stop", "warn")):
        for failure in WATCHED:
            yield from decided(failure, config, [StepPolicy(config).decide_watched(failure)])


def spikes() -> Iterator[tuple[Any, ...]]:
    for name, may_clip, skips in itertools.product(("gradient_spike", "co_spike"), (False, True), (0, 2)):
        config = HealingConfig(max_spike_skips=skips)
        policy = StepPolicy(config)
        decisions = [policy.decide_spike(Symptom(name, step, {}), False, True, may_clip) for step in range(4)]
        yield from decided(FailureType.GRADIENT_SPIKE, config, decisions)
        again = policy.decide_spike(Symptom(name, 4, {}), False, False, may_clip)
        yield from decided(FailureType.GRADIENT_SPIKE, config, [again])
        passed = policy.decide_spike(Symptom(name, 4, {}), True, True, may_clip)
        yield from decided(FailureType.SPIKE_TRANSIENT, config, [passed])


def not_finite() -> Iterator[tuple[Any, ...]]:
    for config in configs(on_nonfinite=("heal", "skip", "raise"), drop_poison_rows=(True, False)):
        for failure in NOT_FINITE if config.on_nonfinite == "heal" else (FailureType.NONFINITE_UNDIAGNOSED,):
            yield from decided(failure, config, [StepPolicy(config).decide(Diagnosis(failure, Cause.UNKNOWN))])


DECIDED = [*rolled_back(), *watched(), *spikes(), *not_finite()]


def test_every_decision_climbs_the_declared_ladder() -> None:
    departures = {off_the_ladder(failure, actions): config for failure, config, actions in DECIDED}
    departures.pop(None)
    assert departures == {}


def test_nothing_is_declared_that_is_never_decided() -> None:
    reached: dict[FailureType, set[Action]] = defaultdict(set)
    for failure, _, actions in DECIDED:
        reached[failure].update(actions)
    for failure in (FailureType.GRADIENT_SPIKE, *NOT_FINITE[1:]):
        reached[failure].update(THE_END)
    assert {failure: set(FAILURE_RECIPES[failure].ladder) for failure in reached} == reached


@pytest.mark.parametrize("failure", FailureType)
def test_no_rung_is_declared_twice(failure: FailureType) -> None:
    ladder = FAILURE_RECIPES[failure].ladder
    assert len(set(ladder)) == len(ladder)


def test_a_ladder_ends_where_the_run_does() -> None:
    for recipe in FAILURE_RECIPES.values():
        assert Action.STOP not in recipe.ladder[:-1]


def test_what_a_recipe_says_of_exceptions_is_read_off_its_ladder() -> None:
    entered = {failure: recipe.reentry for failure, recipe in FAILURE_RECIPES.items() if recipe.reentry is not None}
    assert entered == {
        FailureType.NETWORK: Action.WAIT_AND_RESUME,
        FailureType.HANG: Action.RESUME,
        FailureType.PROCESS_DIED: Action.RESUME,
        FailureType.DAMAGED_CHECKPOINT: Action.RESUME,
    }
    for failure in (FailureType.DISK, FailureType.DEVICE, FailureType.INTERRUPTED, FailureType.PREEMPTED):
        assert not FAILURE_RECIPES[failure].saves_first
    for failure in (FailureType.NETWORK, FailureType.HANG, FailureType.OUT_OF_MEMORY, FailureType.USER_CODE):
        assert FAILURE_RECIPES[failure].saves_first


def test_inspections_are_the_rungs_that_leave_a_run_as_it_is() -> None:
    recipe = FAILURE_RECIPES[FailureType.LEARNING_RATE]
    assert recipe.inspections == (Action.CHECK_MODEL_INIT, Action.CHECK_DATA_QUALITY)
    assert set(recipe.inspections) == INSPECTIONS
    assert FAILURE_RECIPES[FailureType.DIVERGENCE].inspections == ()
