"""A job whose restart only one of its launchers has counted goes on; and no two incidents of it have one name."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from forked import Forked

from self_healing.report.reading import read_run


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo"),
]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("uncounted")
    assert Forked("uncounted_restart.py", directory).wait(400) == 0
    return directory


def test_it_goes_on_where_it_was_on_all_ranks(job: Path) -> None:
    before, after = json.loads((job / "outcomes.json").read_text())
    assert (before["hung"], after["hung"]) == ([], []), (before["last"], after["last"])
    assert all(rank.get("error") for rank in before["ranks"])
    for rank in after["ranks"]:
        assert "error" not in rank
        assert rank["steps"] == 10
        assert rank["began"][0] in (4, 5)


def test_no_two_incidents_have_one_name(job: Path) -> None:
    seen: dict[str, list[tuple[int, str]]] = defaultdict(list)
    others: dict[str, set[int]] = defaultdict(set)
    for journal in (job / "run").glob("healing_events*.jsonl"):
        for event in map(json.loads, journal.read_text().splitlines()):
            if event["kind"] == "detected":
                seen[event["incident"]].append((event["rank"], event["symptom"]))
            elif "incident" in event:
                others[event["incident"]].add(event["rank"])
    assert all(len(each) == 1 for each in seen.values()), seen
    assert {name: ranks for name, ranks in others.items() if ranks != {seen[name][0][0]}} == {}
    had = [symptom for each in seen.values() for _, symptom in each]
    assert (had.count("ConnectionError"), had.count("TimeoutError")) == (2, 2)


def test_each_of_them_is_told_once(job: Path) -> None:
    told = [(incident.id.partition(".")[2], incident.symptom) for incident in read_run(job / "run").incidents]
    found: Any = [each for each in told if each[1] in ("ConnectionError", "TimeoutError")]
    assert sorted(found) == [("", "ConnectionError")] * 2 + [("rank1", "TimeoutError")] * 2
