"""What a notebook shows of a report; nothing of a run becomes markup in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import OutputFault, sft_trainer
from made_up_report import made_up_report

from self_healing import HealingReport, SelfHealingCallback, SelfHealingTrainer
from self_healing.report.reading import read_run


def test_the_report_of_a_run_begins_with_its_verdict(tmp_path: Path, tokenizer: Any) -> None:
    callback = SelfHealingCallback()
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[callback])
    OutputFault(trainer.model, strike=lambda number: number == 5)
    trainer.train()
    line = '<td>healed</td><td style="text-align: left">step 2: NaN/Inf in loss, transient -&gt; computed again;'
    for report in (callback.get_report(), read_run(tmp_path)):
        shown = report._repr_html_()
        told = [shown.index(text) for text in ("✓ Verdict: Good: ", "The run ended at step 6 of 6", line)]
        assert told == sorted(told)


def test_printed_it_is_a_line_for_each_incident(tmp_path: Path, tokenizer: Any) -> None:
    callback = SelfHealingCallback()
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[callback])
    OutputFault(trainer.model, strike=lambda number: number == 5)
    trainer.train()
    verdict, state, incident = str(callback.get_report()).splitlines()
    assert verdict.startswith("Verdict: Good: ")
    assert state.startswith("The run ended at step 6 of 6")
    assert incident.startswith("healed: step 2: NaN/Inf in loss, transient -> computed again;")


@pytest.mark.parametrize("enter", [lambda trainer: trainer, SelfHealingTrainer])
def test_after_an_exception_the_verdict_says_how_the_run_ended(tmp_path: Path, tokenizer: Any, enter: Any) -> None:
    def interrupt(*_: Any) -> None:
        if trainer.state.global_step == 3:
            raise KeyboardInterrupt

    callback = SelfHealingCallback()
    trainer = sft_trainer(tmp_path, tokenizer, callbacks=[callback])
    trainer.model.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        enter(trainer).train()
    verdict = "Look first: the run is not finished, it came to step 3 of 6 (KeyboardInterrupt)."
    for report in (callback.get_report(), SelfHealingTrainer(trainer).get_report()):
        assert report.verdict.startswith(verdict)


def test_before_the_first_run_there_is_nothing_to_tell() -> None:
    assert "Nothing had to be healed." in HealingReport()._repr_html_()
    assert str(HealingReport()) == "Nothing had to be healed."


@pytest.mark.parametrize("mark", ["</td><script>alert(1)</script>", "{{ 7 * 7 }}"])
def test_no_text_of_a_run_becomes_markup_in_a_notebook(mark: str) -> None:
    shown = made_up_report(mark=mark)._repr_html_()
    assert "<script" not in shown
    assert shown.count("<td>") == made_up_report(mark="x")._repr_html_().count("<td>")
    assert "49" not in made_up_report(mark="{{ 7 * 7 }}")._repr_html_().replace("2049", "")
