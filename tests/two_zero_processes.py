"""Run by test_deepspeed.py under torchrun: the same struck runs under ZeRO on two processes, on the CPU."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import transformers.training_args
import two_sharded_processes as sharded
from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from conftest import (
    OutputFault,
    adapter_trainer,
    dpo_trainer,
    grpo_trainer,
    journal,
    leave_together,
    losses,
    sft_trainer,
)
from transformers import TrainerCallback, set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from two_sharded_processes import PoisonGradient, inside

from self_healing import HealingConfig, SelfHealingCallback, SelfHealingTrainer
from self_healing.failures.recipes import UnrecoverableTrainingError
from self_healing.hf.state import unwrap_optimizer


# Of a micro-batch, and what one rank has memory for.
ROWS, ROWS_THAT_FIT = 8, 4


def zero_on_the_cpu() -> None:
    """Has accelerate, transformers and DeepSpeed take the CPU for a device that they train on like any other."""
    os.environ.update(ACCELERATE_TORCH_DEVICE="cpu", DS_ACCELERATOR="cpu")
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    import deepspeed

    # Or a collective of its own for the CPU is compiled first, for minutes; those of gloo will do.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It asks for fast kernels, which not every CPU has.
    device = type(deepspeed.accelerator.get_accelerator())
    device.is_fp16_supported = lambda self: True
    device.supported_dtypes = lambda self: [torch.float, torch.half, torch.bfloat16]


def config_of(stage: int, on_cpu_adam: bool = False, **zero: Any) -> dict[str, Any]:
    """What people write who leave the rest to the Trainer."""
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        # Too large at first, as DeepSpeed's own is for most models.
        "fp16": {"enabled": "auto", "initial_scale_power": 20, "hysteresis": 1},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": on_cpu_adam,
        # Norms and biases stay whole on all ranks under ZeRO-3, matrices do not.
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 40, **zero},
    }


def masters_of(zero: Any) -> list[torch.Tensor]:
    """This rank's partition of the weights, in the precision that they are updated in."""
    sharded = hasattr(zero, "fp32_partitioned_groups_flat")
    masters: list[torch.Tensor] = (
        zero.fp32_partitioned_groups_flat if sharded else zero.single_partition_of_fp32_groups
    )
    return masters


def state_of(trainer: Any) -> dict[str, torch.Tensor]:
    """All that this rank holds of weights and optimizer state, read from DeepSpeed itself."""
    zero = trainer.accelerator.deepspeed_engine_wrapped.engine.optimizer
    sharded = hasattr(zero, "fp16_partitioned_groups_flat")
    groups = [*masters_of(zero), *(zero.fp16_partitioned_groups_flat if sharded else zero.bit16_groups_flat)]
    state = {f"group {index}": tensor for index, tensor in enumerate(groups)}
    for index, moments in enumerate(zero.optimizer.state.values()):
        state |= {f"{name} {index}": value for name, value in moments.items() if isinstance(value, torch.Tensor)}
    return {name: tensor.detach().float() for name, tensor in state.items()}


def digest_of(state: Mapping[str, torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()[:16]


def sums_of(trainer: Any) -> list[float]:
    """A number for each of the weights, which all ranks have together."""
    from deepspeed.runtime.zero import GatheredParameters

    parameters = list(trainer.model.parameters())
    with GatheredParameters(parameters, enabled=hasattr(parameters[0], "ds_id")):
        return [float(parameter.detach().double().sum()) for parameter in parameters]


class Told(logging.Handler):
    """Keeps what the library logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("self_healing").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class NanWeights(TrainerCallback):
    """A partition of the weights of one rank turns NaN after a step, in the precision that they are updated in."""

    def __init__(self, trainer: Any, rank: int, step: int) -> None:
        self.fired, self._trainer, self._rank, self._step = 0, trainer, rank, step
        trainer.add_callback(self)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != self._step or torch.distributed.get_rank() != self._rank or self.fired:
            return
        self.fired += 1
        masters_of(self._trainer.accelerator.deepspeed_engine_wrapped.engine.optimizer)[0].data[3] = float("nan")


class LostConnection:
    """The forward of one micro-batch raises, once."""

    def __init__(self, model: torch.nn.Module, at: int) -> None:
        self.fired, self._calls, self._at = 0, 0, at
        model.register_forward_hook(self)

    def __call__(self, *_: Any) -> None:
        self._calls += 1
        if self._calls == self._at:
            self.fired += 1
            raise ConnectionError("gone")


class OutOfMemory:
    """
    Memory runs out at the end of a forward, or in its backward.

    Args:
        model: The model.
        here (`bool`): Whether it is short on this rank.
        only (`int`, *optional*): In this forward alone, counted from 1; else in all of too many rows.
        backward (`str`, *optional*): `"early"`, before there is any gradient, or `"late"`.
    """

    def __init__(self, model: Any, here: bool, only: int | None = None, backward: str = "") -> None:
        self.fired = self.forwards = self._rows = 0
        self._here, self._only, self._backward = here, only, backward
        if backward == "early":
            model.register_forward_hook(lambda module, args, output: self._look(output.log_probs))
        else:
            # By the time there is a gradient of it, the head has its own.
            model.model.norm.register_forward_hook(lambda module, args, output: self._look(output))
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.forwards += torch.is_grad_enabled()
        self._rows = kwargs["input_ids"].shape[0]

    def _look(self, output: torch.Tensor) -> None:
        if not self._here or not torch.is_grad_enabled():
            return
        if self._rows <= ROWS_THAT_FIT if self._only is None else self.forwards != self._only:
            return
        if self._backward:
            output.register_hook(self._run_out)
        else:
            self._run_out()

    def _run_out(self, *_: Any) -> None:
        self.fired += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Asked(TrainerCallback):
    """A rank is asked to leave in the third step."""

    def __init__(self, trainer: Any, struck: bool) -> None:
        self.fired, self._struck = 0, struck
        trainer.add_callback(self)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and self._struck and not self.fired:
            self.fired += 1
            os.kill(os.getpid(), signal.SIGTERM)


class Gradient(TrainerCallback):
    """Measures the gradient that is applied in a step, before DeepSpeed clips it, and what DeepSpeed takes it for."""

    def __init__(self, trainer: Any, step: int) -> None:
        self.norm, self.taken_for, self._trainer, self._step = 0.0, 0.0, trainer, step
        trainer.add_callback(self)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            zero = self._trainer.accelerator.deepspeed_engine_wrapped.engine.optimizer
            parts = [part for group in zero.averaged_gradients.values() for part in group or ()]
            # Where it is offloaded.
            parts = parts or [master.grad for master in masters_of(zero)]
            total = torch.stack([part.double().square().sum() for part in parts]).sum()
            torch.distributed.all_reduce(total)
            self.norm = float(total.sqrt())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step + 1:
            engine = self._trainer.accelerator.deepspeed_engine_wrapped.engine
            self.taken_for = float(engine.get_global_grad_norm())


class UpdatedAt(TrainerCallback):
    """Notes the rates that DeepSpeed's optimizer updates weights with, call by call."""

    def __init__(self, trainer: Any) -> None:
        self.fired: list[list[float]] = []
        trainer.add_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        inner = unwrap_optimizer(kwargs["optimizer"])
        inner.register_step_post_hook(lambda *_: self.fired.append([group["lr"] for group in inner.param_groups]))


class Runs(sharded.Runs):
    """Trains the same model again and again, struck by one fault after the other, and notes what became of it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        # What all runs have in `zero_optimization` beside the stage.
        self._zero: dict[str, Any] = {}
        # Whether accelerate puts DeepSpeed's optimizer for the CPU in the place of torch's.
        self._on_cpu_adam = False

    def run(  # type: ignore[override]
        self,
        name: str,
        stage: int | None,
        fault: Callable[[Any], Any] = lambda trainer: None,
        poisoned: tuple[int, ...] = (),
        healed: bool = True,
        make: Callable[..., Any] = sft_trainer,
        healing: HealingConfig | None = None,
        zero: Mapping[str, Any] | None = None,
        resume: str | None = None,
        scale: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        for state in (AcceleratorState, GradientState):
            state._reset_state()
        unset_hf_deepspeed_config()
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        set_seed(1234)
        arguments = {"max_steps": 4, "use_cpu": False, "ddp_backend": "gloo", **arguments}
        if make in (sft_trainer, adapter_trainer):
            arguments["texts"] = self.texts(poisoned)
        config = None if stage is None else config_of(stage, self._on_cpu_adam, **self._zero, **(zero or {}))
        if config is not None:
            config["fp16"] |= scale or {}
            config |= settings or {}
        trainer = make(
            self._directory / name,
            self.tokenizer,
            callbacks=[SelfHealingCallback(healing or HealingConfig())] if healed and resume is None else None,
            deepspeed=config,
            **arguments,
        )
        if stage is None:
            # Or DDP is given the number of a device.
            trainer.accelerator.state.distributed_type = DistributedType.MULTI_CPU
        struck, stopped, told = fault(trainer), "", Told()
        try:
            if resume is None:
                trainer.train()
            else:
                SelfHealingTrainer(trainer, healing).train(resume_from_checkpoint=resume)
        except UnrecoverableTrainingError as error:
            stopped = str(error)
        except SystemExit as left:
            stopped = str(left.code)
        logging.getLogger("self_healing").removeHandler(told)
        if stage is None:
            # DDP, to compare with.
            self.results[name] = {"losses": losses(trainer)}
            return
        state = state_of(trainer)
        engine = trainer.accelerator.deepspeed_engine_wrapped.engine
        self.results[name] = {
            "stage": engine.zero_optimization_stage(),
            "optimizer": [type(engine.optimizer).__name__, type(engine.optimizer.optimizer).__name__],
            "offloaded": any(getattr(engine.optimizer, name, False) for name in ("cpu_offload", "offload_optimizer")),
            "state": digest_of(state),
            "loss_scaler": {name: str(value) for name, value in vars(engine.optimizer.loss_scaler).items()},
            "finite": all(bool(torch.isfinite(tensor).all()) for tensor in state.values()),
            "losses": losses(trainer),
            "norms": [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log],
            "rates": [log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log],
            "steps": [trainer.state.global_step, engine.global_steps, engine.skipped_steps, engine.micro_steps],
            "fired": getattr(struck, "fired", 0),
            "sums": sums_of(trainer),
            "stopped": stopped,
            "told": told.lines,
            "events": [event["kind"] for event in journal(self._directory / name)],
            "incidents": [
                [event["failure"], event["steps_lost"]] for event in journal(self._directory / name, "outcome")
            ],
            "diagnosed": [event["evidence"] for event in journal(self._directory / name, "diagnosed")],
            "actions": [event["action"] for event in journal(self._directory / name, "action")],
        }
        torch.distributed.barrier()

    # ---- the parts ----

    def offloaded(self, stage: int, bf16: bool) -> None:
        """Has the parts after this one keep optimizer state, and weights where they are sharded, in host memory."""
        on_host = {"device": "cpu"}
        self._zero = {"offload_optimizer": on_host} | ({"offload_param": on_host} if stage == 3 else {})

    def cpu_adam(self, stage: int, bf16: bool) -> None:
        """Has the parts after this one offload with DeepSpeed's own optimizer, as they do on a GPU."""
        self.offloaded(stage, bf16)
        self._on_cpu_adam = True

    def stage(self, stage: int, bf16: bool) -> None:
        same: dict[str, Any] = {"stage": stage, "bf16": bf16}
        self.run("plain", healed=False, **same)
        self.run("healthy", **same)
        self.run("transient", fault=self.nan_on_one_rank, **same)
        once = {**same, "gradient_accumulation_steps": 1}
        self.run("plain_once", healed=False, **once)
        self.run("healthy_once", **once)
        self.run("transient_once", fault=self.nan_on_one_rank, **once)

    def adapter(self, stage: int, bf16: bool) -> None:
        same: dict[str, Any] = {"stage": stage, "bf16": bf16, "make": adapter_trainer}
        self.run("plain_lora", healed=False, **same)
        self.run("healthy_lora", **same)
        self.run("transient_lora", fault=self.nan_on_one_rank, **same)

    def rows(self, stage: int, bf16: bool) -> None:
        same: dict[str, Any] = {"stage": stage, "bf16": bf16, "dropout": 0.0}
        self.run("poison", fault=self.poison_token, poisoned=(5, 17), **same)
        self.run(
            "gradient",
            fault=lambda trainer: PoisonGradient(trainer.model, self.poison),
            poisoned=(5, 17),
            **same,
        )
        if not bf16:
            self.run("poison_ddp", None, fault=self.poison_token, poisoned=(5, 17), dropout=0.0)
        # Of the second and of the last step all rows are NaN: what is left of them reaches the third, or the end.
        struck = (1, 3)
        self.run(
            "skipped",
            fault=lambda trainer: OutputFault(trainer.model, lambda _: trainer.state.global_step in struck),
            **same,
        )

    def weights(self, stage: int, bf16: bool) -> None:
        same: dict[str, Any] = {"stage": stage, "bf16": bf16, "max_steps": 6}
        healing = HealingConfig(snapshot_verify_steps=1)
        self.run("weights_plain", healed=False, **same)
        self.run("weights", fault=lambda trainer: NanWeights(trainer, 1, 4), healing=healing, **same)

    def rate(self, stage: int, bf16: bool) -> None:
        """A rule of the user's own goes back, and lowers the rate; the groups of parameters are two."""
        rules = self._directory / f"rules.{self.rank}.toml"
        rules.write_text(
            '[mine]\nmetric = "learning_rate"\nobjectives = ["sft"]\nhealthy = "low"\n'
            'red_flag = [{ is = "above", value = 0.0006 }]\nsteps = 3\nobservations = 3\n'
            'severity = "error"\naction = "rollback"\ndiagnosis = "It is there."\nremedy = "None."\n'
        )
        same: dict[str, Any] = {"stage": stage, "bf16": bf16, "max_steps": 10, "gradient_accumulation_steps": 1}
        same |= {"learning_rate": 1e-3, "lr_scheduler_type": "constant"}
        self.run("lowered", fault=UpdatedAt, healing=HealingConfig(rules_file=str(rules)), **same)

    def entered_again(self, stage: int, bf16: bool) -> None:
        same: dict[str, Any] = {"stage": stage, "bf16": bf16, "max_steps": 5}
        self.run("entered_once", healed=False, **same)
        self.run(
            "entered_again", fault=lambda trainer: LostConnection(inside(trainer.model), 6), resume="auto", **same
        )

    def own_schedule(self, stage: int, bf16: bool) -> None:
        """DeepSpeed makes optimizer and schedule, as its configuration says, and moves the schedule on in its step."""
        made = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}
        same: dict[str, Any] = {"stage": stage, "bf16": bf16, "gradient_accumulation_steps": 1}
        same["settings"] = {"optimizer": made}
        self.run("own_plain", healed=False, **same)
        self.run("own_healthy", **same)
        self.run("too_high", max_steps=60, learning_rate=3.0, lr_scheduler_type="constant", **same)

    def spike(self, stage: int, bf16: bool) -> None:
        same: dict[str, Any] = {"stage": stage, "bf16": bf16, "max_steps": 34, "gradient_accumulation_steps": 1}

        def steepen(hidden: torch.Tensor) -> torch.Tensor:
            hidden.register_hook(lambda gradient: gradient * 1e4)
            return hidden

        def on_one_rank(trainer: Any, always: bool) -> OutputFault:
            def strikes(forward: int) -> bool:
                return self.rank == 1 and (trainer.state.global_step == 30 if always else forward == 31)

            return OutputFault(trainer.model, strikes, steepen)

        self.run("spike_plain", healed=False, **same)
        self.run("spike", fault=lambda trainer: on_one_rank(trainer, always=False), **same)
        measured: list[Gradient] = []

        def in_the_batch(trainer: Any) -> OutputFault:
            measured.append(Gradient(trainer, 30))
            return on_one_rank(trainer, always=True)

        # DeepSpeed's own clipping, in the step, is to find nothing to do after this one.
        self.run("spike_in_the_batch", fault=in_the_batch, max_grad_norm=100.0, **same)
        clipped = [
            event["clipped_to"]
            for event in journal(self._directory / "spike_in_the_batch", "action")
            if event["action"] == "clip_gradient"
        ]
        self.results["clipped"] = {
            "applied": [measured[0].norm, measured[0].taken_for],
            "wanted": clipped,
        }

    def checkpoints(self, stage: int, bf16: bool) -> None:
        same: dict[str, Any] = {"stage": stage, "bf16": bf16, "save_strategy": "steps", "save_steps": 2}
        self.run("resumed", resume="auto", **same, max_steps=4, lr_scheduler_type="constant")
        self.results["first_part"] = self.results.pop("resumed")
        self.run("resumed", resume="auto", **same, max_steps=6, lr_scheduler_type="constant")
        self.run("uninterrupted", healed=False, max_steps=6, **same, lr_scheduler_type="constant")
        # No state is kept in memory: what was written to disk is gone back to.
        self.run(
            "from_disk",
            fault=lambda trainer: NanWeights(trainer, 1, 7),
            healing=HealingConfig(snapshots=False, snapshot_verify_steps=1),
            max_steps=8,
            **same,
        )

    def pairs(self, stage: int, bf16: bool) -> None:
        same: dict[str, Any] = {"stage": stage, "bf16": bf16, "make": dpo_trainer}
        self.run("pairs_plain", healed=False, **same)
        self.run("pairs_healthy", **same)
        self.run("pairs_transient", fault=self.nan_on_one_rank, **same)

    def policy(self, stage: int, bf16: bool) -> None:
        same: dict[str, Any] = {"stage": stage, "bf16": bf16, "make": grpo_trainer, "beta": 0.0}
        self.run("policy_plain", healed=False, **same)
        self.run("policy_healthy", **same)
        self.run("policy_transient", fault=self.nan_on_one_rank, **same)

    def preempted(self, stage: int, bf16: bool) -> None:
        same: dict[str, Any] = {"stage": stage, "bf16": bf16, "resume": "auto", "max_steps": 6}
        self.run("never_preempted", stage, bf16=bf16, healed=False, max_steps=6)
        self.run("preempted", fault=lambda trainer: Asked(trainer, self.rank == 1), **same)
        self.results["asked_to_leave"] = self.results.pop("preempted")
        self.run("preempted", **same)

    def memory(self, stage: int, bf16: bool) -> None:
        """Runs out on the last rank, or on the only one, and is healed in place."""
        here = self.rank == torch.distributed.get_world_size() - 1
        same: dict[str, Any] = {"stage": stage, "bf16": bf16, "per_device_train_batch_size": ROWS}
        whole = {**same, "dropout": 0.0}
        self.run("fits", healed=False, **same)
        self.run("fits_whole", healed=False, **whole)
        self.run(
            "measured",
            fault=lambda trainer: OutOfMemory(inside(trainer.model), here, only=2),
            settings={"wall_clock_breakdown": True},
            **same,
        )
        for name, kind in KINDS_OF_LACK.items():
            if name.startswith("late") and torch.distributed.get_world_size() > 1:
                continue
            arguments = whole if kind.get("only") is None else same

            def fault(trainer: Any, kind: dict[str, Any] = kind) -> OutOfMemory:
                return OutOfMemory(inside(trainer.model), here, **kind)

            self.run(name, fault=fault, **arguments)

    def restarted(self, stage: int, bf16: bool, kind: str) -> None:
        """Memory is short on the second rank, where nothing can be done about it. It is called once for each start."""
        same: dict[str, Any] = {"stage": stage, "bf16": bf16, "per_device_train_batch_size": ROWS, "dropout": 0.0}
        first = not (self._directory / f"plain.{self.rank}.json").exists()
        lack = KINDS_OF_LACK[kind]
        if lack.get("only") is not None and not first:
            # It has passed.
            lack = {"only": 0}

        def fault(trainer: Any) -> OutOfMemory:
            return OutOfMemory(inside(trainer.model), self.rank == 1, **lack)

        if first:
            self.run("fits_whole", healed=False, **same)
            (self._directory / f"plain.{self.rank}.json").write_text(json.dumps(self.results["fits_whole"]))
        self.run(kind, fault=fault, resume="auto", save_strategy="steps", save_steps=1, **same)
        self.results["fits_whole"] = json.loads((self._directory / f"plain.{self.rank}.json").read_text())

    def once(self, stage: int, bf16: bool) -> None:
        self.restarted(stage, bf16, "once")

    def above(self, stage: int, bf16: bool) -> None:
        self.restarted(stage, bf16, "above")

    def late(self, stage: int, bf16: bool) -> None:
        self.restarted(stage, bf16, "late")

    def half(self, stage: int, bf16: bool) -> None:
        same: dict[str, Any] = {"stage": stage, "fp16": True, "max_steps": 16, "gradient_accumulation_steps": 1}
        self.run("half_plain", healed=False, **same)
        self.run("half_healthy", **same)
        self.run("half_transient", fault=lambda trainer: self.nan_at(trainer, {13}), **same)
        infinite = {12, 13, 14}
        self.run("half_overflows", fault=lambda trainer: self.steep_at(trainer, infinite), **same)

    def nan_at(self, trainer: Any, forwards: set[int]) -> OutputFault:
        return OutputFault(inside(trainer.model), lambda forward: forward in forwards and self.rank == 1)

    def steep_at(self, trainer: Any, steps: set[int]) -> OutputFault:
        def steepen(hidden: torch.Tensor) -> torch.Tensor:
            hidden.register_hook(lambda gradient: gradient * float("inf"))
            return hidden

        def strikes(_: int) -> bool:
            return trainer.state.global_step in steps and self.rank == 1

        return OutputFault(inside(trainer.model), strikes, steepen)

    def watched(self, stage: int, bf16: bool) -> None:
        # In stages 1 and 2 DeepSpeed keeps it in host memory, whatever is asked for.
        place = {"device": "nvme", "nvme_path": str(self._directory)}
        same: dict[str, Any] = {"stage": stage, "bf16": bf16, "zero": {"offload_optimizer": place}}
        self.run("watched_plain", healed=False, **same)
        self.run("watched", **same)
        self.run("watched_struck", fault=self.nan_on_one_rank, **same)


# How memory runs out: once, in the second micro-batch of a step, or whenever there are too many rows.
KINDS_OF_LACK: dict[str, dict[str, Any]] = {
    "once": {"only": 6},
    "above": {},
    "early": {"only": 6, "backward": "early"},
    "early_above": {"backward": "early"},
    "late": {"only": 6, "backward": "late"},
    "late_above": {"backward": "late"},
}


def main(directory: Path, stage: str, precision: str, *parts: str) -> None:
    zero_on_the_cpu()
    # A deadlock is a failure after this time.
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=90))
    runs = Runs(directory)
    for part in parts:
        getattr(runs, part)(int(stage), precision == "bf16")
    (directory / f"results.{runs.rank}.json").write_text(json.dumps(runs.results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
    leave_together()
