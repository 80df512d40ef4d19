"""Makes a config of what was passed as one."""

import os
import reprlib
from collections.abc import Mapping
from typing import Any

from .healing_config import HealingConfig
from .setting import ConfigurationError


def as_config(given: HealingConfig | Mapping[str, Any] | None) -> HealingConfig:
    """Returns the config that was asked for: itself, one made of a mapping, or the defaults."""
    if given is None:
        return HealingConfig()
    if isinstance(given, HealingConfig):
        return given
    if isinstance(given, Mapping):
        return HealingConfig.from_dict(dict(given))
    raise ConfigurationError(
        f"The config is {reprlib.repr(given)} ({type(given).__name__}), but must be a HealingConfig or a dict of "
        f"settings. {_meant(given)}"
    )


def _meant(given: Any) -> str:
    if given is HealingConfig:
        return "Did you mean HealingConfig()?"
    if getattr(given, "__self__", None) is HealingConfig:
        return f"Did you mean HealingConfig.{given.__name__}()?"
    if isinstance(given, str) and given in ("aggressive", "conservative"):
        return f"Did you mean HealingConfig.{given}()?"
    if isinstance(given, str | os.PathLike):
        return f"If it is a file, did you mean HealingConfig.from_toml({str(given)!r})?"
    return "Please leave it out for the defaults."
