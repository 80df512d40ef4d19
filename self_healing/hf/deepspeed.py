"""Everything about steps under DeepSpeed ZeRO that reads its private parts."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import DistributedType

from ..checkpoints.deepspeed import ZeroJob
from ..system import processes
from .patching import Replacements


# What a step moves on in the engine itself, beside weights and optimizer state.
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps", "gas_boundary_ctr")
# By the class of the optimizer that the engine makes: stages 1 and 2, stage 3. Those derived from them (ZenFlow,
# SuperOffload, MiCS) keep gradients elsewhere.
_OPTIMIZERS = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3")
# Read against DeepSpeed 0.19.6 to 0.19.8.
_NEEDED = ("averaged_gradients", "get_grad_norm_direct", "_coalesce_grad_reduction", "_epilogue_ran_this_backward")
# Of one that offloads.
_NEEDED_OFFLOADED = ("norm_for_param_grads", "complete_grad_norm_calculation_for_cpu_offload", "reset_cpu_buffers")


def engine_of(trainer: Any) -> Any:
    """Finds the DeepSpeed engine that a trainer trains with; `None` if there is none."""
    return getattr(getattr(trainer.accelerator, "deepspeed_engine_wrapped", None), "engine", None)


def have_engine_made_again(trainer: Any) -> None:
    """Has the next `train()` make an engine: it destroys the one there is, and uses it (transformers 5.23)."""
    if engine_of(trainer) is not None:
        trainer.model_wrapped = trainer.model


def can_be_entered_again(trainer: Any) -> bool:
    """Whether `train()` makes all that DeepSpeed wraps, and can so make it again."""
    given = trainer.optimizer is not None or trainer.lr_scheduler is not None
    return not (given and trainer.accelerator.distributed_type == DistributedType.DEEPSPEED)


def let_go_of_engine(trainer: Any) -> None:
    """The same after an exception: accelerate (1.15) forgets an engine, and prepares no model that is prepared."""
    if trainer.accelerator.distributed_type != DistributedType.DEEPSPEED or trainer.model_wrapped is trainer.model:
        return
    # Takes its hooks off the parameters, which a second engine has of its own.
    trainer.model_wrapped.destroy()
    trainer.model_wrapped = trainer.model
    trainer.optimizer = trainer.lr_scheduler = None


def why_not_healed(engine: Any) -> str | None:
    """Says why steps of a DeepSpeed engine are only watched; `None` if they can be healed."""
    optimizer = getattr(engine, "optimizer", None)
    if optimizer is None:
        return "its engine is not known"
    name = type(optimizer).__name__
    if name not in _OPTIMIZERS:
        return f"its optimizer is a {name}, and not one of ZeRO stage 1, 2 or 3"
    offloads = _offloads(optimizer)
    missing = [each for each in _NEEDED + _NEEDED_OFFLOADED * offloads if not hasattr(optimizer, each)]
    if missing or not hasattr(engine, "managed_gradient_accumulation"):
        return f"this version of it is not known ({', '.join(missing) or 'managed_gradient_accumulation'})"

    def asked(question: str) -> Any:
        # What a version does not know it does not do.
        return getattr(engine, question, lambda: None)()

    places = [each.device for each in (asked("zero_offload_optimizer"), asked("zero_offload_param")) if each]
    precision = getattr(optimizer, "master_weights_and_grads_dtype", torch.float32)
    refused = {
        "it offloads to NVMe": "nvme" in places,
        "it offloads a part of the optimizer state": offloads and asked("zero_partial_offload") not in (None, 1.0),
        "it offloads weights that are updated in half precision": offloads and precision != torch.float32,
        "its experts are spread over ranks": engine.has_moe_layers,
        "the caller sets its boundaries of accumulation": not engine.managed_gradient_accumulation(),
        "it runs a pipeline": engine.pipeline_parallelism,
        "it spreads layers over ranks": (asked("autotp_size") or 0) > 1 or optimizer.model_parallel_group is not None,
        "it spreads rows over ranks": getattr(optimizer, "sequence_parallel_size", 1) > 1,
        "it compiles the backward pass": asked("is_deepcompile_enabled"),
        "it scales the loss by torch's GradScaler": optimizer.torch_autocast_gradscaler is not None,
        "it keeps secondary partitions": (asked("zero_hpz_partition_size") or 0) > 1,
        "it quantizes gradients": asked("zero_quantized_gradients") or asked("zeropp_loco_param") is not None,
        "Muon moves its momentum in the backward pass": "muon" in type(optimizer.optimizer).__name__.lower(),
    }
    return next((why for why, so in refused.items() if so), None)


def _offloads(optimizer: Any) -> bool:
    # Stages 1 and 2 name it one way, stage 3 another.
    return bool(getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False))


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


def zero_of(trainer: Any) -> Zero | None:
    """Knows the engine of a trainer whose steps can be healed under ZeRO; `None` for any other one."""
    engine = engine_of(trainer)
    return None if engine is None or why_not_healed(engine) is not None else Zero(engine)


@dataclass(frozen=True, slots=True)
class Partitioning:
    """What the optimizer updates on this rank in place of parameters."""

    kind: str
    masters: list[torch.Tensor]
    parts: list[str]


def own_part(parameter: Any) -> torch.Tensor | None:
    """Gives this rank's part of a parameter that ZeRO-3 has split; `None` for any other one."""
    part: torch.Tensor | None = getattr(parameter, "ds_tensor", None)
    if part is None:
        return None
    begin = part.numel() * torch.distributed.get_rank(parameter.ds_process_group)
    # Beyond the parameter's end lies whatever was there.
    return part.detach().view(-1)[: max(parameter.ds_numel - begin, 0)]


class Zero:
    """Knows one DeepSpeed engine with ZeRO stage 1, 2 or 3, while its step is held back."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self.shards_weights = bool(engine.zero_optimization_partition_weights())
        # Whether gradients, optimizer state and the weights that are updated lie in host memory.
        self.offloads = _offloads(engine.optimizer)
        # The method that measures the norm of a group of parameters.
        self.measure = "complete_grad_norm_calculation_for_cpu_offload" if self.offloads else "get_grad_norm_direct"
        self.scales_loss = bool(engine.fp16_enabled())
        # By group of parameters: measured before the step, and not once more in it.
        self._norms: dict[int, torch.Tensor] = {}

    # ---- the gradient ----

    def norm(self) -> torch.Tensor:
        """As DeepSpeed measures it in its step, before clipping; infinite if any of it is not finite. Collective."""
        zero = self.optimizer
        if self.shards_weights:
            total = torch.linalg.vector_norm(torch.stack(zero._get_norm_groups()))
        else:
            total = zero.scaled_global_norm()
        # DeepSpeed says -1 of a group that is not finite, and takes that for its norm where there are several groups.
        bad = torch.stack([norm < 0 for norm in self._norms.values()]).any()
        return torch.where(bad, torch.full_like(total, math.inf), total / zero.loss_scale)

    def norm_of_group(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps that method: what was measured before the step is not measured again."""
        params = args[0] if self.offloads else args[1]
        if id(params) not in self._norms:
            self._norms[id(params)] = original(*args, **kwargs)
        return self._norms[id(params)]

    def forget_norms(self) -> None:
        self._norms.clear()

    def gradients(self) -> list[torch.Tensor]:
        """This rank's partition of the gradients, once they have been reduced."""
        if self.offloads:
            if not self.optimizer.norm_for_param_grads:
                # It stays there after the step, when it is nobody's any more.
                return []
            if not self.shards_weights:
                # Copies of the device that may still be under way.
                self.optimizer._wait_for_offload_copies()
            return [master.grad for master in self._masters() if master.grad is not None]
        return [each for group in self.optimizer.averaged_gradients.values() for each in group or ()]

    def scale_gradients(self, factor: float) -> None:
        """Multiplies the gradient by a factor, as if after DeepSpeed's own clipping, which is done in the step."""
        clip = float(self.optimizer.clip_grad or 0.0)
        if clip > 0:
            factor /= max((float(self.norm()) + 1e-6) / clip, 1.0)
        torch._foreach_mul_(self.gradients(), factor)
        if self.offloads:
            # Taken when the gradient was copied to host memory, and what its norm is made of.
            norms = self.optimizer.norm_for_param_grads
            norms.update({name: norm * factor for name, norm in norms.items()})
        self.forget_norms()

    def discard(self) -> None:
        """Drops what has been computed of a step, reduced or not; the next forward begins it anew."""
        zero = self.optimizer
        self.forget_norms()
        if self.shards_weights:
            zero._overflow_clean_up(zero.loss_scale)
            for bucket in zero.ipg_buckets.values():
                bucket.clear_params()
            zero.params_already_reduced.update(dict.fromkeys(zero.params_already_reduced, False))
        else:
            zero.zero_grad(set_to_none=True)
            zero._release_preflattened_grad_buffers()
            for gradients in (zero.averaged_gradients, zero.all_grad_tensors):
                gradients.update(dict.fromkeys(gradients))
            for bucket in zero.ipg_buckets.values():
                bucket.clear()
            zero.extra_large_param_to_reduce.clear()
            zero._clear_previous_reduced_grads()
            zero.params_already_reduced[:] = [False] * len(zero.params_already_reduced)
            zero._release_ipg_buffers()
            if self.offloads:
                zero.reset_cpu_buffers()
        # As its own step does, before the first backward of the next one.
        zero.micro_step_id = 0 if self.shards_weights else -1
        zero._epilogue_ran_this_backward = False
        self.leave_backward()
        if self.shards_weights and processes.world_size() == 1:
            # Also what was gathered for a module whose forward or backward has raised. Several ranks, which gather
            # alike, end where one of them has raised. Nor is the order of modules it came to that of a whole step.
            coordinator = zero.parameter_offload.get_param_coordinator()
            if not coordinator.is_invalid_trace():
                coordinator._invalidate_trace()
            zero._partition_all_parameters()

    def leave_backward(self) -> None:
        """Ends a forward or backward that has raised; no gradient has been added in it, or all are discarded."""
        self.optimizer._backward_active_depth = 0
        self.engine._running_engine_backward = False
        # With `wall_clock_breakdown` it measures each part, and refuses to begin one that has not ended.
        for timer in self.engine.timers.timers.values():
            timer.started_ = False

    @contextlib.contextmanager
    def kept_on_rank(self) -> Iterator[None]:
        """Has each rank keep its gradients to itself, in the parameters; they are discarded before the next step."""
        # As in `DeepSpeedEngine.coalesce_grad_reduction`, which would reduce them at its end.
        self.optimizer._coalesce_grad_reduction = self.engine.inside_no_sync_ctxt = True
        try:
            yield
        finally:
            self.optimizer._coalesce_grad_reduction = self.engine.inside_no_sync_ctxt = False

    # ---- the step ----

    @property
    def left_out_by_itself(self) -> bool:
        """Whether the engine applied nothing in its last step, and not because it looks for the scale of the loss."""
        return not self.engine.was_step_applied() and not self.optimizer.dynamic_loss_scale

    @contextlib.contextmanager
    def leaving_out(self, overflowed: bool) -> Iterator[None]:
        """Has the engine take its next step as one that overflowed: nothing is applied, and it counts as skipped."""
        zero, replaced = self.optimizer, Replacements()

        def skip(*_: Any, **__: Any) -> None:
            zero.overflow, zero._global_grad_norm = True, math.inf
            if overflowed:
                zero._update_scale(True)

        replaced.put(zero, "step", skip)
        try:
            yield
        finally:
            replaced.give_back()
            # The Trainer's schedule asks it; and up to DeepSpeed 0.19.6, the next step where it does not check.
            zero.overflow = overflowed
        if not overflowed and self.engine.lr_scheduler is not None:
            self.engine.lr_scheduler.step()

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Has a step that is taken inside counted by nothing: it was counted before, or is an experiment."""
        engine = self.engine
        counts = {name: getattr(engine, name) for name in _COUNTERS if hasattr(engine, name)}
        scheduler, engine.lr_scheduler = engine.lr_scheduler, None
        try:
            yield
        finally:
            engine.lr_scheduler = scheduler
            vars(engine).update(counts)

    # ---- the state ----

    def partitions(self) -> dict[str, torch.Tensor]:
        """This rank's part of the weights, in the precision they are updated in and in that they are computed in."""
        zero, masters = self.optimizer, self._masters()
        weights = zero.fp16_partitioned_groups_flat if self.shards_weights else zero.bit16_groups_flat
        found = {f"master weights {index}": tensor for index, tensor in enumerate(masters)}
        # With ZeRO-3 in single precision they are the same.
        held = {id(tensor) for tensor in masters}
        rest = {f"weights {index}": tensor for index, tensor in enumerate(weights) if id(tensor) not in held}
        return found | rest

    def clear_padding(self) -> None:
        """Zeroes what lies behind the weights in this rank's partitions."""
        if not self.shards_weights:
            return
        zero = self.optimizer
        flat = zero.fp16_groups, zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat
        for parameters, *partitions in zip(*flat, strict=True):
            begin = 0
            for parameter in parameters:
                length = parameter.partition_numel()
                here = parameter.ds_numel - length * zero._get_param_partition_rank(parameter)
                held = min(max(here, 0), length)
                for partition in partitions:
                    partition.detach().narrow(0, begin + held, length - held).zero_()
                begin += length

    def _masters(self) -> list[torch.Tensor]:
        name = "fp32_partitioned_groups_flat" if self.shards_weights else "single_partition_of_fp32_groups"
        return list(getattr(self.optimizer, name))

    def loss_scaler(self) -> dict[str, Any]:
        return vars(self.optimizer.loss_scaler) if self.scales_loss else {}

    def partitioning(self) -> Partitioning:
        """Says how this rank's part of the weights was made of them."""
        zero = self.optimizer
        names = {id(parameter): name for name, parameter in self.engine.module.named_parameters()}
        # In the order in which they lie there.
        groups = zero.fp16_groups if self.shards_weights else zero.round_robin_bit16_groups
        made_of = [
            [(names.get(id(each)), tuple(getattr(each, "ds_shape", each.shape))) for each in of] for of in groups
        ]
        parts = [hashlib.sha256(repr(each).encode()).hexdigest()[:8] for each in made_of]
        stage = int(self.engine.zero_optimization_stage())
        kind = f"ZeRO-{stage} in {zero.dtype}{', offloaded' if self.offloads else ''}"
        return Partitioning(kind, self._masters(), parts)

    def standing(self) -> dict[str, dict[str, Any]]:
        counts = {name: getattr(self.engine, name) for name in _COUNTERS if hasattr(self.engine, name)}
        scaler = self.loss_scaler().items()
        return {"counts": counts, "scaler": {name: value for name, value in scaler if isinstance(value, (int, float))}}

    def put_standing(self, standing: Mapping[str, Mapping[str, Any]]) -> None:
        vars(self.engine).update(standing["counts"])
        self.loss_scaler().update(standing["scaler"])

    def load(self, checkpoint: str, strict: bool) -> None:
        """Loads weights and optimizer state of a checkpoint; what the engine counts, and its schedule, stay."""
        from transformers.integrations.deepspeed import deepspeed_load_checkpoint

        with self.uncounted():
            deepspeed_load_checkpoint(self.engine, checkpoint, load_module_strict=strict)
        self.clear_padding()

    def forget_state(self) -> None:
        """Drops what was made of the partitions before they were written over."""
        if self.shards_weights:
            # Weights that are gathered on this rank.
            self.optimizer._partition_all_parameters()
        else:
            # Views of the optimizer's state by parameter, which may be another one now.
            self.optimizer._hp_optimizer_states_linked = False


def saves_in_known_order(engine: Any) -> bool:
    """Whether all that an engine writes of a checkpoint goes through [`writes_of`], but for `latest` at its end."""
    if engine is None or engine.has_moe_layers or engine.pipeline_parallelism or engine.zero_nvme_offload_optimizer():
        return False
    # Others write in threads or processes of their own.
    writer = getattr(engine, "checkpoint_engine", None)
    return type(writer).__name__ == "TorchCheckpointEngine" and hasattr(engine, "_copy_recovery_script")


def writes_of(engine: Any) -> list[tuple[Any, str]]:
    """The methods by which an engine writes to disk, and which wait for no other rank, with their objects."""
    return [*((engine.checkpoint_engine, name) for name in ("makedirs", "save")), (engine, "_copy_recovery_script")]
