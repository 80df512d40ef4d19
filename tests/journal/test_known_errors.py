"""
Known errors: every row of the table is shown the real text. Where the library that says it is installed, it is made to
say it; the others are quoted word for word, with where they were met.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import (
    TEXTS,
    build_tokenizer,
    common_arguments,
    grpo_trainer,
    journal,
    plain_trainer,
    sft_trainer,
    tiny_config,
    tiny_model,
)
from datasets import Dataset
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModel,
    DataCollatorWithPadding,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, SFTConfig, SFTTrainer

from self_healing import HealingConfig, SelfHealingTrainer, UnrecoverableTrainingError
from self_healing.failures.classify import KnownError, known_errors, match_known_error
from self_healing.failures.recipes import FailureType
from self_healing.journal.journal import Journal


# ---- what the installed libraries say, by the row that has to match ----

RAISED: list[tuple[str, Callable[[Path, Any], Any]]] = []


def says(name: str) -> Callable[[Callable[[Path, Any], Any]], Callable[[Path, Any], Any]]:
    def add(function: Callable[[Path, Any], Any]) -> Callable[[Path, Any], Any]:
        RAISED.append((name, function))
        return function

    return add


def rows(**columns: Any) -> Dataset:
    return Dataset.from_dict({name: [value] * 8 for name, value in columns.items()})


def plain(path: Path, model: Any, data: Dataset, **arguments: Any) -> Trainer:
    return Trainer(model=model, args=TrainingArguments(**common_arguments(path, **arguments)), train_dataset=data)


def grpo(path: Path, **arguments: Any) -> GRPOConfig:
    return GRPOConfig(**common_arguments(path, **arguments))


@says("generation_batch_size")
def groups_do_not_divide_the_batch(path: Path, tokenizer: Any) -> None:
    grpo(path, num_generations=3)


@says("generation_batch_size")
def the_batch_does_not_divide_the_generations(path: Path, tokenizer: Any) -> None:
    grpo(path, num_generations=2, generation_batch_size=6)


@says("evaluation_batch_size")
def groups_do_not_divide_the_evaluation(path: Path, tokenizer: Any) -> None:
    grpo(path, num_generations=4, per_device_eval_batch_size=3, eval_strategy="steps", do_eval=True)


@says("too_few_generations")
def one_generation(path: Path, tokenizer: Any) -> None:
    grpo(path, num_generations=1)


@says("reward_count")
def a_weight_too_many(path: Path, tokenizer: Any) -> None:
    grpo_trainer(path, tokenizer, reward_weights=[1.0, 2.0])


@says("reward_arguments")
def a_reward_without_keywords(path: Path, tokenizer: Any) -> None:
    def length_reward(completions: list[str]) -> list[float]:
        return [0.0] * len(completions)

    grpo_trainer(path, tokenizer, reward_funcs=length_reward).train()


@says("reward_module_missing")
def a_reward_that_cannot_be_imported(path: Path, tokenizer: Any) -> None:
    importlib.import_module("my_rewards")


@says("pad_token_missing")
def padding_without_a_token(path: Path, tokenizer: Any) -> None:
    bare = build_tokenizer()
    bare.pad_token = None
    bare(["the model", "reads"], padding=True)


@says("token_not_in_vocabulary")
def a_foreign_eos_token(path: Path, tokenizer: Any) -> None:
    sft_trainer(path, tokenizer, eos_token="<|im_end|>")


@says("token_not_in_vocabulary")
def a_foreign_pad_token(path: Path, tokenizer: Any) -> None:
    sft_trainer(path, tokenizer, pad_token="<|endoftext|>")


@says("chat_template_missing")
def conversations_for_a_base_model(path: Path, tokenizer: Any) -> None:
    tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])


@says("assistant_masks")
def a_template_without_markers(path: Path, tokenizer: Any) -> None:
    templated = build_tokenizer()
    templated.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    sft_trainer(path, templated, assistant_only_loss=True, dataset=rows(messages=talk))


@says("not_conversational")
def assistant_only_loss_on_text(path: Path, tokenizer: Any) -> None:
    sft_trainer(path, tokenizer, assistant_only_loss=True)


@says("packing_without_length")
def packing_into_nothing(path: Path, tokenizer: Any) -> None:
    sft_trainer(path, tokenizer, packing=True, max_length=None)


@says("wrong_columns")
def preferences_by_other_names(path: Path, tokenizer: Any) -> None:
    model, args = tiny_model(tokenizer), DPOConfig(**common_arguments(path))
    data = rows(prompt="a", good="b", bad="c")
    DPOTrainer(model, ref_model=tiny_model(tokenizer), args=args, train_dataset=data, processing_class=tokenizer)


@says("no_matching_columns")
def raw_text(path: Path, tokenizer: Any) -> None:
    plain(path, tiny_model(tokenizer), rows(text="a")).train()


@says("no_loss")
def no_labels(path: Path, tokenizer: Any) -> None:
    plain(path, tiny_model(tokenizer), rows(input_ids=[1, 2])).train()


@says("cannot_make_tensor")
def labels_of_different_lengths(path: Path, tokenizer: Any) -> None:
    batch = [{"input_ids": [1], "labels": [1, 2]}, {"input_ids": [1], "labels": [1]}]
    DataCollatorWithPadding(tokenizer)(batch)


@says("cannot_make_tensor")
def rows_of_different_lengths(path: Path, tokenizer: Any) -> None:
    torch.tensor([[1, 2, 3], [1, 2]])


@says("not_json")
def a_metric_of_numpy_in_the_state_of_the_trainer(path: Path, tokenizer: Any) -> None:
    trainer = plain(path, tiny_model(tokenizer), rows(input_ids=[1, 2], labels=[1, 2]))
    trainer.state.log_history.append({"accuracy": np.float32(0.5)})
    trainer.state.save_to_json(str(path / "trainer_state.json"))


@says("bf16_to_numpy")
def a_prediction_in_bf16(path: Path, tokenizer: Any) -> None:
    torch.ones(1, dtype=torch.bfloat16).numpy()


@says("bf16_to_numpy")
def numpy_asked_for_bf16(path: Path, tokenizer: Any) -> None:
    np.zeros(1, dtype="bfloat16")


@says("evaluation_set_missing")
def evaluating_on_nothing(path: Path, tokenizer: Any) -> None:
    plain(path, tiny_model(tokenizer), rows(text="a"), eval_strategy="steps")


@says("best_model_strategies")
def the_best_of_other_steps(path: Path, tokenizer: Any) -> None:
    TrainingArguments(str(path), load_best_model_at_end=True, eval_strategy="epoch", save_strategy="steps")


@says("peft_twice")
def an_adapter_on_an_adapter(path: Path, tokenizer: Any) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(tiny_model(tokenizer), peft.LoraConfig())
    data, args = Dataset.from_dict({"text": TEXTS}), SFTConfig(**common_arguments(path))
    SFTTrainer(adapted, args=args, train_dataset=data, processing_class=tokenizer, peft_config=peft.LoraConfig())


@says("adapter_targets")
def adapters_for_layers_there_are_not(path: Path, tokenizer: Any) -> None:
    peft = pytest.importorskip("peft")
    peft.get_peft_model(tiny_model(tokenizer), peft.LoraConfig(target_modules=["query_key_value"]))


@says("quantised_without_adapter")
def training_a_quantised_model(path: Path, tokenizer: Any) -> None:
    model = tiny_model(tokenizer)
    model.is_quantized = True
    plain(path, model, rows(text="a"))


@says("quantised_elsewhere")
def a_quantised_model_that_is_offloaded(path: Path, tokenizer: Any) -> None:
    from accelerate import Accelerator

    model = tiny_model(tokenizer)
    model.is_loaded_in_8bit, model.hf_device_map = True, {"": "cpu", "lm_head": "disk"}
    Accelerator(cpu=True).prepare_model(model)


@says("dummy_optimizer")
def a_placeholder_for_an_optimizer(path: Path, tokenizer: Any) -> None:
    from accelerate.utils.deepspeed import DummyOptim

    DummyOptim(tiny_model(tokenizer).parameters()).step()


@says("flash_attention_missing")
def flash_attention_that_is_not_there(path: Path, tokenizer: Any) -> None:
    if importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("it is there")
    LlamaForCausalLM._from_config(tiny_config(tokenizer), attn_implementation="flash_attention_2")


@says("unknown_architecture")
def a_model_of_tomorrow(path: Path, tokenizer: Any) -> None:
    (path / "config.json").write_text('{"model_type": "llama_of_tomorrow"}')
    AutoConfig.from_pretrained(path)


@says("offline")
def a_model_that_is_not_in_the_cache(path: Path, tokenizer: Any) -> None:
    AutoModel.from_pretrained("nobody/nothing-at-all")


@says("gated_or_missing_repo")
def a_gated_model(path: Path, tokenizer: Any) -> None:
    import httpx
    from huggingface_hub.errors import GatedRepoError

    response = httpx.Response(403, request=httpx.Request("GET", "https://huggingface.co"))
    raise GatedRepoError("403 Client Error. Cannot access gated repo for url https://...", response=response)


@says("weight_must_be_2d")
def an_embedding_that_is_elsewhere(path: Path, tokenizer: Any) -> None:
    torch.nn.functional.embedding(torch.zeros(1, dtype=torch.long), torch.empty(0))


def recomputed(change: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    calls = []

    def forward(values: torch.Tensor) -> torch.Tensor:
        calls.append(True)
        return change(values, len(calls))

    checkpoint(forward, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()


@says("checkpoint_tensor_count")
def another_path_through_the_forward(path: Path, tokenizer: Any) -> None:
    recomputed(lambda values, call: values.sin().exp() if call == 1 else values.sin())


@says("checkpoint_metadata")
def another_shape_in_the_forward(path: Path, tokenizer: Any) -> None:
    recomputed(lambda values, call: (values if call == 1 else values[:1]).sin())


@says("no_grad_fn")
def nothing_to_train(path: Path, tokenizer: Any) -> None:
    torch.ones(1).sum().backward()


@says("inplace_modified")
def changed_in_place(path: Path, tokenizer: Any) -> None:
    values = torch.ones(2, requires_grad=True).exp()
    values.add_(1).sum().backward()


@says("backward_twice")
def a_graph_that_was_kept(path: Path, tokenizer: Any) -> None:
    loss = (torch.ones(1, requires_grad=True) ** 2).exp()
    loss.backward()
    loss.backward()


@says("unscale_fp16")
def weights_in_half(path: Path, tokenizer: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    weight.grad = torch.ones(1, dtype=torch.float16)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.unscale_(torch.optim.SGD([weight], lr=1))


@says("bf16_not_supported")
def bf16_without_a_device(path: Path, tokenizer: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    TrainingArguments(str(path), bf16=True)


@says("dtype_mismatch")
def two_types(path: Path, tokenizer: Any) -> None:
    torch.nn.Linear(2, 2)(torch.ones(1, 2, dtype=torch.bfloat16))


@says("index_out_of_range")
def a_token_beyond_the_embedding(path: Path, tokenizer: Any) -> None:
    torch.nn.Embedding(4, 2)(torch.tensor([9]))


@says("index_out_of_range")
def a_label_beyond_the_classes(path: Path, tokenizer: Any) -> None:
    torch.nn.functional.cross_entropy(torch.ones(1, 3), torch.tensor([7]))


@says("two_devices")
def two_devices_in_one_operation(path: Path, tokenizer: Any) -> None:
    torch.ones(2) + torch.ones(2, device="meta")


@says("meta_tensor")
def weights_that_were_never_loaded(path: Path, tokenizer: Any) -> None:
    torch.nn.Linear(2, 2, device="meta").to("cpu")


@says("multinomial_nan")
def drawing_from_nan(path: Path, tokenizer: Any) -> None:
    torch.multinomial(torch.tensor([float("nan"), 1.0]), 1)


@says("out_of_memory")
def out_of_memory(path: Path, tokenizer: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@says("no_cuda_device")
def no_device(path: Path, tokenizer: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    torch.ones(1).cuda()


@says("compile_failed")
def a_graph_that_breaks(path: Path, tokenizer: Any) -> None:
    def breaks(values: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return values + 1

    torch.compile(breaks, fullgraph=True, backend="eager")(torch.ones(1))


@says("size_mismatch")
def weights_of_another_model(path: Path, tokenizer: Any) -> None:
    torch.nn.Linear(2, 2).load_state_dict(torch.nn.Linear(3, 2).state_dict())


@says("optimizer_groups")
def the_optimizer_of_other_parameters(path: Path, tokenizer: Any) -> None:
    layer = torch.nn.Linear(2, 2)
    both = torch.optim.SGD(layer.parameters(), lr=1)
    torch.optim.SGD([layer.weight], lr=1).load_state_dict(both.state_dict())


@says("safetensors_header")
def weights_that_are_cut_off(path: Path, tokenizer: Any) -> None:
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    save_file({"weight": torch.ones(100)}, file)
    file.write_bytes(file.read_bytes()[:200])
    load_file(file)


@says("safetensors_header")
def a_pointer_of_git_lfs(path: Path, tokenizer: Any) -> None:
    from safetensors.torch import load_file

    (path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    load_file(path / "model.safetensors")


@says("shared_tensors")
def one_tensor_twice(path: Path, tokenizer: Any) -> None:
    from safetensors.torch import save_file

    weight = torch.ones(3)
    save_file({"a": weight, "b": weight}, path / "model.safetensors")


@says("torch_load_version")
def more_than_tensors(path: Path, tokenizer: Any) -> None:
    torch.save({"path": Path("x")}, path / "state.pt")
    torch.load(path / "state.pt", weights_only=True)


@says("cannot_pickle")
def a_lambda_for_a_worker(path: Path, tokenizer: Any) -> None:
    pickle.dumps(lambda row: row)


@says("cannot_pickle")
def a_lock_for_a_worker(path: Path, tokenizer: Any) -> None:
    pickle.dumps(threading.Lock())


@says("too_many_open_files")
def no_file_left(path: Path, tokenizer: Any) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "train.jsonl")


@says("disk_full")
def no_space_left(path: Path, tokenizer: Any) -> None:
    with open("/dev/full", "w") as file:
        file.write("x" * 100_000)


class KillsItsWorker(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


@says("worker_died")
def a_worker_that_is_killed(path: Path, tokenizer: Any) -> None:
    list(torch.utils.data.DataLoader(KillsItsWorker(), num_workers=1))


@says("port_in_use")
def a_port_that_is_taken(path: Path, tokenizer: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        torch.distributed.TCPStore("127.0.0.1", taken.getsockname()[1], is_master=True)


@says("spawn_without_main")
def a_script_that_trains_on_import(path: Path, tokenizer: Any) -> None:
    script = path / "train.py"
    script.write_text(
        "import multiprocessing as m\nm.set_start_method('spawn', True)\nm.Process(target=print).start()\n"
    )
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    raise RuntimeError(ran.stderr)


@pytest.mark.parametrize(("name", "fail"), RAISED, ids=lambda value: getattr(value, "__name__", None))
def test_what_the_libraries_say_is_known(
    name: str, fail: Callable[[Path, Any], Any], tmp_path: Path, tokenizer: Any
) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        fail(tmp_path, tokenizer)
    known = match_known_error(caught.value)
    assert known is not None, str(caught.value)
    assert known.name == name


# ---- what could not be had here: word for word, with where it was met ----

QUOTED: list[tuple[str, str, str]] = [
    (
        "xet_storage",
        "RuntimeError: Data processing error: CAS service error : ReqwestMiddleware Error: Request failed after 5 "
        "retries",
        "https://github.com/huggingface/xet-core/issues/407",
    ),
    (
        "disk_full",
        "RuntimeError: Data processing error: CAS service error : IO Error: No space left on device (os error 28)",
        "of runs in containers whose disk is too small",
    ),
    (
        "bf16_not_supported",
        "TypeError: Trying to convert BFloat16 to the MPS backend but it does not have support for that dtype.",
        "aten/src/ATen/native/mps/OperationUtils.mm",
    ),
    (
        "strategy_not_loaded",
        "[WARNING] [axolotl.prompt_strategies.base.load:33] [PID:4859] [RANK:0] unable to load strategy .gsm8k_grpo",
        "https://github.com/axolotl-ai-cloud/axolotl/issues/2740",
    ),
    *(
        ("turn_boundaries", text, "axolotl, prompt_strategies/chat_template.py")
        for text in (
            "Content end boundary is before start boundary for turn 3",
            "Content end boundary is the same as start boundary for turn 0. This is likely an empty turn.",
            "Could not find content start boundary for turn 2",
        )
    ),
    (
        "killed",
        "torch/distributed/elastic/multiprocessing/api.py:826] failed (exitcode: -9) local_rank: 0 (pid: 1322) of "
        "binary: /root/miniconda3/bin/python",
        "https://github.com/OpenBMB/MiniCPM-V/issues/770",
    ),
    (
        "bus_error",
        "RuntimeError: DataLoader worker (pid 3216) is killed by signal: Bus error. It is possible that dataloader's "
        "workers are out of shared memory. Please try to raise your shared memory limit.",
        "https://github.com/THU-DA-6D-Pose-Group/GDR-Net/issues/16",
    ),
    (
        "aborted",
        "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -6) local_rank: 0 (pid: 16) of binary: "
        "/opt/conda/bin/python",
        "https://github.com/Vision-CAIR/MiniGPT-4/issues/237",
    ),
    (
        "nccl_timeout",
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, "
        "NumelIn=9801523, NumelOut=9801523, Timeout(ms)=600000) ran for 600020 milliseconds before timing out.",
        "https://github.com/XPixelGroup/BasicSR/issues/737",
    ),
    (
        "nccl_aborted",
        "NCCL communicator was aborted on rank 0",
        "https://github.com/PeterGriffinJin/Search-R1/issues/170",
    ),
    (
        "nccl_system_error",
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, "
        "unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.",
        "https://github.com/NVIDIA/nccl/issues/1410",
    ),
    (
        "variable_ready_twice",
        "RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the following "
        "reasons: 1) Use of a module parameter outside the `forward` function.",
        "https://github.com/microsoft/FocalNet/issues/4",
    ),
    (
        "unused_parameters",
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This "
        "error indicates that your module has parameters that were not used in producing loss.",
        "https://github.com/Megvii-BaseDetection/YOLOX/issues/885",
    ),
    (
        "mixed_dtensor",
        "RuntimeError: aten.mm.default: got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to "
        "DTensor before calling distributed operators!",
        "https://github.com/meta-pytorch/torchtune/issues/2856",
    ),
    (
        "device_assert",
        "../aten/src/ATen/native/cuda/Indexing.cu:1308: indexSelectLargeIndex: block: [58,0,0], thread: [126,0,0] "
        "Assertion `srcIndex < srcSelectDimSize` failed.",
        "https://github.com/huggingface/trl/issues/2996",
    ),
    (
        "device_assert",
        "RuntimeError: CUDA error: device-side assert triggered",
        "https://github.com/facebookresearch/XLM/issues/204",
    ),
    (
        "broken_gpu",
        "torch.AcceleratorError: CUDA error: an illegal instruction was encountered\n"
        "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
        "incorrect.\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
        "https://github.com/index-tts/index-tts/issues/336",
    ),
    (
        "illegal_access",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "https://github.com/pytorch/pytorch/issues/21819",
    ),
    (
        "no_kernel_image",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "https://github.com/pytorch/pytorch/issues/81883",
    ),
    (
        "two_devices",
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
        "torch/_subclasses/fake_tensor.py and ATen",
    ),
    (
        "flash_attention_broken",
        "ImportError: /usr/local/lib/python3.8/dist-packages/flash_attn_2_cuda.cpython-38-x86_64-linux-gnu.so: "
        "undefined symbol: _ZN3c104cuda9SetDeviceEi",
        "https://github.com/Dao-AILab/flash-attention/issues/723",
    ),
    (
        "flash_attention_dtype",
        "RuntimeError: FlashAttention only support fp16 and bf16 data type",
        "https://github.com/unslothai/unsloth/issues/827",
    ),
    (
        "too_many_open_files",
        "RuntimeError: received 0 items of ancdata",
        "https://github.com/pytorch/pytorch/issues/973",
    ),
    (
        "safetensors_header",
        "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
        "https://github.com/Comfy-Org/ComfyUI/issues/3225",
    ),
    (
        "quantised_elsewhere",
        "ValueError: You can't train a model that has been loaded in 8-bit precision on a different device than the "
        "one you're training on.",
        "https://github.com/artidoro/qlora/issues/186",
    ),
    (
        "vllm_memory",
        "ValueError: Free memory on device (31.44/47.38 GiB) on startup is less than desired GPU memory utilization "
        "(0.95, 45.01 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        "https://github.com/vllm-project/vllm/issues/20305",
    ),
    (
        "port_in_use",
        "RuntimeError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: 0, "
        "code: -98, name: EADDRINUSE, message: address already in use.",
        "https://github.com/om-ai-lab/VLM-R1/issues/289",
    ),
]


@pytest.mark.parametrize(("name", "text", "met_at"), QUOTED, ids=[name for name, _, _ in QUOTED])
def test_what_others_have_met_is_known(name: str, text: str, met_at: str) -> None:
    known = match_known_error(RuntimeError(text))
    assert known is not None
    assert known.name == name


# Said by code that is installed, and cannot be brought to say it here.
IN_SOURCES: list[tuple[str, str, str]] = [
    ("data_parallel", "trl/trainer/sft_trainer.py", "SFTTrainer does not support `nn.DataParallel`"),
    ("vllm_unreachable", "trl/generation/vllm_client.py", "The vLLM server can't be reached"),
    ("image_tokens_truncated", "trl/trainer/sft_trainer.py", "is too short and causes image placeholder tokens"),
    ("mixed_dtensor", "torch/distributed/tensor/_dispatch.py", "got mixed torch.Tensor and DTensor"),
    ("shared_memory_full", "torch/lib/libtorch_cpu.so", "unable to allocate shared memory(shm) for file"),
    ("variable_ready_twice", "torch/lib/libtorch_cpu.so", "Expected to mark a variable ready only once"),
    ("unused_parameters", "torch/lib/libtorch_cpu.so", "Expected to have finished reduction in the prior iteration"),
]


@pytest.mark.parametrize(("name", "file", "text"), IN_SOURCES, ids=[name for name, _, _ in IN_SOURCES])
def test_what_stands_in_the_sources_is_known(name: str, file: str, text: str) -> None:
    package = importlib.util.find_spec(file.split("/")[0])
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent.parent / file
    if path.exists():
        found = path.read_bytes()
        # Messages are put together from several lines of code; the longest piece has to be there.
        longest = max(re.split(r"SFTTrainer |tokens", text), key=len).strip()
        assert longest.encode() in found, f"{file} no longer says it: the row is out of date"
    known = match_known_error(RuntimeError(text))
    assert known is not None
    assert known.name == name


@pytest.mark.parametrize(
    ("exit_code", "name"),
    [
        (-9, "killed"),
        (137, "killed"),
        (-7, "bus_error"),
        (135, "bus_error"),
        (-11, "segmentation_fault"),
        (139, "segmentation_fault"),
        (-6, "aborted"),
        (134, "aborted"),
    ],
)
def test_exit_codes_are_known(exit_code: int, name: str) -> None:
    known = match_known_error(None, exit_code=exit_code)
    assert known is not None
    assert known.name == name


# ---- what is said depends on what is trained ----


def with_columns(**columns: Any) -> Dataset:
    return Dataset.from_dict({"text": TEXTS, **{name: [value] * len(TEXTS) for name, value in columns.items()}})


def collating(tokenizer: Any, column: str) -> Callable[[list[Any]], Any]:
    def collate(batch: list[Any]) -> Any:
        encoded = tokenizer([row[column] for row in batch], padding=True, return_tensors="pt")
        return {**encoded, "labels": encoded["input_ids"]}

    return collate


def reads_it_in_the_collator(path: Path, tokenizer: Any, **arguments: Any) -> Trainer:
    data = {"train_dataset": with_columns(label=0), "data_collator": collating(tokenizer, "text")}
    return plain_trainer(path, tokenizer, trainer_kwargs=data, **arguments)


def reads_it_in_a_worker(path: Path, tokenizer: Any) -> Trainer:
    return reads_it_in_the_collator(path, tokenizer, dataloader_num_workers=1)


def reads_it_in_a_transform(path: Path, tokenizer: Any) -> Trainer:
    def encode(batch: Any) -> Any:
        return {"input_ids": [[1, 2]] * len(batch["text"]), "labels": [[1, 2]] * len(batch["text"])}

    data = {"train_dataset": with_columns(label=0).with_transform(encode)}
    return plain_trainer(path, tokenizer, trainer_kwargs=data)


def reads_it_from_rows_of_torch(path: Path, tokenizer: Any) -> Trainer:
    data = {"train_dataset": list(with_columns(label=0)), "data_collator": collating(tokenizer, "text")}
    return plain_trainer(path, tokenizer, trainer_kwargs=data)


def reads_what_is_not_there(path: Path, tokenizer: Any) -> Trainer:
    data = {"train_dataset": with_columns(label=0), "data_collator": collating(tokenizer, "chosen")}
    return plain_trainer(path, tokenizer, trainer_kwargs=data)


def reads_what_is_not_there_with_trl(path: Path, tokenizer: Any) -> Trainer:
    return sft_trainer(path, tokenizer, trainer_kwargs={"data_collator": collating(tokenizer, "chosen")})


TRAINED: list[tuple[Callable[[Path, Any], Trainer], str]] = [
    (reads_it_in_the_collator, "column_taken_away"),
    (reads_it_in_a_worker, "column_taken_away"),
    (reads_it_in_a_transform, "column_taken_away"),
    (reads_it_from_rows_of_torch, "column_taken_away"),
    (reads_what_is_not_there, "missing_column"),
    (reads_what_is_not_there_with_trl, "wrong_columns"),
]


@pytest.mark.parametrize(("build", "name"), TRAINED, ids=[build.__name__ for build, _ in TRAINED])
def test_a_column_that_is_missing_is_explained_by_what_is_trained(
    build: Callable[[Path, Any], Trainer], name: str, tmp_path: Path, tokenizer: Any
) -> None:
    with pytest.raises(UnrecoverableTrainingError, match=r"KeyError: '(text|chosen)'"):
        SelfHealingTrainer(build(tmp_path, tokenizer)).train()
    told = postmortem(tmp_path)
    assert told["known_error"]["name"] == name
    assert ("`remove_unused_columns=False`" in told["what_to_do"]) == (name == "column_taken_away")
    assert ("DPO" in told["what_to_do"]) == (name == "wrong_columns")


@pytest.mark.parametrize(
    "error",
    [
        TypeError("scale_reward() got an unexpected keyword argument 'step'"),
        ModuleNotFoundError("No module named 'dotenv'"),
    ],
)
def test_advice_about_rewards_is_for_trainers_that_have_them(error: Exception) -> None:
    for objective in ("generic", "unknown", "sft", "dpo", "reward"):
        assert match_known_error(error, trained=f"[objective {objective}]") is None
    assert match_known_error(error, trained="[objective grpo]") == match_known_error(error)
    assert match_known_error(error) is not None


def test_every_row_has_been_shown_a_real_text() -> None:
    shown = {name for name, *_ in [*RAISED, *QUOTED, *IN_SOURCES]} | {"segmentation_fault"}
    shown |= {name for _, name in TRAINED}
    assert {known.name for known in known_errors()} == shown
    assert len(shown) >= 30


def test_every_row_says_what_to_do() -> None:
    for known in known_errors():
        assert len(known.cause) > 20, known.name
        assert len(known.fix) > 20, known.name
        assert known.reference is None or known.reference.startswith("https://"), known.name


# ---- looking one up ----


def test_a_text_nobody_has_met_is_not_known() -> None:
    assert match_known_error(ValueError("the moon is in the wrong house")) is None
    assert match_known_error(None) is None
    assert match_known_error(None, exit_code=1) is None


def test_the_exception_speaks_before_the_one_it_came_from() -> None:
    error = RuntimeError("'weight' must be 2-D")
    error.__cause__ = ValueError("Attempting to unscale FP16 gradients.")
    known = match_known_error(error)
    assert known is not None
    assert known.name == "weight_must_be_2d"


def test_an_exception_that_says_nothing_is_known_by_the_one_it_came_from() -> None:
    error = RuntimeError("training failed")
    error.__cause__ = ValueError("Attempting to unscale FP16 gradients.")
    known = match_known_error(error)
    assert known is not None
    assert known.name == "unscale_fp16"


def test_lines_of_code_in_a_traceback_are_not_taken_for_messages() -> None:
    def fail(met: bool) -> None:
        raise ValueError("'weight' must be 2-D" if met else "nothing of the kind")

    with pytest.raises(ValueError, match="nothing of the kind") as caught:
        fail(met=False)
    assert match_known_error(caught.value) is None


class SaysNothing(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


def test_looking_up_never_raises() -> None:
    assert match_known_error(SaysNothing()) is None
    circle = ValueError("round and round")
    circle.__cause__ = circle
    assert match_known_error(circle) is None


# ---- in the postmortem ----


def postmortem(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "postmortem.json").read_text())
    return found


def write(directory: Path, error: BaseException | None, advice: str | None = None, **kwargs: Any) -> dict[str, Any]:
    Journal(directory, HealingConfig(), "run").write_postmortem(
        "it ended", FailureType.USER_CODE, 3, error, [], None, advice=advice, **kwargs
    )
    return postmortem(directory)


def test_the_postmortem_quotes_the_row_after_its_own_advice(tmp_path: Path) -> None:
    told = write(tmp_path, RuntimeError("'weight' must be 2-D"), advice="Do this.")
    known = KnownError(**told["known_error"])
    assert known.name == "weight_must_be_2d"
    assert told["what_to_do"].startswith("Do this. ")
    assert known.fix in told["what_to_do"]


def test_the_postmortem_of_an_unknown_error_is_as_it_was(tmp_path: Path) -> None:
    told = write(tmp_path, ValueError("the moon"), advice="Do this.")
    assert told["known_error"] is None
    assert told["what_to_do"] == "Do this."


def test_a_process_that_left_no_exception_is_known_by_its_exit_code(tmp_path: Path) -> None:
    assert write(tmp_path, None, exit_code=-7)["known_error"]["name"] == "bus_error"


def test_a_run_that_dies_of_a_known_error_says_what_to_do(tmp_path: Path, tokenizer: Any) -> None:
    def broken(completions: list[str], **_: Any) -> list[float]:
        torch.nn.functional.embedding(torch.zeros(1, dtype=torch.long), torch.empty(0))
        return []

    with pytest.raises(RuntimeError, match="must be 2-D"):
        SelfHealingTrainer(grpo_trainer(tmp_path, tokenizer, reward_funcs=broken)).train()
    assert postmortem(tmp_path)["known_error"]["name"] == "weight_must_be_2d"
    # It advises: what was done went by the type of the exception.
    assert [event["failure"] for event in journal(tmp_path, "diagnosed")] == ["user_code"]


def test_the_report_says_how_the_run_ended(tmp_path: Path) -> None:
    from self_healing.report.healing_report import HealingReport

    record = Journal(tmp_path, HealingConfig(), "run")
    record.event("run_started", 0)
    assert HealingReport.from_run_dir(tmp_path).ending == ""
    write(tmp_path, RuntimeError("'weight' must be 2-D"))
    ending = HealingReport.from_run_dir(tmp_path).ending
    assert "it ended" in ending
    assert "weight_must_be_2d" in ending
