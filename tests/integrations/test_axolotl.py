"""
The plugin for axolotl, loaded and called by axolotl's own `PluginManager` where that is installed (its pins leave no
room for ours, so `pip install --no-deps axolotl addict` is how), else by a double of what it publishes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import OutputFault, journal, sft_trainer

from self_healing import ConfigurationError, HealingConfig, SelfHealingCallback


PLUGIN = "self_healing.tools.anywhere.axolotl.SelfHealingPlugin"


class BasePlugin:
    """Of axolotl 0.19, `axolotl/integrations/base.py`: the methods that are called of a plugin by what is tested."""

    def register(self, cfg: dict[str, Any]) -> None:
        pass

    def get_input_args(self) -> str | None:
        return None

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        return []


class PluginManager:
    """Of the same file: loads plugins by name, and asks each of them."""

    def __init__(self) -> None:
        self.plugins: dict[str, Any] = {}

    def register(self, plugin_name: str) -> None:
        module_name, class_name = plugin_name.rsplit(".", 1)
        self.plugins[plugin_name] = getattr(importlib.import_module(module_name), class_name)()

    def get_input_args(self) -> list[str]:
        named = [plugin.get_input_args() for plugin in self.plugins.values()]
        return [each for each in named if each is not None]

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        callbacks: list[Any] = []
        for plugin in self.plugins.values():
            callbacks.extend(plugin.add_callbacks_post_trainer(cfg, trainer) or ())
        return callbacks


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Has loaded the plugin by its name, as `plugins:` in a YAML file has it done."""
    monkeypatch.delenv("SELF_HEALING_PRESET", raising=False)
    monkeypatch.delitem(sys.modules, "self_healing.tools.anywhere.axolotl", raising=False)
    try:
        from axolotl.integrations.base import PluginManager as Real

        monkeypatch.setattr(Real, "_instance", None)
        manager = Real.get_instance()
    except ImportError:
        for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules["axolotl.integrations.base"])["BasePlugin"] = BasePlugin
        manager = PluginManager()
    manager.register(PLUGIN)
    assert list(manager.plugins) == [PLUGIN]
    yield manager
    sys.modules.pop("self_healing.tools.anywhere.axolotl", None)


def train(output_dir: Path, tokenizer: Any, manager: Any, cfg: dict[str, Any]) -> Any:
    trainer = sft_trainer(output_dir, tokenizer, max_steps=3)
    # As `get_post_trainer_create_callbacks` in axolotl/core/builders/base.py, and who calls it.
    for callback in [each for each in manager.add_callbacks_post_trainer(cfg, trainer) if each]:
        trainer.add_callback(callback)
    return trainer


def config_of(trainer: Any) -> HealingConfig:
    (callback,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, SelfHealingCallback))
    return callback.config


def test_the_trainer_that_axolotl_makes_is_healed(tmp_path: Path, tokenizer: Any, manager: Any) -> None:
    trainer = train(tmp_path / "run", tokenizer, manager, {})
    fault = OutputFault(trainer.model, lambda forward: forward == 3)
    trainer.train()
    assert fault.fired == 1
    assert [event["outcome"] for event in journal(tmp_path / "run", "outcome")] == ["resolved"]
    assert all(torch.isfinite(value).all() for value in trainer.model.state_dict().values())


def test_settings_are_read_from_the_yaml_file(
    tmp_path: Path, tokenizer: Any, manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"self_healing": {"healing_preset": "aggressive", "recovery": {"api_retry_attempts": 3}}}
    trainer = train(tmp_path / "run", tokenizer, manager, given)
    assert config_of(trainer) == HealingConfig.aggressive(api_retry_attempts=3)


@pytest.mark.parametrize("given", [{"nan_patiance": 2}, "aggressive"])
def test_a_mistake_is_found_before_anything_is_loaded(manager: Any, given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"Did you mean `nan_patience`|must be a mapping"):
        manager.plugins[PLUGIN].register({"self_healing": given})


def test_axolotl_is_told_of_the_key(manager: Any) -> None:
    pytest.importorskip("pydantic")
    (named,) = manager.get_input_args()
    module, _, name = named.rpartition(".")
    model = getattr(importlib.import_module(module), name)
    assert model(self_healing={"nan_patience": 2}).self_healing == {"nan_patience": 2}
    assert model().self_healing is None
