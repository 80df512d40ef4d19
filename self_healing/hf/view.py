"""Questions about a trainer that change nothing in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import DistributedType

from ..system import processes
from .deepspeed import Zero, engine_of, why_not_healed
from .memory import retry_after_freeing
from .objective import Objective
from .state import LiveState, WeightSearch, is_sharded, live_state_of, local, nonfinite_tensors, unwrap_optimizer


# XLA and Megatron run the backward pass themselves, and nothing is known of how.
_OWN_BACKWARD = (DistributedType.XLA, DistributedType.MEGATRON_LM)

# How many weights, and numbers of each, stand for all of them where it is asked whether any has moved.
_SOME_WEIGHTS, _SOME_NUMBERS = 8, 4096


class TrainerView:
    """Answers questions about one trainer; what does not change while it trains is an attribute."""

    def __init__(self, trainer: Any, objective: Objective) -> None:
        self._trainer = trainer
        self.objective = objective
        # As it is before anything is replaced.
        self._rate_of_schedule = trainer._get_learning_rate
        self._optimizer = unwrap_optimizer(trainer.optimizer)
        self._weights = WeightSearch(trainer.model)
        self.device: torch.device = trainer.accelerator.device
        self.world_size = processes.world_size()
        # Context and sequence parallelism: each process has some of the tokens of a row.
        self.shares_rows = _spreads_rows(trainer)
        # Whether the training data can only be gone through, not looked up.
        self.streams = isinstance(trainer.train_dataset, torch.utils.data.IterableDataset)
        kind, engine = trainer.accelerator.distributed_type, engine_of(trainer)
        self.under_deepspeed: bool = kind == DistributedType.DEEPSPEED
        # Whether accelerate has sharded the weights in the way before FSDP2: parameters change with each forward.
        self.has_flat_parameters: bool = kind == DistributedType.FSDP and not is_sharded(trainer.model)
        # Why steps are only watched, where they are; elsewhere they can be computed again.
        self.only_watched: str | None = None
        if kind in _OWN_BACKWARD:
            self.only_watched = f"{kind} runs the backward pass itself"
        elif self.under_deepspeed and (why := why_not_healed(engine)) is not None:
            self.only_watched = f"DeepSpeed runs the backward pass itself, and {why}"
        # Trainable weights that are in no optimizer, by name; of some kinds, those are in it by another one.
        self.not_in_optimizer = [] if self.under_deepspeed or self.has_flat_parameters else self._untrained(trainer)
        trained = sum(each.requires_grad for each in trainer.model.parameters())
        if getattr(trainer.accelerator, "has_lomo_optimizer", False):
            self.only_watched = "The optimizer updates weights in the backward pass"
        elif trained and len(self.not_in_optimizer) == trained:
            self.only_watched = "No trainable weight is in the optimizer, which may update them in hooks of its own"
        self.can_recompute = self.only_watched is None
        self.zero = Zero(engine) if engine is not None and self.can_recompute else None
        # Whether another process can go on from copies of its tensors: those are the same whatever was computed.
        offloads = self.zero is not None and self.zero.offloads
        self.can_hand_over = self.can_recompute and not self.has_flat_parameters and not offloads
        # Whether all ranks take part in each call of the model: accelerate has sharded its weights (FSDP, ZeRO-3), or
        # transformers has while it loaded them.
        gathers = engine is not None and bool(engine.zero_optimization_partition_weights())
        # The gradient norm that the Trainer clips to, or DeepSpeed by its own configuration; 0 if it does not.
        self.max_grad_norm = float((trainer.args.max_grad_norm if engine is None else engine.gradient_clipping()) or 0)
        self.sharded: bool = kind == DistributedType.FSDP or is_sharded(trainer.model) or gathers

    def _untrained(self, trainer: Any) -> list[str]:
        held = {id(each) for group in self._groups() for each in group["params"]}
        named = trainer.model.named_parameters()
        return [name for name, each in named if each.requires_grad and id(each) not in held]

    @property
    def step(self) -> int:
        """Optimizer steps finished."""
        return int(self._trainer.state.global_step)

    @property
    def in_last_step(self) -> bool:
        """Whether the step under way is the last one of the run."""
        return 0 < int(self._trainer.state.max_steps) <= self.step + 1

    @property
    def last_step_done(self) -> bool:
        """Whether the run has all the steps it was to have."""
        return 0 < int(self._trainer.state.max_steps) <= self.step

    @property
    def best_model_loaded(self) -> bool:
        """In `on_train_end`: whether the weights are those of the best checkpoint, and not of the last step."""
        trainer = self._trainer
        return bool(trainer.args.load_best_model_at_end) and trainer.state.best_model_checkpoint is not None

    def _groups(self) -> Sequence[dict[str, Any]]:
        return getattr(self._optimizer, "param_groups", [])

    @property
    def can_scale_rate(self) -> bool:
        """Whether the optimizer has learning rates that can be set: Adafactor with `relative_step` has none."""
        groups = self._groups()
        return self.can_recompute and bool(groups) and all(group.get("lr") is not None for group in groups)

    @property
    def learning_rate(self) -> float:
        """The rate in force, of the first parameter group."""
        return float(self._trainer._get_learning_rate())

    @property
    def scheduled_rate(self) -> float:
        """The rate that the schedule asks for, of the first parameter group."""
        groups = getattr(self._optimizer, "param_groups", None)
        # A rate that is a tensor would be waited for.
        rate = groups[0]["lr"] if groups else None
        return rate if type(rate) is float else float(self._rate_of_schedule())

    @property
    def initial_rate(self) -> float | None:
        """The rate that the schedule begins with; `None` if it is not known, or not the same for all parameters."""
        # Groups with rates of their own are the user's matter.
        rates = {float(group["initial_lr"]) for group in self._groups() if group.get("initial_lr") is not None}
        return rates.pop() if len(rates) == 1 else None

    @property
    def beta2(self) -> float | None:
        """Decay of the optimizer's second moments; `None` if it has none."""
        betas = next((group.get("betas") for group in self._groups()), None)
        return float(betas[1]) if isinstance(betas, (tuple, list)) and len(betas) > 1 else None

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

    def some_weights(self) -> torch.Tensor:
        """Copies some numbers of a few of the weights that are trained, spread over the model."""
        groups = self._groups()
        if not self.can_recompute:
            # Where steps are only watched, the optimizer may hold others than are trained.
            groups = [{"params": [*self._trainer.model.parameters()]}]
        trained = [each for group in groups for each in group["params"] if each.requires_grad]
        known = not self.under_deepspeed and not self.has_flat_parameters
        some = trained[:: max(len(trained) // _SOME_WEIGHTS, 1)] if known else []
        flat = [local(each).detach().flatten() for each in some]
        # Spread as well: the first rows of an embedding may be those of tokens that no text has.
        numbers = [each[:: max(len(each) // _SOME_NUMBERS, 1)].to(self.device, torch.float32) for each in flat]
        return torch.cat(numbers) if numbers else torch.empty(0)

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

    def nonfinite_tensors(self, of_optimizer: bool = True) -> list[str]:
        """Names parameters and buffers that hold NaN or Inf, and states of the optimizer."""
        optimizer = self._optimizer if of_optimizer else None
        partitions = None if self.zero is None else self.zero.partitions()
        return retry_after_freeing(lambda: nonfinite_tensors(self._trainer.model, optimizer, partitions), self.device)

    def weights_are_finite(self) -> bool:
        """Whether no parameter or buffer does, looked at often."""
        if self.zero is not None:
            return not self.nonfinite_tensors(of_optimizer=False)
        return retry_after_freeing(self._weights.finds_nothing, self.device)

    def own_part_of(self, tensors: Sequence[str]) -> list[str]:
        """Gives those of some tensors that are not made of the parts of all ranks in each step, as ZeRO does."""
        if self.zero is None:
            return list(tensors)
        own = ("master weights ", "optimizer:", *(["weights "] if self.zero.shards_weights else []))
        return [name for name in tensors if name.startswith(own)]

    def offloaded_tensors(self) -> list[str]:
        """
        Names parameters and buffers that lie on no device while nothing is computed: accelerate keeps what they hold
        elsewhere, and brings it for each call. They can be neither searched nor kept.
        """
        model = self._trainer.model
        return [name for name, each in (*model.named_parameters(), *model.named_buffers()) if each.is_meta]

    def argument_limits(self) -> dict[str, float]:
        """The numbers among the training arguments, for rules whose bounds are taken from them."""
        return {name: value for name, value in vars(self._trainer.args).items() if type(value) in (int, float)}


def _spreads_rows(trainer: Any) -> bool:
    sizes = [getattr(trainer, name, None) for name in ("get_cp_size", "get_sp_size")]
    return any((size() or 1) > 1 for size in sizes if size is not None)


def is_compiled(module: torch.nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def _inside(module: torch.nn.Module) -> torch.nn.Module:
    inner = getattr(module, "module", None)
    return _inside(inner) if isinstance(inner, torch.nn.Module) else module
