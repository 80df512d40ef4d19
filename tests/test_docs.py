"""README and docs: what they show runs, what they name exists, what is generated is up to date."""

from __future__ import annotations

import ast
import dataclasses
import json
import logging
import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from conftest import TEXTS, common_arguments, tiny_model
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from self_healing import Action, FailureType, HealingConfig, SelfHealingTrainer
from self_healing.journal.step_log import StepRow
from self_healing.tools.chaos.faults import KINDS
from self_healing.tools.cli import app


ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    for page in PAGES:
        kinds = set(re.findall(r"^```(\w*)$", page.read_text(encoding="utf-8"), re.MULTILINE)) - {""}
        assert kinds <= {"python", "bash", "toml", "yaml", "text"}


# ---- what they show runs ----


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    logger = logging.getLogger("self_healing")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
@pytest.mark.usefixtures("logging_as_before")
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    """All blocks of a page in order and in one namespace, with what a reader has beforehand: model, dataset, args."""
    monkeypatch.chdir(tmp_path)
    tiny_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    namespace: dict[str, Any] = {
        "model": str(tmp_path / "model"),
        "dataset": Dataset.from_dict({"text": TEXTS}),
        "args": SFTConfig(**common_arguments(tmp_path / "run", max_length=64, max_steps=2)),
    }
    if page.name == "troubleshooting.md":
        namespace |= {"SFTTrainer": SFTTrainer, "SelfHealingTrainer": SelfHealingTrainer}
        leave_a_postmortem(namespace)
    for number, block in enumerate(blocks(page, "python"), start=1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)


def leave_a_postmortem(namespace: dict[str, Any]) -> None:
    """A run that ended after its first step with an exception of the user."""

    class Failing(SFTTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 1:
                raise ValueError("a mistake")
            return super().training_step(*args, **kwargs)

    trainer = Failing(namespace["model"], args=namespace["args"], train_dataset=namespace["dataset"])
    with pytest.raises(ValueError, match="a mistake"):
        SelfHealingTrainer(trainer).train()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "toml")], ids=lambda page: page.name)
def test_toml_is_read(page: Path) -> None:
    for block in blocks(page, "toml"):
        HealingConfig.from_dict(tomllib.loads(block))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")], ids=lambda page: page.name)
def test_yaml_holds_settings_that_exist(page: Path) -> None:
    known = {field.name for config in (SFTConfig, HealingConfig) for field in dataclasses.fields(config)}
    for block in blocks(page, "yaml"):
        given = yaml.safe_load(block)
        # Of our plugin for axolotl.
        HealingConfig.from_dict(given.pop("self_healing", {}))
        # Of TRL's command line, and of axolotl.
        assert set(given) - {"env", "plugins"} <= known


# ---- what they name exists ----


def test_commands_exist() -> None:
    commands = typer.main.get_command(app).commands
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    found = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        code = "\n".join([*blocks(page, "bash"), *re.findall(r"`([^`\n]+)`", text)])
        for target in re.findall(r"\bmake ([a-z-]+)", code):
            assert target in targets, f"{page.name}: make {target}"
            found += 1
        for name, rest in re.findall(r"\bself-healing ([a-z]+)([^#\n]*)", code):
            assert name in commands, f"{page.name}: self-healing {name}"
            found += 1
            if rest.strip():
                # Parses, or raises what the user would see.
                commands[name].make_context(name, rest.split())
    assert found > 8


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)$", text, re.MULTILINE)
        targets += re.findall(r'<img src="([^"]+)"', text)
        for target in targets:
            if "://" in target:
                continue
            path, _, anchor = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.exists(), f"{page.name} links to {target}"
            if anchor:
                headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
                assert anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


INTERNALS = {"architecture.md", "mechanisms.md", "trainer-facts.md", "benchmarks.md"}


def words_of(page: Path) -> int:
    return sum(any(letter.isalnum() for letter in word) for word in page.read_text(encoding="utf-8").split())


def test_the_readme_is_read_in_five_minutes_and_begins_with_code() -> None:
    readme = ROOT / "README.md"
    assert words_of(readme) <= 900
    assert len(readme.read_text(encoding="utf-8").partition("```")[0].split()) <= 120


def test_the_pages_for_users_are_few_and_short() -> None:
    words = {page.name: words_of(page) for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in INTERNALS}
    assert len(words) <= 16
    assert sum(words.values()) <= 20_000
    assert max(words.values()) <= 2_200


def test_every_page_is_in_the_menu_of_the_site() -> None:
    listed = re.findall(r"^      - (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(["index.md", *(page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:])])


def test_settings_that_are_named_exist() -> None:
    """Words in code that look like a setting of ours are one: a renamed setting would be left behind here."""
    parts = {name.split("_")[0] for name in HealingConfig().to_dict()}
    known = {field.name for config in (SFTConfig, HealingConfig) for field in dataclasses.fields(config)}
    known |= {str(failure) for failure in FailureType} | {str(action) for action in Action}
    known |= {"on_instability", "save_model", "save_pretrained", "loss_after", "lr_reductions", "snapshot_refused"}
    known |= {"learning_rate_scale", "snapshots_off", "healing_off", "resume_with", "resume_from_checkpoint"}
    known |= {"grad_accum_dtype"}
    known |= set(KINDS) | set(dir(TrainerCallback)) | set(StepRow._fields)
    for page in PAGES:
        for word in re.findall(r"`(?:--no_)?([a-z]+(?:_[a-z]+)+)(?:=[^`]*)?`", page.read_text(encoding="utf-8")):
            if word.split("_")[0] in parts:
                assert word in known, f"{page.name}: {word}"


def texts_in_the_code() -> str:
    """All string constants of the package, with … for what is filled in."""
    found = []
    for path in [*sorted((ROOT / "self_healing").rglob("*.py")), ROOT / "self_healing_trl.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[sd]", "…", node.value))
    return "\n".join(found)


def test_messages_are_quoted_as_the_code_says_them() -> None:
    code = texts_in_the_code()
    messages = re.findall(
        r"^### `(.+)`$", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(messages) > 30
    for message in messages:
        # Longer pieces between the gaps; `Done: …; …` and the like are put together from several places.
        pieces = [piece for piece in message.split("…") if len(piece.strip()) > 3]
        missing = [piece for piece in pieces if piece.strip() not in code]
        assert not missing, f"{message}: {missing}"


# ---- what is generated or measured is up to date ----


def test_the_table_of_settings_is_up_to_date() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "settings_table.py"))
    page = generator["PAGE"].read_text(encoding="utf-8")
    assert page == generator["page_with_table"](page), "please run: python docs/settings_table.py"
    for name in HealingConfig().to_dict():
        assert f"| `{name}` |" in page


def test_the_tables_of_the_benchmarks_are_those_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "page.py"), run_name="page_of_benchmarks")
    page = benchmark["PAGE"].read_text(encoding="utf-8")
    assert benchmark["page_with_tables"](page) == page, "run python benchmarks/page.py"
    assert benchmark["power_plot"]() == benchmark["PLOT"].read_text(encoding="utf-8"), "run python benchmarks/page.py"
    faults, survives = len(benchmark["survival"].FAULTS), benchmark["survives"]
    plain, healed = survives("sft", "plain"), survives("sft", "wrapper")
    (plainly, points), (goes_on, of) = benchmark["goes_on"]("plain"), benchmark["goes_on"]("wrapper")
    quoted = (
        f"Of {faults} [faults](docs/benchmarks.md), an SFT run survives {plain} plain and started again, "
        f"{healed} healed",
        f"goes on bitwise from {goes_on} of {of} kill points of its saves (plain: {plainly} of {points})",
        f"{benchmark['trains']('wrapper', 'inside steps', 50)} of the time trains",
    )
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert [each for each in quoted if each not in readme] == []


def measured(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def assert_quoted(*pages: str, quoted: list[str]) -> None:
    text = " ".join(" ".join((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in pages).split())
    assert [each for each in quoted if each not in text] == []


def test_the_overhead_is_quoted_as_measured() -> None:
    found = measured("overhead_cpu")
    (low, high), (least, most) = found["extra_ms_per_step_ci95"], found["ratio_ci95"]
    quoted = [
        f"**+{found['extra_ms_per_step']:.2f} ms per step** (95 % interval {low:+.2f} to {high:+.2f} ms)",
        f"a ratio of {found['ratio']:.3f} ({least:.3f} to {most:.3f})",
        f"{found['plain_ms_per_step']:.1f} ms per step",
        f"over {found['duets']} duets of {found['pairs_of_turns_per_duet']} pairs of steps",
    ]
    ranks = measured("ranks_ddp")
    least, most = ranks["ratio_ci95"]
    quoted += [
        f"a ratio of **{ranks['ratio']:.3f}** (95 % interval {least:.3f} to {most:.3f})",
        f"at {ranks['plain_ms_per_step']:.0f} ms per step",
        f"one plain reduction a step is {ranks['reduction_ratio']:.3f}",
    ]
    assert_quoted("how-it-works", quoted=quoted)
    assert_quoted("../README", quoted=[f"{found['ratio']:.3f} on a CPU, {ranks['ratio']:.3f} on two CPU ranks"])


def test_the_cost_of_snapshots_is_quoted_as_measured() -> None:
    found, first = measured("snapshots_cpu"), measured("gpu_first_steps")["cases"]
    seconds = found["seconds"]
    quoted = [
        f"a Llama of {found['parameters'] / 1e6:.1f}M parameters",
        f"{found['step_seconds']:.2f} s per step",
        f"a snapshot of {found['bytes'] / 1e9:.2f} GB takes **{seconds['snapshot']:.3f} s**",
        f"{found['snapshot_share_of_step']:.1%}".replace("%", " %") + " of a step",
        f"one every {found['interval_at_the_default_budget']} steps",
        f"putting it back takes {seconds['restore']:.3f} s",
        f"took {seconds['save_checkpoint']:.2f} s and loading it again {seconds['load_checkpoint']:.2f} s",
        f"{found['snapshot_over_save']:.0%}".replace("%", " %") + " of the time of a checkpoint",
        f"by {first['0.5B']['held_up']:.1f} s with 0.5B parameters, by {first['1.5B']['held_up']:.1f} s with 1.5B",
    ]
    assert_quoted("detection", quoted=quoted)


def test_the_cost_of_splitting_is_quoted_as_measured() -> None:
    tasks = measured("memory_throughput_cpu")["tasks"]
    for task in ("sft", "dpo", "grpo"):
        assert tasks[task]["in_calls"] >= 0.9
        assert tasks[task]["in_processor_time"]["ratio"] >= 0.9
    sft, dpo, grpo = (f"{tasks[task]['in_processor_time']['ratio']:.2f}" for task in ("sft", "dpo", "grpo"))
    found = measured("memory_cost_cpu")
    two, four, healthy = found["split"]["2"], found["split"]["4"], found["healthy_run"]
    low, high = healthy["heal_over_raise"]["ratio_ci95"]
    quoted = [
        f"{sft} (SFT), {dpo} (DPO) and {grpo} (GRPO) of the optimizer steps per second",
        f"two pieces takes {two['over_by_hand']['ratio']:.2f} times as long",
        f"one in four {four['over_by_hand']['ratio']:.2f} times",
        f"{two['over_whole']['ratio']:.2f} and {four['over_whole']['ratio']:.2f} times",
        f"ratio {healthy['heal_over_raise']['ratio']:.3f}, 95 % {low:.3f} to {high:.3f}",
        f"beside itself: {healthy['raise_over_raise']['ratio']:.3f}",
        f"measured: {healthy['backup_over_heal']['ratio']:.3f} times",
    ]
    assert_quoted("memory", quoted=quoted)
