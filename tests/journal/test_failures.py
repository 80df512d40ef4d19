"""Exceptions are told apart by type first."""

from __future__ import annotations

import errno
import importlib
import socket
import ssl
import subprocess
import urllib.error
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch
from conftest import Unspeakable
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from torch.distributed import DistBackendError

from self_healing import FAILURE_RECIPES, FailureType, classify_exception
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
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), FailureType.OUT_OF_MEMORY),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), FailureType.OUT_OF_MEMORY),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9.1 GB)"), FailureType.OUT_OF_MEMORY),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), FailureType.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: device-side assert triggered"), FailureType.DEVICE),
        (ConnectionError("x"), FailureType.NETWORK),
        (TimeoutError("x"), FailureType.NETWORK),
        (socket.gaierror(socket.EAI_AGAIN, "x"), FailureType.NETWORK),
        (urllib.error.URLError("x"), FailureType.NETWORK),
        (httpx.ConnectTimeout("x"), FailureType.NETWORK),
        (HUBS_CLIENT.ConnectError("x"), FailureType.NETWORK),
        (RuntimeError(XET + "ReqwestMiddleware Error: Request failed after 5 retries"), FailureType.NETWORK),
        (
            RuntimeError(f"Caught RuntimeError in DataLoader worker process 0.\nRuntimeError: {XET}Connection reset"),
            FailureType.NETWORK,
        ),
        (caused_by(OSError("Can't load the model"), RuntimeError(XET + "Request failed")), FailureType.NETWORK),
        # It writes what it fetches, and is refused like anybody else.
        (RuntimeError(XET + "IO Error: No space left on device (os error 28)"), FailureType.DISK),
        (RuntimeError(XET + "Reqwest Error: HTTP status client error (401 Unauthorized), x"), FailureType.USER_CODE),
        (ConnectionError("Network error: HTTP status client error (404 Not Found), domain: x"), FailureType.USER_CODE),
        (ConnectionError("Rate limited: HTTP status client error (429 Too Many Requests), x"), FailureType.NETWORK),
        (http_error(503), FailureType.NETWORK),
        (http_error(404), FailureType.USER_CODE),
        (ssl.SSLEOFError(8, "x"), FailureType.NETWORK),
        (ssl.SSLError(1, "[SSL: UNEXPECTED_EOF] EOF occurred in violation of protocol"), FailureType.NETWORK),
        (ssl.SSLCertVerificationError(1, "self-signed certificate"), FailureType.USER_CODE),
        (subprocess.TimeoutExpired("curl", 5), FailureType.NETWORK),
        (OfflineModeIsEnabled("x"), FailureType.USER_CODE),
        (OSError(errno.ENOSPC, "x"), FailureType.DISK),
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


# What c10_cuda_check_implementation adds.
HELP = "\nCUDA kernel errors might be asynchronously reported.\nCompile with `TORCH_USE_CUDA_DSA`.\n"
UNHANDLED = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.27.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)
GEMM = "when calling `cublasGemmEx( handle, opa, opb, m, n, k, &falpha, a, CUDA_R_16BF, lda)`"
SAID = {
    FailureType.DEVICE: [
        # `cudaGetErrorString` of what no process gets over, and of what else the device fails in.
        f"CUDA error: device-side assert triggered{HELP}",
        f"CUDA error: unknown error{HELP}",
        "HIP error: an illegal memory access was encountered",
        "Triton Error [CUDA]: unspecified launch failure",
        "CUDA error (/build/flash_fwd_launch_template.h:188): uncorrectable ECC error encountered",
        "CUDA error: an illegal memory access was encountered; an earlier call had said that it was out of memory",
        f"{UNHANDLED}Cuda failure 700 'an illegal memory access was encountered'",
        f"{UNHANDLED}Cuda failure 'unknown error'",
        f"CUDA error: CUBLAS_STATUS_EXECUTION_FAILED {GEMM}",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "cusolver error: CUSOLVER_STATUS_EXECUTION_FAILED, when calling `cusolverDnSsyevd(handle)`",
        "[Rank 1] NCCL communicator was aborted on rank 1. Original reason for failure was: NCCL error",
    ],
    FailureType.OUT_OF_MEMORY: [
        f"CUDA error: out of memory{HELP}",
        "Triton Error [CUDA]: out of memory",
        f"CUDA error: CUBLAS_STATUS_ALLOC_FAILED {GEMM}",
        f"CUDA error: CUBLAS_STATUS_NOT_INITIALIZED {GEMM}",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`",
        f"{UNHANDLED}Cuda failure 2 'out of memory'",
    ],
    FailureType.USER_CODE: [
        f"CUDA error: CUBLAS_STATUS_INVALID_VALUE {GEMM}",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
        f"Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback:\nCUDA error: unknown error{HELP}",
    ],
}


@pytest.mark.parametrize(("failure", "text"), [(failure, text) for failure, texts in SAID.items() for text in texts])
def test_a_failed_device_is_told_from_memory_that_ran_out_and_from_a_wrong_call(
    failure: FailureType, text: str
) -> None:
    assert classify_exception(RuntimeError(text)) is failure
    if failure is not FailureType.USER_CODE:
        # torch 2.8 is the first to have a type for it.
        assert classify_exception(getattr(torch, "AcceleratorError", RuntimeError)(text)) is failure


def test_an_exception_that_cannot_be_put_into_words_is_classified_all_the_same() -> None:
    assert classify_exception(Unspeakable()) is FailureType.USER_CODE
    assert classify_exception(caused_by(Unspeakable(), ConnectionError("x"))) is FailureType.NETWORK
    assert http_status(Unspeakable()) is None
    assert describe_exception(Unspeakable()) == "Unspeakable: (no message: its __str__ raises ValueError)"


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


def test_every_failure_has_a_recipe_that_says_what_it_is_and_what_to_do() -> None:
    assert set(FAILURE_RECIPES) == set(FailureType)
    assert all(recipe.diagnosis and recipe.advice for recipe in FAILURE_RECIPES.values())


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("probability tensor contains either `inf`, `nan` or element < 0"), True),
        (RuntimeError("Function 'MulBackward0' returned nan values in its 0th output."), True),
        (ValueError("probability tensor contains either `inf`, `nan` or element < 0"), False),
        (RuntimeError("nan"), False),
    ],
)
def test_an_exception_that_only_says_nan_is_known(error: Exception, expected: bool) -> None:
    assert is_nonfinite_exception(error) is expected
