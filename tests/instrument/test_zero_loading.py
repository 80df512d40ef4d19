"""A job that is to load universal checkpoints of DeepSpeed loads those that it has written itself as what they are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from self_healing.hf.deepspeed import load_as_written, loading_as_written
from self_healing.hf.patching import Replacements


class Engine:
    """Notes whether it has loaded a universal checkpoint."""

    def __init__(self, universal: bool = True) -> None:
        self._config = SimpleNamespace(load_universal_checkpoint=universal)
        self.loaded: list[bool] = []

    def load_universal_checkpoint(self) -> bool:
        return self._config.load_universal_checkpoint

    def load_checkpoint(self, path: str) -> None:
        self.loaded.append(self.load_universal_checkpoint())
        if path == "gone":
            raise OSError(path)


@pytest.fixture
def converted(tmp_path: Path) -> str:
    (tmp_path / "latest_universal").write_text("global_step4_universal")
    return str(tmp_path)


def test_a_checkpoint_is_loaded_as_it_was_written(converted: str, tmp_path: Path) -> None:
    engine, replaced = Engine(), Replacements()
    load_as_written(engine, replaced)
    engine.load_checkpoint(converted)
    engine.load_checkpoint(str(tmp_path / "checkpoint-6"))
    engine.load_checkpoint(converted)
    assert engine.loaded == [True, False, True]
    replaced.give_back()
    assert "load_checkpoint" not in vars(engine)


def test_the_setting_is_as_before_where_loading_raises() -> None:
    engine = Engine()
    load_as_written(engine, Replacements())
    with pytest.raises(OSError, match="gone"):
        engine.load_checkpoint("gone")
    assert engine.load_universal_checkpoint()


def test_an_engine_that_loads_no_universal_ones_is_left_alone() -> None:
    engine = Engine(universal=False)
    load_as_written(engine, Replacements())
    assert "load_checkpoint" not in vars(engine)


def test_so_does_the_engine_that_is_made_in_train(converted: str, tmp_path: Path) -> None:
    engine, accelerator = Engine(), SimpleNamespace(deepspeed_engine_wrapped=None)

    def prepare() -> None:
        accelerator.deepspeed_engine_wrapped = SimpleNamespace(engine=engine)

    accelerator.prepare = prepare
    with loading_as_written(SimpleNamespace(accelerator=accelerator)):
        accelerator.prepare()
        engine.load_checkpoint(str(tmp_path / "checkpoint-6"))
        engine.load_checkpoint(converted)
    assert engine.loaded == [False, True]
    assert accelerator.prepare is prepare
    assert "load_checkpoint" not in vars(engine)
