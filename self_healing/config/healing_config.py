"""Every setting of the library in one flat dataclass, its presets, and what users may pass in its place."""

from __future__ import annotations

import functools
import os
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar

from .schema import (
    ConfigurationError,
    LeftOut,
    Setting,
    Switch,
    as_toml,
    raise_if_any,
    read_toml,
    schema_of,
    unknown,
    value_problems,
    values_in,
)


if TYPE_CHECKING:
    from _typeshed import DataclassInstance


# ---- presets: the presets, and how the constructor of a config starts from one ----


PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "aggressive": {
        "reexecute_attempts": 2,
        "nan_patience": 8,
        "max_skipped_fraction": 0.25,
        "max_spike_skips": 10,
        "zclip_mode": "clip",
        "max_lr_reductions": 6,
        "max_bad_fraction": 0.25,
        "max_recovery_attempts": 20,
        "api_retry_max_delay": 900.0,
        "api_retry_attempts": 20,
        "retry_total_seconds": 7200.0,
    },
    "conservative": {
        "nan_patience": 2,
        "drop_poison_rows": False,
        "max_skipped_fraction": 0.02,
        "max_bad_fraction": 0.05,
        "max_spike_skips": 1,
        "on_divergence": "stop",
        "max_lr_reductions": 1,
        "on_bad_sample": "raise",
        "max_recovery_attempts": 2,
    },
}

Config = TypeVar("Config", bound="DataclassInstance")


def preset_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of the preset that `healing_preset` among the values names."""
    name = values.get("healing_preset")
    return PRESETS.get(name, {}) if isinstance(name, str) else {}


def starts_from_preset(config: type[Config]) -> type[Config]:
    """Makes the constructor of a config start from the preset it is given, and name settings it does not know."""
    original = config.__init__

    @functools.wraps(original)
    def __init__(self: Config, *args: Any, **kwargs: Any) -> None:
        schema = schema_of(config)
        raise_if_any([unknown(schema, None, name, value) for name, value in kwargs.items() if name not in schema])
        given = {name: value for name, value in kwargs.items() if not isinstance(value, LeftOut)}
        original(self, *args, **preset_of(given) | given)

    type.__setattr__(config, "__init__", __init__)
    for each in fields(config):
        if any(each.name in preset for preset in PRESETS.values()):
            each.default = LeftOut(each.default)
    return config


# ---- healing config: every setting of the library in one flat dataclass ----


@starts_from_preset
@dataclass(frozen=True, kw_only=True, slots=True)
class HealingConfig:
    """
    Settings of [`SelfHealingCallback`] and [`SelfHealingTrainer`]: what they may do, and when they give up.

    The values are checked when the object is made and cannot be changed afterwards: make another one with
    `dataclasses.replace`. Next to a TRL config, [`~transformers.HfArgumentParser`] and [`~trl.TrlParser`] read the
    settings from the command line and from YAML; [`HealingConfig.from_toml`] reads them from a file of their own.

    Args:
        > Section `nonfinite`: a step whose loss or gradient norm is not finite

        on_nonfinite (`str`, *optional*, defaults to `"heal"`):
            What to do when the loss or the gradient norm of a step is not finite: `"heal"` finds the cause by
            experiment and repairs the step, `"skip"` skips the step without a diagnosis, `"warn"` only reports it and
            applies the step as the plain trainer would, `"raise"` stops with an error before the step is applied.
        nan_patience (`int`, *optional*, defaults to `3`):
            After this many skipped steps in a row without a known cause, the run rolls back to a trusted state with a
            lower learning rate; with `on_nonfinite="skip"` it stops. A step with poison rows resets the count. At
            least 1.
        reexecute_attempts (`int`, *optional*, defaults to `1`):
            How often a non-finite step is computed again from its saved random states before the fault counts as
            persistent. From 0 to 10.
        drop_poison_rows (`bool`, *optional*, defaults to `True`):
            Whether to drop the rows that make a step non-finite on their own, and renormalise the rest. If `False`,
            skip the whole step.
        max_skipped_fraction (`float`, *optional*, defaults to `0.1`):
            The run stops when more than this share of the last `skip_window` steps was skipped. Above 0, at most 1.
        skip_window (`int`, *optional*, defaults to `100`):
            Number of recent steps over which `max_skipped_fraction`, `max_bad_fraction` and `max_spike_skips`
            are counted. At least 1.
        max_bad_fraction (`float`, *optional*, defaults to `0.1`):
            The run stops when more than this share of the rows of the last `skip_window` steps was dropped, or of the
            samples drawn so far was bad (of at least 100 samples, or of the whole data set if it is smaller). Above 0,
            at most 1.
        scaler_patience (`int`, *optional*, defaults to `3`):
            fp16 only: consecutive overflows that count as a fault. Fewer are left to the `GradScaler`, which skips
            such steps by design. At least 1.

        > Section `detection`: steps that are finite, but wrong

        on_spike (`str`, *optional*, defaults to `"heal"`):
            What to do when the gradient norm of a step is far above normal: `"heal"` computes the step again and, if
            nothing changes, clips the gradient to its usual norm, or skips the step if the loss spikes as well or the
            gradient has exploded; `"warn"` only reports it.
        loss_spike_z (`float`, *optional*, defaults to `8.0`):
            Robust z-score of the log loss above which a loss is a spike. No checkpoint is written until the loss is
            back. Above 0.
        loss_spike_factor (`float`, *optional*, defaults to `0.0`):
            A loss above this multiple of its baseline is a spike, whatever its z-score. 0 switches this off. At least
            0.
        gradient_spike_z (`float`, *optional*, defaults to `10.0`):
            Robust z-score of the log gradient norm above which it is a spike. Above 0.
        grad_explosion_threshold (`float`, *optional*, defaults to `10000.0`):
            Gradient norm before clipping above which the gradient has exploded, unless such norms are usual in the
            run. 0 switches this off. At least 0.
        max_spike_skips (`int`, *optional*, defaults to `3`):
            How many of the last `skip_window` steps may be skipped for a spike. Further spikes are clipped to the
            usual norm. At least 0.
        on_divergence (`str`, *optional*, defaults to `"heal"`):
            What to do when the loss rises and stays up, unless trusted weights show that the data have become harder:
            `"heal"` rolls back to a trusted state if the weights are at fault, `"warn"` reports it and writes no
            checkpoint until the loss is back, `"stop"` ends the run with a postmortem.
        divergence_slack (`float`, *optional*, defaults to `0.5`):
            Amount subtracted from each z-score of the loss before the CUSUM adds it up. Above 0.
        divergence_limit (`float`, *optional*, defaults to `11.0`):
            Value of that CUSUM above which the loss has diverged. Above 0.
        divergence_patience (`int`, *optional*, defaults to `100`):
            Steps after which a diverged loss that stays at a new level counts as settled there. At least 1.
        vanishing_gradient_steps (`int`, *optional*, defaults to `20`):
            Consecutive steps with a gradient norm below 1e-7 that count as a vanished gradient. The run rolls back if
            trusted weights still learn; otherwise it is reported. At least 1.
        on_dead_loss (`str`, *optional*, defaults to `"stop"`):
            What to do when the loss of SFT is exactly 0.0, which is a wiring bug: `"stop"` ends the run with a
            postmortem, `"warn"` reports it.
        dead_loss_steps (`int`, *optional*, defaults to `20`):
            Consecutive steps with a loss of exactly 0.0 after which the loss counts as dead. At least 1.
        plateau_window (`int`, *optional*, defaults to `500`):
            Steps without progress that are reported as a plateau. 0 switches this off. At least 0.
        overfitting_evaluations (`int`, *optional*, defaults to `3`):
            Plain [`~transformers.Trainer`] only: evaluations in a row in which the evaluation loss rises while the
            training loss falls before overfitting is reported. For TRL trainers the metric rule `overfitting` decides.
            At least 1.
        rules_file (`str`, *optional*):
            TOML file with metric rules, merged over the built-in table. `self-healing rules` prints the table in
            force.
        on_red_flag (`str`, *optional*, defaults to `"act"`):
            What to do when a metric rule fires whose action is `"stop"` or `"rollback"`: `"act"` carries it out,
            `"warn"` only reports it.

        > Section `clipping`: adaptive gradient clipping, below `max_grad_norm`

        zclip_mode (`str`, *optional*, defaults to `"observe"`):
            Adaptive gradient clipping by the norms usual in the run, below `max_grad_norm`: `"off"`, `"observe"` keeps
            the statistic and logs what it would clip, `"clip"` clips.
        zclip_z_threshold (`float`, *optional*, defaults to `2.5`):
            z-score above which a gradient norm is an outlier. Above 0.
        zclip_ema_decay (`float`, *optional*, defaults to `0.97`):
            Weight of the past in the running mean and variance. Above 0, at most 0.9999.
        zclip_warmup_steps (`int`, *optional*, defaults to `25`):
            First steps, which only fill the statistic; nothing is clipped in them. At least 2.

        > Section `rollback`: rolling back to a trusted state, and the learning rate afterwards

        snapshots (`bool`, *optional*, defaults to `True`):
            Whether to keep trusted states in host memory. If `False`, or if host memory is short, a run rolls back to
            its newest trusted checkpoint on disk.
        snapshot_interval (`int`, *optional*, defaults to `0`):
            Steps between two snapshots. 0 chooses the interval from `snapshot_overhead_budget`. At least 0.
        snapshot_overhead_budget (`float`, *optional*, defaults to `0.01`):
            Share of the training time that copying snapshots may take. Above 0, at most 1.
        snapshot_verify_steps (`int`, *optional*, defaults to `6`):
            Healthy steps that must follow a snapshot or a checkpoint before it is trusted. At least 1.
        lr_reduce_factor (`float`, *optional*, defaults to `0.5`):
            The learning rate is multiplied by this factor when rolling back alone did not help. Above 0, at most 0.95.
        max_lr_reductions (`int`, *optional*, defaults to `4`):
            Most learning rate reductions in force at the same time. If they do not suffice, the run stops. At least 0.
        lr_hold_steps (`int`, *optional*, defaults to `0`):
            Steps the learning rate stays reduced, at most a tenth of the run. 0 for 100, or for as long as the
            optimizer's second moments remember if that is longer. At least 0.
        lr_ramp_steps (`int`, *optional*, defaults to `0`):
            Steps in which the learning rate then grows back linearly. 0 for as many as it was held. At least 0.
        lr_increase_factor (`float`, *optional*, defaults to `1.0`):
            The learning rate is multiplied by this factor, once, when the loss has reached a plateau. 1 switches this
            off. From 1 to 3.

        > Section `memory`: out of memory

        on_oom (`str`, *optional*, defaults to `"heal"`):
            What to do when memory runs out: `"heal"` frees memory, tries again, and then runs the model over fewer
            rows at a time with the same result; `"raise"` raises the error.
        oom_probe_steps (`int`, *optional*, defaults to `50`):
            Steps after which a size that did not fit is tried again. The wait doubles whenever that fails. At least 1.
        oom_activation_checkpointing (`bool`, *optional*, defaults to `True`):
            Whether to allow activation checkpointing to be switched on for the rest of the run when a single row does
            not fit.
        oom_reduce_batch (`bool`, *optional*, defaults to `True`):
            Whether to allow [`SelfHealingTrainer`], as a last resort, to divide `per_device_train_batch_size` and
            multiply `gradient_accumulation_steps` by the same factor, and to continue from an emergency checkpoint.
        optimizer_step_backup (`bool`, *optional*, defaults to `False`):
            Whether to copy weights and optimizer state to host memory before every `optimizer.step()`, so that a step
            that runs out of memory half-way can be undone bit for bit. Costs one such copy per step.
        oom_memory_snapshot (`bool`, *optional*, defaults to `False`):
            Whether to record the history of the CUDA allocator, and write it next to the journal the first time memory
            runs out.

        > Section `data`: samples that cannot be loaded or collated

        on_bad_sample (`str`, *optional*, defaults to `"quarantine"`):
            What to do about a sample that raises twice while it is loaded or collated, or that is empty:
            `"quarantine"` writes it to `quarantine.jsonl` and uses another sample in its place, `"raise"` raises the
            error and names the sample.

        > Section `recovery`: how often a run is recovered, and exceptions that end `train()`

        max_recovery_attempts (`int`, *optional*, defaults to `6`):
            How often a run may roll back, or [`SelfHealingTrainer`] enter `train()` again, without progress before it
            gives up. At least 0.
        budget_refund_steps (`int`, *optional*, defaults to `50`):
            Healthy steps beyond the failure after which these attempts are given back. At least 1.
        emergency_checkpoint (`bool`, *optional*, defaults to `True`):
            Whether to write an exactly resumable checkpoint when an exception ends `train()`. If `False`, the run
            falls back on its newest regular checkpoint.
        api_retry_base_delay (`float`, *optional*, defaults to `5.0`):
            Upper bound of the first wait after a network or service failure, in seconds. The bound doubles with every
            attempt, and each wait is drawn at random below it. At least 0.
        api_retry_max_delay (`float`, *optional*, defaults to `300.0`):
            Longest such wait, in seconds. At least `api_retry_base_delay`.
        api_retry_attempts (`int`, *optional*, defaults to `8`):
            How often a call to a service (reward function, streamed data, vLLM server, Hub) is attempted before its
            error is raised. At least 1.
        retry_total_seconds (`float`, *optional*, defaults to `900.0`):
            Longest time such a call may take with all its attempts and waits, in seconds. At least 0.
        on_save_failure (`str`, *optional*, defaults to `"continue"`):
            What to do when the disk refuses a checkpoint: `"continue"` removes the partial checkpoint, raises an
            alert, trains on and tries again at the next save; `"raise"` raises the error.
        make_room_for_checkpoints (`bool`, *optional*, defaults to `False`):
            Whether to allow the oldest unverified checkpoint to be removed when the disk is full.
        keep_verified_checkpoints (`int`, *optional*, defaults to `2`):
            How many verified checkpoints to keep in `last-known-good/`, where rotation cannot remove them. 0 keeps
            none. They make room before a save is given up. At least 0.

        > Section `hangs`: training that hangs

        on_hang (`str`, *optional*, defaults to `"recover"`):
            What to do when a part of a step takes far longer than ever before: `"recover"` writes the stacks of all
            threads to disk, interrupts the step and goes on ([`SelfHealingTrainer`]; if the step cannot be interrupted
            and a launcher restarts the job, the process ends with exit code 75), `"notify"` only writes the stacks and
            raises an alert, `"off"` does not watch.
        hang_factor (`float`, *optional*, defaults to `10.0`):
            A part of a step hangs when it takes more than this many times its longest time so far. At least 1.
        hang_floor_seconds (`float`, *optional*, defaults to `60.0`):
            Shortest time that counts as a hang, in seconds. Above 0.
        hang_learning_steps (`int`, *optional*, defaults to `3`):
            How often a part of a step (data, forward and backward, optimizer, ...) has to be seen before it is
            watched. At least 1.
        hang_grace_seconds (`float`, *optional*, defaults to `30.0`):
            Seconds a step has to respond to the interrupt. Above 0.
        collective_timeout_check_seconds (`float`, *optional*, defaults to `20.0`):
            On several ranks, seconds within which they have to sum up known numbers before the first step: a sum that
            is wrong, or late, ends the run. 0 switches this off. Else at least 10.

        > Section `restarts`: processes that are killed or preempted

        resume_after_restart (`bool`, *optional*, defaults to `True`):
            Whether `train()` of a [`SelfHealingTrainer`] resumes from the newest trusted checkpoint of its own run
            when a launcher (torchrun, SLURM) has restarted the process.
        resume_from_memory (`bool`, *optional*, defaults to `True`):
            Whether snapshots lie in shared memory (`/dev/shm`) where a launcher will restart the job, so that the
            processes that it starts go on from there.
        launcher_restarts (`str`, *optional*, defaults to `"auto"`):
            Whether a process that ends with exit code 75 is restarted. `"auto"` reads it from the environment
            (torchrun with restarts left), `"yes"` and `"no"` override that.
        on_preemption (`str`, *optional*, defaults to `"save"`):
            What to do on SIGTERM or SIGUSR1: `"save"` finishes the step, writes a checkpoint and exits, `"ignore"`
            leaves the signals alone.
        preemption_deadline (`float`, *optional*, defaults to `30.0`):
            Seconds between the signal and the end of the process, at most. Above 0.

        > Section `journal`: what is written to disk, and where

        healing_dir (`str`, *optional*):
            Directory for `healing_events.jsonl`, `quarantine.jsonl`, `postmortem.json` and the report. Defaults to the
            `output_dir` of the training arguments. Checkpoints and the record of the run always stay in `output_dir`.
        save_offending_batch (`bool`, *optional*, defaults to `True`):
            Whether to keep the batch of a step that was not finite, or that spiked again when it was computed again,
            for `self-healing replay`.
        quarantine_text (`bool`, *optional*, defaults to `True`):
            Whether to write the text of quarantined rows and samples to disk. If `False`, only their position and a
            hash are written, and no batch is kept.
        upload_healing_files (`bool`, *optional*, defaults to `False`):
            Whether to upload the files of this library (journal, quarantine, kept batches and checkpoints) to the Hub
            with everything else.
        trackio_alerts (`bool`, *optional*, defaults to `True`):
            Whether to send an alert for each incident when the run reports to Trackio.
        healing_metrics (`bool`, *optional*, defaults to `True`):
            Whether to add `healing/*` metrics to what the trainer logs: counts from the first incident on, and the
            statistic of ZClip.
        outcome_steps (`int`, *optional*, defaults to `5`):
            Healthy steps after an incident before its outcome is judged. At least 1.

        > Section `preset`: where the other settings start

        healing_preset (`str`, *optional*, defaults to `"default"`):
            Preset for the settings you leave out: `"default"`, `"aggressive"` or `"conservative"`. What you set takes
            precedence.

    Raises:
        `ConfigurationError`: if a name is unknown, or a value has the wrong type or is out of range. All of them are
        named at once.

    Example:

    ```python
    >>> HealingConfig.conservative(healing_dir="outputs/healing").nan_patience
    2
    ```
    """

    # The heading of these options in `--help`, read by `HfArgumentParser`.
    _argument_group_name: ClassVar[str] = "self-healing"

    on_nonfinite: Annotated[Literal["heal", "skip", "warn", "raise"], Setting("nonfinite")] = field(
        default="heal",
        metadata={
            "help": "What to do when the loss or the gradient norm of a step is not finite: `heal` finds the cause by "
            "experiment and repairs the step, `skip` skips the step without a diagnosis, `warn` only reports "
            "it and applies the step as the plain trainer would, `raise` stops with an error before the step "
            "is applied."
        },
    )
    nan_patience: Annotated[int, Setting("nonfinite", at_least=1)] = field(
        default=3,
        metadata={
            "help": "After this many skipped steps in a row without a known cause, the run rolls back to a trusted "
            "state with a lower learning rate; with `on_nonfinite='skip'` it stops. A step with poison rows "
            "resets the count."
        },
    )
    reexecute_attempts: Annotated[int, Setting("nonfinite", at_least=0, at_most=10)] = field(
        default=1,
        metadata={
            "help": "How often a non-finite step is computed again from its saved random states before the fault "
            "counts as persistent."
        },
    )
    drop_poison_rows: Annotated[bool, Setting("nonfinite")] = field(
        default=True,
        metadata={
            "help": "Drop the rows that make a step non-finite on their own, and renormalise the rest. If False, skip "
            "the whole step.",
            "action": Switch,
            "aliases": ["--no_drop_poison_rows", "--no-drop-poison-rows"],
        },
    )
    max_skipped_fraction: Annotated[float, Setting("nonfinite", above=0, at_most=1)] = field(
        default=0.1,
        metadata={"help": "The run stops when more than this share of the last `skip_window` steps was skipped."},
    )
    skip_window: Annotated[int, Setting("nonfinite", at_least=1)] = field(
        default=100,
        metadata={
            "help": "Number of recent steps over which `max_skipped_fraction`, `max_bad_fraction` and "
            "`max_spike_skips` are counted."
        },
    )
    max_bad_fraction: Annotated[float, Setting("nonfinite", above=0, at_most=1)] = field(
        default=0.1,
        metadata={
            "help": "The run stops when more than this share of the rows of the last `skip_window` steps was dropped, "
            "or of the samples drawn so far was bad (of at least 100 samples, or of the whole data set if it is "
            "smaller)."
        },
    )
    scaler_patience: Annotated[int, Setting("nonfinite", at_least=1)] = field(
        default=3,
        metadata={
            "help": "fp16 only: consecutive overflows that count as a fault. Fewer are left to the GradScaler, which "
            "skips such steps by design."
        },
    )

    on_spike: Annotated[Literal["heal", "warn"], Setting("detection")] = field(
        default="heal",
        metadata={
            "help": "What to do when the gradient norm of a step is far above normal: `heal` computes the step again "
            "and, if nothing changes, clips the gradient to its usual norm, or skips the step if the loss "
            "spikes as well or the gradient has exploded; `warn` only reports it."
        },
    )
    loss_spike_z: Annotated[float, Setting("detection", above=0)] = field(
        default=8.0,
        metadata={
            "help": "Robust z-score of the log loss above which a loss is a spike. No checkpoint is written until the "
            "loss is back."
        },
    )
    loss_spike_factor: Annotated[float, Setting("detection", at_least=0)] = field(
        default=0.0,
        metadata={
            "help": "A loss above this multiple of its baseline is a spike, whatever its z-score. 0 switches this off."
        },
    )
    gradient_spike_z: Annotated[float, Setting("detection", above=0)] = field(
        default=10.0, metadata={"help": "Robust z-score of the log gradient norm above which it is a spike."}
    )
    grad_explosion_threshold: Annotated[float, Setting("detection", at_least=0)] = field(
        default=1e4,
        metadata={
            "help": "Gradient norm before clipping above which the gradient has exploded, unless such norms are usual "
            "in the run. 0 switches this off."
        },
    )
    max_spike_skips: Annotated[int, Setting("detection", at_least=0)] = field(
        default=3,
        metadata={
            "help": "How many of the last `skip_window` steps may be skipped for a spike. Further spikes are clipped "
            "to the usual norm."
        },
    )
    on_divergence: Annotated[Literal["heal", "warn", "stop"], Setting("detection")] = field(
        default="heal",
        metadata={
            "help": "What to do when the loss rises and stays up, unless trusted weights show that the data have "
            "become harder: `heal` rolls back to a trusted state if the weights are at fault, `warn` reports "
            "it and writes no checkpoint until the loss is back, `stop` ends the run with a postmortem."
        },
    )
    divergence_slack: Annotated[float, Setting("detection", above=0)] = field(
        default=0.5, metadata={"help": "Amount subtracted from each z-score of the loss before the CUSUM adds it up."}
    )
    divergence_limit: Annotated[float, Setting("detection", above=0)] = field(
        default=11.0, metadata={"help": "Value of that CUSUM above which the loss has diverged."}
    )
    divergence_patience: Annotated[int, Setting("detection", at_least=1)] = field(
        default=100,
        metadata={"help": "Steps after which a diverged loss that stays at a new level counts as settled there."},
    )
    vanishing_gradient_steps: Annotated[int, Setting("detection", at_least=1)] = field(
        default=20,
        metadata={
            "help": "Consecutive steps with a gradient norm below 1e-7 that count as a vanished gradient. The run "
            "rolls back if trusted weights still learn; otherwise it is reported."
        },
    )
    on_dead_loss: Annotated[Literal["stop", "warn"], Setting("detection")] = field(
        default="stop",
        metadata={
            "help": "What to do when the loss of SFT is exactly 0.0, which is a wiring bug: `stop` ends the run with "
            "a postmortem, `warn` reports it."
        },
    )
    dead_loss_steps: Annotated[int, Setting("detection", at_least=1)] = field(
        default=20,
        metadata={"help": "Consecutive steps with a loss of exactly 0.0 after which the loss counts as dead."},
    )
    plateau_window: Annotated[int, Setting("detection", at_least=0)] = field(
        default=500, metadata={"help": "Steps without progress that are reported as a plateau. 0 switches this off."}
    )
    overfitting_evaluations: Annotated[int, Setting("detection", at_least=1)] = field(
        default=3,
        metadata={
            "help": "Plain `Trainer` only: evaluations in a row in which the evaluation loss rises while the training "
            "loss falls before overfitting is reported. For TRL trainers the metric rule `overfitting` "
            "decides."
        },
    )
    rules_file: Annotated[str | None, Setting("detection")] = field(
        default=None,
        metadata={
            "help": "TOML file with metric rules, merged over the built-in table. `self-healing rules` prints the "
            "table in force."
        },
    )
    on_red_flag: Annotated[Literal["act", "warn"], Setting("detection")] = field(
        default="act",
        metadata={
            "help": "What to do when a metric rule fires whose action is `stop` or `rollback`: `act` carries it out, "
            "`warn` only reports it."
        },
    )

    zclip_mode: Annotated[Literal["off", "observe", "clip"], Setting("clipping")] = field(
        default="observe",
        metadata={
            "help": "Adaptive gradient clipping by the norms usual in the run, below `max_grad_norm`: `off`, "
            "`observe` keeps the statistic and logs what it would clip, `clip` clips."
        },
    )
    zclip_z_threshold: Annotated[float, Setting("clipping", above=0)] = field(
        default=2.5, metadata={"help": "z-score above which a gradient norm is an outlier."}
    )
    zclip_ema_decay: Annotated[float, Setting("clipping", above=0, at_most=0.9999)] = field(
        default=0.97, metadata={"help": "Weight of the past in the running mean and variance."}
    )
    zclip_warmup_steps: Annotated[int, Setting("clipping", at_least=2)] = field(
        default=25, metadata={"help": "First steps, which only fill the statistic; nothing is clipped in them."}
    )

    snapshots: Annotated[bool, Setting("rollback")] = field(
        default=True,
        metadata={
            "help": "Keep trusted states in host memory. If False, or if host memory is short, a run rolls back to "
            "its newest trusted checkpoint on disk."
        },
    )
    snapshot_interval: Annotated[int, Setting("rollback", at_least=0)] = field(
        default=0,
        metadata={"help": "Steps between two snapshots. 0 chooses the interval from `snapshot_overhead_budget`."},
    )
    snapshot_overhead_budget: Annotated[float, Setting("rollback", above=0, at_most=1)] = field(
        default=0.01, metadata={"help": "Share of the training time that copying snapshots may take."}
    )
    snapshot_verify_steps: Annotated[int, Setting("rollback", at_least=1)] = field(
        default=6, metadata={"help": "Healthy steps that must follow a snapshot or a checkpoint before it is trusted."}
    )
    lr_reduce_factor: Annotated[float, Setting("rollback", above=0, at_most=0.95)] = field(
        default=0.5,
        metadata={"help": "The learning rate is multiplied by this factor when rolling back alone did not help."},
    )
    max_lr_reductions: Annotated[int, Setting("rollback", at_least=0)] = field(
        default=4,
        metadata={
            "help": "Most learning rate reductions in force at the same time. If they do not suffice, the run stops."
        },
    )
    lr_hold_steps: Annotated[int, Setting("rollback", at_least=0)] = field(
        default=0,
        metadata={
            "help": "Steps the learning rate stays reduced, at most a tenth of the run. 0 for 100, or for as long as "
            "the optimizer's second moments remember if that is longer."
        },
    )
    lr_ramp_steps: Annotated[int, Setting("rollback", at_least=0)] = field(
        default=0,
        metadata={"help": "Steps in which the learning rate then grows back linearly. 0 for as many as it was held."},
    )
    lr_increase_factor: Annotated[float, Setting("rollback", at_least=1, at_most=3)] = field(
        default=1.0,
        metadata={
            "help": "The learning rate is multiplied by this factor, once, when the loss has reached a plateau. 1 "
            "switches this off."
        },
    )

    on_oom: Annotated[Literal["heal", "raise"], Setting("memory")] = field(
        default="heal",
        metadata={
            "help": "What to do when memory runs out: `heal` frees memory, tries again, and then runs the model over "
            "fewer rows at a time with the same result; `raise` raises the error."
        },
    )
    oom_probe_steps: Annotated[int, Setting("memory", at_least=1)] = field(
        default=50,
        metadata={
            "help": "Steps after which a size that did not fit is tried again. The wait doubles whenever that fails."
        },
    )
    oom_activation_checkpointing: Annotated[bool, Setting("memory")] = field(
        default=True,
        metadata={
            "help": "Allow activation checkpointing to be switched on for the rest of the run when a single row does "
            "not fit."
        },
    )
    oom_reduce_batch: Annotated[bool, Setting("memory")] = field(
        default=True,
        metadata={
            "help": "Allow `SelfHealingTrainer`, as a last resort, to divide `per_device_train_batch_size` and "
            "multiply `gradient_accumulation_steps` by the same factor, and to continue from an emergency "
            "checkpoint."
        },
    )
    optimizer_step_backup: Annotated[bool, Setting("memory")] = field(
        default=False,
        metadata={
            "help": "Copy weights and optimizer state to host memory before every `optimizer.step()`, so that a step "
            "that runs out of memory half-way can be undone bit for bit. Costs one such copy per step."
        },
    )
    oom_memory_snapshot: Annotated[bool, Setting("memory")] = field(
        default=False,
        metadata={
            "help": "Record the history of the CUDA allocator, and write it next to the journal the first time memory "
            "runs out."
        },
    )

    on_bad_sample: Annotated[Literal["quarantine", "raise"], Setting("data")] = field(
        default="quarantine",
        metadata={
            "help": "What to do about a sample that raises twice while it is loaded or collated, or that is empty: "
            "`quarantine` writes it to quarantine.jsonl and uses another sample in its place, `raise` raises "
            "the error and names the sample."
        },
    )

    max_recovery_attempts: Annotated[int, Setting("recovery", at_least=0)] = field(
        default=6,
        metadata={
            "help": "How often a run may roll back, or `SelfHealingTrainer` enter `train()` again, without progress "
            "before it gives up."
        },
    )
    budget_refund_steps: Annotated[int, Setting("recovery", at_least=1)] = field(
        default=50, metadata={"help": "Healthy steps beyond the failure after which these attempts are given back."}
    )
    emergency_checkpoint: Annotated[bool, Setting("recovery")] = field(
        default=True,
        metadata={
            "help": "Write an exactly resumable checkpoint when an exception ends `train()`. If False, the run falls "
            "back on its newest regular checkpoint."
        },
    )
    api_retry_base_delay: Annotated[float, Setting("recovery", at_least=0)] = field(
        default=5.0,
        metadata={
            "help": "Upper bound of the first wait after a network or service failure, in seconds. The bound doubles "
            "with every attempt, and each wait is drawn at random below it."
        },
    )
    api_retry_max_delay: Annotated[float, Setting("recovery", at_least=0)] = field(
        default=300.0,
        metadata={"help": "Longest such wait, in seconds. At least `api_retry_base_delay`."},
    )

    api_retry_attempts: Annotated[int, Setting("recovery", at_least=1)] = field(
        default=8,
        metadata={
            "help": "How often a call to a service (reward function, streamed data, vLLM server, Hub) is attempted "
            "before its error is raised."
        },
    )
    retry_total_seconds: Annotated[float, Setting("recovery", at_least=0)] = field(
        default=900.0,
        metadata={"help": "Longest time such a call may take with all its attempts and waits, in seconds."},
    )
    on_save_failure: Annotated[Literal["continue", "raise"], Setting("recovery")] = field(
        default="continue",
        metadata={
            "help": "What to do when the disk refuses a checkpoint: `continue` removes the partial checkpoint, raises "
            "an alert, trains on and tries again at the next save; `raise` raises the error."
        },
    )
    make_room_for_checkpoints: Annotated[bool, Setting("recovery")] = field(
        default=False,
        metadata={"help": "Allow the oldest unverified checkpoint to be removed when the disk is full."},
    )
    keep_verified_checkpoints: Annotated[int, Setting("recovery", at_least=0)] = field(
        default=2,
        metadata={
            "help": "How many verified checkpoints to keep in `last-known-good/`, where rotation cannot remove them. "
            "0 keeps none. They make room before a save is given up."
        },
    )

    on_hang: Annotated[Literal["recover", "notify", "off"], Setting("hangs")] = field(
        default="recover",
        metadata={
            "help": "What to do when a part of a step takes far longer than ever before: `recover` writes the stacks "
            "of all threads to disk, interrupts the step and goes on (`SelfHealingTrainer`; if the step "
            "cannot be interrupted and a launcher restarts the job, the process ends with exit code 75), "
            "`notify` only writes the stacks and raises an alert, `off` does not watch."
        },
    )
    hang_factor: Annotated[float, Setting("hangs", at_least=1)] = field(
        default=10.0,
        metadata={"help": "A part of a step hangs when it takes more than this many times its longest time so far."},
    )
    hang_floor_seconds: Annotated[float, Setting("hangs", above=0)] = field(
        default=60.0, metadata={"help": "Shortest time that counts as a hang, in seconds."}
    )
    hang_learning_steps: Annotated[int, Setting("hangs", at_least=1)] = field(
        default=3,
        metadata={
            "help": "How often a part of a step (data, forward and backward, optimizer, ...) has to be seen before it "
            "is watched."
        },
    )
    hang_grace_seconds: Annotated[float, Setting("hangs", above=0)] = field(
        default=30.0, metadata={"help": "Seconds a step has to respond to the interrupt."}
    )
    collective_timeout_check_seconds: Annotated[float, Setting("hangs", at_least=0)] = field(
        default=20.0,
        metadata={
            "help": "On several ranks, seconds within which they have to sum up known numbers before the first step: "
            "a sum that is wrong, or late, ends the run. 0 switches this off. Else at least 10."
        },
    )

    resume_after_restart: Annotated[bool, Setting("restarts")] = field(
        default=True,
        metadata={
            "help": "Whether `train()` of a `SelfHealingTrainer` resumes from the newest trusted checkpoint of its "
            "own run when a launcher (torchrun, SLURM) has restarted the process."
        },
    )
    resume_from_memory: Annotated[bool, Setting("restarts")] = field(
        default=True,
        metadata={
            "help": "Whether snapshots lie in shared memory (`/dev/shm`) where a launcher will restart the job, so "
            "that the processes that it starts go on from there."
        },
    )
    launcher_restarts: Annotated[Literal["auto", "yes", "no"], Setting("restarts")] = field(
        default="auto",
        metadata={
            "help": "Whether a process that ends with exit code 75 is restarted. `auto` reads it from the environment "
            "(torchrun with restarts left), `yes` and `no` override that."
        },
    )
    on_preemption: Annotated[Literal["save", "ignore"], Setting("restarts")] = field(
        default="save",
        metadata={
            "help": "What to do on SIGTERM or SIGUSR1: `save` finishes the step, writes a checkpoint and exits, "
            "`ignore` leaves the signals alone."
        },
    )
    preemption_deadline: Annotated[float, Setting("restarts", above=0)] = field(
        default=30.0, metadata={"help": "Seconds between the signal and the end of the process, at most."}
    )

    healing_dir: Annotated[str | None, Setting("journal")] = field(
        default=None,
        metadata={
            "help": "Directory for healing_events.jsonl, quarantine.jsonl, postmortem.json and the report. Defaults "
            "to the `output_dir` of the training arguments. Checkpoints and the record of the run always stay "
            "in `output_dir`."
        },
    )
    save_offending_batch: Annotated[bool, Setting("journal")] = field(
        default=True,
        metadata={
            "help": "Keep the batch of a step that was not finite, or that spiked again when it was computed again, "
            "for `self-healing replay`."
        },
    )
    quarantine_text: Annotated[bool, Setting("journal")] = field(
        default=True,
        metadata={
            "help": "Write the text of quarantined rows and samples to disk. If False, only their position and a hash "
            "are written, and no batch is kept."
        },
    )
    upload_healing_files: Annotated[bool, Setting("journal")] = field(
        default=False,
        metadata={
            "help": "Upload the files of this library (journal, quarantine, kept batches and checkpoints) to the Hub "
            "with everything else."
        },
    )
    trackio_alerts: Annotated[bool, Setting("journal")] = field(
        default=True, metadata={"help": "Send an alert for each incident when the run reports to Trackio."}
    )
    healing_metrics: Annotated[bool, Setting("journal")] = field(
        default=True,
        metadata={
            "help": "Add healing/* metrics to what the trainer logs: counts from the first incident on, and the "
            "statistic of ZClip."
        },
    )
    outcome_steps: Annotated[int, Setting("journal", at_least=1)] = field(
        default=5, metadata={"help": "Healthy steps after an incident before its outcome is judged."}
    )

    healing_preset: Annotated[Literal["default", "aggressive", "conservative"], Setting("preset")] = field(
        default="default",
        metadata={
            "help": "Preset for the settings you leave out: `default`, `aggressive` or `conservative`. What you set "
            "takes precedence."
        },
    )

    def __post_init__(self) -> None:
        schema = schema_of(HealingConfig)
        for name, declared in schema.items():
            object.__setattr__(self, name, declared.converted(getattr(self, name)))
        raise_if_any(value_problems(schema, {name: getattr(self, name) for name in schema}))
        for name, declared in schema.items():
            if declared.kind is float:
                object.__setattr__(self, name, float(getattr(self, name)))

    @classmethod
    def aggressive(cls, **overrides: Any) -> Self:
        """
        Returns settings for unattended runs that should reach their end: more attempts, longer waits, more reductions
        of the learning rate, more skipped steps and dropped rows.

        Args:
            overrides:
                Settings that differ from the preset, by name.
        """
        return cls.from_dict({"healing_preset": "aggressive", **overrides})

    @classmethod
    def conservative(cls, **overrides: Any) -> Self:
        """
        Returns settings for runs that should stop rather than train on other data than you asked for: no row is
        dropped, and few steps are skipped.

        Args:
            overrides:
                Settings that differ from the preset, by name.
        """
        return cls.from_dict({"healing_preset": "conservative", **overrides})

    def to_dict(self) -> dict[str, Any]:
        """Returns all settings by name, without sections, ready for JSON and for [`HealingConfig.from_dict`]."""
        return asdict(self)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """
        Makes a config of settings that are given by name, by section, or both.

        Args:
            config (`Mapping[str, Any]`):
                For example `{"nan_patience": 2, "recovery": {"max_recovery_attempts": 10}}`. What is left out keeps
                its default.

        Raises:
            `ConfigurationError`: if a name is unknown, is in the wrong section or given twice, or a value is not
            allowed. All problems are named at once.
        """
        schema = schema_of(HealingConfig)
        values, problems = values_in(config, schema)
        defaults = {name: declared.default for name, declared in schema.items()}
        raise_if_any(problems + value_problems(schema, defaults | preset_of(values) | values))
        return cls(**values)

    def to_toml(self, path: str | os.PathLike[str] | None = None) -> str:
        """
        Returns the settings as TOML that [`HealingConfig.from_toml`] reads back to an equal config.

        Args:
            path (`str` or `os.PathLike`, *optional*):
                File to write the text to as well.
        """
        text = as_toml(self.to_dict(), schema_of(HealingConfig))
        if path is not None:
            Path(path).write_text(text, encoding="utf-8", newline="\n")
        return text

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Self:
        """
        Reads a config from a TOML file with the sections of [`HealingConfig.to_toml`], or with no sections at all.

        Args:
            path (`str` or `os.PathLike`):
                The file. What it leaves out keeps its default.

        Raises:
            `ConfigurationError`: if the file is not TOML, or as [`HealingConfig.from_dict`] does.
            `OSError`: if the file cannot be read.
        """
        try:
            config = read_toml(
                path,
                ConfigurationError,
                ": strings need quotes, true and false are lower case, and a section or a setting may stand only once",
            )
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"There is no file {path} to read the settings from (working directory: {Path.cwd()}). Please check "
                "the path; `self-healing config > healing.toml` writes such a file."
            ) from error
        except OSError as error:
            raise type(error)(
                f"The settings in {path} cannot be read: {error.strerror}. Please name a readable TOML file; "
                "`self-healing config > healing.toml` writes one."
            ) from error
        try:
            return cls.from_dict(config)
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: {error}") from None


# ---- given: makes a config of what was passed as one ----


def as_config(given: HealingConfig | Mapping[str, Any] | None) -> HealingConfig:
    """Returns the config that was asked for: itself, one made of a mapping, or the defaults."""
    if given is None:
        return HealingConfig()
    if isinstance(given, HealingConfig):
        return given
    if isinstance(given, Mapping):
        return HealingConfig.from_dict(dict(given))
    raise ConfigurationError(
        f"The config is {reprlib.repr(given)} ({type(given).__name__}), but must be a HealingConfig or a dict of "
        f"settings. {_meant(given)}"
    )


def _meant(given: Any) -> str:
    if given is HealingConfig:
        return "Did you mean HealingConfig()?"
    if getattr(given, "__self__", None) is HealingConfig:
        return f"Did you mean HealingConfig.{given.__name__}()?"
    if isinstance(given, str) and given in ("aggressive", "conservative"):
        return f"Did you mean HealingConfig.{given}()?"
    if isinstance(given, str | os.PathLike):
        return f"If it is a file, did you mean HealingConfig.from_toml({str(given)!r})?"
    return "Please leave it out for the defaults."
