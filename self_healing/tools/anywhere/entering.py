"""Enters `train()` of a trainer that the program has made through the wrapper."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.trainer_utils import TrainOutput

from ...anywhere.settings import given_settings, settings_of_the_process
from ...callback import SelfHealingCallback, is_adopted
from ...config.healing_config import HealingConfig
from ...config.schema import ConfigurationError
from ...journal.terminal import speaking_of
from ...trainer import SelfHealingTrainer


logger = logging.getLogger("self_healing")


class _Within(SelfHealingTrainer):
    """The wrapper, within a call of `train()` that is under way."""

    def __init__(
        self, trainer: Any, plain: Callable[..., TrainOutput], config: HealingConfig | Mapping[str, Any] | None
    ) -> None:
        super().__init__(trainer, config)
        self._plain = plain

    def _enter(self, **kwargs: Any) -> TrainOutput:
        return self._plain(self.trainer, **kwargs)


def way_in(
    trainer: Any, plain: Callable[..., TrainOutput], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[[], TrainOutput]:
    """Finds how a call of `train()` is to be made: healed, or as it is."""
    as_it_is = functools.partial(plain, trainer, *args, **kwargs)
    if is_adopted(trainer):
        # Entered by a wrapper that the program has made itself.
        return as_it_is
    try:
        named = inspect.signature(plain).bind(trainer, *args, **kwargs).arguments
    except TypeError:
        # Calling it says what is wrong with it.
        return as_it_is
    named = dict(list(named.items())[1:])
    if named.get("trial") is not None:
        with speaking_of(trainer.args):
            logger.warning(
                "Trials of a hyperparameter search are not healed: the search needs the exception, to prune the trial."
            )
        return as_it_is
    try:
        return functools.partial(_Within(trainer, plain, _config_for(trainer)).train, **named)
    except ConfigurationError:
        raise
    except Exception:
        with speaking_of(trainer.args):
            logger.exception("self_healing could not wrap the trainer; training goes on without it.")
        return as_it_is


def _config_for(trainer: Any) -> HealingConfig | None:
    """The settings for a trainer; `None` for those of the callback that the program has given it."""
    settings = settings_of_the_process()
    theirs = next((each for each in trainer.callback_handler.callbacks if isinstance(each, SelfHealingCallback)), None)
    if theirs is None:
        return settings
    if given_settings() is not None and theirs.config != settings:
        with speaking_of(trainer.args):
            logger.warning(
                "The program has its own SelfHealingCallback. Its settings are in force, and those of "
                "`self-healing run` are not."
            )
    return None
