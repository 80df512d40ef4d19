"""
Votes by which all ranks see the same step and decide the same.

Every vote is the same operation on a tensor of the same shape, a ballot, whatever is asked. So a rank whose own code
has failed anywhere between two votes casts one ballot that says so, whichever vote the others are in, and all of them
learn it there, at the same moment, and take the same way out: each vote raises [`AgreedFailure`] on all ranks or on
none. An answer may be a function: what it raises is cast in place of its answer.

Ranks come to each vote together: no condition that holds on one rank alone (bytes, memory, files, exceptions that were
contained, threads) may stand before one.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState

from .log_safely import log_safely


logger = logging.getLogger("self_healing")

_T = TypeVar("_T")
_Answers = Sequence[float] | torch.Tensor

# A ballot: which question, in three numbers, whether this rank's own code has failed, whether its training code has
# raised in an experiment, and the answers.
_QUESTION, _FAILED, _RAISED, _FIRST_ANSWER = slice(0, 3), 3, 4, 5
_ANSWERS = 12
BALLOT = _FIRST_ANSWER + _ANSWERS
# Sums of such numbers over some thousand ranks are exact in single precision, which every device has.
_QUESTIONS = 4096
# A size in bytes is cast as so many of these and a rest: single precision has no odd numbers above 2**24.
_CHUNK = 2**20
# How long a rank that failed waits for the others: to fail alike, or to be through what they compute.
_MEETING_SECONDS, _COMPUTING_SECONDS = 10.0, 20.0

# Known numbers that each rank gives.
_KNOWN = 253
# Seconds after which is asked again what the first rank is looking up: the first time, of the time since, at most.
_ASK_FIRST, _ASK_SHARE, _ASK_LAST = 0.02, 0.1, 2.0


class AgreedFailure(Exception):
    """Raised on all ranks in the same vote."""


class RankFailed(AgreedFailure):
    """Reports that code of this library has failed on a rank, maybe this one."""


class RankRaised(AgreedFailure):
    """Reports that training code has raised on a rank, maybe this one, in an experiment."""


class RanksDisagree(AgreedFailure):
    """Reports that ranks have come to different votes at the same time."""


class Stranded(Exception):
    """
    Ends the process of a rank that can neither go on with the others nor tell them so: they may wait for it in a
    collective of the training, and learn from its end that it is gone.
    """


class _Votes:
    """Counts the votes of this process, the same on all ranks as long as they go together."""

    def __init__(self) -> None:
        self.count = 0
        self.last = ""
        # Names the meeting before them, which no other ranks have had.
        self.meeting = ""
        # Whether this process has entered a collective of a vote, or of what follows one, and not come through it.
        self.inside = False


_votes = _Votes()


def world_size() -> int:
    """Number of processes that train together."""
    world = dist.group.WORLD if dist.is_available() else None
    if world is None:
        return 1
    # A program may have made a group for something else, of processes each of which trains by itself. A new
    # AcceleratorState, to ask that of, would read the environment, several times a step.
    by_itself = AcceleratorState._shared_state.get("num_processes") == 1
    return 1 if by_itself else int(world.size())


def own_rank() -> int:
    """Number of this process among them."""
    return dist.get_rank() if world_size() > 1 else 0


def is_first_rank() -> bool:
    """Whether this process is the one that decides about files."""
    return own_rank() == 0


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    """Marks a collective to which all ranks have come. If it fails here, the others may stay in it."""
    _votes.inside = True
    yield
    _votes.inside = False


# ---- votes: every rank has to come ----


def sum_over_ranks(question: str, answers: _Answers | Callable[[], _Answers], device: torch.device) -> list[float]:
    """
    Sums numbers over all ranks; a NaN or Inf of any rank stays one.

    Args:
        question (`str`):
            What is asked, the same on all ranks.
        answers (`Sequence[float]`, `torch.Tensor`, or a function that gives them):
            Up to twelve numbers of this rank, in single precision.
        device (`torch.device`):
            Where the run trains.

    Raises:
        AgreedFailure: On all ranks, if one has failed, or is in another vote.
    """
    if world_size() == 1:
        given = answers() if callable(answers) else answers
        return given.tolist() if isinstance(given, torch.Tensor) else [float(each) for each in given]
    try:
        ballot = _ballot(question, answers() if callable(answers) else answers, device)
    except Exception as error:
        tell_failure(question, error, device)
    return _cast(question, ballot)


def any_rank(question: str, flag: bool | Callable[[], bool], device: torch.device) -> bool:
    """Whether a flag, or what a function gives, is true on any rank. As [`sum_over_ranks`]."""
    return sum_over_ranks(question, lambda: [float(_answer(flag))], device)[0] > 0


def all_ranks(question: str, flag: bool | Callable[[], bool], device: torch.device) -> bool:
    """Whether a flag, or what a function gives, is true on all ranks. As [`sum_over_ranks`]."""
    return not any_rank(question, lambda: not _answer(flag), device)


def wait_for_all_ranks(question: str, device: torch.device) -> None:
    """Returns once every rank has come, and none has failed. As [`sum_over_ranks`]."""
    # A barrier returns before the others have come where the device works asynchronously; a value that is read on the
    # host does not.
    sum_over_ranks(question, (), device)


def largest(question: str, answers: _Answers | Callable[[], _Answers], device: torch.device) -> list[float]:
    """Takes the largest of each number over all ranks. As [`sum_over_ranks`]."""
    if world_size() == 1:
        return sum_over_ranks(question, answers, device)
    found: torch.Tensor | None = None

    def prepare() -> tuple[()]:
        nonlocal found
        found = torch.as_tensor(_answer(answers), dtype=torch.float32).to(device)
        return ()

    sum_over_ranks(question, prepare, device)
    assert found is not None
    with _inside():
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [float(each) for each in found.tolist()]


def smallest(question: str, value: float | Callable[[], float], device: torch.device) -> float:
    """The smallest of a number over all ranks. As [`sum_over_ranks`]."""
    return -largest(question, lambda: [-_answer(value)], device)[0]


def from_first_rank(question: str, find: Callable[[], _T], device: torch.device) -> _T:
    """Calls a function on the first rank alone, and gives what it gives to all. As [`sum_over_ranks`]."""
    return find() if world_size() == 1 else _from_rank(0, question, find, device)


def from_first_rank_with(question: str, find: Callable[[], _T | None], device: torch.device) -> _T | None:
    """Gives to all what a function gives on the first rank where that is not `None`. As [`sum_over_ranks`]."""
    if world_size() == 1:
        return find()
    found: _T | None = None

    def place() -> float:
        nonlocal found
        found = find()
        return float(world_size() if found is None else dist.get_rank())

    first = round(smallest(question, place, device))
    return None if first == world_size() else _from_rank(first, question, lambda: found, device)


def _from_rank(source: int, question: str, find: Callable[[], _T], device: torch.device) -> _T:
    content = b""

    def size() -> tuple[float, ...]:
        nonlocal content
        content = pickle.dumps(find()) if dist.get_rank() == source else b""
        return divmod(len(content), _CHUNK)

    chunks, rest = (int(each) for each in sum_over_ranks(question, size, device)[:2])
    length = chunks * _CHUNK + rest
    with _inside():
        box = torch.frombuffer(bytearray(content or length), dtype=torch.uint8).to(device)
        dist.broadcast(box, src=source)
    received: _T = pickle.loads(box.cpu().numpy().tobytes())
    return received


def from_every_rank(question: str, value: _T, device: torch.device) -> list[_T]:
    """Gives the values of all ranks to each, by rank; for where something has gone wrong. As [`sum_over_ranks`]."""
    wait_for_all_ranks(question, device)
    if world_size() == 1:
        return [value]
    with _inside():
        values: list[Any] = [None] * world_size()
        dist.all_gather_object(values, value)
    return values


def ranks_where(question: str, flag: bool, device: torch.device) -> list[int]:
    """Lists the ranks on which a flag is true; for where something has gone wrong. As [`sum_over_ranks`]."""
    return [rank for rank, holds in enumerate(from_every_rank(question, bool(flag), device)) if holds]


def in_words(ranks: Sequence[int]) -> str:
    """Names some ranks: the only one, or the first of several."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"{len(ranks)} of {world_size()} ranks, the first of them rank {ranks[0]},"


def looked_up_by_first_rank(question: str, look: Callable[[], _T], device: torch.device) -> _T:
    """
    As [`from_first_rank`], for what may take longer than a collective may wait: checkpoints are read to the last byte.
    Until the first rank is through, the others sleep and ask again, in no collective; in one, where the store is lost.
    """
    store = job_store()
    if store is None:
        return from_first_rank(question, look, device)
    done, found, failed = _key("looked_up", _votes.count), list[_T](), list[Exception]()
    if dist.get_rank() == 0:
        try:
            found.append(look())
        except Exception as error:
            failed.append(error)
        finally:
            with contextlib.suppress(RuntimeError):
                store.set(done, b"")
    else:
        began = time.monotonic()
        with contextlib.suppress(RuntimeError):
            while not store.check([done]):
                time.sleep(pause_after(time.monotonic() - began))

    def tell() -> _T:
        if failed:
            raise failed[0]
        return found[0]

    return from_first_rank(question, tell, device)


def pause_after(waited: float) -> float:
    """Gives the seconds until the store is asked once more, after so many."""
    return min(_ASK_FIRST + _ASK_SHARE * waited, _ASK_LAST)


def changed_in_sum(seconds: float, device: torch.device) -> list[int]:
    """
    Has the ranks sum up numbers that all of them know: each gives one row, and zeros for those of the others, so that
    a row is exactly what its rank has given. As [`sum_over_ranks`].

    Args:
        seconds (`float`):
            How long the sum may take.
        device (`torch.device`):
            Where the run trains.

    Returns:
        `list[int]`: The ranks whose numbers have arrived changed on this one.

    Raises:
        RuntimeError: If there is no sum by then, or the others are gone.
    """
    row, column = torch.arange(dist.get_world_size(), device="cpu")[:, None], torch.arange(_KNOWN, device="cpu")
    known = ((row * 31 + column * 7 + row * column) % 251 + 1).to(torch.float32)
    found = torch.zeros_like(known)

    def prepare() -> tuple[()]:
        nonlocal found
        found[dist.get_rank()] = known[dist.get_rank()]
        found = found.to(device)
        return ()

    sum_over_ranks("known numbers are summed up", prepare, device)
    # All are here, and nothing can come between.
    with _inside():
        dist.all_reduce(found, async_op=True).wait(timedelta(seconds=seconds))
        return [int(rank) for rank in (found.cpu() != known).any(1).nonzero()]


# ---- a rank that failed ----


def tell_failure(question: str, error: Exception, device: torch.device) -> NoReturn:
    """
    Tells the other ranks, in the vote they are in or come to next, that code of this library has failed here.

    Args:
        question (`str`):
            What this rank was about.
        error (`Exception`):
            The failure.
        device (`torch.device`):
            Where the run trains.

    Raises:
        RankFailed: On all ranks.
        Exception: The failure, if all ranks know of it, or if it is that of a collective, where nobody can be told.
    """
    if isinstance(error, AgreedFailure | Stranded) or _votes.inside:
        raise error
    log_failure(question, error)
    store = job_store()
    if store is not None and dist.get_rank() == 0:
        # They may wait for what it would have looked up, and come to the vote then.
        with contextlib.suppress(RuntimeError):
            store.set(_key("looked_up", _votes.count), b"")
    _cast(question, _ballot(question, (), device, failed=True))
    raise AssertionError("a ballot that says so raises")


@contextlib.contextmanager
def all_or_none(question: str, device: torch.device, alike: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """
    Marks a block, maybe with votes in it, that all ranks come through or none.

    Args:
        question (`str`):
            Names the vote at its end.
        device (`torch.device`):
            Where the run trains.
        alike (`tuple` of exception types, *optional*):
            What all ranks raise if one does.

    Raises:
        AgreedFailure: On the other ranks, if one fails.
    """
    try:
        yield
    except Exception as error:
        if world_size() > 1 and not isinstance(error, alike):
            with contextlib.suppress(Exception):
                tell_failure(question, error, device)
        raise
    wait_for_all_ranks(question, device)


def log_failure(question: str, error: Exception) -> None:
    """Logs a failure of this library on one of several ranks."""
    # Not raised from it: what it is (memory that ran out) holds on this rank alone, and all have to do the same.
    text = "self_healing failed on rank %d (%s), and says so to the other ranks. Please report this traceback."
    log_safely(logger, logging.ERROR, text, dist.get_rank(), question, exc_info=error)


def tell_raised(question: str, device: torch.device) -> NoReturn:
    """
    Tells the other ranks, in the vote they are in or come to next, that training code has raised here in an
    experiment.

    Raises:
        RankRaised: On all ranks, unless one of them has failed.
    """
    _cast(question, _ballot(question, (), device, raised=True))
    raise AssertionError("a ballot that says so raises")


def came_through() -> None:
    """Notes that this rank is through what may have been a collective of the training, entered after the last vote."""
    store = job_store()
    if store is not None:
        # Where the store is lost the others wait for this rank in vain, and go on.
        with contextlib.suppress(RuntimeError):
            store.set(_key("through", dist.get_rank()), str(_votes.count))


def all_came_through(seconds: float = _COMPUTING_SECONDS) -> bool:
    """
    Waits for all ranks to be through what this one is through, by [`came_through`]. For a rank that has left it early,
    and cannot know whether others wait for it there.

    Args:
        seconds (`float`, *optional*):
            How long to wait for them.
    """
    came_through()
    store, until, behind = job_store(), time.monotonic() + seconds, list(range(world_size()))
    while store is not None:
        keys = {rank: _key("through", rank) for rank in behind}
        try:
            behind = [
                rank for rank, key in keys.items() if not store.check([key]) or int(store.get(key)) < _votes.count
            ]
        except RuntimeError:
            return False
        if not behind or time.monotonic() > until:
            return not behind
        time.sleep(0.05)
    return world_size() == 1


def all_fail_alike(why: str, seconds: float = _MEETING_SECONDS) -> bool:
    """
    Waits for all other ranks to have failed at the same place: between the same two votes. For a rank that cannot cast
    a ballot, because the others may be in a collective of the training.

    Args:
        why (`str`):
            What failed.
        seconds (`float`, *optional*):
            How long to wait for them.
    """
    store = job_store()
    if store is None:
        return False
    place = _key("failed", _votes.count, zlib.crc32(why.encode()))
    try:
        store.set(f"{place}/{dist.get_rank()}", b"")
        store.wait([f"{place}/{rank}" for rank in range(world_size())], timedelta(seconds=seconds))
    except RuntimeError:
        return False
    return True


def job_store() -> Any:
    """What the job keeps for all its processes, beside collectives; `None` where there is none (one process, MPI)."""
    return dist.distributed_c10d._get_default_store() if world_size() > 1 else None


def name_meeting(name: str) -> None:
    """Notes by which name all ranks have met, before the first of their votes."""
    _votes.meeting, _votes.inside = name, False


def meeting() -> str:
    """The name by which all ranks have met: that of no ranks before these, whatever a launcher has kept of them."""
    return _votes.meeting


def _key(*parts: object) -> str:
    """Names an entry of the store of the job."""
    return "/".join(map(str, ("self_healing", _votes.meeting, *parts)))


class Collectives:
    """Counts collectives. A step asks a dozen times: groups are asked for their backends once."""

    def __init__(self) -> None:
        self._groups: list[Any] = []
        self._backends: list[Any] = []

    def begun(self) -> int | None:
        """
        Counts the collectives that this process has begun, in all process groups; `None` where a backend does not
        count them (MPI).
        """
        groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
        try:
            if groups != self._groups:
                # torch 2.13: asked by itself, a group counts those of one of its backends.
                of_groups = ({group._get_backend(device) for device in group._device_types} for group in groups)
                self._groups, self._backends = groups, [each for backends in of_groups for each in backends]
            count = 0
            for backend in self._backends:
                count += backend._get_sequence_number_for_group()
        except (AttributeError, RuntimeError, TypeError):
            return None
        return count


def collectives_begun() -> int | None:
    """As [`Collectives.begun`], for what is asked rarely."""
    return Collectives().begun()


# ---- the ballot ----


def votes_cast() -> tuple[int, str]:
    """Number of votes this process has taken part in, and the question of the last one."""
    return _votes.count, _votes.last


def _answer(value: Any) -> Any:
    return value() if callable(value) else value


@lru_cache(maxsize=256)
def _number_of(question: str) -> int:
    return zlib.crc32(question.encode()) % _QUESTIONS


def _named(question: str) -> tuple[int, int, int]:
    """
    Gives what names a question in a ballot: its number, and the square of that in two parts, so that sums are exact.
    Numbers whose sum and whose squares' sum are those of as many equal ones are all equal, however many they are.
    """
    number = _number_of(question)
    return (number, *divmod(number**2, _QUESTIONS))


@lru_cache(maxsize=256)
def _blank(question: str, device: torch.device) -> torch.Tensor:
    return torch.tensor([*_named(question), *[0.0] * (BALLOT - _FAILED)], device=device)


def _ballot(
    question: str, answers: _Answers, device: torch.device, failed: bool = False, raised: bool = False
) -> torch.Tensor:
    if len(answers) > _ANSWERS:
        raise ValueError(f"{question!r} has {len(answers)} answers; a ballot holds {_ANSWERS}")
    if isinstance(answers, torch.Tensor) and device.type != "cpu":
        # Without a look from the host, for which it would have to wait.
        ballot = _blank(question, device).clone()
        ballot[_FIRST_ANSWER : _FIRST_ANSWER + len(answers)] = answers
        return ballot
    given = answers.tolist() if isinstance(answers, torch.Tensor) else answers
    blank = [0.0] * (_ANSWERS - len(given))
    # A fifth of the time of `torch.tensor`, and as that an Inf of what is too large for single precision.
    numbers = array("f", (*_named(question), failed, raised, *given, *blank))
    return torch.frombuffer(numbers, dtype=torch.float32).to(device)


def _cast(question: str, ballot: torch.Tensor) -> list[float]:
    _votes.count, _votes.last = _votes.count + 1, question
    with _inside():
        dist.all_reduce(ballot)
        found: list[float] = ballot.tolist()
    if found[_FAILED] > 0:
        raise RankFailed(f"{question}: code of self_healing has failed on a rank, whose log says how")
    if found[_RAISED] > 0:
        raise RankRaised(f"{question}: the training code has raised on a rank")
    # Where ranks ask different questions, these are the sums that none of them expects.
    number, chunks, rest = found[_QUESTION]
    expected = world_size() * _number_of(question), world_size() * _number_of(question) ** 2
    if (number, chunks * _QUESTIONS + rest) != expected:
        raise RanksDisagree(f"{question}: other ranks are in another vote")
    return found[_FIRST_ANSWER:]
