"""Builders shared by all tests: tiny models from configs, a tokenizer trained on the spot, real trainers, faults."""

from __future__ import annotations

import functools
import gc
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

import accelerate.utils.imports
import pytest
import torch
from forked import Forked, fork_server
from recorded_votes import RecordedVotes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import self_healing.callback as healing_callback
from self_healing import FAILURE_RECIPES, Action, FailureType, Incident
from self_healing.failures.recipes import Rung
from self_healing.healers.numerics.detectors.rules import load_rules
from self_healing.journal.journal import Journal
from self_healing.journal.terminal import Terminal
from self_healing.run.incidents import OpenIncident, Outcomes
from self_healing.system.files import CHECKPOINT_FILES, GITIGNORE, REPORT_FILES, RUN_FILES
from self_healing.tools.chaos.faults import KINDS


try:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import (
        DPOConfig,
        DPOTrainer,
        GRPOConfig,
        GRPOTrainer,
        KTOConfig,
        KTOTrainer,
        RewardConfig,
        RewardTrainer,
        RLOOConfig,
        RLOOTrainer,
        SFTConfig,
        SFTTrainer,
    )
    from trl.trainer import base_trainer
except ImportError as _missing:
    # A machine with a GPU need not have all of it. What needs none of it is run there all the same.
    SFTTrainer = None
    _WHY = f"{_missing}; `python benchmarks/gpu.py needs` says how to get it"

    class LeftOut(pytest.Module):
        def collect(self) -> Any:
            pytest.skip(_WHY, allow_module_level=True)

    def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> Any:
        return None if module_path.name == "test_gpu_bench.py" else LeftOut.from_parent(parent, path=module_path)


# What a user relies on, beside the tests marked `heals`: their faults and assertions stay as they are while the code
# below them is rebuilt (`make contract`). All other tests go with the code that they test.
CONTRACT = frozenset(
    {
        *("test_chaos_journals", "test_cli", "test_collectives", "test_healthy", "test_healthy_settings"),
        *("test_colocated_engine", "test_ddp_settings", "test_memory", "test_memory_gpu", "test_one_rank"),
        *("test_copies", "test_disk", "test_known_errors", "test_outcomes", "test_steps_lost_unknown", "test_verdict"),
        *("test_faults_healed_in_place", "test_faults_that_end_a_job", "test_private_text"),
        *("test_spoken_runs", "test_terminal", "test_whole_runs"),
    }
)


# What takes longest comes first, or one process would still be at it when the others have nothing left.
LONGEST = (
    *("test_counts", "test_memory", "test_restarts", "test_distributed", "test_veto", "test_failing_ranks"),
    *("test_rollback", "test_size", "test_learning_rate", "test_collectives", "test_poison", "test_exceptions"),
    *("test_faults_that_end_a_job", "test_ending_together", "test_faults_healed_in_place"),
)


def pytest_configure(config: pytest.Config) -> None:
    # Not where others run the tests.
    if config.getoption("dist", "no") == "no":
        fork_server()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in CONTRACT or item.get_closest_marker("heals") is not None:
            item.add_marker("contract")
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


# What is installed does not change; accelerate reads it from the disk in each step.
accelerate.utils.imports._is_package_available = functools.cache(accelerate.utils.imports._is_package_available)
# Nor does the table of rules, which is read whenever a callback is made.
_TABLE = load_rules()
healing_callback.load_rules = lambda path: _TABLE if path is None else load_rules(path)


def tokenized_once(trainer_class: Any) -> None:
    """Has trainers of a class that are made of the same rows share what they make of them: a third of their time."""
    prepare, known = trainer_class._prepare_dataset, dict[Any, Any]()

    def prepared(trainer: Any, dataset: Any, tokenizer: Any, args: Any, *others: Any, **named: Any) -> Any:
        if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom":
            return prepare(trainer, dataset, tokenizer, args, *others, **named)
        settings = (args.max_length, getattr(args, "loss_type", None), others, named)
        made_of = (dataset._fingerprint, tokenizer, str(settings))
        if made_of not in known:
            known[made_of] = prepare(trainer, dataset, tokenizer, args, *others, **named)
        return known[made_of]

    trainer_class._prepare_dataset = prepared


def written_once(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Has checkpoints whose model cards are the same share one: half of the time that it takes to write them."""
    known: dict[str, Any] = {}

    def generated(**about: Any) -> Any:
        if str(about) not in known:
            known[str(about)] = generate(**about)
        return known[str(about)]

    return generated


if SFTTrainer is not None:
    if hasattr(base_trainer, "generate_model_card"):
        base_trainer.generate_model_card = written_once(base_trainer.generate_model_card)
    for _class in (SFTTrainer, DPOTrainer, KTOTrainer, RewardTrainer):
        if hasattr(_class, "_prepare_dataset"):
            tokenized_once(_class)

torch.set_num_threads(1)
# Of several processes each compares its own with those of the others at its end; one alone takes part in none.
VOTES = RecordedVotes()
# Where the models of all tests are trained, and in which precision: `make test-gpu` has them on a GPU.
DEVICE = os.environ.get("TEST_DEVICE", "cpu")
PRECISION = os.environ.get("TEST_PRECISION", "fp32")
if DEVICE != "cpu":
    # Before the first matrix product: without it, cuBLAS does not repeat bitwise.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)

SENTENCE = "the model reads a row of text and learns to say what comes next in every line it has seen before"
WORDS = SENTENCE.split()
TEXTS = [" ".join(WORDS[(i * 7 + j * (1 + i % 5)) % len(WORDS)] for j in range(6 + i % 9)) for i in range(64)]
POISON_WORD = "xylophone"


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@functools.cache
def build_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(unk_token=None))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "<eos>", POISON_WORD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def tiny_config(tokenizer: Any, dropout: float = 0.1, **overrides: Any) -> LlamaConfig:
    return LlamaConfig(
        **{
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "attention_dropout": dropout,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": None,
            **overrides,
        }
    )


def tiny_model(tokenizer: Any, dropout: float = 0.1, seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    set_seed(seed)
    return LlamaForCausalLM(tiny_config(tokenizer, dropout, **overrides))


def common_arguments(output_dir: Path, **overrides: Any) -> dict[str, Any]:
    return {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": DEVICE == "cpu",
        "disable_tqdm": True,
        "seed": 7,
        "bf16": PRECISION == "bf16",
        "gradient_checkpointing": False,
        **overrides,
    }


@functools.cache
def text_rows(*texts: str) -> Dataset:
    return Dataset.from_dict({"text": [*texts]})


def sft_trainer(
    output_dir: Path,
    tokenizer: Any,
    *,
    dropout: float = 0.1,
    texts: list[str] | None = None,
    callbacks: list[TrainerCallback] | None = None,
    model: Any = None,
    dataset: Any = None,
    trainer_class: type[SFTTrainer] = SFTTrainer,
    trainer_kwargs: dict[str, Any] | None = None,
    **arguments: Any,
) -> SFTTrainer:
    return trainer_class(
        model=model if model is not None else tiny_model(tokenizer, dropout),
        args=SFTConfig(**common_arguments(output_dir, **{"max_length": 64, **arguments})),
        train_dataset=dataset if dataset is not None else text_rows(*(texts or TEXTS)),
        processing_class=tokenizer,
        callbacks=callbacks,
        **(trainer_kwargs or {}),
    )


def scaled_half_precision_trainer(output_dir: Path, tokenizer: Any, **arguments: Any) -> SFTTrainer:
    """What fp16 is on a GPU, and accelerate leaves out on the CPU: autocast, and gradients that are scaled."""
    trainer = sft_trainer(output_dir, tokenizer, fp16=True, **arguments)
    trainer.accelerator.native_amp = True
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
    return trainer


def adapter_trainer(output_dir: Path, tokenizer: Any, **arguments: Any) -> SFTTrainer:
    """Trains a LoRA adapter."""
    adapter = {"peft_config": LoraConfig(target_modules=["q_proj"], r=2, lora_dropout=0.1)}
    return sft_trainer(output_dir, tokenizer, trainer_kwargs=adapter, **arguments)


def best_model_trainer(output_dir: Path, tokenizer: Any, *callbacks: TrainerCallback, **arguments: Any) -> SFTTrainer:
    """Evaluates and saves every two steps, and ends with the best of the checkpoints."""
    return sft_trainer(
        output_dir,
        tokenizer,
        callbacks=list(callbacks),
        trainer_kwargs={"eval_dataset": Dataset.from_dict({"text": TEXTS[:4]})},
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        **arguments,
    )


def plain_trainer(
    output_dir: Path,
    tokenizer: Any,
    *,
    callbacks: Any = None,
    dropout: float = 0.1,
    model: Any = None,
    trainer_class: type[Trainer] = Trainer,
    trainer_kwargs: dict[str, Any] | None = None,
    **arguments: Any,
) -> Trainer:
    return trainer_class(
        model=model if model is not None else tiny_model(tokenizer, dropout),
        args=TrainingArguments(**common_arguments(output_dir, **arguments)),
        processing_class=tokenizer,
        callbacks=callbacks,
        **({"train_dataset": encoded_rows(tokenizer)} | (trainer_kwargs or {})),
    )


@functools.cache
def encoded_rows(tokenizer: Any) -> Dataset:
    def encode(text: str) -> dict[str, list[int]]:
        ids = (tokenizer(text)["input_ids"] + [tokenizer.pad_token_id] * 24)[:24]
        return {
            "input_ids": ids,
            "attention_mask": [int(token != tokenizer.pad_token_id) for token in ids],
            "labels": [token if token != tokenizer.pad_token_id else -100 for token in ids],
        }

    return Dataset.from_list([encode(text) for text in TEXTS])


def preferences(poisoned: Collection[int] = ()) -> Dataset:
    def ending(index: int) -> str:
        return f" {POISON_WORD}" if index in poisoned else ""

    return Dataset.from_dict(
        {
            "prompt": [" ".join(text.split()[:3]) for text in TEXTS],
            "chosen": [" " + " ".join(text.split()[3:7]) + ending(index) for index, text in enumerate(TEXTS)],
            "rejected": [" " + " ".join(reversed(text.split()[3:6])) for text in TEXTS],
        }
    )


def dpo_trainer(output_dir: Path, tokenizer: Any, *, callbacks: Any = None, **arguments: Any) -> DPOTrainer:
    dropout = arguments.pop("dropout", 0.1)
    pairs = preferences(arguments.pop("poisoned", ()))
    trainer_kwargs = {"ref_model": tiny_model(tokenizer, dropout)} | arguments.pop("trainer_kwargs", {})
    return DPOTrainer(
        model=tiny_model(tokenizer, dropout),
        args=DPOConfig(**common_arguments(output_dir, **{"max_length": 64, **arguments})),
        processing_class=tokenizer,
        callbacks=callbacks,
        **({"train_dataset": pairs} | trainer_kwargs),
    )


def kto_trainer(output_dir: Path, tokenizer: Any, *, callbacks: Any = None, **arguments: Any) -> KTOTrainer:
    pairs = preferences(arguments.pop("poisoned", ()))
    dropout = arguments.pop("dropout", 0.1)
    return KTOTrainer(
        model=tiny_model(tokenizer, dropout),
        ref_model=tiny_model(tokenizer, dropout),
        args=KTOConfig(**common_arguments(output_dir, **{"max_length": 64, **arguments})),
        train_dataset=Dataset.from_dict(
            {
                "prompt": pairs["prompt"],
                "completion": [
                    c if i % 2 or POISON_WORD in c else r
                    for i, (c, r) in enumerate(zip(pairs["chosen"], pairs["rejected"], strict=True))
                ],
                "label": [bool(i % 2) for i in range(len(pairs))],
            }
        ),
        processing_class=tokenizer,
        callbacks=callbacks,
    )


def reward_trainer(output_dir: Path, tokenizer: Any, *, callbacks: Any = None, **arguments: Any) -> RewardTrainer:
    set_seed(0)
    model = LlamaForSequenceClassification(tiny_config(tokenizer, arguments.pop("dropout", 0.1), num_labels=1))
    pairs = preferences(arguments.pop("poisoned", ()))
    return RewardTrainer(
        model=model,
        args=RewardConfig(**common_arguments(output_dir, **{"max_length": 64, **arguments})),
        train_dataset=Dataset.from_dict(
            {
                "chosen": [p + c for p, c in zip(pairs["prompt"], pairs["chosen"], strict=True)],
                "rejected": [p + r for p, r in zip(pairs["prompt"], pairs["rejected"], strict=True)],
            }
        ),
        processing_class=tokenizer,
        callbacks=callbacks,
    )


def count_of_the(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs between completions."""
    return [float(len(set(text))) + 0.1 * len(text) for text in completions]


def prompts() -> Dataset:
    return Dataset.from_dict({"prompt": [" ".join(text.split()[:3]) for text in TEXTS]})


def grpo_trainer(output_dir: Path, tokenizer: Any, *, callbacks: Any = None, **arguments: Any) -> GRPOTrainer:
    dropout = arguments.pop("dropout", 0.1)
    trainer_kwargs = arguments.pop("trainer_kwargs", {})
    return GRPOTrainer(
        model=arguments.pop("model", None) or tiny_model(tokenizer, dropout),
        reward_funcs=arguments.pop("reward_funcs", count_of_the),
        args=GRPOConfig(
            **common_arguments(
                output_dir, **{"max_completion_length": 8, "num_generations": 4, "max_steps": 4, **arguments}
            )
        ),
        processing_class=tokenizer,
        callbacks=callbacks,
        **({"train_dataset": prompts()} | trainer_kwargs),
    )


def rloo_trainer(output_dir: Path, tokenizer: Any, *, callbacks: Any = None, **arguments: Any) -> RLOOTrainer:
    dropout = arguments.pop("dropout", 0.1)
    model = arguments.pop("model", None) or tiny_model(tokenizer, dropout)
    # RLOO's reference model is loaded from where the model came from.
    model.save_pretrained(output_dir.parent / "rloo-model")
    model.config._name_or_path = str(output_dir.parent / "rloo-model")
    return RLOOTrainer(
        model=model,
        reward_funcs=count_of_the,
        args=RLOOConfig(
            **common_arguments(
                output_dir, **{"max_completion_length": 8, "num_generations": 4, "max_steps": 4, **arguments}
            )
        ),
        train_dataset=prompts(),
        processing_class=tokenizer,
        callbacks=callbacks,
    )


TRAINERS: dict[str, Callable[..., Trainer]] = {
    "Trainer": plain_trainer,
    "SFTTrainer": sft_trainer,
    "DPOTrainer": dpo_trainer,
    "GRPOTrainer": grpo_trainer,
    "KTOTrainer": kto_trainer,
    "RewardTrainer": reward_trainer,
    "RLOOTrainer": rloo_trainer,
}


# ---- faults, injected inside the network ----


class OutputFault:
    """Changes the output of a model's final norm (B, T, D) in training forwards, gradients on, counted from 1."""

    def __init__(
        self,
        model: Any,
        strike: Callable[[int], bool],
        change: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden * float("nan"),
    ) -> None:
        self.forwards = 0
        self.fired = 0
        self._strike, self._change = strike, change
        self.handle = model.model.norm.register_forward_hook(self._hook)

    def _hook(self, module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        if not torch.is_grad_enabled() or not module.training:
            return None
        self.forwards += 1
        if not self._strike(self.forwards):
            return None
        self.fired += 1
        return self._change(output)


class GradientFault:
    """Puts an Inf into one entry of one gradient, at the nth backward through it."""

    def __init__(self, model: Any, strike: Callable[[int], bool], value: float = float("inf")) -> None:
        self.backwards = 0
        self.fired = 0
        self._strike, self._value = strike, value
        self.handle = model.model.layers[0].mlp.down_proj.weight.register_hook(self._hook)

    def _hook(self, gradient: torch.Tensor) -> torch.Tensor | None:
        self.backwards += 1
        if not self._strike(self.backwards):
            return None
        self.fired += 1
        changed = gradient.clone()
        changed.view(-1)[3] = self._value
        return changed


class WeightFault(TrainerCallback):
    """Changes the weights in place once a step is finished, at the given steps."""

    def __init__(self, change: Callable[[Any], Any], *steps: int) -> None:
        self.change, self.steps = change, steps
        self.fired: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step in self.steps:
            self.fired.append(state.global_step)
            with torch.no_grad():
                self.change(model)


def a_few_nans(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.weight.view(-1)[:3] = float("nan")


class PoisonToken:
    """The model's output is NaN for every row that holds a certain token, always."""

    def __init__(self, model: Any, token: int) -> None:
        self.fired = 0
        self._token, self._bad = token, None
        self._handles = [
            model.model.embed_tokens.register_forward_pre_hook(self._see),
            model.model.norm.register_forward_hook(self._spoil),
        ]

    def _see(self, module: Any, inputs: tuple[torch.Tensor]) -> None:
        self._bad = inputs[0] == self._token  # (B, T)

    def _spoil(self, module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        if self._bad is None or not bool(self._bad.any()) or not torch.is_grad_enabled():
            return None
        self.fired += 1
        return output.masked_fill(self._bad.any(dim=1)[:, None, None], float("nan"))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class RaisingForward:
    """Raises in training forwards for which `strike` says so."""

    def __init__(self, model: Any, strike: Callable[[int], bool], error: Callable[[], Exception]) -> None:
        self.forwards = 0
        self.fired = 0
        self._strike, self._error = strike, error
        self.handle = model.model.norm.register_forward_pre_hook(self._hook)

    def _hook(self, module: Any, inputs: Any) -> None:
        if not torch.is_grad_enabled() or not module.training:
            return
        self.forwards += 1
        if self._strike(self.forwards):
            self.fired += 1
            raise self._error()


class Adversarial(Trainer):
    """The embedding is moved along its gradient, another one is computed there, and the embedding is put back."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss, embedding = super().training_step(*args, **kwargs), self.model.model.embed_tokens.weight
        assert embedding.grad is not None
        before = embedding.data.clone()
        # Past the counter of versions, as it is often written.
        embedding.data.add_(embedding.grad / embedding.grad.norm(), alpha=0.3)
        super().training_step(*args, **kwargs)
        embedding.data.copy_(before)
        return loss


def lost_connection() -> Exception:
    return ConnectionError("the storage went away")


class RaisingAt(TrainerCallback):
    """Raises once in one event at one step."""

    def __init__(self, event: str, step: int) -> None:
        self.fired = 0

        def handler(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step and not self.fired:
                self.fired += 1
                raise lost_connection()

        setattr(self, event, handler)


class EvalLoss(TrainerCallback):
    """Has evaluations find a loss that rises with the step, or falls: the first one is the best, or the last."""

    def __init__(self, rises: bool) -> None:
        self._sign = 1 if rises else -1

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        metrics["eval_loss"] = float(self._sign * state.global_step)


class Unspeakable(Exception):
    """Cannot be put into words, or looked into."""

    def __str__(self) -> str:
        raise ValueError("no text")

    @property
    def response(self) -> Any:
        raise ValueError("no response")


# As pyo3 raises it: a class that cannot be imported, and no `Exception`.
PanicException = type("PanicException", (BaseException,), {})


def every_fault(slow: str = "0.2") -> str:
    """All kinds there are, as `all` has them; but nobody waits for an hour, and torn checkpoints have to be read."""
    otherwise = {
        "hang": "hang:seconds=600",
        "slow_step": f"slow_step:seconds={slow}",
        "torn_checkpoint": "torn_checkpoint:then=sigkill",
    }
    return ", ".join(otherwise.get(kind, kind) for kind in KINDS)


def slowly(*values: Any) -> list[Any]:
    """Further values of a parameter, for `make test-slow`."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


# ---- comparisons ----


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def assert_same_weights(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not different, f"not bitwise equal: {different[:5]}"


TIMES = ("runtime", "per_second", "step_time", "healing/")


def logged(trainer: Trainer) -> list[dict[str, Any]]:
    """The log history without run times and speeds."""
    return without_times(trainer.state.log_history)


def without_times(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in entry.items() if not any(part in key for part in TIMES)} for entry in history
    ]


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class DiskThatFills:
    """A trainer for whose process the disk takes only small files while the checkpoint of one step is written."""

    state: Any
    full_at: int | None = None

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step != self.full_at:
            super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]
            return
        # A file that is too large is an error then, and not the end of the process.
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        try:
            super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, before)


def leave_together() -> None:
    """
    Ends a process of several, which have all taken part in the same votes. Gloo threads that outlive the others, or
    the interpreter, abort it now and then.
    """
    VOTES.compare()
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


def journal(output_dir: Path, kind: str | None = None, rank: int = 0) -> list[dict[str, Any]]:
    path = Path(output_dir) / (f"healing_events.rank{rank}.jsonl" if rank else "healing_events.jsonl")
    if not path.exists():
        return []
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [event for event in events if kind is None or event["kind"] == kind]


def quarantined(output_dir: Path) -> list[dict[str, Any]]:
    path = Path(output_dir) / "quarantine.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_own(path: str | os.PathLike[str]) -> bool:
    """Whether a file, relative to an `output_dir`, is one of self_healing."""
    relative = PurePosixPath(path)
    in_checkpoint = len(relative.parts) == 2 and relative.match("checkpoint-*/*")
    if in_checkpoint and relative.name in CHECKPOINT_FILES:
        return True
    return any(fnmatchcase(str(relative), pattern) for pattern in (*RUN_FILES, *REPORT_FILES, GITIGNORE))


# ---- jobs in processes of their own ----

JOB = "restarted_job.py"


def start_job(output_dir: Path, environment: dict[str, str], options: dict[str, Any]) -> int:
    """Runs the job of restarted_job.py to its end, and gives its exit code."""
    log = Path(f"{output_dir}.log")
    return Forked(JOB, output_dir, json.dumps(options), environment=environment, out=log, err=log).wait()


@pytest.fixture
def start() -> Callable[..., int]:
    """Starts the job as a launcher would that has started it so many times before; gives its exit code."""

    def start(output_dir: Path, restarts: int = 0, launcher: str = "torchrun", **options: Any) -> int:
        variables = {
            "torchrun": {
                "TORCHELASTIC_RUN_ID": "job",
                "TORCHELASTIC_RESTART_COUNT": str(restarts),
                "TORCHELASTIC_MAX_RESTARTS": "30",
            },
            "slurm": {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": str(restarts)},
            "pod": {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
            "none": {},
        }[launcher]
        return start_job(output_dir, variables, options)

    return start


@pytest.fixture
def until_it_ends(start: Callable[..., int]) -> Callable[..., list[int]]:
    """The exit codes of a job that is started again whenever it fails."""

    def until_it_ends(output_dir: Path, starts: int, **options: Any) -> list[int]:
        codes = [start(output_dir, 0, **options)]
        while codes[-1] != 0 and len(codes) < starts:
            codes.append(start(output_dir, len(codes), **options))
        return codes

    return until_it_ends


def job_result(output_dir: Path) -> dict[str, Any]:
    return json.loads(Path(f"{output_dir}.json").read_text())


def job_log(output_dir: Path) -> str:
    return Path(f"{output_dir}.log").read_text()


@pytest.fixture(scope="module", autouse=True)
def settled_imports() -> None:
    """Trainers collect garbage at each training, and a third of all time here would go into what was imported."""
    gc.collect()
    gc.freeze()


def off_the_ladder(failure: FailureType, actions: Sequence[str]) -> str | None:
    """How what was done about an incident departs from what its recipe declares; `None` if it does not."""
    recipe, first = FAILURE_RECIPES[failure], [Action(action) for action in dict.fromkeys(actions)]
    ladder = recipe.actions
    if any(isinstance(each, Rung) for each in recipe.ladder):
        # What is declared is what is executed.
        return None
    if unknown := [action.value for action in first if action not in ladder]:
        return f"{failure.value}: {unknown} on no rung of {[action.value for action in ladder]}"
    if Action.CHECKPOINT_ACTIVATIONS in first:
        # What could not be split before may be split now: with fewer activations kept, something else runs out.
        upto = first.index(Action.CHECKPOINT_ACTIVATIONS)
        first = [*first[:upto], *(action for action in first[upto:] if action is not Action.SPLIT_BATCH)]
    if first != sorted(first, key=ladder.index):
        return f"{failure.value}: {[*map(str, first)]} is not the order of {[action.value for action in ladder]}"
    return None


@pytest.fixture(autouse=True)
def _ladders_are_climbed_as_declared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test does to a run: each incident is treated in the order of its failure's ladder."""
    taken: dict[tuple[str, FailureType], list[str]] = {}
    written = Journal.acted
    ends_the_process = {Action.STOP, Action.SAVE_AND_LEAVE, Action.EXIT_FOR_RESTART}

    def acted(self: Journal, incident: Incident, action: str, happened: bool = True, **result: Any) -> None:
        if incident.failure is not None:
            earlier = taken.setdefault((incident.id, incident.failure), [])
            # Whatever the failure: a run that is taken up again says so in the incident that ended it, and one is
            # entered once more where it was the way back to it that failed.
            besides = action == Action.RESUME and action not in FAILURE_RECIPES[incident.failure].actions
            if not besides and (action != Action.RESUME or ends_the_process.isdisjoint(earlier)):
                earlier.append(action)
        written(self, incident, action, happened, **result)

    monkeypatch.setattr(Journal, "acted", acted)
    yield
    departures = [off_the_ladder(failure, actions) for (_, failure), actions in taken.items()]
    assert [each for each in departures if each is not None] == []


@pytest.fixture(autouse=True)
def _nobody_goes_on_speaking() -> Iterator[None]:
    """Whatever ends a run, and wherever."""
    yield
    assert [each for each in logging.getLogger("self_healing").handlers if isinstance(each, Terminal)] == []


@pytest.fixture(autouse=True)
def _no_incident_is_lost(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """
    Whatever a test does to a run: an incident that was told of has an outcome, or is where it waits for one, and none
    is open any more when the run has ended.
    """
    told: list[Incident] = []
    waiting: list[Incident] = []
    lost: list[str] = []
    deal_with, event = Journal.dealt_with, Journal.event
    wait_for, leave_open = Outcomes.wait_for, OpenIncident.leave_open

    def dealt_with(self: Journal, incident: Incident) -> None:
        told.append(incident)
        deal_with(self, incident)

    def written(self: Journal, kind: str, step: int, **fields: Any) -> None:
        # The device may be lost while an incident is dealt with.
        if kind == "run_ended" or (kind == "postmortem" and fields["failure"] != FailureType.DEVICE):
            # The watchdog closes its own when it stops, after this.
            lost.extend(
                f"{each} when {kind}"
                for each in self.incidents
                if each.outcome == "open" and each.failure is not FailureType.HANG and not left(each)
            )
        event(self, kind, step, **fields)

    def waits(self: Outcomes, incident: Incident) -> None:
        waiting.append(incident)
        wait_for(self, incident)

    def stays_open(self: OpenIncident) -> None:
        waiting.append(self.incident)
        leave_open(self)

    def left(incident: Incident) -> bool:
        """Whether the next process takes it up."""
        return Action.EXIT_FOR_RESTART in incident.actions

    monkeypatch.setattr(Journal, "dealt_with", dealt_with)
    monkeypatch.setattr(Journal, "event", written)
    monkeypatch.setattr(Outcomes, "wait_for", waits)
    monkeypatch.setattr(OpenIncident, "leave_open", stays_open)
    yield
    placed = {id(incident) for incident in waiting}
    # Of a save that failed it is told at once, and the next save or the end of the run closes it.
    open_still = [each for each in told if each.outcome == "open" and each.failure is not FailureType.DISK]
    lost += [f"{each} told of" for each in open_still if id(each) not in placed and not left(each)]
    assert lost == []


@pytest.fixture(autouse=True)
def _same_start() -> None:
    set_seed(1234)
