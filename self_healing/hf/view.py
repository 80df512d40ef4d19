"""Questions about a trainer that change nothing in it."""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from accelerate.utils import DistributedType
from transformers import Trainer

from ..checkpoints.deepspeed import ZeroJob
from ..system import processes
from ..system.files import jsonable
from .deepspeed import engine_of, why_not_healed, zero_of
from .memory import retry_after_freeing
from .objective import Objective, has_own_loss
from .patching import Replacements
from .state import LiveState, is_sharded, live_state_of, nonfinite_tensors, unwrap_optimizer


logger = logging.getLogger(__name__)


# ---- view: answers questions about a trainer, and changes nothing in it ----


# XLA and Megatron run the backward pass themselves, and nothing is known of how.
_OWN_BACKWARD = (DistributedType.XLA, DistributedType.MEGATRON_LM)


class TrainerView:
    """Answers questions about one trainer."""

    def __init__(self, trainer: Any, objective: Objective, replaced: Replacements) -> None:
        self._trainer = trainer
        self.objective = objective
        self._replaced = replaced
        # Neither changes while a trainer trains, and each step asks.
        self.device: torch.device = trainer.accelerator.device
        self.world_size = processes.world_size()
        # Context and sequence parallelism: each process has some of the tokens of a row.
        self.shares_rows = _spreads_rows(trainer)
        kind = trainer.accelerator.distributed_type
        self.under_deepspeed: bool = kind == DistributedType.DEEPSPEED
        # Whether the training data can only be gone through, not looked up.
        self.streams = isinstance(trainer.train_dataset, torch.utils.data.IterableDataset)
        # Why steps are only watched, where they are; elsewhere they can be computed again.
        self.only_watched: str | None = _why_only_watched(trainer)
        self.can_reexecute = self.only_watched is None
        # Whether accelerate has sharded the weights in the way before FSDP2: parameters change with each forward.
        self.has_flat_parameters: bool = kind == DistributedType.FSDP and not is_sharded(trainer.model)
        # Whether all ranks take part in each call of the model: accelerate has sharded its weights (FSDP, ZeRO-3), or
        # transformers has while it loaded them.
        engine = engine_of(trainer)
        gathers = engine is not None and bool(engine.zero_optimization_partition_weights())
        self.sharded: bool = kind == DistributedType.FSDP or is_sharded(trainer.model) or gathers

    # ---- where the run is ----

    @property
    def step(self) -> int:
        """Optimizer steps finished."""
        return int(self._trainer.state.global_step)

    @property
    def in_last_step(self) -> bool:
        """Whether the step under way is the last one of the run."""
        state = self._trainer.state
        return 0 < int(state.max_steps) <= int(state.global_step) + 1

    @property
    def last_step_done(self) -> bool:
        """Whether the run has all the steps it was to have."""
        state = self._trainer.state
        return 0 < int(state.max_steps) <= int(state.global_step)

    @property
    def best_model_loaded(self) -> bool:
        """In `on_train_end`: whether the weights are those of the best checkpoint, and not of the last step."""
        trainer = self._trainer
        return bool(trainer.args.load_best_model_at_end) and trainer.state.best_model_checkpoint is not None

    # ---- what can be done with it ----

    @property
    def can_hand_over(self) -> bool:
        """Whether another process can go on from copies of its tensors: those are the same whatever was computed."""
        zero = zero_of(self._trainer)
        return self.can_reexecute and not self.has_flat_parameters and not (zero is not None and zero.offloads)

    @property
    def can_scale_rate(self) -> bool:
        """Whether the optimizer has learning rates that can be set: Adafactor with `relative_step` has none."""
        groups = getattr(unwrap_optimizer(self._trainer.optimizer), "param_groups", [])
        can_be_set = bool(groups) and all(group.get("lr") is not None for group in groups)
        return self.can_reexecute and can_be_set

    @property
    def why_not_split(self) -> str:
        """Says why the calls of a model are made whole, whatever they do; empty if they can be split."""
        if self._trainer.args.n_gpu > 1:
            return "nn.DataParallel makes replicas of the model for each call"
        if self.has_flat_parameters:
            return (
                "FSDP1 has the weights in flat parameters, which change with each forward (calls are split with "
                '"fsdp_version": 2 in fsdp_config)'
            )
        return ""

    @property
    def may_compute_in_passes(self) -> bool:
        """
        Whether a training step may be computed in passes over its rows: no other process takes part in it, and its
        loss is one of the libraries that compare no rows (DPO's `aot` sorts the batch).
        """
        known = self.objective.name in ("generic", "sft", "dpo", "reward", "grpo", "rloo")
        sorts = any(str(kind).startswith("aot") for kind in getattr(self._trainer, "loss_types", None) or [])
        alone = self.world_size == 1 and not self.under_deepspeed
        own_loss = has_own_loss(self._trainer) or "compute_loss" in vars(self._trainer)
        return known and alone and not sorts and not own_loss

    def engine_is_free_of_requests(self) -> bool:
        """
        Drops what a call that raised has left in a vLLM engine of this process, which the next call would answer
        together with its own prompts: their completions would come first, and each row would get those of another.
        """
        engine = getattr(getattr(getattr(self._trainer, "vllm_generation", None), "llm", None), "llm_engine", None)
        if engine is None:
            return True
        try:
            if engine.has_unfinished_requests():
                # Newer versions know them by another name than the one they were given.
                internal = "internal" in inspect.signature(engine.abort_request).parameters
                left = list(engine.output_processor.request_states)
                engine.abort_request(left, **({"internal": True} if internal else {}))
            return not engine.has_unfinished_requests()
        except Exception:
            logger.warning("What a failed call has left in the vLLM engine cannot be dropped.", exc_info=True)
            return False

    # ---- its learning rate and optimizer ----

    @property
    def learning_rate(self) -> float:
        """The rate in force, of the first parameter group."""
        return float(self._trainer._get_learning_rate())

    @property
    def scheduled_rate(self) -> float:
        """The rate that the schedule asks for, of the first parameter group."""
        return float(self._replaced.original(self._trainer, "_get_learning_rate")())

    @property
    def initial_rate(self) -> float | None:
        """The rate that the schedule begins with; `None` if it is not known, or not the same for all parameters."""
        groups = getattr(unwrap_optimizer(self._trainer.optimizer), "param_groups", [])
        # Groups with rates of their own are the user's matter.
        rates = {float(group["initial_lr"]) for group in groups if group.get("initial_lr") is not None}
        return rates.pop() if len(rates) == 1 else None

    @property
    def beta2(self) -> float | None:
        """Decay of the optimizer's second moments; `None` if it has none."""
        groups = getattr(unwrap_optimizer(self._trainer.optimizer), "param_groups", [])
        betas = groups[0].get("betas") if groups else None
        return float(betas[1]) if isinstance(betas, (tuple, list)) and len(betas) > 1 else None

    @property
    def max_grad_norm(self) -> float:
        """The gradient norm that the Trainer clips to, or DeepSpeed by its own configuration; 0 if it does not."""
        engine = engine_of(self._trainer)
        limit = self._trainer.args.max_grad_norm if engine is None else engine.gradient_clipping()
        return float(limit or 0.0)

    # ---- its models and their tensors ----

    def models(self) -> list[torch.nn.Module]:
        """Finds the models the trainer calls: what it trains, its reference, teachers and reward models."""
        trainer = self._trainer
        wrapped = _inside(getattr(trainer, "model_wrapped", trainer.model))
        held: list[Any] = [wrapped if type(wrapped).__name__ == "OptimizedModule" else trainer.model]
        for name, value in vars(trainer).items():
            if name != "model_wrapped":
                several = value if isinstance(value, (list, tuple)) else [value]
                held.extend(each for each in several if hasattr(each, "config"))
        found: list[torch.nn.Module] = []
        inner: set[int] = set()
        for value in held:
            if isinstance(value, torch.nn.Module) and id(_inside(value)) not in inner:
                found.append(_inside(value))
                inner.update(id(module) for module in _inside(value).modules())
        return found

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The type that calls of the models are cast to; accelerate does it inside of their forward."""
        precision = str(self._trainer.accelerator.mixed_precision)
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}.get(precision)

    @property
    def vocabulary(self) -> int | None:
        """Tokens the model knows, if the loss is a mean cross-entropy per token; `None` for any other loss."""
        if "above_chance" not in self.objective.detectors:
            return None
        model = self._trainer.model
        inner = getattr(model, "get_base_model", lambda: model)()
        if self.objective.name == "sft":
            counts_tokens = getattr(self._trainer.args, "loss_type", "nll") == "nll"
        else:
            counts_tokens = type(inner).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        if not counts_tokens or not hasattr(inner.config, "get_text_config"):
            return None
        size = getattr(inner.config.get_text_config(), "vocab_size", None)
        return size if isinstance(size, int) and size > 1 else None

    def live_state(self) -> LiveState:
        """The tensors that training changes, as they are now."""
        return live_state_of(self._trainer)

    def nonfinite_tensors(self) -> list[str]:
        """Names parameters, buffers and optimizer states that hold NaN or Inf."""
        return self._nonfinite(unwrap_optimizer(self._trainer.optimizer))

    def own_part_of(self, tensors: Sequence[str]) -> list[str]:
        """Gives those of some tensors that are not made of the parts of all ranks in each step, as ZeRO does."""
        zero = zero_of(self._trainer)
        return [name for name in tensors if zero is None or zero.is_own(name)]

    def nonfinite_weights(self) -> list[str]:
        """Names parameters and buffers that hold NaN or Inf."""
        return self._nonfinite(None)

    def _nonfinite(self, optimizer: Any) -> list[str]:
        model, zero = self._trainer.model, zero_of(self._trainer)
        partitions = None if zero is None else zero.partitions()
        return retry_after_freeing(lambda: nonfinite_tensors(model, optimizer, partitions), self.device)

    def offloaded_tensors(self) -> list[str]:
        """
        Names parameters and buffers that lie on no device while nothing is computed: accelerate keeps what they hold
        elsewhere, and brings it for each call. They can be neither searched nor kept.
        """
        model = self._trainer.model
        return [name for name, each in (*model.named_parameters(), *model.named_buffers()) if each.is_meta]

    def fingerprint(self) -> dict[str, Any]:
        """Gives facts that have to be the same for sizes that fitted in one process to fit in another."""
        trainer, device = self._trainer, self.device
        parameters = list(trainer.model.parameters())
        return {
            "parameters": sum(map(_size_of, parameters)),
            "trained": sum(_size_of(parameter) for parameter in parameters if parameter.requires_grad),
            "dtypes": sorted({str(parameter.dtype) for parameter in parameters}),
            "precision": str(trainer.accelerator.mixed_precision),
            "activation_checkpointing": bool(getattr(trainer.args, "gradient_checkpointing", False)),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "memory": torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
            "processes": int(trainer.args.world_size),
        }

    # ---- its data and arguments ----

    def argument_limits(self) -> dict[str, float]:
        """The numbers among the training arguments, for rules whose bounds are taken from them."""
        arguments = vars(self._trainer.args)
        return {
            name: value
            for name, value in arguments.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }


def _why_only_watched(trainer: Any) -> str | None:
    kind = trainer.accelerator.distributed_type
    if kind in _OWN_BACKWARD:
        return f"{kind} runs the backward pass itself"
    if kind == DistributedType.DEEPSPEED:
        why = why_not_healed(engine_of(trainer))
        return None if why is None else f"DeepSpeed runs the backward pass itself, and {why}"
    return None


def _spreads_rows(trainer: Any) -> bool:
    sizes = [getattr(trainer, name, None) for name in ("get_cp_size", "get_sp_size")]
    return any((size() or 1) > 1 for size in sizes if size is not None)


def _inside(module: torch.nn.Module) -> torch.nn.Module:
    inner = getattr(module, "module", None)
    return _inside(inner) if isinstance(inner, torch.nn.Module) else module


def _size_of(parameter: torch.Tensor) -> int:
    # Under ZeRO-3 there are elements only while they are gathered.
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def zero_job_of(trainer: Any) -> ZeroJob | None:
    """Tells how the trainer uses DeepSpeed, before there is an engine; `None` if it does not."""
    if not getattr(trainer, "is_deepspeed_enabled", False):
        return None
    config = trainer.accelerator.state.deepspeed_plugin.hf_ds_config
    bf16 = config.get_value("bf16.enabled", False)
    tensor_parallel = config.get_value("tensor_parallel.autotp_size", 0) or 1
    return ZeroJob(
        int(trainer.args.world_size) // int(tensor_parallel),
        # Without a word of ZeRO it is -1 (accelerate 1.15).
        max(int(config.get_value("zero_optimization.stage", 0)), 0),
        bool(trainer.args.bf16 if bf16 == "auto" else bf16),
        bool(config.get_value("checkpoint.load_universal", False)),
    )


# ---- blueprint ----


def blueprint_of(trainer: Any) -> dict[str, Any]:
    """Writes down the classes, arguments, model and precision of a trainer, in types that JSON has."""
    accelerator, args = trainer.accelerator, trainer.args
    reference = getattr(trainer, "ref_model", None)
    # Enumerations, and other subclasses of str and int, become what they are based on.
    written: dict[str, Any] = _plain(
        {
            "classes": [_name_of(cls) for cls in type(trainer).__mro__ if issubclass(cls, Trainer)],
            # A method may be replaced on this one trainer.
            "own_loss": has_own_loss(trainer) or "compute_loss" in vars(trainer),
            "arguments_class": _name_of(type(args)),
            # Tokens are not among them: `to_dict` writes their names in their place.
            "arguments": args.to_dict(),
            "model": _model_blueprint(accelerator.unwrap_model(trainer.model, keep_torch_compile=False)),
            "reference": {**_model_blueprint(reference), "training": reference.training} if reference else None,
            "precision": str(accelerator.mixed_precision),
            "autocast": bool(accelerator.native_amp),
            "device": accelerator.device.type,
            "processes": processes.world_size(),
            "directory": os.getcwd(),
        }
    )
    return written


def kept_weights(trainer: Any, at_most: int) -> dict[str, Any]:
    """
    Copies the weights of a trainer's model to host memory: all of them, or those that are trained, as far as they are
    small enough.
    """
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    names = {id(tensor): name for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    held = [*model.parameters(), *(buffer for buffer in model.buffers() if id(buffer) in names)]
    # Of what FSDP2 or ZeRO-3 shards, this rank has a part.
    if any(hasattr(tensor, "full_tensor") or hasattr(tensor, "ds_id") or tensor.is_meta for tensor in held):
        return {}
    trained = [tensor for tensor in held if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter)]
    for chosen in (held, trained):
        if sum(tensor.nbytes for tensor in chosen) <= at_most:
            weights = {names[id(tensor)]: tensor.detach().to("cpu", copy=True) for tensor in chosen}
            return {"weights": weights, "all_weights": chosen is held}
    return {}


def _model_blueprint(model: Any) -> dict[str, Any]:
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    config: Any = getattr(base, "config", None)
    parameters = dict(model.named_parameters())
    trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
    return {
        "class": _name_of(type(base)),
        "config": config.to_dict() if hasattr(config, "to_dict") else None,
        "name_or_path": getattr(config, "_name_or_path", None) or None,
        "attention": getattr(config, "_attn_implementation", None),
        "dtype": _most_common_dtype(base.parameters()),
        "trained_dtype": _most_common_dtype(trained),
        "adapters": {name: each.to_dict() for name, each in getattr(model, "peft_config", {}).items()},
        # An adapter says itself what is trained.
        "frozen": []
        if hasattr(model, "peft_config")
        else [name for name, parameter in parameters.items() if not parameter.requires_grad],
    }


def _most_common_dtype(tensors: Iterable[torch.Tensor]) -> str | None:
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.is_floating_point():
            sizes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    return sizes.most_common(1)[0][0] if sizes else None


def _name_of(cls: type) -> list[str]:
    return [cls.__module__, cls.__qualname__]


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(jsonable(value)))
