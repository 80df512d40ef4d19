"""From an exception to its failure, and from its text to a known cause and cure."""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import re
import socket
import ssl
import tomllib
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
import torch.distributed as dist

from ..system import processes
from . import recipes
from .recipes import FailureType, Interruption, text_of


logger = logging.getLogger(__name__)


# ---- classify ----


# Named, not imported: none of these libraries is a dependency, and an exception of theirs can only arrive
# where the library is installed.
_NETWORK_TYPES = frozenset(
    {
        "requests.exceptions.ConnectionError",
        "requests.exceptions.Timeout",
        "requests.exceptions.ChunkedEncodingError",
        "requests.exceptions.RetryError",
        "urllib3.exceptions.HTTPError",
        "urllib.error.URLError",
        "http.client.HTTPException",
        "httpx.TransportError",
        "httpx2.TransportError",
        "httpcore.NetworkError",
        "httpcore.TimeoutException",
        "aiohttp.client_exceptions.ClientConnectionError",
        "aiohttp.client_exceptions.ServerTimeoutError",
        "aiohttp.client_exceptions.ClientPayloadError",
        "botocore.exceptions.ConnectionError",
        "botocore.exceptions.HTTPClientError",
        "google.api_core.exceptions.RetryError",
        "grpc.RpcError",
        "openai.APIConnectionError",
        "subprocess.TimeoutExpired",
    }
)
# Connection errors by inheritance that waiting does not cure.
_PERMANENT_TYPES = frozenset({"huggingface_hub.errors.OfflineModeIsEnabled"})
_NETWORK_ERRNOS = frozenset(
    {
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ETIMEDOUT,
        errno.EPIPE,
    }
)
_DISK_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG})
# Of a data loader. That it was killed is most often seen when a signal arrives, else while its batch is waited for.
# The thread that pins memory ends where a worker dies while it hands over a batch.
_DEAD_WORKER = re.compile(
    r"^DataLoader worker \(pid.*(?:exited unexpectedly|is killed by signal)|^Pin memory thread exited unexpectedly"
)
# How torch passes on what was raised in one.
_IN_A_WORKER = re.compile(r"Caught (\w+) in DataLoader worker")
# The answer of a server in the words of hf_xet, and in those of an exception that torch cannot make again.
_SAID_STATUS = re.compile(
    r"(?s)HTTP status (?:client|server) error \((\d{3})"
    r"|Caught \w+ in DataLoader worker.*?(?:\b(\d{3}) (?:Client|Server) Error|\bHTTP Error (\d{3}))\b"
)
# Modules through which a batch comes from a data loader worker.
_HANDING_OVER = frozenset({"multiprocessing.connection", "torch.multiprocessing.reductions"})
# gloo raises a bare RuntimeError that names its source.
_GLOO_SOURCE = "gloo/transport/"
# What the processes that are left say of one that is gone.
_GONE_PEER_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection was likely closed",
    "Broken pipe",
    "remote process exit",
)
# safetensors and torch write through code that knows no error numbers.
_DISK_TEXTS = (
    ". unexpected pos ",
    "PytorchStreamWriter failed writing",
    "basic_ios::clear: iostream error",
    "write(): fd ",
)
# How Rust puts an error of the system. tokenizers (0.22) raises it as a bare `Exception`, with no number of its own;
# hf_xet, the storage of the Hub, as a `RuntimeError`.
_RUST_ERRNO = re.compile(r"\(os error (\d+)\)")
_XET_TEXTS = ("CAS service error", "CAS Client Error")
# As torch has it where it cannot open a file to write to.
_UNOPENED_TEXTS = ("open file failed with strerror", "Parent directory ")
# Where a file is written; anywhere else they are a mistake in the user's code.
_FORBIDDEN_ERRNOS = frozenset({errno.EACCES, errno.EPERM})
# RFC 9110 and RFC 6585: request timeout, too early, too many requests; every 5xx but "not implemented" may pass.
_RETRYABLE_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
# Statuses of cuBLAS, cuDNN and their like are said by name: of memory they could not get, and of a handle that could
# not be made, which is for lack of memory as well.
_OUT_OF_MEMORY = re.compile(
    r"out of memory"
    # Where the driver is asked how much is left, for the message, and has none for the answer (pytorch#112377).
    r"|NVML_SUCCESS == r INTERNAL ASSERT FAILED at .*CUDACachingAllocator"
    r"|[A-Z]_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)"
    r"|(?:HOST|DEVICE)_ALLOCATION_FAILED"
    r"|CUFFT_ALLOC_FAILED"
    r"|when calling `cusolverDnCreate"
    r"|Cannot allocate memory"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory"
    r"|RESOURCE_EXHAUSTED: "
)
# What is said of a context that is lost (cudaGetErrorString; AMD uses the same words), by torch, NCCL, Triton or an
# extension alike. Every later call fails with it, one for memory as well.
_LOST_CONTEXT = re.compile(
    # Torch ends what it says of any CUDA error with how to "enable device-side assertions".
    r"device-side assert\b"
    r"|illegal memory access"
    r"|illegal instruction was encountered"
    r"|misaligned address"
    r"|unspecified launch failure"
    r"|launch timed out and was terminated"
    r"|hardware stack error"
    r"|invalid program counter"
    r"|operation not supported on global/shared address space"
    r"|tensor memory not completely freed"
    r"|uncorrectable (?:ECC|NVLink)"
    r"|peer GPU memory over nvlink or a hardware error"
    r"|async error has occurr?ed in external entity"
    r"|context is destroyed"
    r"|MPS client has been terminated|between the MPS server and the MPS client failed"
    r"|NCCL communicator was aborted"
)
# What else the device is said to have failed in. Before torch 2.8 there is no type for it, only "CUDA error: ...";
# that of a library names the status and the call, and may as well be about arguments.
_FAILED_DEVICE = re.compile(
    r"\b(?:CUDA|HIP)(?: driver)? error: (?!.* when calling `)"
    r"|(?:BLAS|DNN|SOLVER|SPARSE)_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)"
    r"|unhandled cuda error"
)
_ACCELERATOR_ERROR: type[BaseException] | None = getattr(torch, "AcceleratorError", None)
_NONFINITE_TEXTS = (
    # torch.multinomial on NaN logits: how a NaN in a policy surfaces while it generates.
    "probability tensor contains either `inf`, `nan` or element < 0",
    # torch.autograd.set_detect_anomaly(True)
    "returned nan values in its",
)


def describe_exception(error: BaseException) -> str:
    """Returns type and message of an exception; a `KeyboardInterrupt` has no message."""
    text = text_of(error)
    described = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, OSError | EOFError) and _comes_from_a_dying_worker(error):
        # A connection that is reset, or a file that is not found, sends people to the network and to the disk.
        return f"{described} (a DataLoader worker is gone)"
    return described


def add_note(error: BaseException, note: str) -> None:
    """Adds a line to the traceback of an exception; one that cannot take it stays as it is."""
    try:
        error.add_note(note)
    except Exception:
        logger.warning("%s (%s takes no note.)", note, type(error).__name__)


_IN_BETWEEN = ("self_healing", "tenacity")


def drop_own_frames(error: BaseException) -> None:
    """Takes what lies in between, ours and that of retries, out of the traceback of an error that others raised."""
    chain = [*causes_of(error, shown=True)]
    if recipes.HealingFailed in map(type, chain):
        return
    for each in chain:
        kept, entry, last = list[types.TracebackType](), each.__traceback__, None
        while entry is not None:
            if str(entry.tb_frame.f_globals.get("__name__")).partition(".")[0] not in _IN_BETWEEN:
                kept.append(entry)
            last, entry = entry, entry.tb_next
        # One that we have raised is ours, and left whole.
        if kept and kept[-1] is last:
            for entry, following in zip(kept, [*kept[1:], None], strict=True):
                entry.tb_next = following
            each.__traceback__ = kept[0]


def attribute_of(holder: Any, name: str) -> Any:
    """Reads an attribute of an exception or of what it carries; `None` also where a property raises."""
    try:
        return getattr(holder, name, None)
    except Exception:
        return None


def is_error(error: BaseException) -> bool:
    """Whether an exception is an error of the code it comes from, and not a request to end."""
    return isinstance(error, Exception | asyncio.CancelledError) or type(error).__name__ == "PanicException"


def is_nonfinite_exception(error: BaseException) -> bool:
    """Whether an exception only says that a number was NaN or infinite."""
    if isinstance(error, FloatingPointError):
        return True
    return isinstance(error, RuntimeError) and any(text in text_of(error) for text in _NONFINITE_TEXTS)


def classify_exception(error: BaseException) -> FailureType:
    """
    Tells what kind of failure an exception is: by its type, then by its error number or HTTP status, and by its text
    only where a library raises nothing more specific than a `RuntimeError`.

    An exception raised `from` another one that is understood counts as that one.
    """
    for each in causes_of(error):
        failure = _classify_one(each)
        if failure is not None:
            return failure
    return FailureType.USER_CODE


def causes_of(error: BaseException | None, shown: bool = False) -> Iterator[BaseException]:
    """Gives an exception and those that it was raised from; or all that are `shown` before it by Python."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        context = error.__context__ if shown and not error.__suppress_context__ else None
        error = error.__cause__ or context


def _classify_one(error: BaseException) -> FailureType | None:
    if isinstance(error, Interruption):
        return error.failure
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return FailureType.INTERRUPTED
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return FailureType.OUT_OF_MEMORY
    status = http_status(error)
    if status is not None:
        return FailureType.NETWORK if status in _RETRYABLE_STATUS else None
    if isinstance(error, (OSError, EOFError)) and _comes_from_a_dying_worker(error):
        return FailureType.PROCESS_DIED
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(error).__mro__}
    if names & _PERMANENT_TYPES:
        return None
    if isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)) or names & _NETWORK_TYPES:
        return FailureType.NETWORK
    if isinstance(error, ssl.SSLError):
        # Its numbers are not those of the operating system: 5 is a connection that was cut off, not a broken disk.
        lost = isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError))
        return FailureType.NETWORK if lost or "EOF occurred" in text_of(error) else None
    if isinstance(error, OSError) and error.errno in _NETWORK_ERRNOS:
        return FailureType.NETWORK
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return FailureType.OUT_OF_MEMORY
    if isinstance(error, RuntimeError):
        text = text_of(error)
        failure = _classify_device_error(error, text)
        if failure is not None:
            return failure
        # Because another process of the job is not there any more.
        gone = comes_from_a_collective(error) and any(marker in text for marker in _GONE_PEER_TEXTS)
        if _DEAD_WORKER.search(text) or (gone and processes.world_size() > 1):
            return FailureType.PROCESS_DIED
        number = _errno_of(error)
        if any(marker in text for marker in _DISK_TEXTS) or number in _DISK_ERRNOS:
            return FailureType.DISK
        if any(marker in text for marker in _XET_TEXTS) and number in {None, *_NETWORK_ERRNOS}:
            return FailureType.NETWORK
        return _classify_worker_report(text)
    if "safetensors._safetensors_rust.SafetensorError" in names and "I/O error" in text_of(error):
        return FailureType.DISK
    return FailureType.DISK if _errno_of(error) in _DISK_ERRNOS else None


def _errno_of(error: BaseException) -> int | None:
    """Returns the number of the system's error that an exception stands for, one of a library in Rust included."""
    if isinstance(error, OSError):
        return error.errno
    said = _RUST_ERRNO.search(text_of(error)) if type(error) in (Exception, RuntimeError) else None
    return None if said is None else int(said.group(1))


def _classify_device_error(error: RuntimeError, text: str) -> FailureType | None:
    """Classifies an error of the accelerator; `None` if it is none."""
    # A data loader worker has a context of its own, or none: what it says of one is a mistake in the code it runs.
    elsewhere = _IN_A_WORKER.match(text) is not None
    if not elsewhere and _LOST_CONTEXT.search(text):
        return FailureType.DEVICE
    if _OUT_OF_MEMORY.search(text):
        return FailureType.OUT_OF_MEMORY
    if elsewhere:
        return None
    typed = _ACCELERATOR_ERROR is not None and isinstance(error, _ACCELERATOR_ERROR)
    return FailureType.DEVICE if typed or _FAILED_DEVICE.search(text) else None


def _comes_from_a_dying_worker(error: BaseException) -> bool:
    """
    Whether an exception was raised while a batch was taken over from a data loader worker: its end of the connection,
    or the memory it shared, is gone, and torch has not yet seen that the worker is.
    """
    fetching = False
    trace = error.__traceback__
    while trace is not None:
        code, trace = trace.tb_frame, trace.tb_next
        module = code.f_globals.get("__name__")
        if fetching and module in _HANDING_OVER:
            return True
        fetching |= module == "torch.utils.data.dataloader" and code.f_code.co_name == "_try_get_data"
    return False


def comes_from_a_collective(error: BaseException) -> bool:
    """Whether an exception was raised by a collective: because of another process, most often."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _GLOO_SOURCE in text_of(error))


def could_not_be_written(error: BaseException) -> bool:
    """Whether an exception that was raised while a checkpoint was written comes from the disk, and not from code."""
    forbidden = any(_errno_of(each) in _FORBIDDEN_ERRNOS for each in causes_of(error))
    return forbidden or classify_exception(error) is FailureType.DISK


def costs_its_save(error: BaseException) -> bool:
    """Whether an exception that left the Trainer's save is an error of the system, whichever, or raised from one."""
    if any(isinstance(each, recipes.Stranded) for each in causes_of(error)):
        return False
    return could_not_be_written(error) or any(
        isinstance(each, OSError)
        or _errno_of(each) is not None
        or (isinstance(each, RuntimeError) and any(text in text_of(each) for text in _UNOPENED_TEXTS))
        for each in causes_of(error)
    )


def _classify_worker_report(text: str) -> FailureType | None:
    """Classifies an exception that torch cannot make again and a data loader worker reports as text."""
    caught = _IN_A_WORKER.search(text)
    if caught is None:
        return None
    names = {name.rsplit(".", 1)[-1] for name in _NETWORK_TYPES}
    return FailureType.NETWORK if caught.group(1) in names else None


def http_status(error: BaseException) -> int | None:
    """
    Returns the status of the response that an HTTP exception carries (requests, httpx, huggingface_hub, urllib,
    aiohttp, openai), or that TRL's client of a vLLM server or hf_xet has put into its message.
    """
    if type(error) is Exception and (said := re.match(r"Request failed: (\d{3})\b", text_of(error))):
        return int(said.group(1))
    if type(error) in (RuntimeError, ConnectionError) and (said := _SAID_STATUS.search(text_of(error))):
        return int(next(filter(None, said.groups())))
    response = attribute_of(error, "response")
    for holder, names in ((response, ("status_code", "status")), (error, ("status_code", "status", "code"))):
        for name in names:
            value = attribute_of(holder, name)
            if isinstance(value, int) and 100 <= value < 600:
                return value
    return None


# ---- known errors ----


# Of the text of an exception that is searched: some carry whole tensors.
_LONGEST = 50_000


@dataclass(frozen=True, slots=True)
class KnownError:
    """One row of the table."""

    name: str
    cause: str
    fix: str
    reference: str | None = None
    pattern: re.Pattern[str] | None = None
    exit_codes: frozenset[int] = frozenset()


@functools.cache
def known_errors() -> tuple[KnownError, ...]:
    """Returns all rows of the table, in the order they are tried."""
    text = resources.files(__package__).joinpath("known_errors.toml").read_text(encoding="utf-8")
    found = []
    for name, row in tomllib.loads(text).items():
        pattern = re.compile(row.pop("pattern"), re.DOTALL) if "pattern" in row else None
        found.append(KnownError(name, pattern=pattern, exit_codes=frozenset(row.pop("exit_codes", ())), **row))
    return tuple(found)


def match_known_error(
    error: BaseException | None, exit_code: int | None = None, trained: str = ""
) -> KnownError | None:
    """
    Looks an error up; the first row that matches wins. Never raises.

    The exception's own words are looked up first, with its type and notes, then those of the exceptions it came from;
    one out of a data loader worker carries the traceback there in its text. The lines of code of the traceback here
    are not searched: they quote messages that were never raised.

    Args:
        error (`BaseException`, *optional*):
            The exception.
        exit_code (`int`, *optional*):
            Exit code of the process: negative for a signal, as Python and torchrun tell it, or above 128, as a
            shell does.
        trained (`str`, *optional*):
            What is trained, for rows that are not for all: `"[objective sft]"`, with `"[taken away: 'text']"`.

    Example:

    ```python
    >>> match_known_error(None, exit_code=-9).name
    'killed'
    ```
    """
    try:
        # With notes, as Python prints it; the type with its module, which tells what torch.compile raises.
        shown = map(traceback.format_exception_only, causes_of(error, shown=True))
        texts = ["".join(lines)[:_LONGEST] for lines in shown]
    except Exception:
        # Its own `__str__` raises, for one.
        texts = []
    for text in texts:
        for row in known_errors():
            if row.pattern is not None and row.pattern.search(text + trained):
                return row
    return next((row for row in known_errors() if exit_code in row.exit_codes), None)
