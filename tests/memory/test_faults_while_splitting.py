"""What strikes while memory is being healed: a NaN, another out-of-memory error, an exception."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    POISON_WORD,
    PoisonToken,
    journal,
    lost_connection,
    quarantined,
    sft_trainer,
    weights,
)
from test_memory import BUILDERS, TooManyRows, assert_same_run, out_of_memory, run
from test_poison import poisoned_texts
from trl import SFTTrainer

from self_healing import HealingConfig, SelfHealingTrainer


class StrikingCalls:
    """Changes what the model gives in some of its calls, counted from the first one that is split."""

    def __init__(self, model: Any, rows: int, strike: Callable[[int], bool], change: Callable[[Any], Any]) -> None:
        # Generation is left whole: split, it draws other tokens.
        self.memory = TooManyRows(model, rows, unless=lambda: not torch.is_grad_enabled())
        self.calls, self.fired = 0, 0
        self._rows, self._strike, self._change = rows, strike, change
        model.model.norm.register_forward_hook(self._hook)

    def _hook(self, module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        if not module.training or output.shape[0] > self._rows:
            return None
        self.calls += 1
        if not self._strike(self.calls):
            return None
        self.fired += 1
        return self._change(output)


def nan(output: torch.Tensor) -> torch.Tensor:
    return output * math.nan


class OwnLoss(SFTTrainer):
    """With a loss that nobody knows: parts of its batches are computed again in the backward pass."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **kwargs)


class TestFaultsInASplitBatch:
    """A fault of the device that strikes one piece says nothing about splitting."""

    @pytest.mark.parametrize(
        ("name", "call", "change"),
        [
            pytest.param("SFTTrainer", 1, nan, id="SFT, NaN in a piece"),
            pytest.param("DPOTrainer", 4, nan, id="DPO, NaN in the last piece"),
            pytest.param("own loss", 3, nan, id="computed again, NaN the second time"),
            pytest.param("own loss", 1, nan, id="computed again, NaN the first time", marks=pytest.mark.slow),
            pytest.param("SFTTrainer", 2, nan, id="SFT, NaN in the last piece", marks=pytest.mark.slow),
            pytest.param("DPOTrainer", 2, nan, id="DPO, NaN in a piece", marks=pytest.mark.slow),
            pytest.param("GRPOTrainer", 1, nan, id="GRPO, NaN in a piece", marks=pytest.mark.slow),
        ],
    )
    def test_is_computed_again(
        self, tmp_path: Path, tokenizer: Any, name: str, call: int, change: Callable[[Any], Any]
    ) -> None:
        build = {"own loss": partial(sft_trainer, trainer_class=OwnLoss), **BUILDERS}[name]
        plain = build(tmp_path / "plain", tokenizer, dropout=0.0)
        plain.train()
        healed, fault = run(
            build,
            tmp_path / "healed",
            tokenizer,
            lambda model: StrikingCalls(model, 2, lambda number: number == call, change),
            dropout=0.0,
        )
        assert fault.fired == 1
        assert_same_run(healed, plain)
        assert sum(outcome["steps_lost"] for outcome in journal(tmp_path / "healed", "outcome")) == 0
        assert "not_split" not in json.dumps(journal(tmp_path / "healed"))


class TestNumbersThatAreNotFinite:
    def test_are_left_to_the_search_for_poison_rows(self, tmp_path: Path, tokenizer: Any) -> None:
        def strike(trainer: Any) -> None:
            TooManyRows(trainer.model, 2, unless=lambda: not torch.is_grad_enabled())
            PoisonToken(trainer.model, tokenizer.convert_tokens_to_ids(POISON_WORD))

        build = partial(sft_trainer, trainer_class=OwnLoss, texts=poisoned_texts())
        healed_by_the_wrapper(build, tmp_path, tokenizer, strike, dropout=0.0, max_steps=4)
        assert quarantined(tmp_path)
        assert "not_split" not in json.dumps(journal(tmp_path))
        assert_nothing_lost(tmp_path)


def runs_out(output: torch.Tensor) -> torch.Tensor:
    raise out_of_memory(len(output))


def raises(output: torch.Tensor) -> torch.Tensor:
    raise lost_connection()


def healed_by_the_wrapper(
    build: Callable[..., Any],
    directory: Path,
    tokenizer: Any,
    fault: Callable[[Any], Any],
    config: HealingConfig | None = None,
    **arguments: Any,
) -> tuple[Any, Any]:
    trainer = build(directory, tokenizer, **arguments)
    struck = fault(trainer)
    SelfHealingTrainer(trainer, config, sleep=lambda seconds: None).train()
    return trainer, struck


def assert_nothing_lost(directory: Path) -> None:
    outcomes = journal(directory, "outcome")
    assert outcomes
    assert [outcome["steps_lost"] for outcome in outcomes] == [0] * len(outcomes)


class TestWhileASplitBatchIsComputed:
    @pytest.mark.parametrize("change", [runs_out, raises])
    @pytest.mark.parametrize(
        ("name", "call"),
        [
            ("SFTTrainer", 1),
            pytest.param("SFTTrainer", 2, marks=pytest.mark.slow),
            pytest.param("SFTTrainer", 7, marks=pytest.mark.slow),
            pytest.param("DPOTrainer", 3, marks=pytest.mark.slow),
            pytest.param("GRPOTrainer", 2, marks=pytest.mark.slow),
            pytest.param("KTOTrainer", 2, marks=pytest.mark.slow),
            pytest.param("own loss", 1, marks=pytest.mark.slow),
            pytest.param("own loss", 3, marks=pytest.mark.slow),
        ],
    )
    def test_no_step_is_lost(
        self, tmp_path: Path, tokenizer: Any, name: str, call: int, change: Callable[[Any], Any]
    ) -> None:
        build = {"own loss": partial(sft_trainer, trainer_class=OwnLoss), **BUILDERS}[name]
        plain = build(tmp_path / "plain", tokenizer, dropout=0.0)
        plain.train()
        healed, fault = healed_by_the_wrapper(
            build,
            tmp_path / "healed",
            tokenizer,
            lambda trainer: StrikingCalls(trainer.model, 2, lambda number: number == call, change),
            dropout=0.0,
        )
        assert fault.fired == 1
        assert_same_run(healed, plain)
        assert_nothing_lost(tmp_path / "healed")


class StrikingTheTry:
    """A device that has room for all rows after some steps, and a fault that strikes the first call of all of them."""

    def __init__(self, trainer: Any, change: Callable[[Any], Any]) -> None:
        self.fired = 0
        TooManyRows(trainer.model, 2, unless=lambda: trainer.state.global_step >= 2)

        def strike(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
            if self.fired or output.shape[0] < 4:
                return None
            self.fired += 1
            changed: torch.Tensor = change(output)
            return changed

        trainer.model.model.norm.register_forward_hook(strike)


class TestWhileALargerSizeIsTried:
    @pytest.mark.parametrize("change", [nan, runs_out, raises])
    @pytest.mark.parametrize("name", ["SFTTrainer", pytest.param("DPOTrainer", marks=pytest.mark.slow)])
    def test_no_step_is_lost(self, tmp_path: Path, tokenizer: Any, name: str, change: Callable[[Any], Any]) -> None:
        plain = BUILDERS[name](tmp_path / "plain", tokenizer, dropout=0.0)
        plain.train()
        healed, fault = healed_by_the_wrapper(
            BUILDERS[name],
            tmp_path / "healed",
            tokenizer,
            lambda trainer: StrikingTheTry(trainer, change),
            HealingConfig(oom_probe_steps=1),
            dropout=0.0,
        )
        assert fault.fired == 1
        assert_same_run(healed, plain)
        assert_nothing_lost(tmp_path / "healed")


class StrikingTheSearch:
    """Strikes one of the forwards in which poison rows are looked for."""

    def __init__(self, trainer: Any, nth: int, change: Callable[[Any], Any]) -> None:
        self.seen = self.fired = 0

        def strike(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
            if not any(frame.f_code.co_name == "_bisect" for frame, _ in traceback.walk_stack(None)):
                return None
            self.seen += 1
            if self.seen != nth:
                return None
            self.fired += 1
            changed: torch.Tensor = change(output)
            return changed

        trainer.model.model.norm.register_forward_hook(strike)


class TestWhilePoisonRowsAreLookedFor:
    @pytest.mark.parametrize(
        ("change", "rows"),
        [
            pytest.param(runs_out, 99, id="out of memory"),
            pytest.param(raises, 99, id="an exception"),
            pytest.param(runs_out, 2, id="out of memory, and the batch is split", marks=pytest.mark.slow),
            pytest.param(lambda output: output, 2, id="nothing, but the batch is split"),
        ],
    )
    @pytest.mark.parametrize("nth", [1, pytest.param(2, marks=pytest.mark.slow)])
    def test_the_same_rows_are_found(
        self, tmp_path: Path, tokenizer: Any, change: Callable[[Any], Any], rows: int, nth: int
    ) -> None:
        def poisoned(directory: Path, *faults: Callable[[Any], Any]) -> Any:
            def strike(trainer: Any) -> list[Any]:
                PoisonToken(trainer.model, tokenizer.convert_tokens_to_ids(POISON_WORD))
                return [fault(trainer) for fault in faults]

            return healed_by_the_wrapper(
                sft_trainer, directory, tokenizer, strike, texts=poisoned_texts(), dropout=0.0, max_steps=4
            )

        expected, _ = poisoned(tmp_path / "poison alone")
        healed, (fault, _) = poisoned(
            tmp_path / "healed",
            lambda trainer: StrikingTheSearch(trainer, nth, change),
            lambda trainer: TooManyRows(trainer.model, rows),
        )
        assert fault.fired == 1
        found, due = (
            {row["dataset_index"] for row in quarantined(tmp_path / name)} for name in ("healed", "poison alone")
        )
        assert found == due
        assert due
        for name, value in weights(expected).items():
            torch.testing.assert_close(weights(healed)[name], value, rtol=0, atol=1e-5, msg=name)
        assert_nothing_lost(tmp_path / "healed")
