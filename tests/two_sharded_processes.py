"""Run by test_distributed.py under torchrun: the same struck runs under FSDP2 or DDP, on two processes or four."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate import PartialState
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from conftest import (
    POISON_WORD,
    TEXTS,
    OutputFault,
    PoisonToken,
    adapter_trainer,
    build_tokenizer,
    dpo_trainer,
    journal,
    leave_together,
    losses,
    plain_trainer,
    sft_trainer,
    tiny_model,
)
from datasets import Dataset
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM, set_seed
from two_processes import BitFlip

from self_healing import SelfHealingCallback
from self_healing.healers.numerics import replicas
from self_healing.hf.memory import fingerprint_of
from self_healing.hf.state import named_gradients_of


def sharded_on_the_cpu(strategy: str) -> None:
    """Has accelerate take the CPU for a device that FSDP2 can shard over; otherwise it trains under DDP, silently."""
    os.environ.update(ACCELERATE_TORCH_DEVICE="cpu")
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    if strategy == "fsdp2":
        os.environ.update(
            ACCELERATE_USE_FSDP="true",
            FSDP_VERSION="2",
            FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
            FSDP_TRANSFORMER_CLS_TO_WRAP="LlamaDecoderLayer",
        )


class PoisonGradient(PoisonToken):
    """The gradient is NaN for every row that holds a certain token, the loss is not."""

    def _spoil(self, module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        if self._bad is None or not bool(self._bad.any()) or not output.requires_grad:
            return None
        self.fired += 1
        bad = self._bad.any(dim=1)[:, None, None]
        output.register_hook(lambda gradient: gradient.masked_fill(bad, float("nan")))
        return None


class ShortOfMemory:
    """The second rank has memory for so many rows of a call at a time."""

    def __init__(self, model: Any, rows: int) -> None:
        self.fired, self._rows = 0, rows
        model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        rows = kwargs["input_ids"].shape[0]
        if rows > self._rows and torch.distributed.get_rank() == 1:
            self.fired += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 2.00 GiB. ({rows} rows)")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def inside(model: Any) -> Any:
    """The model below an adapter."""
    return getattr(model, "get_base_model", lambda: model)()


class Runs:
    """Trains the same model again and again, struck by one fault after the other, and notes what became of it."""

    def __init__(self, directory: Path) -> None:
        self.results: dict[str, Any] = {}
        self._directory = directory
        self.rank = torch.distributed.get_rank()
        self.tokenizer = build_tokenizer()
        self.poison = self.tokenizer.convert_tokens_to_ids(POISON_WORD)

    def texts(self, poisoned: tuple[int, ...]) -> list[str]:
        return [f"{text} {POISON_WORD}" if index in poisoned else text for index, text in enumerate(TEXTS)]

    def run(
        self,
        name: str,
        fault: Callable[[Any], Any] = lambda trainer: None,
        poisoned: tuple[int, ...] = (),
        healed: bool = True,
        make: Callable[..., Any] = sft_trainer,
        **arguments: Any,
    ) -> None:
        set_seed(1234)
        if make is sft_trainer:
            arguments["texts"] = self.texts(poisoned)
        elif poisoned:
            arguments["poisoned"] = poisoned
        trainer = make(
            self._directory / name,
            self.tokenizer,
            callbacks=[SelfHealingCallback()] if healed else None,
            **{"ddp_backend": "gloo", "max_steps": 4, **arguments},
        )
        struck = fault(trainer)
        trainer.train()
        self.note(name, trainer, getattr(struck, "fired", 0))

    def note(self, name: str, trainer: Any, fired: int = 0) -> None:
        parameters = list(trainer.model.parameters())
        self.results[name] = {
            "sharded": all(isinstance(parameter, DTensor) for parameter in parameters),
            "placements": str(getattr(parameters[0], "placements", "")),
            "sum": sum(float(whole(value.data).double().sum()) for value in parameters),
            "losses": losses(trainer),
            "left_over": len(list(named_gradients_of(trainer.model))),
            "fired": fired,
            "outcomes": [
                [event["failure"], event["steps_lost"]]
                for event in journal(self._directory / name, "outcome")
                if self.rank == 0
            ],
            "metrics": trainer.state.log_history[0],
        }

    def nan_on_one_rank(self, trainer: Any) -> OutputFault:
        return OutputFault(inside(trainer.model), lambda forward: forward == 4 and self.rank == 1)

    def poison_token(self, trainer: Any) -> PoisonToken:
        return PoisonToken(inside(trainer.model), self.poison)

    def learned_before(self, name: str) -> Callable[[Any], ShortOfMemory]:
        """
        What an earlier start of the job has left: three rows did not fit, two short ones did. So the ranks, whose rows
        differ in length, would not split alike by themselves. Once more out of memory would end the job.
        """

        def fault(trainer: Any) -> ShortOfMemory:
            if self.rank == 0:
                sizes = {kind: {"fits": [[2, 12]], "fails": [[3, 1]]} for kind in ("train", "generate")}
                content = {
                    "version": 1,
                    "for": fingerprint_of(trainer),
                    "sizes": sizes,
                }
                (self._directory / name).mkdir(parents=True, exist_ok=True)
                (self._directory / name / "healing_sizes.json").write_text(
                    json.dumps({**content, "checkpointing_activations": False})
                )
            torch.distributed.barrier()
            return ShortOfMemory(trainer.model, 2)

        return fault

    # ---- the parts ----

    def within_a_step(self) -> None:
        same: dict[str, Any] = {"dropout": 0.0}
        self.run("plain", healed=False)
        self.run("transient", self.nan_on_one_rank)
        # Of the second and of the last step all rows are NaN: what is left of them reaches the third, or the end.
        struck = (1, 3)
        self.run(
            "skipped",
            lambda trainer: OutputFault(trainer.model, lambda _: trainer.state.global_step in struck),
            **same,
        )
        self.run("poison", self.poison_token, poisoned=(5, 17), **same)
        self.run("gradient", lambda trainer: PoisonGradient(trainer.model, self.poison), poisoned=(5, 17), **same)

    def all_rows_of_a_rank(self) -> None:
        """Micro-batches of one row, of which a rank has nothing left without it."""
        one: dict[str, Any] = {"dropout": 0.0, "per_device_train_batch_size": 1, "max_steps": 8}
        for name, masked in (("masked", True), ("only_row", False)):
            data = Dataset.from_list([self.encoded(text, masked) for text in self.texts((5, 9))])
            self.run(
                name,
                (lambda trainer: None) if masked else self.poison_token,
                healed=not masked,
                make=plain_trainer,
                trainer_kwargs={"train_dataset": data},
                # Nothing at all is left for a rank to count.
                gradient_accumulation_steps=1,
                **one,
            )
        # Every pair has a loss of ln 2, as the policy is its own reference.
        self.run("only_pair", self.poison_token, make=dpo_trainer, poisoned=(5, 9), **one, learning_rate=0.0)

    def encoded(self, text: str, masked: bool) -> dict[str, list[int]]:
        ids = (self.tokenizer(text)["input_ids"] + [self.tokenizer.pad_token_id] * 24)[:24]
        ignored = {self.tokenizer.pad_token_id}
        counts = not (masked and self.poison in ids)
        return {
            "input_ids": ids,
            "attention_mask": [int(token not in ignored) for token in ids],
            "labels": [token if counts and token not in ignored else -100 for token in ids],
        }

    def in_pieces(self) -> None:
        same: dict[str, Any] = {"dropout": 0.0, "max_steps": 3}
        self.run("whole", healed=False, **same)
        self.run("pieces", self.learned_before("pieces"), **same)
        self.run("whole_pairs", healed=False, make=dpo_trainer, **same)
        self.run("pieces_of_pairs", self.learned_before("pieces_of_pairs"), make=dpo_trainer, **same)

    def variant(self, name: str) -> None:
        """One way to shard, or to train what is sharded."""
        variables, arguments = _VARIANTS[name]
        os.environ.update(variables)
        made = self.maker_of(name)
        same = {"dropout": 0.0, "max_steps": 3, **arguments}
        for run, options in {
            "plain": {"healed": False},
            "transient": {"fault": self.nan_on_one_rank},
            "poison": {"fault": self.poison_token, "poisoned": (5, 17)},
            "pieces": {"fault": self.learned_before(f"{name}_pieces")},
        }.items():
            if (name, run) == ("loaded_tensor_parallel", "pieces"):
                # Not split: the Trainer averages gradients of weights that stay whole, in hooks on them.
                continue
            texts = self.texts(options.pop("poisoned", ()))  # type: ignore[arg-type]
            self.run(f"{name}_{run}", make=made, texts=texts, **options, **same)  # type: ignore[arg-type]
        for variable in variables:
            del os.environ[variable]

    def maker_of(self, name: str) -> Callable[..., Any]:
        """What builds the trainer of a variant."""
        make: Callable[..., Any] = adapter_trainer if name == "lora" else sft_trainer

        def made(*args: Any, **kwargs: Any) -> Any:
            for state in (AcceleratorState, GradientState):
                state._reset_state()
            if name.startswith("loaded"):
                kwargs["model"] = self.loaded_sharded(name)
            if "parallelism_config" in kwargs:
                kwargs["parallelism_config"] = ParallelismConfig(**kwargs["parallelism_config"])
            trainer = make(*args, **kwargs)
            if name == "offloaded":
                # Memory can be pinned for an accelerator only.
                trainer.accelerator.state.fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
            return trainer

        return made

    def flipped_replica(self, variant: str, **flips: tuple[int, dict[str, Any]]) -> None:
        """One bit of what several ranks keep is another one on one of them after a step."""
        same: dict[str, Any] = {"dropout": 0.0, "gradient_accumulation_steps": 1, **_VARIANTS[variant][1]}
        same |= {"make": self.maker_of(variant), "texts": TEXTS, "max_steps": 16}
        self.run(f"{variant}_plain", healed=False, **same)
        self.run(f"{variant}_healthy", **same)
        for name, (struck, flip) in flips.items():

            def fault(trainer: Any, struck: int = struck, flip: Any = flip) -> BitFlip:
                trainer.add_callback(strike := BitFlip(self.rank == struck, step=7, **flip))
                return strike

            # How often they are compared is chosen by what it costs, which is up to how busy the machine is.
            with patch.object(replicas, "_EVERY", 10):
                self.run(f"{variant}_{name}", fault, **same)
            found = journal(self._directory / f"{variant}_{name}", "diagnosed") if self.rank == 0 else []
            self.results[f"{variant}_{name}"]["named"] = [event["evidence"].get("odd_ranks") for event in found][-1:]

    def hsdp_replicas(self) -> None:
        self.flipped_replica(
            "hsdp",
            weight=(1, {"bit": 3, "place": 0.7}),
            moment=(2, {"bit": 26, "place": 0.7, "moment": True}),
        )

    def tensor_parallel_replicas(self) -> None:
        self.flipped_replica("loaded_tensor_parallel", weight=(1, {"bit": 3, "place": 0.7, "named": "norm"}))

    def loaded_sharded(self, name: str) -> Any:
        from transformers.distributed import DistributedConfig

        path = self._directory / "model"
        if self.rank == 0:
            tiny_model(self.tokenizer, dropout=0.0).save_pretrained(path)
        torch.distributed.barrier()
        sizes = {"loaded": {"fsdp_size": 2}, "loaded_hsdp": {"fsdp_size": 2, "dp_replicate_size": 2}}
        parallel = sizes.get(name, {"tp_size": 2})
        return LlamaForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(**parallel))


# Environment and training arguments.
_VARIANTS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "kept": ({"FSDP_RESHARD_AFTER_FORWARD": "false"}, {}),
    "offloaded": ({"FSDP_OFFLOAD_PARAMS": "true"}, {}),
    "checkpointing": ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, {}),
    "bf16": ({}, {"bf16": True}),
    "lora": ({}, {}),
    "hsdp": ({}, {"parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 2}}),
    "loaded": ({}, {}),
    "loaded_hsdp": ({}, {}),
    "loaded_tensor_parallel": ({}, {}),
}


def main(directory: Path, strategy: str, *parts: str) -> None:
    if strategy != "ddp":
        sharded_on_the_cpu(strategy)
    # A deadlock is a failure after this time.
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=90))
    runs = Runs(directory)
    known = {
        "step": runs.within_a_step,
        "only_rows": runs.all_rows_of_a_rank,
        "pieces": runs.in_pieces,
        "hsdp_replicas": runs.hsdp_replicas,
        "tensor_parallel_replicas": runs.tensor_parallel_replicas,
    }
    for part in parts:
        known.get(part, lambda part=part: runs.variant(part))()
    (directory / f"results.{runs.rank}.json").write_text(json.dumps(runs.results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
    leave_together()
