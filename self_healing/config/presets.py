"""The presets, and how the constructor of a config starts from one."""

import functools
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from .checks import raise_if_any, unknown
from .command_line import LeftOut
from .schema import schema_of


if TYPE_CHECKING:
    from _typeshed import DataclassInstance


PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "aggressive": {
        "reexecute_attempts": 2,
        "nan_patience": 8,
        "max_skipped_fraction": 0.25,
        "max_quarantined_fraction": 0.5,
        "max_spike_skips": 10,
        "zclip_mode": "clip",
        "max_lr_reductions": 6,
        "max_bad_data_fraction": 0.25,
        "max_recovery_attempts": 20,
        "retry_max_seconds": 900.0,
        "retry_attempts": 20,
        "retry_total_seconds": 7200.0,
    },
    "conservative": {
        "nan_patience": 2,
        "drop_poison_rows": False,
        "max_skipped_fraction": 0.02,
        "max_quarantined_fraction": 0.05,
        "max_spike_skips": 1,
        "on_divergence": "stop",
        "max_lr_reductions": 1,
        "on_bad_sample": "raise",
        "max_recovery_attempts": 2,
    },
}

Config = TypeVar("Config", bound="DataclassInstance")


def preset_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of the preset that `healing_preset` among the values names."""
    name = values.get("healing_preset")
    return PRESETS.get(name, {}) if isinstance(name, str) else {}


def starts_from_preset(config: type[Config]) -> type[Config]:
    """Makes the constructor of a config start from the preset it is given, and name settings it does not know."""
    original = config.__init__

    @functools.wraps(original)
    def __init__(self: Config, *args: Any, **kwargs: Any) -> None:
        schema = schema_of(config)
        raise_if_any([unknown(schema, None, name, value) for name, value in kwargs.items() if name not in schema])
        given = {name: value for name, value in kwargs.items() if not isinstance(value, LeftOut)}
        original(self, *args, **preset_of(given) | given)

    type.__setattr__(config, "__init__", __init__)
    for each in fields(config):
        if any(each.name in preset for preset in PRESETS.values()):
            each.default = LeftOut(each.default)
    return config
