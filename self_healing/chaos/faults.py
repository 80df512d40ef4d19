"""The faults there are, and how they are written down: `nan_loss*3@12`, `hang@20:seconds=5`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


RANDOM, ALWAYS, ANY = "random", "always", "any"


class FaultError(ValueError):
    """A fault cannot be had like this; the message names the value, what is allowed and what to do."""


@dataclass(frozen=True, slots=True)
class Kind:
    """
    One kind of fault.

    Args:
        what (`str`):
            What it does, for a person.
        parameters (`Mapping[str, Any]`):
            The names it takes beyond step and times, and their defaults.
        counts_calls (`bool`):
            Whether several times means calls that fail in a row, instead of one step each.
        times (`int` or `str`):
            How often it strikes if nothing is said.
    """

    what: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    counts_calls: bool = False
    times: int | Literal["always"] = 1


_WHERE = {"where": ("data", "forward"), "wait": ("python", "native"), "then": ("nothing", "sigkill")}
_PARAMETERS = ("seconds", "where", "wait", "index", "rows", "token", "then", "rank")
# What every fault takes.
_OF_ALL = {"rank": None}
_NETWORK_WHERE = ("auto", "reward", "data", "forward")

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
        "the run hangs: a wait in Python or in a C call",
        {"seconds": 3600.0, "where": "data", "wait": "python"},
    ),
    "sigterm": Kind("the process gets SIGTERM in the middle of a step"),
    "sigkill": Kind("the process is killed in the middle of a step"),
    "disk_full": Kind("writing a checkpoint fails half way (ENOSPC)", counts_calls=True),
    "torn_checkpoint": Kind("the weights file of the newest checkpoint is truncated", {"then": "nothing"}),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """
    A fault to inject.

    Args:
        kind (`str`):
            Which: a key of [`KINDS`].
        at (`int` or `"random"`, *optional*, defaults to `"random"`):
            The optimizer steps that are finished when it strikes: in the step after that.
        times (`int` or `"always"`, *optional*):
            How often: in this many steps one after the other, or this many calls for what fails in calls (`oom`,
            `network_error`, `disk_full`); `"always"` at every opportunity, also when the step is computed again.
            Defaults to once; `bad_sample` always.
        seconds (`float`, *optional*):
            Of `slow_step` and `hang`: how long.
        where (`str`, *optional*):
            Of `slow_step` and `hang`: `"data"` or `"forward"`; of `network_error` also `"reward"`.
        wait (`str`, *optional*):
            Of `slow_step` and `hang`: `"python"`, which a signal handler can interrupt, or `"native"`, which it
            cannot.
        index (`int`, *optional*):
            Of `bad_sample`: which. Defaults to the first that is loaded from that step on.
        rows (`int`, *optional*):
            Of `poison_samples`: how many of the batch.
        token (`int`, *optional*):
            Of `poison_samples`: chooses only rows that hold this token, in the first batch with such rows from that
            step on. Defaults to any rows.
        then (`str`, *optional*):
            Of `torn_checkpoint`: `"sigkill"` ends the process, so that the next one has to read it.
        rank (`int`, *optional*):
            Of several processes, the one that it strikes. Defaults to any, drawn at random.

    Example:

    ```python
    >>> str(Fault("hang", at=20, seconds=5))
    'hang@20:seconds=5'
    ```
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
            close = difflib.get_close_matches(str(self.kind), KINDS, n=1)
            meant = f" Did you mean {close[0]!r}?" if close else ""
            raise FaultError(f"There is no fault {self.kind!r}.{meant} The faults are: {', '.join(KINDS)}.")
        if self.at != RANDOM and (not _is_whole(self.at) or int(self.at) < 0):
            raise FaultError(f"{self.kind}: at={self.at!r} is no step; please give a number from 0, or {RANDOM!r}.")
        if self.times is not None and self.times != ALWAYS and (not _is_whole(self.times) or int(self.times) < 1):
            raise FaultError(
                f"{self.kind}: times={self.times!r} is no number of times; please give one from 1, or {ALWAYS!r}."
            )
        for name in _PARAMETERS:
            if getattr(self, name) is not None:
                self._check(name, getattr(self, name))

    def _check(self, name: str, value: Any) -> None:
        known = parameters_of(self.kind)
        if name not in known:
            raise FaultError(f"{self.kind} has no parameter {name!r}; it takes {', '.join(known)}.")
        if name == "seconds" and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
            raise FaultError(f"{self.kind}: seconds={value!r} is no time; please give a number above 0.")
        least = {"index": 0, "rows": 1, "token": 0, "rank": 0}
        if name in least and (not _is_whole(value) or value < least[name]):
            raise FaultError(f"{self.kind}: {name}={value!r} must be a whole number from {least[name]}.")
        allowed = _NETWORK_WHERE if self.kind == "network_error" else _WHERE.get(name)
        if allowed is not None and value not in allowed:
            raise FaultError(f"{self.kind}: {name}={value!r} must be one of {', '.join(allowed)}.")

    def get(self, name: str) -> Any:
        """A parameter, or its default."""
        value = getattr(self, name)
        return parameters_of(self.kind)[name] if value is None else value

    @property
    def drawn(self) -> bool:
        """Whether its step is drawn at random; a sample that is named raises from the beginning."""
        return self.at == RANDOM and self.index is None

    @property
    def limit(self) -> int | None:
        """The number of times it strikes; `None` is always."""
        times = KINDS[self.kind].times if self.times is None else self.times
        return None if times == ALWAYS else int(times)

    def __str__(self) -> str:
        told = "" if self.times in (None, 1) else f"*{self.times}"
        given = [
            f":{name}={getattr(self, name):g}" if name == "seconds" else f":{name}={getattr(self, name)}"
            for name in parameters_of(self.kind)
            if getattr(self, name) is not None
        ]
        return f"{self.kind}{told}@{self.at}{''.join(given)}"


def parameters_of(kind: str) -> dict[str, Any]:
    """Gives the parameters of a kind of fault, and their defaults."""
    return {**KINDS[kind].parameters, **_OF_ALL}


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_SPEC = re.compile(r"(?P<kind>[^*@:]+)(?:\*(?P<times>[^*@:]*))?(?:@(?P<at>[^*@:]*))?(?P<rest>(?::[^:]*)*)")
_GRAMMAR = "KIND[*TIMES][@STEP][:NAME=VALUE...], such as nan_loss@12, oom*2@random or hang@20:seconds=5"


def parse_fault(text: str) -> Fault:
    """
    Reads one fault.

    Args:
        text (`str`):
            `KIND[*TIMES][@STEP][:NAME=VALUE...]`, where TIMES may be `always` and STEP `random` (the default).

    Raises:
        `FaultError`: if it cannot be read.
    """
    found = _SPEC.fullmatch(text.strip())
    if found is None:
        raise FaultError(f"{text!r} is no fault. Please write {_GRAMMAR}.")
    given: dict[str, Any] = {}
    for part in found["rest"].split(":")[1:]:
        name, equals, value = part.partition("=")
        if not equals or name not in _PARAMETERS:
            takes = ", ".join(parameters_of(found["kind"])) if found["kind"] in KINDS else "none"
            raise FaultError(f"{text!r}: {part!r} is no parameter of {found['kind']}, which takes: {takes}.")
        given[name] = _number(value, float if name == "seconds" else int)
    times, at = found["times"], found["at"]
    return Fault(
        found["kind"],
        at="random" if at is None else _number(at, int),
        times=None if times is None else _number(times, int),
        **given,
    )


def parse_faults(text: str) -> tuple[Fault, ...]:
    """
    Reads faults separated by commas; `all` is every kind there is, once, at a random step.

    Raises:
        `FaultError`: if one of them cannot be read, or there is none.
    """
    parts = [part for part in text.split(",") if part.strip()]
    if not parts:
        raise FaultError(f"There are no faults in {text!r}. Please write {_GRAMMAR}; separate several by commas.")
    return tuple(
        fault
        for part in parts
        for fault in ([Fault(kind) for kind in KINDS] if part.strip() == "all" else [parse_fault(part)])
    )


def _number(text: str, kind: type[int] | type[float]) -> Any:
    """The number, or the text as it is, for the fault to say what is wrong with it."""
    try:
        return kind(text)
    except ValueError:
        return text


def keys_of(faults: Sequence[Fault]) -> tuple[str, ...]:
    """A name for each fault by which a restarted process knows it again."""
    seen: dict[str, int] = {}
    names = []
    for fault in faults:
        spec = str(fault)
        seen[spec] = seen.get(spec, 0) + 1
        names.append(spec if seen[spec] == 1 else f"{spec} ({seen[spec]})")
    return tuple(names)
