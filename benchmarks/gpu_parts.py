"""The parts of `gpu.py`: real runs, each held against the plain trainer's, and what they have to show."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock


# Before anything reads it: nothing is asked of the Hub, and cuBLAS can be told to repeat itself.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import accelerate
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import self_healing
from self_healing import HealingConfig, SelfHealingCallback, SelfHealingTrainer
from self_healing.healers.hangs import watchdog
from self_healing.hf import sections
from self_healing.rollback.host_memory import TRANSFERS, Transfer


HERE = Path(__file__)


class Skipped(Exception):
    """A case that cannot be run here."""


@dataclass(frozen=True)
class Setting:
    """
    Where and how large.

    Args:
        device (`str`):
            `"cuda"`, or `"cpu"` for a rehearsal.
        tiny (`bool`):
            Whether sizes are those of a rehearsal.
        directory (`Path`):
            For what runs write.
    """

    device: str
    tiny: bool
    directory: Path

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def pick(self, real: Any, tiny: Any) -> Any:
        """One of two sizes."""
        return tiny if self.tiny else real


Case = Callable[[Setting], dict[str, Any]]


def needs(*modules: str) -> None:
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if absent:
        raise Skipped(f"not installed: {', '.join(absent)}")


def needs_gpu(setting: Setting) -> None:
    if not setting.on_gpu:
        raise Skipped("only on a GPU")


# ---- models, data, trainers ----

# Width and depth; with tied embeddings of 32,000 tokens 110M, 0.5B and 1.5B parameters.
SIZES = {"small": (768, 9), "0.5B": (1280, 18), "1.5B": (2048, 21), "tiny": (32, 2)}


def llama(setting: Setting, size: str = "small", seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    width, layers = SIZES["tiny" if setting.tiny else size]
    transformers.set_seed(seed)
    heads = max(changes.get("hidden_size", width) // 64, 2)
    values = {
        "vocab_size": setting.pick(32_000, 128),
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": setting.pick(4096, 64),
        "tie_word_embeddings": True,
    }
    return LlamaForCausalLM(LlamaConfig(**{**values, **changes}))


def rows_of_tokens(setting: Setting, number: int, tokens: int, harder_from: int | None = None) -> list[dict[str, Any]]:
    """Rows that count up, of a few tokens each; from a row on any token may follow any."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for index in range(number):
        ids = (torch.arange(tokens) + index) % 16
        if harder_from is not None and index >= harder_from:
            ids = torch.randint(0, setting.pick(32_000, 128), (tokens,), generator=generator)
        rows.append({"input_ids": ids, "labels": ids})
    return rows


def trainer_of(
    setting: Setting,
    name: str,
    callbacks: Sequence[TrainerCallback] = (),
    *,
    model: Any = None,
    size: str = "small",
    tokens: int | None = None,
    harder_from: int | None = None,
    optimizer: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
    repeatable: bool = False,
    **arguments: Any,
) -> Trainer:
    """
    A plain `Trainer` of a language model; everything that is needed is made here. The backward of fused attention does
    not repeat itself, also where torch is told to use deterministic algorithms (H200, torch 2.11).
    """
    if model is None:
        model = llama(setting, size, **({"attn_implementation": "eager"} if repeatable else {}))
    values = {
        "output_dir": str(setting.directory / name),
        "per_device_train_batch_size": setting.pick(8, 2),
        "max_steps": setting.pick(30, 4),
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": not setting.on_gpu,
        "bf16": setting.on_gpu,
        "optim": "adamw_torch_fused" if setting.on_gpu else "adamw_torch",
        "dataloader_pin_memory": setting.on_gpu,
        "seed": 7,
        **arguments,
    }
    args = TrainingArguments(**values)
    number = args.max_steps * args.per_device_train_batch_size * args.gradient_accumulation_steps
    tokens = tokens or setting.pick(512, 16)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows_of_tokens(setting, number, tokens, harder_from),
        callbacks=list(callbacks),
        optimizer_cls_and_kwargs=optimizer,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


@dataclass
class Ended:
    """What is kept of a run, without the run: its memory is needed for the next one."""

    weights: dict[str, torch.Tensor]
    losses: list[float]
    seconds: float
    steps: int
    peak: int
    events: list[dict[str, Any]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    @property
    def steps_lost(self) -> int:
        return sum(event["steps_lost"] for event in self.of("outcome"))

    @property
    def actions(self) -> list[str]:
        return [event["action"] for event in self.of("action") if event["happened"]]


def finish(setting: Setting, trainer: Trainer, wrapped: bool = False) -> Ended:
    """Trains to the end, and gives its memory back."""
    if setting.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    began = time.monotonic()
    (SelfHealingTrainer(trainer) if wrapped else trainer).train()
    seconds = time.monotonic() - began
    journal = Path(trainer.args.output_dir) / "healing_events.jsonl"
    ended = Ended(
        weights={name: whole(value).to("cpu", copy=True) for name, value in trainer.model.state_dict().items()},
        losses=[entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        seconds=seconds,
        steps=int(trainer.state.global_step),
        peak=torch.cuda.max_memory_allocated() if setting.on_gpu else 0,
        events=[json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else [],
    )
    del trainer
    gc.collect()
    if setting.on_gpu:
        torch.cuda.empty_cache()
    return ended


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.detach().full_tensor() if isinstance(value, DTensor) else value.detach()


def largest_difference(one: Ended, other: Ended) -> float:
    """Of any weight; 0 where two runs are bitwise equal."""
    return max(
        float((one.weights[name].float() - other.weights[name].float()).abs().max())
        if not torch.equal(one.weights[name], other.weights[name])
        else 0.0
        for name in one.weights
    )


def loss_difference(one: Ended, other: Ended) -> float:
    return max((abs(a - b) for a, b in zip(one.losses, other.losses, strict=False)), default=0.0)


# ---- faults ----


class NaNOnce:
    """One training forward whose output is NaN."""

    def __init__(self, model: torch.nn.Module, nth: int) -> None:
        self.forwards = 0
        self._nth = nth
        _last_norm(model).register_forward_hook(self._hook)

    def _hook(self, module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        if torch.is_grad_enabled():
            self.forwards += 1
        return output * float("nan") if self.forwards == self._nth and torch.is_grad_enabled() else None


class NaNGradientOnce:
    """One gradient that is NaN, at the nth backward: what code that is compiled does not take for its own."""

    def __init__(self, model: torch.nn.Module, nth: int) -> None:
        self.backwards = 0
        self._nth = nth
        [each for each in model.parameters() if each.requires_grad][-1].register_hook(self._hook)

    def _hook(self, gradient: torch.Tensor) -> torch.Tensor | None:
        self.backwards += 1
        return gradient * float("nan") if self.backwards == self._nth else None


class NaNInWeights(TrainerCallback):
    """Writes one NaN into a trained weight after a step."""

    def __init__(self, step: int) -> None:
        self._step, self._struck = step, False

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self._step and not self._struck:
            self._struck = True
            trained = [each for each in model.parameters() if each.requires_grad and each.is_floating_point()]
            local = trained[-1].to_local() if isinstance(trained[-1], DTensor) else trained[-1].data
            local.detach().view(-1)[0] = float("nan")


def _last_norm(model: torch.nn.Module) -> torch.nn.Module:
    return [module for name, module in model.named_modules() if name.rpartition(".")[2] == "norm"][-1]


class FewRows:
    """On a CPU, the memory of a device: training calls of more rows do not fit."""

    def __init__(self, model: torch.nn.Module, rows: int) -> None:
        self.failures = 0
        self._rows = rows
        model.register_forward_pre_hook(self._hook, with_kwargs=True)

    def _hook(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and len(kwargs["input_ids"]) > self._rows:
            self.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB. (simulated)")


@contextlib.contextmanager
def limited_to(setting: Setting, nbytes: float) -> Iterator[None]:
    """Less memory than there is."""
    if not setting.on_gpu:
        yield
        return
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(nbytes / torch.cuda.get_device_properties(0).total_memory, 1.0))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@contextlib.contextmanager
def repeatable_kernels() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# ---- 1: two plain runs, and ours ----


def repeats(setting: Setting, deterministic: bool, bf16: bool) -> dict[str, Any]:
    settings = {"max_steps": setting.pick(100, 4), "bf16": bf16 and setting.on_gpu, "repeatable": deterministic}
    with repeatable_kernels() if deterministic else contextlib.nullcontext():
        one = finish(setting, trainer_of(setting, "one", **settings))
        two = finish(setting, trainer_of(setting, "two", **settings))
        ours = finish(setting, trainer_of(setting, "ours", [SelfHealingCallback()], **settings))
    spread, difference = largest_difference(one, two), largest_difference(one, ours)
    return {
        "shown": difference <= 2 * spread and not ours.of("detected") and not (deterministic and spread),
        "plain_against_plain": spread,
        "ours_against_plain": difference,
        "incidents": len(ours.of("detected")),
    }


def heals(setting: Setting, bf16: bool) -> dict[str, Any]:
    """A passing NaN, and NaN in the weights, undone bitwise where kernels repeat."""
    settings = {"max_steps": setting.pick(40, 8), "bf16": bf16 and setting.on_gpu, "repeatable": True}
    config = {"snapshot_interval": setting.pick(8, 2), "snapshot_verify_steps": 2}
    with repeatable_kernels():
        plain = finish(setting, trainer_of(setting, "plain", **settings))
        trainer = trainer_of(setting, "passing", [SelfHealingCallback(HealingConfig(**config))], **settings)
        NaNOnce(trainer.model, setting.pick(20, 5))
        passing = finish(setting, trainer)
        callbacks = [SelfHealingCallback(HealingConfig(**config)), NaNInWeights(setting.pick(25, 6))]
        weights = finish(setting, trainer_of(setting, "weights", callbacks, **settings))
    differences = {name: largest_difference(run, plain) for name, run in (("passing", passing), ("weights", weights))}
    return {
        "shown": not any(differences.values()) and passing.steps_lost == weights.steps_lost == 0,
        "differences": differences,
        "actions": {"passing": passing.actions, "weights": weights.actions},
        "steps_lost": {"passing": passing.steps_lost, "weights": weights.steps_lost},
    }


# ---- 2 and 3: memory ----


_SENTENCE = "the model reads a row of text and learns to say what comes next in every line it has seen before"
NAMES = list(dict.fromkeys(_SENTENCE.split()))


def texts_of(setting: Setting) -> tuple[Any, list[str]]:
    """A tokenizer that knows a few words, and rows of them that just fill what a row may have."""
    tokenizer = Tokenizer(models.WordLevel({name: at for at, name in enumerate(("<pad>", "<eos>", "?", *NAMES))}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    length = setting.pick(440, 20)
    texts = [" ".join(NAMES[(7 * row + at * (1 + row % 5)) % len(NAMES)] for at in range(length)) for row in range(64)]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"), texts


def preference_trainer(setting: Setting, name: str, task: str, callbacks: Sequence[TrainerCallback]) -> Trainer:
    """SFT, DPO, KTO or Reward of TRL."""
    import datasets
    import trl
    from transformers import LlamaForSequenceClassification

    tokenizer, texts = texts_of(setting)
    tokens = setting.pick(512, 32)
    values = {
        "output_dir": str(setting.directory / name),
        "per_device_train_batch_size": setting.pick(16, 4),
        "max_steps": setting.pick(8, 3),
        "max_length": tokens,
        "learning_rate": 1e-5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": not setting.on_gpu,
        "bf16": setting.on_gpu,
        "gradient_checkpointing": False,
    }
    number = values["per_device_train_batch_size"] * values["max_steps"]
    chosen = [" " + texts[index % len(texts)] for index in range(number)]
    rejected = [" " + texts[(index + 7) % len(texts)] for index in range(number)]
    columns: dict[str, dict[str, list[Any]]] = {
        "sft": {"text": chosen},
        "dpo": {"prompt": ["the model"] * number, "chosen": chosen, "rejected": rejected},
        "kto": {
            "prompt": ["the model"] * number,
            "completion": chosen,
            "label": [bool(index % 2) for index in range(number)],
        },
        "reward": {"chosen": chosen, "rejected": rejected},
    }
    kind = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward"}[task]
    model = llama(setting, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    extra: dict[str, Any] = {}
    if task == "reward":
        model.config.num_labels = 1
        transformers.set_seed(0)
        model = LlamaForSequenceClassification(model.config)
    elif task in ("dpo", "kto"):
        extra["ref_model"] = llama(setting, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    trainer: Trainer = getattr(trl, f"{kind}Trainer")(
        model=model,
        args=getattr(trl, f"{kind}Config")(**values),
        train_dataset=datasets.Dataset.from_dict(columns[task]),
        processing_class=tokenizer,
        callbacks=list(callbacks),
        **extra,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


class Peaks(TrainerCallback):
    """What is allocated between two steps, and the most within one."""

    def __init__(self) -> None:
        self.at_rest = self.in_step = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step and torch.cuda.is_available():
            self.at_rest = max(self.at_rest, torch.cuda.memory_allocated())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            self.in_step = max(self.in_step, torch.cuda.max_memory_allocated())


def too_large(setting: Setting, build: Callable[..., Trainer], rows: int, share: float = 0.5) -> dict[str, Any]:
    """A batch that does not fit, beside the same run with all of the memory."""
    peaks = Peaks()
    full = finish(setting, build("full", [peaks]))
    limit = max(peaks.at_rest + share * (peaks.in_step - peaks.at_rest), 1.02 * peaks.at_rest)
    with limited_to(setting, limit):
        trainer = build("healed", [SelfHealingCallback()])
        few = None if setting.on_gpu else FewRows(trainer.model, rows)
        before = torch.cuda.memory_stats().get("num_ooms", 0) if setting.on_gpu else 0
        healed = finish(setting, trainer)
        failures = torch.cuda.memory_stats().get("num_ooms", 0) - before if few is None else few.failures
    return {
        "shown": healed.steps == full.steps and healed.steps_lost == 0 and failures >= 2,
        "steps_lost": healed.steps_lost,
        "failures": failures,
        "limit_bytes": int(limit),
        "peak_bytes": {"full": full.peak, "healed": healed.peak},
        "seconds": {"full": full.seconds, "healed": healed.seconds},
        "largest_difference_of_weights": largest_difference(full, healed),
        "largest_difference_of_losses": loss_difference(full, healed),
        "evidence": [event["evidence"].get("place") for event in healed.of("detected")],
    }


def memory(setting: Setting, task: str) -> dict[str, Any]:
    if task == "lm":
        settings = {"per_device_train_batch_size": setting.pick(32, 4), "max_steps": setting.pick(8, 3)}
        return too_large(setting, lambda name, callbacks: trainer_of(setting, name, callbacks, **settings), 2)
    needs("trl", "datasets")
    return too_large(setting, lambda name, callbacks: preference_trainer(setting, name, task, callbacks), 2)


def vocabulary(setting: Setting) -> dict[str, Any]:
    """Logits are what takes the memory: what is checked of them must not take as much again."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": setting.pick(4, 4),
        "max_steps": setting.pick(4, 2),
        "tokens": setting.pick(4096, 32),
    }

    def build(name: str, callbacks: Sequence[TrainerCallback]) -> Trainer:
        width, layers = setting.pick((1024, 2), (32, 2))
        model = llama(setting, vocab_size=setting.pick(152_000, 4096), hidden_size=width, num_hidden_layers=layers)
        return trainer_of(setting, name, callbacks, model=model, **settings)

    # One of the four rows fits, and hardly more; a third of the memory was too little for it (H200).
    return too_large(setting, build, 1, share=0.5)


# ---- 4: copies that take long ----


class SlowTransfer(Transfer):
    """A copy beside the computation that begins late."""

    def __init__(self, device: torch.device, work: Callable[[], None]) -> None:
        def slowly() -> None:
            torch.cuda._sleep(500_000_000)
            work()

        super().__init__(device, slowly)


def side_stream(setting: Setting) -> dict[str, Any]:
    """Data that become harder, which is found out by putting other states in place; the run's own must come back."""
    steps = setting.pick(120, 8)
    rows = setting.pick(8, 2)
    settings = {"max_steps": steps, "harder_from": int(0.7 * steps) * rows, "per_device_train_batch_size": rows}
    settings["learning_rate"] = 3e-4 if setting.on_gpu else 3e-3
    # In the order of the rows: the harder ones come last.
    settings |= {"train_sampling_strategy": "sequential", "repeatable": True}
    with repeatable_kernels():
        plain = finish(setting, trainer_of(setting, "plain", **settings))
        with mock.patch.dict(TRANSFERS, {"cuda": SlowTransfer}):
            config = HealingConfig(snapshot_interval=4, snapshot_verify_steps=2)
            ours = finish(setting, trainer_of(setting, "ours", [SelfHealingCallback(config)], **settings))
    same = largest_difference(plain, ours) == 0.0
    return {
        # Where nothing was suspected, nothing was put in place either.
        "shown": None if not ours.of("diagnosed") else same and "roll_back" not in ours.actions,
        "largest_difference_of_weights": largest_difference(plain, ours),
        "diagnosed": [event["failure"] for event in ours.of("diagnosed")],
        "actions": ours.actions,
    }


# ---- 5: applying steps again ----


def replay(setting: Setting, rate: float) -> dict[str, Any]:
    interval = setting.pick(40, 3)
    steps = 3 * interval
    settings = {"max_steps": steps, "learning_rate": rate}
    plain = finish(setting, trainer_of(setting, "plain", **settings))
    config = HealingConfig(snapshot_interval=interval, snapshot_verify_steps=min(8, interval - 1))
    callbacks = [SelfHealingCallback(config), NaNInWeights(2 * interval + interval // 2)]
    ours = finish(setting, trainer_of(setting, "ours", callbacks, **settings))
    after = 2 * interval + interval // 2
    deviations = [abs(a - b) for a, b in zip(ours.losses[after:], plain.losses[after:], strict=False)]
    return {
        "shown": "replay_steps" in ours.actions and ours.steps_lost == 0,
        "actions": ours.actions,
        "replayed": [event.get("replayed") for event in ours.of("action")],
        "steps_lost": ours.steps_lost,
        "deviation_of_loss_per_step_after": deviations,
        "largest_difference_of_weights": largest_difference(plain, ours),
    }


# ---- 6: a lost device ----


class EveryOperationRaises(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise getattr(torch, "AcceleratorError", RuntimeError)("CUDA error: an illegal memory access was encountered")


KERNELS = {
    "illegal_access": 'extern "C" __global__ void fail(float *x) { *(volatile float *)0x10 = x[0]; }',
    "trap": 'extern "C" __global__ void fail(float *x) { asm("trap;"); }',
}


class LoseDevice(TrainerCallback):
    """Loses the device in the middle of a step, once however often the job is started."""

    def __init__(self, how: str, step: int, note: Path) -> None:
        self._how, self._step, self._note = how, step, note
        self.mode: EveryOperationRaises | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step != self._step or self._note.exists():
            return
        self._note.write_text(str(time.time()))
        if self._how == "simulated":
            self.mode = EveryOperationRaises()
            self.mode.__enter__()
        elif self._how == "assert":
            zeros = torch.zeros(4, device="cuda")
            zeros[torch.tensor([10**6], device="cuda")]
        else:
            kernel = torch.cuda._compile_kernel(KERNELS[self._how], "fail")
            kernel(grid=(1, 1, 1), block=(1, 1, 1), args=[torch.zeros(1, device="cuda")])


def job(setting: Setting, how: str, wrapped: bool) -> LoseDevice:
    """A run that loses its device in its first process; the second one goes on to the end."""
    note = setting.directory / "struck"
    strike = LoseDevice(how, setting.pick(12, 5), note)
    if how == "never":
        note.touch()
    callbacks: list[TrainerCallback] = [strike] if wrapped else [SelfHealingCallback(), strike]
    trainer = trainer_of(
        setting,
        "run",
        callbacks,
        # What is saved is small: nothing here depends on the size.
        model=llama(setting, hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=128),
        max_steps=setting.pick(20, 8),
        save_strategy="steps",
        save_steps=setting.pick(5, 2),
    )
    resume = True if note.exists() and how != "never" else None
    try:
        (SelfHealingTrainer(trainer) if wrapped else trainer).train(resume_from_checkpoint=resume)
    finally:
        if strike.mode is not None:
            strike.mode.__exit__(None, None, None)
    (setting.directory / "done").write_text(str(trainer.state.global_step))
    return strike


UNDER_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "--max-restarts", "1")


def lost_device(setting: Setting, how: str, launcher: str, wrapped: bool = True) -> dict[str, Any]:
    """Each process of the job is one of its own: nothing gets over a lost context."""
    if (how == "simulated") is setting.on_gpu:
        raise Skipped("only on a CPU" if setting.on_gpu else "only on a GPU")
    if how in KERNELS and not hasattr(torch.cuda, "_compile_kernel"):
        raise Skipped("this torch cannot compile a kernel (torch.cuda._compile_kernel)")
    arguments = [str(HERE), "job", str(setting.directory), how, "--device", setting.device]
    arguments += ["--tiny"] if setting.tiny else []
    arguments += [] if wrapped else ["--callback-alone"]
    if launcher == "torchrun":
        code, seconds, output = started([*UNDER_TORCHRUN, *arguments], {})
        codes = [code]
    else:
        # As a launcher would start it that has restarts left, and then again; or by hand.
        codes, outputs, waits = [], [], []
        for restarts in (0, 1):
            variables = {
                "TORCHELASTIC_RUN_ID": "job",
                "TORCHELASTIC_RESTART_COUNT": str(restarts),
                "TORCHELASTIC_MAX_RESTARTS": "3",
            }
            code, seconds, text = started(arguments, variables if launcher == "environment" else {})
            codes.append(code)
            outputs.append(text)
            waits.append(seconds)
        output, seconds = outputs[0], max(waits)
    run = setting.directory / "run"
    told = [json.loads(path.read_text()) for path in sorted(run.glob("postmortem*.json"))]
    expected = {"torchrun": [0], "environment": [75 if wrapped else 1, 0], "none": [1, 0]}[launcher]
    return {
        "shown": codes == expected and bool(told) and told[0]["failure"] == "device",
        "exit_codes": codes,
        "expected": expected,
        "seconds_of_the_longest_process": seconds,
        "postmortem": [(each["failure"], each["verdict"][:200]) for each in told],
        "finished": (setting.directory / "done").exists(),
        "end_of_output": output[-600:],
    }


def started(arguments: Sequence[str], environment: dict[str, str], within: float = 150) -> tuple[int, float, str]:
    """Exit code, seconds and output of a process; one that hangs is ended, which is no exit code of its own."""
    began = time.monotonic()
    try:
        ended = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=within,
        )
    except subprocess.TimeoutExpired as hang:
        return -1, time.monotonic() - began, str(hang.stdout)
    return ended.returncode, time.monotonic() - began, ended.stdout


# ---- precision, kernels, optimizers ----


def heals_with(
    setting: Setting, kind: str, model: Callable[[], Any] | None = None, **arguments: Any
) -> dict[str, Any]:
    """A passing NaN, and NaN in the weights, beside the undisturbed run; what is not bitwise is named."""
    settings = {"max_steps": setting.pick(24, 8), **arguments}
    config = HealingConfig(snapshot_interval=setting.pick(6, 2), snapshot_verify_steps=2)

    def build(name: str, callbacks: Sequence[TrainerCallback] = ()) -> Trainer:
        return trainer_of(setting, name, callbacks, model=None if model is None else model(), **settings)

    try:
        plain, again = finish(setting, build("plain")), finish(setting, build("again"))
    except RuntimeError as error:
        raise Skipped(f"the plain trainer cannot: {str(error).splitlines()[0]}") from error
    trainer = build("passing", [SelfHealingCallback(config)])
    fault = NaNGradientOnce if trainer.args.torch_compile else NaNOnce
    fault(trainer.model, setting.pick(12, 5) * trainer.args.gradient_accumulation_steps)
    passing = finish(setting, trainer)
    weights = finish(setting, build("weights", [SelfHealingCallback(config), NaNInWeights(setting.pick(15, 6))]))
    lost = passing.steps_lost + weights.steps_lost
    return {
        "shown": lost == 0 and passing.steps == weights.steps == plain.steps and bool(passing.actions),
        "kind": kind,
        "steps_lost": {"passing": passing.steps_lost, "weights": weights.steps_lost},
        "actions": {"passing": passing.actions, "weights": weights.actions},
        "largest_difference_of_weights": {
            "plain_again": largest_difference(plain, again),
            "passing": largest_difference(plain, passing),
            "weights": largest_difference(plain, weights),
        },
    }


def lora(setting: Setting, quantised: bool = False) -> Any:
    needs("peft")
    from peft import LoraConfig, get_peft_model

    model = llama(setting)
    if quantised:
        needs_gpu(setting)
        needs("bitsandbytes")
        from transformers import BitsAndBytesConfig

        path = str(setting.directory / "base")
        model.to(torch.bfloat16).save_pretrained(path)
        model = LlamaForCausalLM.from_pretrained(
            path, quantization_config=BitsAndBytesConfig(load_in_4bit=True), device_map={"": 0}
        )
    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=8))


def precision(setting: Setting, kind: str) -> dict[str, Any]:
    if kind == "fp16":
        needs_gpu(setting)
        return heals_with(setting, kind, bf16=False, fp16=True)
    if kind == "bf16 weights":
        return heals_with(setting, kind, lambda: llama(setting).to(torch.bfloat16), bf16=False)
    if kind == "LoRA":
        return heals_with(setting, kind, lambda: lora(setting))
    if kind == "flash attention":
        needs_gpu(setting)
        needs("flash_attn")
        return heals_with(
            setting, kind, lambda: llama(setting, attn_implementation="flash_attention_2").to(torch.bfloat16)
        )
    return heals_with(setting, kind, lambda: llama(setting, attn_implementation=kind))


def optimizers(setting: Setting, optim: str) -> dict[str, Any]:
    if "8bit" in optim:
        needs_gpu(setting)
        needs("bitsandbytes")
    if optim == "adamw_torch_fused":
        needs_gpu(setting)
    if optim == "muon":
        return heals_with_muon(setting)
    if optim == "4-bit LoRA":
        return heals_with(setting, optim, lambda: lora(setting, quantised=True))
    return heals_with(setting, optim, optim=optim)


def heals_with_muon(setting: Setting) -> dict[str, Any]:
    kind = getattr(torch.optim, "Muon", None)
    if kind is None:
        raise Skipped("this torch has no Muon")
    # Of matrices only: the adapters of a LoRA are nothing else.
    return heals_with(setting, "muon", lambda: lora(setting), optimizer=(kind, {"lr": 1e-3}))


def found_inf(setting: Setting, where: str) -> dict[str, Any]:
    """A fused update that is told on the device whether it may be: with 0 as without it, with 1 nothing moves."""
    generator = torch.Generator().manual_seed(0)
    width = setting.pick(512, 16)
    weights = [torch.randn(width, width, generator=generator) for _ in range(290)]
    gradients = [torch.randn(width, width, generator=generator).to(setting.device) for _ in weights]

    def updated(tellings: Sequence[float | None]) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(each.to(setting.device, copy=True)) for each in weights]
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
        for told in tellings:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            if told is not None:
                optimizer.found_inf = torch.tensor(told, device=setting.device)
            optimizer.step()
            vars(optimizer).pop("found_inf", None)
        kept = [value for state in optimizer.state.values() for value in state.values()]
        return [each.detach() for each in (*parameters, *kept)]

    def same(one: Sequence[float | None], other: Sequence[float | None]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(updated(one), updated(other), strict=False))

    allowed, forbidden = {
        "first step": (([0.0], [None]), ([1.0], [])),
        "third step": (([None, None, 0.0], [None] * 3), ([None, None, 1.0], [None] * 2)),
    }[where]
    return {"shown": same(*allowed) and same(*forbidden), "allowed": same(*allowed), "forbidden": same(*forbidden)}


# ---- compiled models ----


def compiled(setting: Setting, mode: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "torch_compile": True}
    if setting.on_gpu:
        settings["torch_compile_mode"] = mode
    else:
        settings["torch_compile_backend"] = "eager"
    return heals_with(setting, mode, **settings)


# ---- what a step costs ----


def syncs(setting: Setting) -> dict[str, Any]:
    """What makes the host wait for the device, per step: plain beside ours."""
    plain = waits_per_step(setting, "plain", [])
    ours = waits_per_step(setting, "ours", [SelfHealingCallback()])
    more = {name: ours[name] - plain.get(name, 0.0) for name in ours}
    return {"shown": None, "plain": plain, "ours": ours, "more": more}


WAITS = ("aten::_local_scalar_dense", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


class Profiled(TrainerCallback):
    """Counts in the later half of a run: the first steps are others."""

    def __init__(self, steps: int) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profiler = torch.profiler.profile(activities=activities)
        self._first = steps // 2

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._first:
            self.profiler.__enter__()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.profiler.__exit__(None, None, None)


def waits_per_step(setting: Setting, name: str, callbacks: list[TrainerCallback]) -> dict[str, float]:
    steps = setting.pick(20, 6)
    profiled = Profiled(steps)
    trainer = trainer_of(setting, name, [*callbacks, profiled], max_steps=steps, logging_steps=10**6)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if setting.on_gpu:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            finish(setting, trainer)
        finally:
            if setting.on_gpu:
                torch.cuda.set_sync_debug_mode("default")
    counted = {event.key: event.count for event in profiled.profiler.key_averages()}
    measured = steps - steps // 2
    found = {wait: counted.get(wait, 0) / measured for wait in WAITS}
    copied = sum(count for key, count in counted.items() if "DtoH" in key or "Device -> " in key)
    synchronised = sum("synchronizing" in str(warning.message).lower() for warning in told)
    return {**found, "copies_to_the_host": copied / measured, "synchronising_calls": synchronised / steps}


def overhead(setting: Setting, size: str, accumulation: int, task: str = "lm") -> dict[str, Any]:
    """Runs take turns, so that whatever else the machine does falls on both; see `overhead.py`."""
    if task == "grpo":
        needs("trl", "datasets")
    turns, seconds, peaks = setting.pick(24, 3), {}, {}
    for rounds in range(setting.pick(2, 1)):
        for name in ("plain", "ours") if rounds % 2 == 0 else ("ours", "plain"):
            clock = Clock(setting.pick(5, 1))
            callbacks: list[TrainerCallback] = [clock] if name == "plain" else [SelfHealingCallback(), clock]
            directory = f"{name}-{rounds}"
            if task == "grpo":
                trainer = grpo_trainer(setting, directory, callbacks, size)
            else:
                trainer = trainer_of(
                    setting,
                    directory,
                    callbacks,
                    size=size,
                    max_steps=(turns + 2) * clock.steps,
                    gradient_accumulation_steps=accumulation,
                    per_device_train_batch_size=setting.pick(4, 2),
                    logging_steps=10,
                )
            ended = finish(setting, trainer)
            seconds.setdefault(name, []).extend(clock.seconds[1:])
            peaks[name] = ended.peak
    ratio = torch.tensor(seconds["ours"]).median().item() / torch.tensor(seconds["plain"]).median().item()
    return {
        # On a CPU this is no measurement.
        "shown": ratio <= 1.005 if setting.on_gpu and not setting.tiny else None,
        "ratio": ratio,
        "seconds_per_step": {name: torch.tensor(values).median().item() for name, values in seconds.items()},
        "peak_bytes": peaks,
        "host_bytes": host_bytes(),
    }


class Clock(TrainerCallback):
    """Seconds per step, of so many steps at a time: the host runs ahead of the device within them."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.seconds: list[float] = []
        self._began: float | None = None

    def begin(self) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.steps:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._began is not None:
            self.seconds.append((now - self._began) / self.steps)
        self._began = now


def host_bytes() -> dict[str, int]:
    import psutil

    found = {"resident": int(psutil.Process().memory_info().rss)}
    if torch.cuda.is_available() and hasattr(torch.cuda, "host_memory_stats"):
        found |= {
            f"pinned_by_torch_{key}": int(value)
            for key, value in torch.cuda.host_memory_stats().items()
            if key in ("allocated_bytes.current", "active_bytes.current")
        }
    return found


def grpo_trainer(setting: Setting, name: str, callbacks: Sequence[TrainerCallback], size: str) -> Trainer:
    import datasets
    import trl

    tokenizer, texts = texts_of(setting)
    trainer: Trainer = trl.GRPOTrainer(
        model=llama(setting, size, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id),
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=trl.GRPOConfig(
            output_dir=str(setting.directory / name),
            per_device_train_batch_size=setting.pick(16, 4),
            num_generations=4,
            max_completion_length=setting.pick(32, 4),
            max_steps=setting.pick(50, 5),
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not setting.on_gpu,
            bf16=setting.on_gpu,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": [text[:30] for text in texts]}),
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def first_steps(setting: Setting, size: str) -> dict[str, Any]:
    """The seconds of each of the first steps, in which host memory for states is taken and pinned."""
    seconds: dict[str, list[list[float]]] = {"plain": [], "ours": []}
    for turn in range(setting.pick(2, 1)):
        for name, told in seconds.items():
            clock = Clock(1)
            callbacks = [clock, *([SelfHealingCallback()] if name == "ours" else [])]
            trainer = trainer_of(
                setting, f"{name}-{turn}", callbacks, size=size, max_steps=setting.pick(16, 6), logging_steps=100
            )
            clock.begin()
            finish(setting, trainer)
            told.append([round(each, 4) for each in clock.seconds])
    # The first run of a process has more to do for the first time than the others.
    held_up = sum(seconds["ours"][-1]) - sum(seconds["plain"][-1])
    return {"shown": None, "seconds": seconds, "held_up": held_up}


def snapshots(setting: Setting) -> dict[str, Any]:
    import snapshots as script

    result = script.measure(
        "tiny" if setting.tiny else "100M", setting.pick(7, 2), setting.pick(512, 16), str(setting.directory)
    )
    return {"shown": result["restore_over_load"] < 1 if setting.on_gpu else None, **result}


# ---- several processes, and the older benchmark of memory ----


def distributed(setting: Setting) -> dict[str, Any]:
    """One process under torchrun, with NCCL where there is a GPU: the run ends."""
    arguments = [str(HERE), "job", str(setting.directory), "never", "--device", setting.device]
    code, seconds, output = started([*UNDER_TORCHRUN, *arguments, *(["--tiny"] if setting.tiny else [])], {})
    return {"shown": code == 0, "exit_code": code, "seconds": seconds, "end_of_output": output[-600:]}


def engine_arguments(engine: str) -> dict[str, Any]:
    """What has a trainer shard over the processes there are."""
    if engine == "fsdp2":
        units = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        return {"fsdp": True, "fsdp_config": {**units, "fsdp_version": 2, "cpu_ram_efficient_loading": False}}
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    zero = {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
    return {"deepspeed": {**dict.fromkeys(auto, "auto"), **zero}}


def sharded_job(setting: Setting, engine: str) -> None:
    """A plain run, one with a passing NaN, and under FSDP2 one with NaN in the weights."""
    settings = {"max_steps": setting.pick(30, 8), "repeatable": True, **engine_arguments(engine)}
    config = HealingConfig(snapshot_interval=setting.pick(8, 2), snapshot_verify_steps=2)
    with repeatable_kernels():
        plain = finish(setting, trainer_of(setting, "plain", **settings))
        trainer = trainer_of(setting, "passing", [SelfHealingCallback(config)], **settings)
        NaNOnce(trainer.model, setting.pick(20, 5))
        healed, engine_of = {"passing": finish(setting, trainer)}, str(trainer.accelerator.distributed_type)
        if engine == "fsdp2":
            callbacks = [SelfHealingCallback(config), NaNInWeights(setting.pick(25, 6))]
            healed["weights"] = finish(setting, trainer_of(setting, "weights", callbacks, **settings))
    told = {
        name: {"steps_lost": run.steps_lost, "actions": run.actions, "difference": largest_difference(run, plain)}
        for name, run in healed.items()
    }
    (setting.directory / "told.json").write_text(json.dumps({"engine": engine_of, "healed": told}))


def sharded(setting: Setting, engine: str) -> dict[str, Any]:
    """One process whose parameters are those of an engine: what goes wrong in a step is undone bitwise."""
    needs(*(["deepspeed"] if engine == "zero2" else []))
    if not setting.on_gpu:
        raise Skipped("only on a GPU: on a CPU the tests do it on two ranks")
    arguments = [str(HERE), "job", str(setting.directory), engine, "--device", setting.device]
    code, seconds, output = started([*UNDER_TORCHRUN, *arguments, *(["--tiny"] if setting.tiny else [])], {})
    note = setting.directory / "told.json"
    told = json.loads(note.read_text()) if note.exists() else {"healed": {}}
    runs = told["healed"].values()
    undone = [run["steps_lost"] == 0 and run["actions"] and run["difference"] == 0.0 for run in runs]
    return {"shown": code == 0 and all(undone), **told, "seconds": seconds, "end_of_output": output[-1500:]}


class Block(TrainerCallback):
    """One of two ranks does not come to the collective that the other one waits in."""

    def __init__(self, step: int, note: Path) -> None:
        self._step, self._note = step, note

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step and args.process_index == 1:
            self._note.write_text(str(time.time()))
            time.sleep(600)


def blocked_job(setting: Setting) -> None:
    """One of two ranks of a run; on a GPU both have the same one, which NCCL refuses and gloo does not."""
    watchdog.GRACE_SECONDS, sections.LEARNING_STEPS = 1.0, 2
    config = HealingConfig(hang_floor_seconds=2.0, launcher_restarts="yes")
    trainer = trainer_of(
        setting,
        "run",
        [Block(8, setting.directory / "blocked")],
        model=llama(setting, hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=128),
        max_steps=12,
        gradient_accumulation_steps=2,
        ddp_backend="gloo",
    )
    SelfHealingTrainer(trainer, config).train()


def blocked(setting: Setting) -> dict[str, Any]:
    """A collective that nobody ends: the process that waits in it writes down where, and leaves."""
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "0",
        str(HERE),
    ]
    command += ["job", str(setting.directory), "blocked", "--device", setting.device]
    variables = {"GLOO_SOCKET_IFNAME": "lo"}
    if setting.on_gpu:
        # Both ranks take the one device there is.
        variables |= {"ACCELERATE_TORCH_DEVICE": "cuda:0", "ACCELERATE_BYPASS_DEVICE_MAP": "true"}
    code, seconds, output = started([*command, *(["--tiny"] if setting.tiny else [])], variables)
    note = setting.directory / "blocked"
    began = float(note.read_text()) if note.exists() else None
    events = [
        json.loads(line)
        for path in (setting.directory / "run").glob("healing_events*.jsonl")
        for line in path.read_text().splitlines()
    ]
    left = [event["time"] for event in events if event.get("action") == "exit_for_restart"]
    waited = None if began is None or not left else min(left) - began
    return {
        "shown": waited is not None and waited <= 10.0,
        "seconds_until_it_left": waited,
        "seconds_of_the_job": seconds,
        "exit_code": code,
        "end_of_output": output[-600:],
    }


def limits(setting: Setting, task: str, lengths: str) -> dict[str, Any]:
    """`memory.py cuda`: healed beside a batch set by hand and `auto_find_batch_size`."""
    needs("trl", "datasets")
    output = setting.directory / "memory.json"
    command = [str(HERE.with_name("memory.py")), "cuda", "--tasks", task, "--lengths", lengths]
    command += ["--output", str(output)]
    command += [] if setting.on_gpu else ["--device", "cpu", "--simulate-rows", "5", "--steps", "4"]
    _, seconds, text = started(command, {}, within=480)
    found = json.loads(output.read_text()) if output.exists() else None
    runs = {run["variant"]: run for run in (found or {"settings": [{"runs": []}]})["settings"][0]["runs"]}
    healed, by_hand = (runs.get(name, {}).get("steps_per_second") for name in ("ours", "by_hand"))
    ratio = healed / by_hand if healed and by_hand else 0.0
    return {
        "shown": ratio >= 0.9 and runs["ours"]["steps_lost"] == 0 if setting.on_gpu else None,
        "throughput_over_by_hand": ratio,
        "seconds": seconds,
        "result": found,
        "end_of_output": text[-600:],
    }


PARTS: dict[str, dict[str, Case]] = {
    "veto": {where: partial(found_inf, where=where) for where in ("first step", "third step")},
    "repeats": {
        "bf16": partial(repeats, deterministic=False, bf16=True),
        "bf16, kernels that repeat": partial(repeats, deterministic=True, bf16=True),
        "fp32, kernels that repeat": partial(repeats, deterministic=True, bf16=False),
        "heals in bf16": partial(heals, bf16=True),
        "heals in fp32": partial(heals, bf16=False),
    },
    "memory": {task: partial(memory, task=task) for task in ("lm", "sft", "dpo", "kto", "reward")},
    "vocabulary": {"152k tokens": vocabulary},
    "side_stream": {"harder data, slow copies": side_stream},
    "replay": {f"learning rate {rate:g}": partial(replay, rate=rate) for rate in (2e-5, 1e-3)},
    "lost_device": {
        "simulated, by hand": partial(lost_device, how="simulated", launcher="none"),
        "simulated, launcher": partial(lost_device, how="simulated", launcher="environment"),
        "assert, by hand": partial(lost_device, how="assert", launcher="none"),
        "assert, launcher": partial(lost_device, how="assert", launcher="environment"),
        "assert, callback alone": partial(lost_device, how="assert", launcher="none", wrapped=False),
        "illegal access, launcher": partial(lost_device, how="illegal_access", launcher="environment"),
        "trap, launcher": partial(lost_device, how="trap", launcher="environment"),
        "simulated, torchrun": partial(lost_device, how="simulated", launcher="torchrun"),
        "assert, torchrun": partial(lost_device, how="assert", launcher="torchrun"),
    },
    "precision": {
        kind: partial(precision, kind=kind)
        for kind in ("fp16", "bf16 weights", "LoRA", "sdpa", "eager", "flash attention")
    },
    "optimizers": {
        optim: partial(optimizers, optim=optim)
        for optim in ("adamw_torch_fused", "adafactor", "adamw_8bit", "paged_adamw_8bit", "muon", "4-bit LoRA")
    },
    "compile": {mode: partial(compiled, mode=mode) for mode in ("default", "reduce-overhead")},
    "syncs": {"sft": syncs},
    "overhead": {
        "0.5B": partial(overhead, size="0.5B", accumulation=1),
        "0.5B, accumulation 8": partial(overhead, size="0.5B", accumulation=8),
        "1.5B": partial(overhead, size="1.5B", accumulation=1),
    },
    "overhead_grpo": {"0.5B": partial(overhead, size="0.5B", accumulation=1, task="grpo")},
    "first_steps": {size: partial(first_steps, size=size) for size in ("0.5B", "1.5B")},
    "snapshots": {"100M": snapshots},
    "distributed": {
        "one process, NCCL": distributed,
        "two ranks, one blocked": blocked,
        "FSDP2, one process": partial(sharded, engine="fsdp2"),
        "ZeRO-2, one process": partial(sharded, engine="zero2"),
    },
    **{
        f"limits_{task}": {
            f"{lengths} row long": partial(limits, task=task, lengths=lengths)
            for lengths in (("every",) if task == "grpo" else ("every", "some"))
        }
        for task in ("sft", "dpo", "grpo")
    },
}


# ---- one part ----


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "self_healing": self_healing.__version__,
    }
    for name in ("trl", "datasets", "peft", "bitsandbytes"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def run_part(part: str, results: Path, device: str, tiny: bool) -> dict[str, Any]:
    """The cases of a part that have no result yet; what there is is written after each."""
    file = results / f"gpu_{part}.json"
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    content |= {
        "part": part,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "tiny": tiny,
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "versions": versions(),
        "complete": False,
    }
    cases = content.setdefault("cases", {})

    def write() -> None:
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    for name, case in PARTS[part].items():
        if name in cases and "begun" not in cases[name]:
            continue
        # Once it may have been the machine that was taken away.
        begun = cases.get(name, {}).get("begun", 0)
        if begun > 1:
            cases[name] = {"shown": False, "error": "its process was ended twice while it ran; --again begins it anew"}
            write()
            continue
        cases[name] = {"begun": begun + 1}
        write()
        # What was cut off may be gone on with on another card.
        cases[name] = {**outcome(case, device, tiny), "device": content["device"], "date": content["date"]}
        write()
        print(f"{part}, {name}: {json.dumps(cases[name])[:400]}", flush=True)
    content["complete"] = True
    write()
    return content


def outcome(case: Case, device: str, tiny: bool) -> dict[str, Any]:
    """What a case has found; what it raises is a result as well."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        try:
            found = case(Setting(device, tiny, Path(directory)))
        except Skipped as skipped:
            return {"shown": None, "skipped": str(skipped)}
        except Exception as error:
            return {"shown": False, "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    return {**found, "case_seconds": round(time.monotonic() - began, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("part", choices=[*PARTS, "job"])
    parser.add_argument("directory", type=Path, help="of the results; of a job its own")
    parser.add_argument("how", nargs="?", help="of a job: how its device is lost")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--callback-alone", action="store_true")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if options.part == "job" and options.how == "blocked":
        blocked_job(Setting(options.device, options.tiny, options.directory))
    elif options.part == "job" and options.how in ("fsdp2", "zero2"):
        sharded_job(Setting(options.device, options.tiny, options.directory), options.how)
    elif options.part == "job":
        job(Setting(options.device, options.tiny, options.directory), options.how, not options.callback_alone)
    else:
        run_part(options.part, options.directory, options.device, options.tiny)


if __name__ == "__main__":
    main()
