"""Imports go one way, families do not know each other, one room knows the Trainer, and one page names all of it."""

from __future__ import annotations

import ast
import functools
import graphlib
import inspect
import re
import textwrap
from pathlib import Path

import pytest
from accelerate import Accelerator
from transformers import Trainer

from self_healing.ranks import votes
from self_healing.rollback import trusted


trl = pytest.importorskip("trl")

ROOT = Path(__file__).resolve().parent
while not (ROOT / "pyproject.toml").is_file():
    ROOT = ROOT.parent
PACKAGE = ROOT / "self_healing"
PAGE = ROOT / "docs" / "architecture.md"

FAMILIES = ("data", "hangs", "numerics", "oom", "restarts", "saves", "services")

# From the ground up: a room imports from rooms below its own, and its modules from each other.
ROOMS = (
    *("config", "system", "failures", "ranks", "journal", "checkpoints", "hf", "rollback", "run", "report", "healers"),
    *("actions", "callback", "trainer", "tools", "__main__"),
)
FLOOR_OF = {room: floor for floor, room in enumerate(ROOMS)} | {"__init__": len(ROOMS)}


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


PACKAGES = {name_of(path) for path in PACKAGE.rglob("__init__.py")}


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Each module, parsed: by the first test that asks, and not by every process that collects this module."""
    return {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(module: str) -> set[str]:
    """All modules of the package that a module imports, wherever in it, and be it for its types alone."""
    found: set[str] = set()
    for node in ast.walk(trees()[module]):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                own = [] if module == "__init__" else module.split(".")
                own = own if module in PACKAGES else own[:-1]
                origin = ".".join(["self_healing", *own[: len(own) - node.level + 1], *filter(None, [node.module])])
            found.update(f"{origin}.{alias.name}" for alias in node.names)
    ours = (name.partition(".")[2] for name in found if name.partition(".")[0] == "self_healing")
    return {_module_behind(name) for name in ours} - {module}


def _module_behind(name: str) -> str:
    """The module that a dotted name of the package is, or is defined in."""
    while name and name not in trees():
        name = name.rpartition(".")[0]
    return name or "__init__"


@functools.cache
def imports() -> dict[str, set[str]]:
    return {module: imports_of(module) for module in trees()}


def room_of(module: str) -> str:
    return module.partition(".")[0]


def edges() -> list[tuple[str, str]]:
    return [(module, other) for module, others in imports().items() for other in sorted(others)]


def test_every_room_has_its_floor() -> None:
    assert {room_of(module) for module in trees()} == set(FLOOR_OF)


def test_imports_go_one_way() -> None:
    # The version of the package stands in its `__init__`.
    upwards = [(one, other) for one, other in edges() if FLOOR_OF[room_of(one)] < FLOOR_OF[room_of(other)]]
    assert [edge for edge in upwards if edge[1] != "__init__"] == []


def family_of(module: str) -> str | None:
    room, _, rest = module.partition(".")
    family = rest.partition(".")[0]
    return family if room == "healers" and family in FAMILIES else None


def test_families_do_not_import_each_other() -> None:
    assert {family_of(module) for module in trees()} == {*FAMILIES, None}
    between = [(one, other) for one, other in edges() if family_of(one) and family_of(other)]
    assert [(one, other) for one, other in between if family_of(one) != family_of(other)] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    # Raises with the circle.
    graphlib.TopologicalSorter(imports()).prepare()


# ---- the Trainer ----


TRAINERS = (trl.SFTTrainer, trl.DPOTrainer, trl.GRPOTrainer, trl.RLOOTrainer, trl.KTOTrainer, trl.RewardTrainer)


@functools.cache
def private_names() -> frozenset[str]:
    """Private methods of trainers and of what they are made from, and private attributes that these set or read."""
    classes = {each for cls in (Trainer, Accelerator, *TRAINERS) for each in cls.__mro__}
    names: set[str] = set()
    for each in classes:
        if each.__module__.partition(".")[0] not in ("transformers", "trl", "accelerate"):
            continue
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(each)))):
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                names.add(node.attr)
    return frozenset(name for name in names if re.match("_[^_]", name))


def private_names_used(tree: ast.Module) -> set[str]:
    """Private names that code reads of a trainer, or of anything if they are the Trainer's; in texts as well."""
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            used.update(private_names() & set(re.findall(r"\b_\w+", node.value)))
        elif isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
            holder = ast.unparse(node.value)
            of_trainer = holder.rpartition(".")[2].lstrip("_") in ("trainer", "accelerator")
            if of_trainer or (node.attr in private_names() and holder not in ("self", "cls")):
                used.add(node.attr)
    return used


def test_private_names_are_seen_however_they_are_named() -> None:
    for code in ("trainer._compute_loss()", "getattr(trainer, '_compute_loss')", "'see Trainer._compute_loss'"):
        assert private_names_used(ast.parse(code)) == {"_compute_loss"}


def test_only_one_room_knows_private_names_of_the_trainer() -> None:
    assert {"_tr_loss", "_save_checkpoint", "_get_learning_rate", "_buffered_inputs"} <= private_names()
    elsewhere = {
        (module, name)
        for module, tree in trees().items()
        if room_of(module) != "hf"
        for name in private_names_used(tree)
    }
    assert elsewhere == set()


# ---- the page ----


def modules_on_the_page() -> list[str]:
    """
    The tree on the page: two spaces for each floor down, a name that ends in `/` for a room, and what it is.
    """
    tree = re.search(r"^```text\n(self_healing/.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert tree is not None
    found: list[str] = []
    rooms: list[str] = []
    for line in tree[1].splitlines()[1:]:
        entry = re.match(r"^( +)([a-z_]+)(\.py|/) ", f"{line} ")
        if entry is None:
            continue
        depth = len(entry[1]) // 2 - 1
        rooms = [*rooms[:depth], entry[2]]
        found.append(".".join(rooms))
    return found


def test_the_page_names_every_module_and_no_other() -> None:
    named = modules_on_the_page()
    assert len(set(named)) == len(named)
    assert set(named) == trees().keys() - {"__init__"}


def test_the_page_goes_from_the_top_down() -> None:
    floors = [FLOOR_OF[room_of(module)] for module in modules_on_the_page()]
    assert floors == sorted(floors, reverse=True)


def test_the_page_is_read_in_one_sitting() -> None:
    assert sum(any(map(str.isalpha, word)) for word in PAGE.read_text(encoding="utf-8").split()) <= 1500


def test_the_page_points_at_what_exists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(re.findall(r"\btest_\w+\.py\b", text)) <= tests
    paths = re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.(?:py|toml))`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    places = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.*")} | tests
    assert [path for path in paths if path not in places] == []


# What asks the ranks something, or names the vote at the end of a block.
ASKS = frozenset(
    {"any_rank", "all_ranks", "sum_over_ranks", "largest", "smallest", "from_first_rank", "wait_for_all_ranks"}
    | {"together", "alike", "with_all_ranks"}
)


def questions() -> list[str]:
    """What is asked of several ranks, wherever it stands in the code as a text of its own."""
    calls = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    asking = [call for call in calls if getattr(call.func, "attr", getattr(call.func, "id", "")) in ASKS and call.args]
    firsts = [call.args[0] for call in asking]
    constants = [trusted.TAKEN, trusted.TRUSTED, trusted.SET_ASIDE]
    return constants + [
        each.value for each in firsts if isinstance(each, ast.Constant) and isinstance(each.value, str)
    ]


def test_no_two_modules_of_tests_have_one_name() -> None:
    # pytest takes the second for the first, and collects neither.
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_no_two_votes_can_be_taken_for_each_other() -> None:
    asked = questions()
    assert len(asked) > 40
    # By its number two ranks know that they are in the same vote.
    assert len({votes._number_of(each) for each in asked}) == len(asked)
