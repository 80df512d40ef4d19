"""`self-healing run` in a process of the program: its settings, and `train()` entered through the wrapper."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers.trainer_utils import TrainOutput

from ...callback import callback_of, is_adopted
from ...config.healing_config import HealingConfig
from ...config.schema import ConfigurationError
from ...healers.numerics.detectors.rules import load_rules
from ...journal.terminal import speaking_of
from ...trainer import SelfHealingTrainer
from .hook import UNTOUCHED, VARIABLE


logger = logging.getLogger("self_healing")


# ---- entering: enters `train()` of a trainer that the program has made through the wrapper ----


def way_in(
    trainer: Any, plain: Callable[..., TrainOutput], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[[], TrainOutput]:
    """Finds how a call of `train()` is to be made: healed, or as it is."""
    as_it_is = functools.partial(plain, trainer, *args, **kwargs)
    if is_adopted(trainer):
        # Entered by a wrapper that the program has made itself.
        return as_it_is
    _, *given = inspect.signature(plain).bind(trainer, *args, **kwargs).arguments.items()
    named = dict(given)
    if named.get("trial") is not None:
        with speaking_of(trainer.args):
            logger.warning(
                "Trials of a hyperparameter search are not healed: the search needs the exception, to prune the trial."
            )
        return as_it_is
    try:
        wrapper = SelfHealingTrainer(trainer, _config_for(trainer))
        # Within a call of `train()` that is under way.
        wrapper._enter = functools.partial(plain, trainer)  # type: ignore[method-assign]
        return functools.partial(wrapper.train, **named)
    except ConfigurationError:
        raise
    except Exception:
        with speaking_of(trainer.args):
            logger.exception("self_healing could not wrap the trainer; training goes on without it.")
        return as_it_is


def _config_for(trainer: Any) -> HealingConfig | None:
    """The settings for a trainer; `None` for those of the callback that the program has given it."""
    settings = settings_of_the_process()
    theirs = callback_of(trainer)
    if theirs is None:
        return settings
    if given_settings() is not None and theirs.config != settings:
        with speaking_of(trainer.args):
            logger.warning(
                "The program has its own SelfHealingCallback. Its settings are in force, and those of "
                "`self-healing run` are not."
            )
    return None


# ---- settings: the settings of `self-healing run`, on their way to the processes of the program ----


PRESET_VARIABLE = "SELF_HEALING_PRESET"
SITE = Path(__file__).parent / "site"


def read_settings(path: Path) -> HealingConfig:
    """Reads a TOML file of settings, for a program that may look for files from elsewhere."""
    config = HealingConfig.from_toml(path)
    if config.rules_file is None:
        return config
    rules = Path(config.rules_file).absolute()
    load_rules(rules)
    return replace(config, rules_file=str(rules))


def environment(config: HealingConfig | None = None, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Gives the environment in which the trainers of a program, and of the processes it starts, are healed."""
    given = os.environ if given is None else given
    before = [each for each in given.get("PYTHONPATH", "").split(os.pathsep) if Path(each) != SITE]
    return {
        **given,
        "PYTHONPATH": os.pathsep.join([str(SITE), *(before if any(before) else ())]),
        VARIABLE: json.dumps(None if config is None else config.to_dict()),
        UNTOUCHED: os.path.join(tempfile.gettempdir(), f"self-healing-run.{os.getpid()}"),
    }


def given_settings() -> HealingConfig | None:
    """The settings that `self-healing run` was given for this process, if it was."""
    values = json.loads(os.environ.get(VARIABLE, "null"))
    return None if values is None else HealingConfig.from_dict(values)


def settings_of_the_process() -> HealingConfig:
    """
    The settings of this process: those that `self-healing run` was given, else the preset of `SELF_HEALING_PRESET`.
    """
    given = given_settings()
    if given is not None:
        return given
    preset = os.environ.get(PRESET_VARIABLE)
    return HealingConfig.from_dict({"healing_preset": preset} if preset else {})
