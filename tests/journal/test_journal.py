"""What is written down, and what happens when it cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    POISON_WORD,
    TEXTS,
    OutputFault,
    PoisonToken,
    RaisingForward,
    assert_same_weights,
    journal,
    logged,
    sft_trainer,
    weights,
)
from transformers import TrainerCallback

from self_healing import (
    HealingConfig,
    Incident,
    SelfHealingCallback,
    SelfHealingTrainer,
)


def struck(output_dir: Path, tokenizer: Any, config: HealingConfig | None = None, **arguments: Any) -> Any:
    trainer = sft_trainer(
        output_dir, tokenizer, callbacks=[SelfHealingCallback(config), *arguments.pop("more", [])], **arguments
    )
    trainer.fault = OutputFault(trainer.model, strike=lambda forward: forward == 5)
    return trainer


TRACKIO_RUN = """
import json, sys
from pathlib import Path
from conftest import OutputFault, build_tokenizer, sft_trainer
from self_healing import SelfHealingCallback
from trackio.sqlite_storage import SQLiteStorage

trainer = sft_trainer(
    Path(sys.argv[1]), build_tokenizer(), callbacks=[SelfHealingCallback()],
    report_to=["trackio"], project="healing-test", run_name="run",
)
OutputFault(trainer.model, strike=lambda forward: forward == 5)
trainer.train()
logs = SQLiteStorage.get_logs("healing-test", "run")
alerts = SQLiteStorage.get_alerts("healing-test")
Path(sys.argv[1], "read_back.json").write_text(json.dumps({"logs": logs, "alerts": alerts}, default=str))
"""


@pytest.mark.slow
def test_trackio_shows_the_metrics_and_the_alert(tmp_path: Path) -> None:
    # In a process of its own: trackio takes its directory from the environment when it is imported.
    environment = {
        **os.environ,
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    subprocess.run([sys.executable, "-c", TRACKIO_RUN, str(tmp_path)], env=environment, check=True, timeout=120)
    read_back = json.loads((tmp_path / "read_back.json").read_text())
    assert any(entry.get("train/healing/incidents") == 1 for entry in read_back["logs"])
    (alert,) = read_back["alerts"]
    assert alert["title"] == "self_healing: transient"
    assert "no step lost" in alert["text"]
    assert alert["step"] == 2


def test_callbacks_that_listen_are_told(tmp_path: Path, tokenizer: Any) -> None:
    told: list[tuple[Incident, int]] = []

    class Listener(TrainerCallback):
        def on_instability(self, args: Any, state: Any, control: Any, incident: Incident, **kwargs: Any) -> None:
            told.append((incident, state.global_step))

    struck(tmp_path, tokenizer, more=[Listener()]).train()
    ((incident, step),) = told
    assert (incident.failure, incident.cause, incident.actions, step) == (
        "nonfinite_transient",
        "transient",
        ["use_reexecuted_step"],
        2,
    )


def test_failing_sinks_never_fail_the_training(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Listener(TrainerCallback):
        def on_instability(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("pager is down")

    for name in ("healing_events.jsonl", "quarantine.jsonl"):
        (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run" / "incidents").write_text("a file where a directory should be")
    texts = [f"{text} {POISON_WORD}" if index in (5, 17) else text for index, text in enumerate(TEXTS)]
    callbacks = [SelfHealingCallback(), Listener()]
    trainer = sft_trainer(tmp_path / "run", tokenizer, texts=texts, max_steps=8, callbacks=callbacks)
    fault = PoisonToken(trainer.model, tokenizer.convert_tokens_to_ids(POISON_WORD))
    trainer.train()
    assert fault.fired
    assert trainer.state.global_step == 8
    for told in ("healing_events.jsonl", "pager is down", "could not be written"):
        assert told in caplog.text


def test_a_postmortem_of_an_earlier_run_is_set_aside(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "postmortem.json").write_text("{}")
    sft_trainer(tmp_path, tokenizer, max_steps=1, callbacks=[SelfHealingCallback()]).train()
    assert not (tmp_path / "postmortem.json").exists()
    assert len(list(tmp_path.glob("postmortem.before-*.json"))) == 1


def test_the_postmortem_is_strict_json_though_the_values_were_not_finite(tmp_path: Path, tokenizer: Any) -> None:
    trainer = struck(tmp_path, tokenizer, HealingConfig(on_nonfinite="raise"))
    with pytest.raises(RuntimeError):
        trainer.train()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    json.loads((tmp_path / "postmortem.json").read_text(), parse_constant=refuse)
    for line in (tmp_path / "healing_events.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


# ---- a failure of our own ----


@pytest.mark.parametrize(
    ("broken", "wrapped"),
    [
        ("self_healing.healers.numerics.detectors.panel.DetectorPanel.observe", False),
        pytest.param("self_healing.hf.reentry.Reentry.events_begin", True, marks=pytest.mark.slow),
        ("self_healing.journal.journal.Journal.metrics", True),
    ],
)
def test_a_failure_of_ours_leaves_the_plain_trainer(
    tmp_path: Path,
    tokenizer: Any,
    broken: str,
    wrapped: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = sft_trainer(tmp_path / "plain", tokenizer)
    plain.train()
    calls = {"count": 0}

    def fail(*_: Any, **__: Any) -> None:
        calls["count"] += 1
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(broken, fail)
    trainer = sft_trainer(tmp_path / "healed", tokenizer, callbacks=None if wrapped else [SelfHealingCallback()])
    (SelfHealingTrainer(trainer) if wrapped else trainer).train()
    assert calls["count"] == 1
    assert_same_weights(weights(trainer), weights(plain))
    assert logged(trainer) == logged(plain)
    assert "a bug of ours" in caplog.text
    assert "The bug is ours, not yours." in caplog.text
    # To whom, it could not say.
    assert "eport this" not in caplog.text
    assert not {"training_step", "get_batch_samples", "log"} & set(vars(trainer))


def test_a_failure_of_ours_while_recovering_leaves_the_users_exception(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = ConnectionError("the storage went away")

    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr("self_healing.trainer.classify_exception", fail)
    trainer = sft_trainer(tmp_path, tokenizer)
    RaisingForward(trainer.model, lambda forward: forward == 3, lambda: error)
    with pytest.raises(ConnectionError) as caught:
        SelfHealingTrainer(trainer).train()
    assert caught.value is error
    assert "a bug of ours" in caplog.text
    assert "training_step" not in vars(trainer)


def test_a_run_that_is_only_watched_reports_a_dead_model_once(tmp_path: Path, tokenizer: Any) -> None:
    trainer = sft_trainer(
        tmp_path, tokenizer, max_steps=8, callbacks=[SelfHealingCallback(HealingConfig(on_nonfinite="watch"))]
    )
    fault = OutputFault(trainer.model, strike=lambda forward: forward >= 5)
    trainer.train()
    assert fault.fired > 2
    assert len(journal(tmp_path, "detected")) == 1
    # To be replayed: nothing else says later which rows it was.
    assert len(list((tmp_path / "incidents").iterdir())) == 1
