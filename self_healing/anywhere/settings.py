"""The settings of `self-healing run`, on their way to the processes of the program."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ..config.healing_config import HealingConfig
from ..config.schema import ConfigurationError
from ..healers.numerics.detectors.rules import load_rules
from ..tools.anywhere.hook import UNTOUCHED, VARIABLE


PRESET_VARIABLE = "SELF_HEALING_PRESET"
SITE = Path(__file__).parent / "site"


def read_settings(path: Path) -> HealingConfig:
    """Reads a TOML file of settings, for a program that may look for files from elsewhere."""
    config = HealingConfig.from_toml(path)
    if config.rules_file is None:
        return config
    rules = Path(config.rules_file).absolute()
    try:
        load_rules(rules)
    except OSError as error:
        raise ConfigurationError(
            f"{path}: `rules_file` is {config.rules_file!r}, which cannot be read: {error.strerror} ({rules}). Please "
            "check the path, or leave it out for the built-in rules."
        ) from error
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
