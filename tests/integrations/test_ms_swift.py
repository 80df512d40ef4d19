"""
The callback for ms-swift, made as ms-swift makes callbacks: in its own table where it is installed, else in a double
of what it publishes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import OutputFault, journal, sft_trainer
from trl import SFTTrainer

from self_healing import HealingConfig, SelfHealingCallback


PLUGIN = "self_healing.tools.anywhere.ms_swift"


@pytest.fixture
def callbacks_map(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What `--callbacks` chooses from, after a file under `--external_plugins` has imported the plugin."""
    monkeypatch.delenv("SELF_HEALING_PRESET", raising=False)
    monkeypatch.delitem(sys.modules, PLUGIN, raising=False)
    try:
        from swift.callbacks import callbacks_map as table
    except ImportError:
        # Of ms-swift 4.6, `swift/callbacks/mapping.py`.
        table = {}
        for name in ("swift", "swift.callbacks"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules["swift.callbacks"])["callbacks_map"] = table
    importlib.import_module(PLUGIN)
    yield table
    table.pop("self_healing", None)
    sys.modules.pop(PLUGIN, None)


def trainer_like_swifts(names: list[str], table: dict[str, Any]) -> type[SFTTrainer]:
    class Mixed(SFTTrainer):
        """As `SwiftMixin` in swift/trainers/mixin.py has it: callbacks are made before the trainer is."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["callbacks"] = [table[name](kwargs["args"], self) for name in names]
            super().__init__(*args, **kwargs)

    return Mixed


def test_a_trainer_with_the_callback_is_healed(tmp_path: Path, tokenizer: Any, callbacks_map: dict[str, Any]) -> None:
    trainer_class = trainer_like_swifts(["self_healing"], callbacks_map)
    trainer = sft_trainer(tmp_path / "run", tokenizer, max_steps=3, trainer_class=trainer_class)
    fault = OutputFault(trainer.model, lambda forward: forward == 3)
    trainer.train()
    assert fault.fired == 1
    assert [event["outcome"] for event in journal(tmp_path / "run", "outcome")] == ["resolved"]


def test_the_preset_of_the_environment_is_taken(
    callbacks_map: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SELF_HEALING_PRESET", "aggressive")
    callback = callbacks_map["self_healing"](None, None)
    assert callback.config == HealingConfig.aggressive()


def test_it_is_built_again_from_a_checkpoint(callbacks_map: dict[str, Any]) -> None:
    """As transformers does it: from the class and what its state says of the arguments."""
    callback = callbacks_map["self_healing"](None, None)
    assert type(callback) is SelfHealingCallback
    assert type(callback)(**callback.state()["args"]).config == callback.config
