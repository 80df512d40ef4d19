"""
Plugin for axolotl: `plugins: [self_healing.tools.anywhere.axolotl.SelfHealingPlugin]` in its YAML file.

Written against `axolotl.integrations.base.BasePlugin` of axolotl 0.19, and loaded by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel
from transformers import Trainer, TrainerCallback

from ...callback import SelfHealingCallback, callback_of
from ...config.healing_config import HealingConfig
from .entering import settings_of_the_process


class SelfHealingArgs(BaseModel):
    """What the plugin adds to the settings that axolotl knows."""

    # Those of `HealingConfig`, flat or by section. Left out, the preset of `SELF_HEALING_PRESET`.
    self_healing: dict[str, Any] | None = None


class SelfHealingPlugin(BasePlugin):  # type: ignore[misc]  # axolotl need not be installed
    """Heals the trainer that axolotl makes, by a [`SelfHealingCallback`]."""

    def get_input_args(self) -> str:
        """Names the model of the settings that are added."""
        return f"{__name__}.{SelfHealingArgs.__name__}"

    def register(self, cfg: Mapping[str, Any]) -> None:
        """Refuses settings that cannot be used before data and model are loaded."""
        _config_in(cfg)

    def add_callbacks_post_trainer(self, cfg: Mapping[str, Any], trainer: Trainer) -> list[TrainerCallback]:
        """Gives the callback that heals, unless the trainer has one."""
        return [SelfHealingCallback(_config_in(cfg))] if callback_of(trainer) is None else []


def _config_in(cfg: Mapping[str, Any]) -> HealingConfig:
    settings = cfg.get("self_healing")
    return settings_of_the_process() if settings is None else HealingConfig.from_dict(settings)
