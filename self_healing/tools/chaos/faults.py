"""The faults there are, how they are written (`hang@20:seconds=5`), when each strikes, and the ledger of strikes."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from typing import Any, Literal

from ...system.files import append_line, parse_lines


logger = logging.getLogger("self_healing.chaos")

RANDOM, ALWAYS = "random", "always"


class FaultError(ValueError):
    """A fault cannot be had like this; the message names the value, what is allowed and what to do."""


# ---- kinds of faults ----


@dataclass(frozen=True, slots=True)
class Kind:
    """What a kind of fault does, its parameters with their defaults, and how often it strikes if nothing is said."""

    what: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    # Several times are calls that fail in a row, instead of one step each.
    counts_calls: bool = False
    times: int | Literal["always"] = 1


KINDS: dict[str, Kind] = {
    "nan_loss": Kind("the output of the network is NaN in one forward, and so is the loss"),
    "nan_gradient": Kind("one entry of one gradient is NaN; the loss is finite"),
    "inf_gradient": Kind("one entry of one gradient is infinite; the loss is finite"),
    "corrupted_weights": Kind("NaN is written into a weight between two steps"),
    "scrambled_layer": Kind("the weights of the last layer are replaced by noise: the loss jumps"),
    "poison_samples": Kind("rows of the batch make the loss NaN from then on, always", {"rows": 1, "token": None}),
    "oom": Kind("the forward runs out of memory (on CUDA for real)", counts_calls=True),
    "network_error": Kind(
        "a call of a service raises ConnectionError: in a reward function where there is one, else in the forward",
        {"where": "auto"},
        counts_calls=True,
    ),
    "bad_sample": Kind("a sample of the dataset raises whenever it is loaded", {"index": None}, times="always"),
    "slow_step": Kind("a step takes much longer", {"seconds": 5.0, "where": "forward", "wait": "python"}),
    "hang": Kind(
        "the run hangs: a wait in Python or in a C call", {"seconds": 3600.0, "where": "data", "wait": "python"}
    ),
    "sigterm": Kind("the process gets SIGTERM in the middle of a step"),
    "sigkill": Kind("the process is killed in the middle of a step"),
    "disk_full": Kind("writing a checkpoint fails half way (ENOSPC)", counts_calls=True),
    "torn_checkpoint": Kind("the weights file of the newest checkpoint is truncated", {"then": "nothing"}),
}
_CHOICES = {"where": ("data", "forward"), "wait": ("python", "native"), "then": ("nothing", "sigkill")}
_PARAMETERS = ("seconds", "where", "wait", "index", "rows", "token", "then", "rank")


def _parameters_of(kind: str) -> dict[str, Any]:
    return {**KINDS[kind].parameters, "rank": None}


@dataclass(frozen=True, slots=True)
class Fault:
    """
    A fault to inject; its parameters are those of its kind.

    Args:
        kind (`str`):
            A key of `KINDS`.
        at (`int` or `"random"`, *optional*, defaults to `"random"`):
            The optimizer steps that are finished when it strikes: in the step after that.
        times (`int` or `"always"`, *optional*):
            In how many steps one after the other, or how many calls for what fails in calls (`oom`, `network_error`,
            `disk_full`); `"always"` also when the step is computed again. Defaults to once; `bad_sample` always.
        rank (`int`, *optional*):
            Of several processes, the one that it strikes. Defaults to any, drawn at random.
    """

    kind: str
    at: int | Literal["random"] = "random"
    times: int | Literal["always"] | None = None
    seconds: float | None = None
    where: str | None = None
    wait: str | None = None
    index: int | None = None
    rows: int | None = None
    token: int | None = None
    then: str | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise FaultError(f"There is no fault {self.kind!r}. The faults are: {', '.join(KINDS)}.")
        for name in ("at", "times", *_PARAMETERS):
            value = getattr(self, name)
            if value is not None:
                self._check(name, value)

    def _check(self, name: str, value: Any) -> None:
        known = _parameters_of(self.kind)
        if name not in ("at", "times", *known):
            raise FaultError(f"{self.kind} has no parameter {name!r}; it takes {', '.join(known)}.")
        if name == "seconds":
            fits, wanted = isinstance(value, int | float) and value > 0, "a number above 0"
        elif name in _CHOICES:
            choices = _CHOICES[name] if known[name] != "auto" else ("auto", "reward", *_CHOICES[name])
            fits, wanted = value in choices, f"one of {', '.join(choices)}"
        else:
            least, word = 1 if name in ("times", "rows") else 0, {"at": RANDOM, "times": ALWAYS}.get(name)
            fits = (word is not None and value == word) or (isinstance(value, int) and value >= least)
            wanted = f"a whole number from {least}" + (f", or {word!r}" if word is not None else "")
        if not fits:
            raise FaultError(f"{self.kind}: {name}={value!r} must be {wanted}.")

    def get(self, name: str) -> Any:
        """A parameter, or its default."""
        value = getattr(self, name)
        return _parameters_of(self.kind)[name] if value is None else value

    @property
    def limit(self) -> int | None:
        """The number of times it strikes; `None` is always."""
        times = KINDS[self.kind].times if self.times is None else self.times
        return None if times == ALWAYS else int(times)

    def __str__(self) -> str:
        told = "" if self.times in (None, 1) else f"*{self.times}"
        values = {name: getattr(self, name) for name in _parameters_of(self.kind)}
        given = [f":{name}={value}" for name, value in values.items() if value is not None]
        return f"{self.kind}{told}@{self.at}{''.join(given)}"


GRAMMAR = "KIND[*TIMES][@STEP][:NAME=VALUE...], such as nan_loss@12, oom*2@random or hang@20:seconds=5"


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Reads faults separated by commas; `all` is every kind there is, once, at a random step."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise FaultError(f"There are no faults in {text!r}. Please write {GRAMMAR}; separate several by commas.")
    return tuple(fault for part in parts for fault in (map(Fault, KINDS) if part == "all" else [parse_fault(part)]))


def parse_fault(text: str) -> Fault:
    """Reads one fault, as `str(fault)` writes it."""
    head, *rest = text.strip().split(":")
    head, _, at = head.partition("@")
    kind, _, times = head.partition("*")
    given: dict[str, Any] = {"at": _value(at or RANDOM), "times": _value(times) if times else None}
    for part in rest:
        name, equals, value = part.partition("=")
        if not equals or name not in _PARAMETERS:
            takes = ", ".join(_parameters_of(Fault(kind).kind))
            raise FaultError(f"{text!r}: {part!r} is no parameter of {kind}, which takes: {takes}.")
        given[name] = _value(value)
    return Fault(kind, **given)


def _value(text: str) -> Any:
    """The number, or the text as it is, for the fault to say what is wrong with it."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


# ---- the ledger ----


@dataclass(slots=True)
class Strike:
    """One strike of one fault: `count` is the how many-th, and one that the process did not survive had an effect."""

    fault: str
    kind: str
    step: int
    count: int
    pid: int
    time: float
    rank: int = 0
    effect: bool = True
    detail: dict[str, Any] = field(default_factory=dict)


class Ledger:
    """Keeps what has struck any rank in a file of JSON lines, which outlives the processes of a rehearsal."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.rank = 0
        # As they were when the file had as many bytes.
        self._bytes, self._strikes = 0, list[Strike]()

    def write(self, event: str, **fields: Any) -> None:
        """Appends one line."""
        line = {"event": event, "time": time.time(), "pid": os.getpid(), "rank": self.rank, **fields}
        # What comes next may be SIGKILL.
        append_line(self.path, line, sync=True)

    def lines(self) -> list[dict[str, Any]]:
        """Reads what all ranks have written."""
        return parse_lines(self.path.read_text("utf-8"))[0] if self.path.exists() else []

    def strikes(self) -> list[Strike]:
        """Reads all strikes in the order they came, and again only where something was written since."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size == self._bytes:
            return self._strikes
        found: dict[tuple[str, int, int], Strike] = {}
        for line in self.lines():
            if line["event"] == "run":
                continue
            key = line["fault"], line["count"], line["rank"]
            if line["event"] == "strike":
                names = ("fault", "kind", "step", "count", "pid", "time", "rank")
                found[key] = Strike(**{name: line[name] for name in names})
            else:
                found[key].effect = line["effect"]
            found[key].detail.update(line["detail"])
        self._bytes, self._strikes = size, list(found.values())
        return self._strikes

    def run_dirs(self) -> list[str]:
        """Gives the directories of the rehearsal's journals, each once."""
        return list(dict.fromkeys(line["run_dir"] for line in self.lines() if line["event"] == "run"))

    def asked_for(self) -> list[str]:
        """Gives the faults of the rehearsal."""
        return list(dict.fromkeys(name for line in self.lines() if line["event"] == "run" for name in line["faults"]))


# ---- the schedule ----


def strike_steps(faults: Sequence[Fault], max_steps: int, seed: int) -> list[int]:
    """Gives the step of each fault: its own, or one in its share of the run, with a gap before the next may."""
    # A sample that is named raises from the beginning.
    drawn = [number for number, fault in enumerate(faults) if fault.at == RANDOM and fault.index is None]
    steps = [0 if fault.at == RANDOM else int(fault.at) for fault in faults]
    if not drawn:
        return steps
    gap = max(int(max_steps / (len(drawn) + 0.5) / 2), 1)
    room = (max_steps - gap) / len(drawn)
    if room < gap:
        raise FaultError(
            f"{len(drawn)} faults at random do not fit into {max_steps} steps. Please train longer, ask for fewer, or "
            "give them steps."
        )
    # Of its own: the run's random states are none of our business.
    rng = random.Random(seed)
    rng.shuffle(drawn)
    for place, number in enumerate(drawn):
        steps[number] = min(int(gap + place * room + rng.random() * (room - gap)), max_steps - 1)
    return steps


def strike_ranks(faults: Sequence[Fault], world_size: int, seed: int) -> list[int]:
    """Gives the rank of each fault: its own, or one drawn; the same on all ranks without asking each other."""
    highest = max(fault.rank or 0 for fault in faults)
    if highest >= world_size:
        raise FaultError(f"Faults cannot strike rank {highest}: this job has {world_size}. Please name another one.")
    # Apart from the draw of the steps, which is the same for any number of ranks.
    rng = random.Random(f"ranks {seed}")
    drawn = [rng.choice(range(world_size)) for _ in faults]
    return [rank if fault.rank is None else fault.rank for fault, rank in zip(faults, drawn, strict=True)]


class Schedule:
    """Says which faults strike now, each known by its number. A strike is in the ledger before it strikes."""

    def __init__(self, faults: Sequence[Fault], seed: int, ledger: Ledger) -> None:
        self.faults = tuple(faults)
        # A name for each fault by which a restarted process knows it again.
        names = [str(fault) for fault in faults]
        earlier = [names[:number].count(name) for number, name in enumerate(names)]
        self.keys = [name if not n else f"{name} ({n + 1})" for name, n in zip(names, earlier, strict=True)]
        self.seed, self.ledger = seed, ledger
        self.rank = 0
        # None strikes before the steps are drawn.
        self.steps = [2**62] * len(self.faults)
        self.ranks = [0] * len(self.faults)
        # Whether the trainer has reward functions: a network error without `where` strikes there.
        self.has_rewards = False
        # Optimizer steps finished: shared with data loader workers, which are forked with a copy of everything else.
        self.step = RawValue("q", 0)
        self.lock = multiprocessing.RLock()

    def draw(self, max_steps: int, rank: int, ranks: int) -> None:
        """Draws steps and ranks; the same on all ranks without asking each other."""
        self.steps = strike_steps(self.faults, max_steps, self.seed)
        self.ranks = strike_ranks(self.faults, ranks, self.seed)
        self.rank = self.ledger.rank = rank

    def strikes_of(self, number: int) -> list[Strike]:
        """Gives the strikes of a fault in this process, in earlier ones of this rehearsal, and on other ranks."""
        return [strike for strike in self.ledger.strikes() if strike.fault == self.keys[number]]

    @property
    def poison(self) -> set[str]:
        """What identifies the rows that are poison samples from now on, on all ranks."""
        return {row for strike in self.ledger.strikes() for row in strike.detail.get("rows", ())}

    def has(self, *kinds: str) -> bool:
        """Whether one of these kinds was asked for."""
        return any(fault.kind in kinds for fault in self.faults)

    def place_of(self, fault: Fault) -> str:
        """Where a fault strikes: `"data"`, `"reward"` or `"forward"`."""
        if fault.kind == "bad_sample":
            return "data"
        if "where" not in KINDS[fault.kind].parameters:
            return "forward"
        where = str(fault.get("where"))
        return where if where != "auto" else "reward" if self.has_rewards else "forward"

    def due(self, *kinds: str, place: str | None = None) -> Iterator[int]:
        """Gives the faults of these kinds that strike now, by number."""
        step = int(self.step.value)
        for number, fault in enumerate(self.faults):
            if fault.kind not in kinds or self.ranks[number] != self.rank or step < self.steps[number]:
                continue
            struck = self.strikes_of(number)
            fresh = KINDS[fault.kind].counts_calls or all(step > strike.step for strike in struck)
            if place in (None, self.place_of(fault)) and (
                fault.limit is None or (len(struck) < fault.limit and fresh)
            ):
                yield number

    @contextlib.contextmanager
    def strike(self, number: int, **detail: Any) -> Iterator[dict[str, Any]]:
        """Writes down a strike and then, unless the process is gone, what came of it (`effect` in what it gives)."""
        step, fault, struck = int(self.step.value), self.faults[number], self.strikes_of(number)
        result: dict[str, Any] = {"effect": True}
        # One that always strikes is written down the first time: nothing new comes of the rest.
        if fault.limit is None and struck:
            yield result
            return
        about = {"fault": self.keys[number], "count": len(struck) + 1}
        self.ledger.write("strike", **about, kind=fault.kind, step=step, detail=detail)
        logger.warning("Chaos: %s strikes at step %d (rank %d).", self.keys[number], step, self.rank)
        try:
            yield result
        finally:
            self.ledger.write("effect", **about, effect=result.pop("effect"), detail=result)
