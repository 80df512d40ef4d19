"""Exceptions are told apart by type first."""

from __future__ import annotations

import errno
import importlib
import socket
import ssl
import subprocess
import urllib.error
from collections.abc import Callable
from email.message import Message
from typing import Any

import httpx
import pytest
import torch
from conftest import Unspeakable
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from torch.distributed import DistBackendError

from self_healing import FAILURE_RECIPES, Action, FailureType, classify_exception
from self_healing.failures.classify import describe_exception, http_status, is_nonfinite_exception


def http_error(status: int) -> HfHubHTTPError:
    request = httpx.Request("GET", "http://127.0.0.1/model")
    return HfHubHTTPError("hub", response=httpx.Response(status, request=request))


def caused_by(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


# httpx, or httpx2 from huggingface_hub 2.0 on.
HUBS_CLIENT = importlib.import_module(HfHubHTTPError.__mro__[1].__module__.partition(".")[0])
# As the storage of the Hub (hf_xet) begins what it says.
XET = "Data processing error: CAS service error : "


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), FailureType.OUT_OF_MEMORY),
        (MemoryError(), FailureType.OUT_OF_MEMORY),
        (
            RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":830'),
            FailureType.OUT_OF_MEMORY,
        ),
        (RuntimeError("CUDA error: out of memory"), FailureType.OUT_OF_MEMORY),
        (RuntimeError("CUDA driver error: out of memory"), FailureType.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), FailureType.OUT_OF_MEMORY),
        (RuntimeError("NCCL Error 1: Cuda failure 2 'out of memory'"), FailureType.OUT_OF_MEMORY),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), FailureType.OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate"), FailureType.OUT_OF_MEMORY),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
            FailureType.OUT_OF_MEMORY,
        ),
        (torch.OutOfMemoryError("HIP out of memory. Tried to allocate 20.00 MiB"), FailureType.OUT_OF_MEMORY),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9.1 GB)"), FailureType.OUT_OF_MEMORY),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), FailureType.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: device-side assert triggered"), FailureType.DEVICE),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), FailureType.DEVICE),
        (ConnectionError("x"), FailureType.NETWORK),
        (ConnectionResetError(errno.ECONNRESET, "x"), FailureType.NETWORK),
        (BrokenPipeError(errno.EPIPE, "x"), FailureType.NETWORK),
        (TimeoutError("x"), FailureType.NETWORK),
        (socket.gaierror(socket.EAI_AGAIN, "x"), FailureType.NETWORK),
        (OSError(errno.ENETUNREACH, "x"), FailureType.NETWORK),
        (urllib.error.URLError("x"), FailureType.NETWORK),
        (httpx.ConnectTimeout("x"), FailureType.NETWORK),
        (httpx.RemoteProtocolError("x"), FailureType.NETWORK),
        (HUBS_CLIENT.ConnectError("x"), FailureType.NETWORK),
        (RuntimeError(XET + "ReqwestMiddleware Error: Request failed after 5 retries"), FailureType.NETWORK),
        (RuntimeError(XET + "Reqwest Error: error decoding response body, domain: no-url"), FailureType.NETWORK),
        (
            RuntimeError(XET + "Reqwest Error: HTTP status server error (502 Bad Gateway), domain: x"),
            FailureType.NETWORK,
        ),
        (
            RuntimeError("Task error: File reconstruction error: CAS Client Error: Request middleware error: x"),
            FailureType.NETWORK,
        ),
        (
            RuntimeError(f"Caught RuntimeError in DataLoader worker process 0.\nRuntimeError: {XET}Connection reset"),
            FailureType.NETWORK,
        ),
        (caused_by(OSError("Can't load the model"), RuntimeError(XET + "Request failed")), FailureType.NETWORK),
        # It writes what it fetches, and is refused like anybody else.
        (RuntimeError(XET + "IO Error: No space left on device (os error 28)"), FailureType.DISK),
        (
            RuntimeError("Data processing error: File reconstruction error: IO Error: x (os error 122)"),
            FailureType.DISK,
        ),
        (RuntimeError(XET + "IO Error: Permission denied (os error 13)"), FailureType.USER_CODE),
        (RuntimeError(XET + "Reqwest Error: HTTP status client error (401 Unauthorized), x"), FailureType.USER_CODE),
        (ConnectionError("Network error: HTTP status client error (404 Not Found), domain: x"), FailureType.USER_CODE),
        (ConnectionError("Rate limited: HTTP status client error (429 Too Many Requests), x"), FailureType.NETWORK),
        (http_error(503), FailureType.NETWORK),
        (http_error(429), FailureType.NETWORK),
        (http_error(404), FailureType.USER_CODE),
        (http_error(401), FailureType.USER_CODE),
        (urllib.error.HTTPError("u", 502, "m", Message(), None), FailureType.NETWORK),
        (urllib.error.HTTPError("u", 403, "m", Message(), None), FailureType.USER_CODE),
        (ssl.SSLEOFError(8, "x"), FailureType.NETWORK),
        (ssl.SSLZeroReturnError(6, "x"), FailureType.NETWORK),
        (ssl.SSLSyscallError(5, "x"), FailureType.NETWORK),
        (ssl.SSLError(1, "[SSL: UNEXPECTED_EOF] EOF occurred in violation of protocol"), FailureType.NETWORK),
        (ssl.SSLCertVerificationError(1, "self-signed certificate"), FailureType.USER_CODE),
        (subprocess.TimeoutExpired("curl", 5), FailureType.NETWORK),
        (ExceptionGroup("x", [ConnectionError("a"), ExceptionGroup("y", [TimeoutError("b")])]), FailureType.NETWORK),
        (ExceptionGroup("x", [ConnectionError("a"), ValueError("b")]), FailureType.USER_CODE),
        (OfflineModeIsEnabled("x"), FailureType.USER_CODE),
        (OSError(errno.ENOSPC, "x"), FailureType.DISK),
        (OSError(errno.EIO, "x"), FailureType.DISK),
        (FileNotFoundError(errno.ENOENT, "x"), FailureType.USER_CODE),
        (ValueError("connection error: out of memory"), FailureType.USER_CODE),
        (RuntimeError("shape mismatch"), FailureType.USER_CODE),
        # Where one process trains alone, there is no other one to be gone.
        (DistBackendError("NCCL error: remote process exited or there was a network error"), FailureType.USER_CODE),
        (caused_by(RuntimeError("dataset failed"), ConnectionError("x")), FailureType.NETWORK),
        (
            RuntimeError("Caught HfHubHTTPError in DataLoader worker process 0.\n503 Server Error: x"),
            FailureType.NETWORK,
        ),
        (
            RuntimeError("Caught HfHubHTTPError in DataLoader worker process 0.\n404 Client Error: x"),
            FailureType.USER_CODE,
        ),
        (KeyboardInterrupt(), FailureType.INTERRUPTED),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_an_exception_is_classified(error: BaseException, failure: FailureType) -> None:
    assert classify_exception(error) is failure


# `cudaGetErrorString` of what no process gets over, says the CUDA documentation, and of what else the device fails in.
LOST_CONTEXTS = [
    "an illegal memory access was encountered",
    "the launch timed out and was terminated",
    "context is destroyed",
    "device-side assert triggered",
    "hardware stack error",
    "an illegal instruction was encountered",
    "misaligned address",
    "operation not supported on global/shared address space",
    "invalid program counter",
    "unspecified launch failure",
    "unspecified launch failure in prior launch",
    "tensor memory not completely freed",
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error detected during the execution",
    "Invalid access of peer GPU memory over nvlink or a hardware error",
    "an async error has occured in external entity outside of CUDA",
    "the remote procedural call between the MPS server and the MPS client failed",
    "the MPS client has been terminated by the server",
]
FAILED_CALLS = [
    "unknown error",
    "initialization error",
    "driver shutting down",
    "CUDA-capable device(s) is/are busy or unavailable",
    "no CUDA-capable device is detected",
    "invalid device context",
    "device not ready",
    "invalid resource handle",
    "system not yet initialized",
]
# What c10_cuda_check_implementation adds.
HELP = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions.\n"
)
NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, "
UNHANDLED = (
    f"{NCCL}unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)
GEMM = "when calling `cublasGemmEx( handle, opa, opb, m, n, k, &falpha, a, CUDA_R_16BF, lda)`"
accelerator_error = pytest.param(
    getattr(torch, "AcceleratorError", None),
    marks=pytest.mark.skipif(not hasattr(torch, "AcceleratorError"), reason="torch 2.8 is the first to have it"),
    id="AcceleratorError",
)


@pytest.mark.parametrize("kind", [pytest.param(RuntimeError, id="RuntimeError"), accelerator_error])
@pytest.mark.parametrize("said", [*LOST_CONTEXTS, *FAILED_CALLS])
def test_what_cuda_says_of_a_failed_device_is_understood(said: str, kind: type[Exception]) -> None:
    assert classify_exception(kind(f"CUDA error: {said}{HELP}")) is FailureType.DEVICE


@pytest.mark.parametrize("said", LOST_CONTEXTS)
@pytest.mark.parametrize(
    "text",
    [
        "HIP error: {}",
        "CUDA driver error: {}",
        "Triton Error [CUDA]: {}",
        "CUDA error (/build/flash_fwd_launch_template.h:188): {}",
        UNHANDLED + "Cuda failure 700 '{}'",
        "CUDA error: {}; an earlier call had said that it was out of memory",
    ],
)
def test_a_lost_context_is_understood_whoever_tells_of_it(text: str, said: str) -> None:
    assert classify_exception(RuntimeError(text.format(said))) is FailureType.DEVICE


@pytest.mark.parametrize(
    "text",
    [
        f"CUDA error: CUBLAS_STATUS_EXECUTION_FAILED {GEMM}",
        f"CUDA error: CUBLAS_STATUS_INTERNAL_ERROR {GEMM}",
        f"CUDA error: CUBLAS_STATUS_MAPPING_ERROR {GEMM}",
        f"CUDA error: HIPBLAS_STATUS_EXECUTION_FAILED {GEMM}",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED_CUDART",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
        "cusolver error: CUSOLVER_STATUS_EXECUTION_FAILED, when calling `cusolverDnSsyevd(handle)`",
        "CUDA driver error: unknown error",
        f"{UNHANDLED}Cuda failure 'unknown error'",
        f"{NCCL}unhandled cuda error, NCCL version 2.18.1\nLast error:\nCuda failure 1 'invalid argument'",
        "[Rank 1] NCCL communicator was aborted on rank 1. Original reason for failure was: NCCL error",
    ],
)
def test_what_the_libraries_of_a_failed_device_say_is_understood(text: str) -> None:
    assert classify_exception(RuntimeError(text)) is FailureType.DEVICE
    assert classify_exception(DistBackendError(text)) is FailureType.DEVICE


@pytest.mark.parametrize(
    "text",
    [
        f"CUDA error: out of memory{HELP}",
        "CUDA driver error: out of memory",
        "HIP error: out of memory",
        "Triton Error [CUDA]: out of memory",
        f"CUDA error: CUBLAS_STATUS_ALLOC_FAILED {GEMM}",
        f"CUDA error: CUBLAS_STATUS_NOT_INITIALIZED {GEMM}",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasLtCreate(handle)`",
        f"CUDA error: HIPBLAS_STATUS_ALLOC_FAILED {GEMM}",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
        "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`",
        f"{UNHANDLED}Cuda failure 2 'out of memory'",
    ],
)
def test_a_library_without_memory_is_not_a_failed_device(text: str) -> None:
    assert classify_exception(RuntimeError(text)) is FailureType.OUT_OF_MEMORY


def test_memory_that_ran_out_has_the_type_of_a_failed_device_and_is_none() -> None:
    error = getattr(torch, "AcceleratorError", RuntimeError)(f"CUDA error: out of memory{HELP}")
    assert classify_exception(error) is FailureType.OUT_OF_MEMORY


@pytest.mark.parametrize(
    "text",
    [
        f"CUDA error: CUBLAS_STATUS_INVALID_VALUE {GEMM}",
        f"CUDA error: CUBLAS_STATUS_NOT_SUPPORTED {GEMM}",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
        "cuDNN error: CUDNN_STATUS_BAD_PARAM",
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
        "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, use the 'spawn' method",
        f"Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback:\nCUDA error: unknown error{HELP}",
        "Caught AcceleratorError in DataLoader worker process 0.\nCUDA error: misaligned address",
    ],
)
def test_a_wrong_call_and_a_workers_own_device_are_no_failed_device(text: str) -> None:
    assert classify_exception(RuntimeError(text)) is FailureType.USER_CODE


def test_causes_that_form_a_circle_are_followed_once() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert classify_exception(first) is FailureType.USER_CODE


def test_an_exception_in_a_group_that_came_from_the_group_is_followed_once() -> None:
    inner = ValueError("a")
    group = ExceptionGroup("b", [inner])
    inner.__cause__ = group
    assert classify_exception(group) is FailureType.USER_CODE


def test_an_exception_that_cannot_be_put_into_words_is_classified_all_the_same() -> None:
    assert classify_exception(Unspeakable()) is FailureType.USER_CODE
    assert classify_exception(caused_by(Unspeakable(), ConnectionError("x"))) is FailureType.NETWORK
    assert http_status(Unspeakable()) is None
    assert describe_exception(Unspeakable()) == "Unspeakable: (no message: its __str__ raises ValueError)"


def test_an_exception_without_a_text_is_its_type() -> None:
    assert describe_exception(KeyboardInterrupt()) == "KeyboardInterrupt"


def raised_through(calls: list[tuple[str, str]], error: BaseException) -> BaseException:
    """An exception whose traceback goes through functions of modules by these names."""

    def fail() -> None:
        raise error

    call: Callable[[], None] = fail
    for module, name in reversed(calls):
        scope: dict[str, Any] = {"__name__": module, "call": call}
        exec(f"def {name}(): call()", scope)
        call = scope[name]
    try:
        call()
    except BaseException as raised:
        return raised
    raise AssertionError


@pytest.mark.parametrize(
    ("module", "error"),
    [
        ("multiprocessing.connection", ConnectionResetError(errno.ECONNRESET, "x")),
        ("multiprocessing.connection", EOFError()),
        ("torch.multiprocessing.reductions", FileNotFoundError(errno.ENOENT, "x")),
    ],
)
def test_what_a_dying_data_loader_worker_leaves_is_told_from_the_network(module: str, error: Exception) -> None:
    fetching = ("torch.utils.data.dataloader", "_try_get_data")
    raised = raised_through([fetching, (module, "recv")], error)
    assert classify_exception(raised) is FailureType.PROCESS_DIED
    assert describe_exception(raised).endswith("(a DataLoader worker is gone)")
    # The same in code of the user, which has processes of its own.
    elsewhere = raised_through([(module, "recv")], type(error)(*error.args))
    assert classify_exception(elsewhere) is not FailureType.PROCESS_DIED
    assert "DataLoader" not in describe_exception(elsewhere)


def test_every_failure_has_a_recipe_that_ends_or_heals() -> None:
    assert set(FAILURE_RECIPES) == set(FailureType)
    # A spike passes or becomes a divergence; that nothing is learned, that the data are harder, that a copy of the
    # weights is not finite, is told, and is no reason to end a run.
    watched = {
        FailureType.LOSS_SPIKE,
        FailureType.VANISHING_GRADIENT,
        FailureType.NEVER_LEARNED,
        FailureType.SLOW_RISE,
        FailureType.HARDER_DATA,
        FailureType.PLATEAU,
        FailureType.REPORTING,
        FailureType.PREEMPTED,
        FailureType.CORRUPTED_COPY,
    }
    for failure, recipe in FAILURE_RECIPES.items():
        assert failure in watched or recipe.ladder[-1] in (Action.STOP, Action.USE_REEXECUTED_STEP)
        assert recipe.diagnosis
        assert recipe.advice


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("probability tensor contains either `inf`, `nan` or element < 0"), True),
        (RuntimeError("Function 'MulBackward0' returned nan values in its 0th output."), True),
        (FloatingPointError("overflow"), True),
        (ValueError("probability tensor contains either `inf`, `nan` or element < 0"), False),
        (RuntimeError("nan"), False),
    ],
)
def test_an_exception_that_only_says_nan_is_known(error: Exception, expected: bool) -> None:
    assert is_nonfinite_exception(error) is expected
