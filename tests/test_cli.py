"""The command line."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from self_healing import FailureType, HealingConfig
from self_healing.journal.journal import Journal
from self_healing.rollback import shared_memory
from self_healing.tools.chaos.faults import KINDS
from self_healing.tools.chaos.rehearsal import Survival
from self_healing.tools.cli import app
from self_healing.tools.demo import show
from self_healing.tools.demo.show import DemoResult, RehearsalResult


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120"})


# ---- help ----


COMMANDS = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]


def help_of(*command: str, asked_by: str = "-h") -> str:
    result = CliRunner().invoke(app, [*command, asked_by], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=str)
def test_help_is_asked_for_in_two_ways_and_fits_the_terminal(command: list[str]) -> None:
    told = help_of(*command)
    assert told == help_of(*command, asked_by="--help")
    assert max(map(len, told.splitlines())) <= 80
    assert "<bool>" not in told


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_tells_its_exit_codes(command: str) -> None:
    assert "xit code" in help_of(command)


def test_each_command_is_told_of_in_one_whole_line() -> None:
    lines = help_of().partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in lines] == COMMANDS
    assert [line for line in lines if not line.endswith(".") or line.endswith("...")] == []


def test_the_help_of_chaos_tells_how_faults_are_written() -> None:
    told = help_of("chaos")
    assert "KIND[*TIMES][@STEP]" in told
    assert [kind for kind in KINDS if kind not in told.partition("KIND is one of:")[2]] == []


# ---- config ----


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], HealingConfig()),
        (["--preset", "default"], HealingConfig()),
        (["--preset", "aggressive"], HealingConfig.aggressive()),
        (["--preset", "conservative"], HealingConfig.conservative()),
    ],
)
def test_config_prints_toml_that_is_read_back(tmp_path: Path, arguments: list[str], expected: HealingConfig) -> None:
    result = run("config", *arguments)
    assert result.exit_code == 0
    (tmp_path / "healing.toml").write_text(result.stdout, encoding="utf-8")
    assert HealingConfig.from_toml(tmp_path / "healing.toml") == expected


def test_config_names_the_presets_it_knows() -> None:
    result = run("config", "--preset", "timid")
    assert result.exit_code == 2
    assert "conservative" in result.stderr


# ---- report ----


def write_journal(directory: Path, incidents: int, run_id: str = "run") -> None:
    journal = Journal(directory, HealingConfig(), run_id=run_id)
    journal.event("run_started", 0)
    for number in range(incidents):
        incident = journal.open(10 * number, "nonfinite_loss", {"loss": float("nan")})
        journal.diagnosed(incident, FailureType.NONFINITE_NUMERICAL, "numerical", {})
        journal.acted(incident, "skip_step")
        incident.steps_lost, incident.seconds_lost = 1, 0.25
        journal.closed(incident, "unresolved")
    journal.event("run_ended", 100)


def test_report_shows_the_incidents_and_their_sum(tmp_path: Path) -> None:
    write_journal(tmp_path, incidents=3)
    result = run("report", str(tmp_path))
    assert result.exit_code == 0
    assert result.stdout.count("-> step skipped; 1 step lost, 0.2 s") == 3
    assert "3 incidents, 3 steps and 0.8 s lost." in result.stdout
    assert str(tmp_path / "healing_events.jsonl") in result.stdout


def test_report_of_one_incident_counts_it_in_the_singular(tmp_path: Path) -> None:
    write_journal(tmp_path, incidents=1)
    assert "1 incident, 1 step and 0.2 s lost." in run("report", str(tmp_path)).stdout


def test_report_tells_incidents_of_earlier_runs_apart(tmp_path: Path) -> None:
    for name, incidents in (("first", 2), ("second", 1)):
        write_journal(tmp_path, incidents, run_id=name)
    assert "Of these, 2 incidents of earlier runs in this directory." in run("report", str(tmp_path)).stdout


def test_report_of_a_healthy_run_says_so(tmp_path: Path) -> None:
    write_journal(tmp_path, incidents=0)
    result = run("report", str(tmp_path))
    assert result.exit_code == 0
    assert "Nothing had to be healed." in result.stdout


def test_report_writes_a_page(tmp_path: Path) -> None:
    write_journal(tmp_path, incidents=2)
    result = run("report", str(tmp_path), "--html", str(tmp_path / "page.html"))
    assert (result.exit_code, result.stdout) == (0, f"Written: {tmp_path / 'page.html'}\n")
    assert (tmp_path / "page.html").read_text(encoding="utf-8").count('class="incident ') == 2


def test_report_says_once_that_lines_cannot_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_journal(tmp_path, 1)
    with (tmp_path / "healing_events.jsonl").open("a") as file:
        file.write("{torn")
    result = run("report", str(tmp_path))
    assert result.stdout.count("1 line of the journal cannot be read") == 1
    assert (result.stderr, caplog.text) == ("", "")


def test_report_does_not_print_two_forms_at_once(tmp_path: Path) -> None:
    write_journal(tmp_path, 1)
    result = run("report", str(tmp_path), "--json", "--agent")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--json and --agent" in result.stderr


def test_report_writes_a_page_beside_its_json(tmp_path: Path) -> None:
    write_journal(tmp_path, incidents=1)
    result = run("report", str(tmp_path), "--json", "--html", str(tmp_path / "page.html"))
    assert len(json.loads(result.stdout)["incidents"]) == 1
    assert (tmp_path / "page.html").is_file()


def test_a_page_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    write_journal(tmp_path, incidents=1)
    result = run("report", str(tmp_path), "--html", str(tmp_path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{tmp_path} cannot be written: Is a directory. Please name a file" in result.stderr


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_a_page_takes_the_place_of_no_device(tmp_path: Path) -> None:
    write_journal(tmp_path, incidents=1)
    os.mkfifo(tmp_path / "pipe")
    result = run("report", str(tmp_path), "--html", str(tmp_path / "pipe"))
    assert result.exit_code == 2
    assert "pipe cannot be written: it is not a regular file" in result.stderr
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    "content", ["import torch\n", "", "<!doctype html>\n<title>mine</title>\n", b"\xff\xfe\x00self-healing"], ids=repr
)
def test_a_page_takes_the_place_of_no_file_that_is_not_a_page(tmp_path: Path, content: str | bytes) -> None:
    write_journal(tmp_path, incidents=1)
    mine = tmp_path / "train.py"
    mine.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = mine.read_bytes()
    result = run("report", str(tmp_path), "--html", str(mine))
    assert (result.exit_code, result.stdout, mine.read_bytes()) == (2, "", before)
    assert f"{mine} cannot be written: there is a file of that name that is not such a page" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_page_takes_the_place_of_no_journal(tmp_path: Path) -> None:
    write_journal(tmp_path, incidents=1)
    journal = tmp_path / "healing_events.jsonl"
    before = journal.read_bytes()
    assert run("report", str(tmp_path), "--html", str(journal)).exit_code == 2
    assert journal.read_bytes() == before


def test_a_page_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    write_journal(tmp_path, incidents=1)
    page = tmp_path / "page.html"
    assert run("report", str(tmp_path), "--html", str(page)).exit_code == 0
    write_journal(tmp_path, incidents=2)
    assert run("report", str(tmp_path), "--html", str(page)).exit_code == 0
    assert page.read_text(encoding="utf-8").count('class="incident ') > 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no disk that is always full")
@pytest.mark.parametrize("form", [(), ("--json",), ("--agent",)], ids=str)
def test_report_to_a_full_disk_is_a_clear_error(tmp_path: Path, form: tuple[str, ...]) -> None:
    write_journal(tmp_path, incidents=1)
    command = [sys.executable, "-c", "from self_healing.tools.cli import app; app()", "report", str(tmp_path), *form]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "The report cannot be printed: No space left on device.\n")


@pytest.mark.parametrize("name", ["", "nowhere/page.html"])
def test_a_page_makes_no_directories(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_journal(tmp_path, incidents=1)
    result = run("report", str(tmp_path), "--html", name)
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr
    assert not (tmp_path / "nowhere").exists()


def test_report_without_a_journal_is_a_clear_error(tmp_path: Path) -> None:
    result = run("report", str(tmp_path / "elsewhere"))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "There is no healing_events.jsonl in" in result.stderr
    assert "it is written when train() of a healed run begins" in result.stderr
    assert "Please name the output_dir" in result.stderr


@pytest.mark.parametrize("content", ["", "print('I train')\n", '{"step": 1}\n', "42\n", "\ufffd\x00\n"])
def test_report_of_a_file_that_is_no_journal_is_a_clear_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(content, encoding="utf-8")
    result = run("report", str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is no journal: not one of its lines is an event" in result.stderr


def test_report_of_a_journal_with_nothing_in_it_yet_is_healthy(tmp_path: Path) -> None:
    (tmp_path / "healing_events.jsonl").touch()
    result = run("report", str(tmp_path))
    assert result.exit_code == 0
    assert "Nothing had to be healed." in result.stdout


# ---- chaos ----


def test_chaos_names_no_ledger_where_nothing_has_struck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("self_healing.tools.chaos.rehearsal.rehearse", lambda *_: (0, []))
    script = tmp_path / "script.py"
    script.touch()
    result = run("chaos", str(script), "--ledger", str(tmp_path / "chaos.jsonl"))
    assert result.exit_code == 1
    assert "No fault struck" in result.stdout
    assert "Ledger" not in result.stdout


# ---- demo ----


A_SURVIVAL = Survival("oom@20", 20, True, "f1-001", "resolved", True)


@pytest.fixture
def demo_result(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the demo returns, and what it was called with."""
    seen: dict[str, Any] = {"result": DemoResult(), "rehearsal": RehearsalResult(0, [A_SURVIVAL])}

    def run_demo(output_dir: Path, **kwargs: Any) -> DemoResult:
        seen.update(kwargs, output_dir=output_dir)
        return seen["result"]

    def run_rehearsal(output_dir: Path, **kwargs: Any) -> RehearsalResult:
        seen["rehearsed_in"] = output_dir
        return seen["rehearsal"]

    monkeypatch.setattr(show, "run_demo", run_demo)
    monkeypatch.setattr(show, "run_rehearsal", run_rehearsal)
    return seen


def test_demo_says_how_to_look_at_it_again(tmp_path: Path, demo_result: dict[str, Any]) -> None:
    result = run("demo", "--output-dir", str(tmp_path), "--seed", "5")
    assert result.exit_code == 0
    assert (demo_result["output_dir"], demo_result["seed"], demo_result["healing"]) == (tmp_path, 5, True)
    assert f"self-healing report {tmp_path}" in result.stdout
    apart = tmp_path / "of two words"
    assert f"self-healing report '{apart}'" in run("demo", "--output-dir", str(apart)).stdout


def test_demo_goes_to_a_fresh_directory(demo_result: dict[str, Any]) -> None:
    assert run("demo").exit_code == 0
    assert demo_result["output_dir"].match("outputs/demo-*")


def test_demo_fails_when_something_was_not_healed(tmp_path: Path, demo_result: dict[str, Any]) -> None:
    demo_result["result"] = DemoResult(problems=["the transient NaN never struck"])
    assert run("demo", "--output-dir", str(tmp_path)).exit_code == 1


def test_demo_fails_when_chaos_was_not_survived(tmp_path: Path, demo_result: dict[str, Any]) -> None:
    demo_result["rehearsal"] = RehearsalResult(1, [A_SURVIVAL])
    assert run("demo", "--output-dir", str(tmp_path)).exit_code == 1
    assert demo_result["rehearsed_in"] == tmp_path / "chaos"


def test_demo_without_chaos(tmp_path: Path, demo_result: dict[str, Any]) -> None:
    assert run("demo", "--no-chaos", "--output-dir", str(tmp_path)).exit_code == 0
    assert "rehearsed_in" not in demo_result


def test_demo_refuses_a_directory_that_is_in_use(tmp_path: Path, demo_result: dict[str, Any]) -> None:
    (tmp_path / "file").touch()
    result = run("demo", "--output-dir", str(tmp_path))
    assert result.exit_code == 2
    assert f"There is something in {tmp_path} already" in result.stderr
    assert "output_dir" not in demo_result


def test_demo_without_healing_is_no_failure(tmp_path: Path, demo_result: dict[str, Any]) -> None:
    result = run("demo", "--no-healing", "--output-dir", str(tmp_path))
    assert result.exit_code == 0
    assert demo_result["healing"] is False
    assert "report" not in result.stdout


def test_demo_without_trl_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "trl" else find_spec(name))
    result = run("demo")
    assert result.exit_code == 1
    assert "pip install 'self-healing-trl[trl]'" in result.stderr


# ---- all ----


@pytest.mark.slow
def test_the_command_line_needs_trl_only_for_the_demo() -> None:
    code = (
        "import sys\n"
        "sys.modules.update({'trl': None, 'datasets': None})\n"
        "from typer.testing import CliRunner\n"
        "from self_healing.tools.cli import app\n"
        "assert CliRunner().invoke(app, ['config']).exit_code == 0\n"
        "assert 'self_healing.tools.demo.show' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_command_shows_the_help() -> None:
    result = run()
    for command in ("demo", "report", "config"):
        assert command in result.output


# ---- clean ----


@pytest.fixture
def left_behind(tmp_path: Path) -> Iterator[Path]:
    """What a job that was killed for good has left in shared memory: a block of a process that is gone."""
    if not shared_memory.ROOT.is_dir():
        pytest.skip("the system has no shared memory as files")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    place = shared_memory.directory_of(tmp_path) / "run-rank0-of-1"
    shared_memory.make_directory(place)
    (place / f"{gone.pid}-1.block").write_bytes(bytes(3_000_000))
    yield tmp_path
    shared_memory.remove_states(tmp_path)


def test_clean_frees_what_a_killed_run_has_left(left_behind: Path) -> None:
    result = run("clean", str(left_behind))
    assert (result.exit_code, "Freed 3 MB" in result.output) == (0, True)
    assert not shared_memory.directory_of(left_behind).exists()
    assert "have left nothing in /dev/shm" in run("clean", str(left_behind)).output


def test_clean_of_a_directory_there_is_not_fails(tmp_path: Path) -> None:
    result = run("clean", str(tmp_path / "outptu"))
    assert result.exit_code == 2
    assert f"There is no directory {tmp_path / 'outptu'}" in result.stderr


def test_clean_frees_what_is_left_of_an_output_dir_that_was_removed(left_behind: Path) -> None:
    left_behind.rmdir()
    result = run("clean", str(left_behind))
    assert (result.exit_code, "Freed 3 MB" in result.output) == (0, True)


def test_clean_leaves_a_run_alone_that_still_trains(left_behind: Path) -> None:
    place = shared_memory.directory_of(left_behind) / "run-rank0-of-1"
    fork = multiprocessing.get_context("fork")
    holds = fork.Event()

    def train() -> None:
        shared_memory.hold(place)
        holds.set()
        time.sleep(60)

    trains = fork.Process(target=train)
    trains.start()
    assert holds.wait(60)
    result = run("clean", str(left_behind))
    trains.kill()
    trains.join()
    assert result.exit_code == 1
    assert f"is in use by process {trains.pid}" in result.output
    assert place.is_dir()


def test_clean_is_not_kept_away_by_a_process_that_has_been_given_an_old_number(left_behind: Path) -> None:
    place = shared_memory.directory_of(left_behind) / "run-rank0-of-1"
    (place / f"{os.getpid()}-1.block").write_bytes(b"")
    assert run("clean", str(left_behind)).exit_code == 0
    assert not place.is_dir()
