"""Incidents for bad samples and the end of a run that has too many: a real loader, and no training."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from made_up_run import MadeUpRun, MadeUpWindow

from self_healing import Action, UnrecoverableTrainingError
from self_healing.healers.data.healer import SampleHealer
from self_healing.healers.data.quarantine import QUARANTINE_FILE, Quarantine


class Rows(torch.utils.data.Dataset[Any]):
    """Numbers, some of which cannot be loaded, and some only the second time."""

    def __init__(self, rows: int, bad: Collection[int], flaky: Collection[int] = ()) -> None:
        self.rows, self.bad, self.flaky = rows, bad, set(flaky)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index in self.bad:
            raise ValueError(f"row {index} is broken")
        if index in self.flaky:
            self.flaky.discard(index)
            raise ValueError(f"row {index} was not there yet")
        return {"input_ids": torch.full((4,), index)}


class Loading:
    """A run that loads its rows in order, two in a batch, and trains on none of them."""

    def __init__(self, directory: Path, rows: Any, **settings: Any) -> None:
        self.run = run = MadeUpRun(directory, **settings)
        loader = torch.utils.data.DataLoader(rows, batch_size=2)
        instrument, trainer = run.instrument, run.instrument.trainer
        trainer.args = SimpleNamespace(seed=0, data_seed=None, process_index=0, gradient_accumulation_steps=1)
        trainer.callback_handler = SimpleNamespace(train_dataloader=loader)
        trainer._train_batch_size = 2
        instrument.attached, instrument.on_detach, instrument.position = True, [], SimpleNamespace()
        made: Any = run
        made.run_id, made.heartbeat = "made-up", SimpleNamespace(start_over=lambda: None)
        quarantine = Quarantine(directory)
        made.part = lambda kind: quarantine
        calls: Any = SimpleNamespace(call=self.call, take_back=lambda: None)
        self.healer = SampleHealer(made, calls)
        self.healer.attach(first=True)
        self.batches = iter(loader)

    def call(self, service: str, rewind: Callable[[], None], function: Callable[..., Any], /, *args: Any) -> Any:
        return function(*args)

    def load(self, batches: int) -> list[int]:
        """The rows of the next steps."""
        rows = list[int]()
        for step in range(batches):
            self.run.at(MadeUpWindow(step))
            rows += [int(row) for row in next(self.batches)["input_ids"][:, 0]]
            self.healer.fetched()
        return rows


def test_a_sample_that_cannot_be_loaded_is_replaced_and_written_down(tmp_path: Path) -> None:
    loading = Loading(tmp_path, Rows(20, bad=[3]))
    rows = loading.load(10)
    assert [row for row in rows if row != rows[3]] == [row for row in range(20) if row not in (3, rows[3])]
    (incident,) = loading.run.journal.incidents
    assert (incident.step, incident.outcome) == (1, "resolved")
    assert incident.evidence["samples"][0]["dataset_index"] == 3
    assert incident.evidence["samples"][0]["replaced_by"] == rows[3]
    assert "row 3 is broken" in incident.cause
    line = json.loads((tmp_path / QUARANTINE_FILE).read_text())
    assert (line["run"], line["dataset_index"]) == ("made-up", 3)


def test_its_text_is_shown_as_it_was_before_the_transform(tmp_path: Path) -> None:
    def transform(rows: dict[str, Any]) -> dict[str, Any]:
        if "torn" in rows["text"]:
            raise ValueError("cannot be decoded")
        return {"input_ids": [torch.zeros(4)] * len(rows["text"])}

    texts = ["whole"] * 19
    loading = Loading(tmp_path, Dataset.from_dict({"text": [*texts, "torn"]}).with_transform(transform))
    loading.load(10)
    assert loading.run.journal.incidents[0].evidence["samples"][0]["preview"] == "torn"


def test_one_that_is_there_the_second_time_is_no_bad_sample(tmp_path: Path) -> None:
    loading = Loading(tmp_path, Rows(20, bad=[], flaky=[3]))
    assert loading.load(10) == list(range(20))
    assert "was not there yet" in loading.run.journal.incidents[0].cause
    assert not (tmp_path / QUARANTINE_FILE).exists()


@pytest.mark.parametrize(("bad", "ends"), [(2, False), (3, True)])
def test_a_run_with_too_many_of_them_ends(tmp_path: Path, bad: int, ends: bool) -> None:
    # 2 % of 100 samples at least.
    loading = Loading(tmp_path, Rows(400, bad=range(bad)), max_bad_fraction=0.02)
    if not ends:
        loading.load(2)
        assert loading.run.actions.applied == []
        return
    with pytest.raises(
        UnrecoverableTrainingError, match=r"3 samples among 4 drawn .* allows \(2\): sample 0 \("
    ) as raised:
        loading.load(2)
    assert loading.run.actions.applied == [Action.EMERGENCY_CHECKPOINT, Action.STOP]
    assert "more in" not in str(raised.value)
    incident = loading.run.journal.incidents[-1]
    assert incident.cause == "too many bad samples"
    assert incident.evidence == {"bad": 3, "limit": 2.0, "drawn": 4}


def test_later_in_a_run_the_fraction_is_of_what_was_drawn(tmp_path: Path) -> None:
    loading = Loading(tmp_path, Rows(400, bad=[200, 201, 202]), max_bad_fraction=0.02)
    loading.load(102)
    assert loading.run.actions.applied == []
