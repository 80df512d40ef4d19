"""Numbers of healing are for trackers and the log history; the lines that a run prints are as they were."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import OutputFault, plain_trainer
from transformers import PrinterCallback, ProgressCallback
from transformers.integrations import TensorBoardCallback
from trl.trainer.callbacks import RichProgressCallback

from self_healing import SelfHealingCallback, SelfHealingTrainer


class Tracker(TensorBoardCallback):
    def __init__(self) -> None:
        writer = dict.fromkeys(("add_text", "add_scalar", "flush", "close"), lambda *_, **__: None)
        super().__init__(tb_writer=SimpleNamespace(**writer))
        self.told: set[str] = set()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.told |= set(logs)


@pytest.mark.parametrize("wrapped", [False, True], ids=["callback", "wrapper"])
@pytest.mark.parametrize("printer", [PrinterCallback, ProgressCallback, RichProgressCallback])
def test_what_a_run_prints_has_no_numbers_of_healing(
    printer: Any, wrapped: bool, tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Tracker()
    trainer = plain_trainer(
        tmp_path, tokenizer, callbacks=[tracker, *[SelfHealingCallback()] * (not wrapped)], max_steps=4
    )
    for usual in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(usual)
    trainer.add_callback(printer())
    before = trainer.callback_handler.callbacks[-1].on_log
    OutputFault(trainer.model, lambda forward: forward == 3)
    (SelfHealingTrainer(trainer) if wrapped else trainer).train()
    printed = "".join(capsys.readouterr())
    assert "loss" in printed
    # A table of TRL has the part before the slash as its title.
    assert ("healing/" in printed, "steps_repeated" in printed) == (False, False)
    assert "healing/incidents" in tracker.told & set(trainer.state.log_history[-2])
    assert next(each for each in trainer.callback_handler.callbacks if type(each) is printer).on_log == before
