"""The distribution is `self-healing-trl`: every instruction says so, and the command tells of its namesake."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.plugin.interface import BuilderInterface
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

import self_healing


ROOT = Path(__file__).parent.parent
# `self-healing` where it is the name of something to install, and not the command or this project's distribution.
OLD_INSTRUCTION = re.compile(r"self[-_]healing\[|(?<!un)install\b[^\n`]*\bself[-_]healing(?![-_\w]|\.|/)")


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_instruction_installs_the_namesake() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in tracked_files()
        if path != Path(__file__)
        for match in OLD_INSTRUCTION.finditer(path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert found == []


def test_the_distribution_has_a_name_of_its_own() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "self-healing-trl"
    assert project["scripts"] == {"self-healing": "self_healing_trl:main"}


# ---- what is built ----


def test_the_newest_version_of_the_changelog_is_that_of_the_package() -> None:
    versions = re.findall(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert versions[0] == self_healing.__version__


def included(builder: BuilderInterface) -> set[str]:
    """Paths within what would be built; nothing is written."""
    return {Path(file.distribution_path).as_posix() for file in builder.recurse_included_files()}


def test_the_wheel_holds_the_package_and_nothing_else() -> None:
    tracked = {path.relative_to(ROOT).as_posix() for path in tracked_files()}
    expected = {name for name in tracked if name.startswith("self_healing/") or name == "self_healing_trl.py"}
    assert "self_healing/py.typed" in expected
    assert included(WheelBuilder(str(ROOT))) == expected


def test_the_source_distribution_holds_what_its_tests_need() -> None:
    tracked = {path.relative_to(ROOT).as_posix() for path in tracked_files()}
    always = {".gitignore", "LICENSE", "README.md", "pyproject.toml"}
    # `.ci` is for the place where this is developed.
    assert included(SdistBuilder(str(ROOT))) == {name for name in tracked - always if not name.startswith(".ci/")}


def test_the_wheel_holds_the_licence_of_everything_in_it(tmp_path: Path) -> None:
    licences = {path.relative_to(ROOT).as_posix() for path in tracked_files() if path.name == "LICENSE"}
    assert "self_healing/report/page/vendored/uplot/LICENSE" in licences
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path))
    with zipfile.ZipFile(wheel) as built:
        places = {name.partition(".dist-info/licenses/")[2]: name for name in built.namelist()}
        assert licences <= places.keys()
        assert all(built.read(places[each]) == (ROOT / each).read_bytes() for each in licences)
        about = built.read(next(name for name in built.namelist() if name.endswith(".dist-info/METADATA")))
    assert {f"License-File: {each}" for each in licences} <= set(about.decode().splitlines())


@pytest.mark.slow
def test_what_is_built_works_in_a_fresh_environment(tmp_path: Path) -> None:
    """Needs an index of packages, for all but torch, which is the largest: it is that of these tests."""
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, ROOT], check=True)
    wheel, sdist = next(tmp_path.glob("*.whl")), next(tmp_path.glob("*.tar.gz"))
    assert wheel.name == f"self_healing_trl-{self_healing.__version__}-py3-none-any.whl"
    assert sdist.name == f"self_healing_trl-{self_healing.__version__}.tar.gz"

    # Nothing from elsewhere: pip leaves out what it sees there, and the package of the clone would be imported.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "fresh"], check=True)
    commands = tmp_path / "fresh" / "bin"
    (site,) = (tmp_path / "fresh").glob("lib/*/site-packages")
    for entry in {file.parts[0] for file in metadata.files("torch") or ()} - {".."}:
        (site / entry).symlink_to(metadata.distribution("torch").locate_file(entry))
    install = [commands / "python", "-m", "pip", "install", "-q", "--no-compile", "-c", ROOT / "constraints.txt"]
    subprocess.run([*install, f"{wheel}[trl]"], check=True, env=environment)

    def self_healing_does(*arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [commands / "self-healing", *arguments],
            cwd=tmp_path,
            env={**environment, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert self_healing_does("--version") == f"self-healing-trl {self_healing.__version__}\n"
    assert "There is no" in self_healing_does("report", "elsewhere", code=2)
    self_healing_does("rules")
    self_healing_does("demo", "--output-dir", "demo")
    assert "transient" in self_healing_does("report", "demo")

    # Of the process alone: what else the machine does is not counted.
    costs = [cpu_seconds_of([commands / "self-healing", "report", "demo"], tmp_path, environment) for _ in range(5)]
    assert min(costs) < 1.0, costs
    imported = subprocess.run(
        [commands / "python", "-X", "importtime", commands / "self-healing", "--help"],
        **{"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "check": True},
    ).stderr
    names = {line.rpartition("|")[2].strip().partition(".")[0] for line in imported.splitlines()}
    assert "self_healing" in names
    assert names.isdisjoint({"torch", "transformers", "accelerate", "trl", "numpy"})


def cpu_seconds_of(command: list[Any], directory: Path, environment: dict[str, str]) -> float:
    """What a command costs, on all cores, with what it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout + done.stderr
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


# ---- beside its namesake ----


def namesake(directory: Path) -> Path:
    """What `pip install self-healing` leaves."""
    files = {
        "self_healing-0.1.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: self_healing\nVersion: 0.1.2\n",
        "self_healing-0.1.2.dist-info/RECORD": "self_healing/__init__.py,,\nself_healing/core.py,,\n",
        "self_healing/__init__.py": "from .core import check_code\n",
        "self_healing/core.py": "def check_code(code): ...\n",
    }
    for name, text in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)
    return directory


def command(*path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import self_healing_trl; self_healing_trl.main()", "--help"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(each) for each in path)},
        cwd=path[0],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_command_says_that_the_namesake_has_taken_its_place(tmp_path: Path) -> None:
    done = command(namesake(tmp_path), ROOT)
    assert done.returncode == 1
    assert f"imported from {tmp_path / 'self_healing'}, and that is not self-healing-trl" in done.stderr
    assert "`self-healing` 0.1.2 is installed" in done.stderr
    assert "pip install 'self-healing-trl[trl]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_command_warns_of_a_namesake_behind_it(tmp_path: Path) -> None:
    done = command(ROOT, namesake(tmp_path))
    assert done.returncode == 0
    assert "`self-healing` 0.1.2 is installed" in done.stderr
    assert "Usage" in done.stdout
