"""
Every setting of the library in one flat dataclass.

Long, because parsers, `help()` and TOML all read one class, and each setting is declared and described there once.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from ..toml import read_toml
from .checks import raise_if_any, value_problems
from .command_line import Switch
from .presets import preset_of, starts_from_preset
from .schema import schema_of
from .sections import as_toml, values_in
from .setting import ConfigurationError, Setting


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
            What to do about such a step: `"heal"` finds the cause by experiment and repairs the step, `"skip"` leaves
            the step out without a diagnosis, `"warn"` only reports it (the step is applied as the plain trainer
            would), `"raise"` stops with an error before it is applied.
        nan_patience (`int`, *optional*, defaults to `3`):
            Consecutive steps that were skipped without an explanation, after which the run goes back to a trusted
            state with a lower learning rate; a step with poison rows starts the count again. At least 1.
        reexecute_attempts (`int`, *optional*, defaults to `1`):
            Times the micro-batches of the step are computed again from their saved random states before the fault
            counts as persistent. From 0 to 10.
        drop_poison_rows (`bool`, *optional*, defaults to `True`):
            Whether to drop the rows that make a step non-finite by themselves and renormalise the rest exactly. If
            `False`, the whole step is skipped instead.
        max_poison_fraction (`float`, *optional*, defaults to `0.5`):
            Largest share of a step's rows that may be blamed on the data. Above it the fault counts as numerical,
            unless a batch that was healthy before still is. Above 0, at most 1.
        max_skipped_fraction (`float`, *optional*, defaults to `0.1`):
            Share of the last `skip_window` steps; when more of them were skipped, the run stops. Above 0, at most 1.
        skip_window (`int`, *optional*, defaults to `100`):
            Steps over which `max_skipped_fraction` and `max_quarantined_fraction` are measured. At least 1.
        max_quarantined_fraction (`float`, *optional*, defaults to `0.25`):
            Share of the rows of the last `skip_window` steps; when more of them were dropped, the run stops. Above 0,
            at most 1.
        scaler_patience (`int`, *optional*, defaults to `3`):
            Consecutive overflowing steps that are left to the `GradScaler`, whose own skipping is normal. Only for
            fp16. At least 1.

        > Section `detection`: steps that are finite and wrong all the same

        on_spike (`str`, *optional*, defaults to `"heal"`):
            What to do about a step whose gradient is far outside of what is usual, alone or together with its loss:
            `"heal"` computes it again and, if it comes out the same, clips it to the usual norm or, if the loss is a
            spike as well, leaves it out; `"warn"` only reports it.
        loss_spike_z (`float`, *optional*, defaults to `8.0`):
            Robust z of the log-loss above which a loss is a spike. No checkpoint is written until it is over. Above 0.
        loss_spike_factor (`float`, *optional*, defaults to `0.0`):
            Multiple of its baseline above which a loss is a spike whatever its z; 0 for none. At least 0.
        gradient_spike_z (`float`, *optional*, defaults to `10.0`):
            Robust z of the log gradient norm above which it is a spike. Above 0.
        gradient_explosion (`float`, *optional*, defaults to `10000.0`):
            Gradient norm (before clipping) above which it has exploded, unless such norms are usual in the run; 0 for
            none. At least 0.
        max_spike_skips (`int`, *optional*, defaults to `3`):
            Steps among the last `skip_window` that may be left out for a spike of loss and gradient together; further
            ones are clipped to the usual norm. At least 0.
        on_divergence (`str`, *optional*, defaults to `"heal"`):
            What to do about a loss that rises and stays up, unless trusted weights show that the data are harder:
            `"heal"` goes back to a trusted state if it is the weights, `"warn"` reports it and writes no checkpoint
            until it is back, `"stop"` ends the run with a postmortem.
        divergence_slack (`float`, *optional*, defaults to `0.5`):
            Part of each robust z of the loss that a CUSUM forgives. Above 0.
        divergence_limit (`float`, *optional*, defaults to `11.0`):
            Sum of what is not forgiven at which a loss has diverged. Above 0.
        divergence_patience (`int`, *optional*, defaults to `100`):
            Steps after which a diverged loss that keeps to another level is taken to have settled there. At least 1.
        vanishing_gradient_steps (`int`, *optional*, defaults to `20`):
            Steps in a row with a gradient norm below 1e-7 that are reported. At least 1.
        on_dead_loss (`str`, *optional*, defaults to `"stop"`):
            What to do about a loss of exactly 0.0, which is a wiring bug: `"stop"` ends the run with a postmortem,
            `"warn"` reports it.
        dead_loss_steps (`int`, *optional*, defaults to `20`):
            Steps in a row with such a loss. At least 1.
        plateau_window (`int`, *optional*, defaults to `500`):
            Steps without progress that are reported as a plateau; 0 for never. At least 0.
        overfitting_evaluations (`int`, *optional*, defaults to `3`):
            Evaluation losses in a row that rise while the training loss falls before it is reported. At least 1.
        rules_file (`str`, *optional*):
            TOML file of metric rules, merged over the table in the package. `self-healing rules` prints both.
        on_red_flag (`str`, *optional*, defaults to `"act"`):
            What to do when a metric rule fires whose action is to stop or to roll back: `"act"` does it, `"warn"`
            reports it.

        > Section `clipping`: gradients that are clipped by what is usual in the run, below `max_grad_norm`

        zclip_mode (`str`, *optional*, defaults to `"observe"`):
            `"off"`; `"observe"` keeps the statistic and logs what would be clipped; `"clip"` clips.
        clip_algorithm (`str`, *optional*, defaults to `"zclip"`):
            `"zclip"` clips the norm of the whole gradient by its z-score, `"adagc"` the gradient of each parameter
            by the running mean of its norm (not for LoRA).
        zclip_variant (`str`, *optional*, defaults to `"reciprocal"`):
            What an outlier is clipped to: `"reciprocal"` (the further out, the closer to the mean), `"mean"`, or
            `"percentile"` (to the threshold).
        zclip_z (`float`, *optional*, defaults to `2.5`):
            z-score above which a gradient norm is an outlier. Above 0.
        zclip_decay (`float`, *optional*, defaults to `0.97`):
            Share of the running mean and variance that each step keeps. Above 0, at most 0.9999.
        zclip_warmup_steps (`int`, *optional*, defaults to `25`):
            Steps the statistic starts from, in which nothing is clipped. At least 2.

        > Section `rollback`: going back to a trusted state, and the learning rate afterwards

        snapshots (`bool`, *optional*, defaults to `True`):
            Whether to keep trusted states in host memory. If `False`, and where memory is short, a run goes back to
            its newest trusted checkpoint on disk.
        snapshot_interval (`int`, *optional*, defaults to `0`):
            Steps between two snapshots; 0 to choose them by `snapshot_overhead_budget`. At least 0.
        snapshot_overhead_budget (`float`, *optional*, defaults to `0.01`):
            Share of the training time that copying may take. Above 0, at most 1.
        snapshot_verify_steps (`int`, *optional*, defaults to `6`):
            Healthy steps after which a snapshot or a checkpoint is trusted. At least 1.
        lr_reduce_factor (`float`, *optional*, defaults to `0.5`):
            What the learning rate is multiplied with when going back alone did not help. Above 0, at most 0.95.
        max_lr_reductions (`int`, *optional*, defaults to `4`):
            Reductions in force at the same time; when they do not suffice, the run stops. At least 0.
        lr_hold_steps (`int`, *optional*, defaults to `0`):
            Steps the rate stays down, but no more than a tenth of the run; 0 for 100, or as long as the optimizer's
            second moments remember, if that is longer. At least 0.
        lr_ramp_steps (`int`, *optional*, defaults to `0`):
            Steps in which the rate grows back in a straight line afterwards; 0 for as many as it was held. At least
            0.
        lr_increase_factor (`float`, *optional*, defaults to `1.0`):
            What the learning rate is multiplied with, once, when the loss has reached a plateau; 1 for never. At least
            1, at most 3.

        > Section `memory`: steps, evaluations and generations that do not fit into memory

        on_oom (`str`, *optional*, defaults to `"heal"`):
            What to do when memory runs out: `"heal"` frees what can be freed, tries once more, and then runs the model
            over fewer rows at a time, with the same result; `"raise"` lets the error pass.
        oom_probe_steps (`int`, *optional*, defaults to `50`):
            Steps after which rows that did not fit are tried again, and twice as many whenever that failed. At least
            1.
        oom_activation_checkpointing (`bool`, *optional*, defaults to `True`):
            Whether activation checkpointing may be switched on for the rest of the run when a single row does not fit.
        oom_reduce_batch (`bool`, *optional*, defaults to `True`):
            Whether [`SelfHealingTrainer`] may, when nothing else helped, divide `per_device_train_batch_size` by what
            it multiplies `gradient_accumulation_steps` with, and go on from an emergency checkpoint.
        optimizer_step_backup (`bool`, *optional*, defaults to `False`):
            Whether to copy weights and optimizer state to the host before every `optimizer.step()`, so that one that
            ran out of memory half-way can be undone bit for bit. Costs one such copy a step.
        oom_memory_snapshot (`bool`, *optional*, defaults to `False`):
            Whether to record the history of the CUDA allocator and write it next to the journal at the first failure,
            to be looked at on https://docs.pytorch.org/memory_viz.

        > Section `data`: samples that cannot be loaded or put into a batch

        on_bad_sample (`str`, *optional*, defaults to `"quarantine"`):
            What to do about a sample that raises while it is loaded or collated, twice, or that is empty:
            `"quarantine"` writes it to `quarantine.jsonl` and puts another one in its place, always the same one, so
            that shapes and step counts stay; `"raise"` lets the error pass.
        max_bad_data_fraction (`float`, *optional*, defaults to `0.1`):
            Share of the samples drawn so far (of at least 100 of them, or of all if there are fewer); when more of
            them were bad, the run stops and lists them. Above 0, at most 1.

        > Section `recovery`: how often a run may be brought back, and exceptions that end `train()`

        max_recovery_attempts (`int`, *optional*, defaults to `6`):
            Rollbacks and re-entries into `train()` without progress before giving up; only [`SelfHealingTrainer`] can
            enter it again. At least 0.
        budget_refund_steps (`int`, *optional*, defaults to `50`):
            Healthy steps beyond the failure that give the attempts back. At least 1.
        emergency_checkpoint (`bool`, *optional*, defaults to `True`):
            Whether to write an exactly resumable checkpoint when an exception ends `train()`. If `False`, the run
            falls back on the newest regular checkpoint.
        retry_initial_seconds (`float`, *optional*, defaults to `5.0`):
            Upper bound of the first wait, in seconds, before re-entering after a network or service failure. The bound
            doubles with every further attempt, and each wait is drawn at random below it. At least 0.
        retry_max_seconds (`float`, *optional*, defaults to `300.0`):
            Longest such wait, in seconds. At least `retry_initial_seconds`.
        retry_attempts (`int`, *optional*, defaults to `8`):
            Times a call of a service (reward function, streamed data, vLLM server, Hub) is made in place, with such
            waits in between, before its error surfaces. At least 1.
        retry_total_seconds (`float`, *optional*, defaults to `900.0`):
            Longest time such a call may take with all its attempts and waits, in seconds. At least 0.
        on_save_failure (`str`, *optional*, defaults to `"continue"`):
            What to do when a checkpoint cannot be written because of the disk: `"continue"` removes what there is of
            it, raises an alert, trains on and tries again at the next save; `"raise"` lets the error pass.
        make_room_for_checkpoints (`bool`, *optional*, defaults to `False`):
            Whether the oldest checkpoint that is not verified may be removed when the disk is full.
        keep_verified_checkpoints (`int`, *optional*, defaults to `2`):
            Verified checkpoints that are kept in `last-known-good/`, where rotation cannot take them; 0 for none. One
            more is kept until it is verified. They give way before a save is given up. At least 0.

        > Section `hangs`: nothing moves any more

        hang_action (`str`, *optional*, defaults to `"recover"`):
            What to do when a part of a step takes much longer than it ever did: `"recover"` writes down the stacks of
            all threads, interrupts the step and goes on ([`SelfHealingTrainer`]; where it cannot be interrupted and a
            launcher restarts the job, the process ends with exit code 75), `"notify"` writes down the stacks and
            raises an alert, `"off"` does not watch.
        hang_factor (`float`, *optional*, defaults to `10.0`):
            Multiple of the longest time seen that counts as a hang. At least 1.
        hang_floor_seconds (`float`, *optional*, defaults to `60.0`):
            Shortest time that counts as one, in seconds. Above 0.
        hang_learning_steps (`int`, *optional*, defaults to `3`):
            Times a part of a step is seen (data, forward and backward, optimizer, save, ...) before it is watched. At
            least 1.
        hang_grace_seconds (`float`, *optional*, defaults to `30.0`):
            Time a step has to answer to an interrupt, in seconds. Above 0.

        > Section `restarts`: processes that are killed or preempted

        resume_after_restart (`bool`, *optional*, defaults to `True`):
            Whether `train()` of a [`SelfHealingTrainer`] that a launcher has started again (torchrun, SLURM) resumes
            from the newest checkpoint of its own run that can be trusted.
        launcher_restarts (`str`, *optional*, defaults to `"auto"`):
            Whether a process that ends with exit code 75 is started again: `"auto"` takes it from the environment
            (torchrun with restarts left), `"yes"` or `"no"`.
        on_preemption (`str`, *optional*, defaults to `"save"`):
            What to do on SIGTERM or SIGUSR1: `"save"` finishes the step, writes a checkpoint and leaves, `"ignore"`
            leaves the signals alone.
        preemption_deadline (`float`, *optional*, defaults to `30.0`):
            Time between the signal and the end of the process, in seconds. Above 0.

        > Section `journal`: what is written down, and where

        healing_dir (`str`, *optional*):
            Directory for `healing_events.jsonl`, `quarantine.jsonl` and `postmortem.json`. If `None`, the `output_dir`
            of the training arguments, where checkpoints and the record of the run always are.
        save_offending_batch (`bool`, *optional*, defaults to `True`):
            Whether to keep the batch of a step that computing it again did not heal, so that it can be replayed.
        quarantine_text (`bool`, *optional*, defaults to `True`):
            Whether what is written about rows and samples holds their text. If `False`, only where they are in the
            data and a hash: in `quarantine.jsonl`, the journal, the log and the postmortem; no batch is kept either.
        upload_healing_files (`bool`, *optional*, defaults to `False`):
            Whether what is uploaded to the Hub holds the files of this library: journal, quarantine, kept batches and
            checkpoints.
        trackio_alerts (`bool`, *optional*, defaults to `True`):
            Whether to send an alert for each incident when the run reports to Trackio.
        healing_metrics (`bool`, *optional*, defaults to `True`):
            Whether to add `healing/*` metrics to what the trainer logs, from the first incident on.
        outcome_steps (`int`, *optional*, defaults to `5`):
            Healthy steps after an incident before its outcome is judged. At least 1.

        > Section `preset`: what the other settings start from

        healing_preset (`str`, *optional*, defaults to `"default"`):
            The preset that gives the settings which are left out: `"default"`, `"aggressive"` or `"conservative"`.

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
            "experiment and repairs the step, `skip` leaves the step out without a diagnosis, `warn` only reports it, "
            "`raise` stops with an error before the step is applied."
        },
    )
    nan_patience: Annotated[int, Setting("nonfinite", at_least=1)] = field(
        default=3,
        metadata={
            "help": "Consecutive steps skipped without an explanation after which the run goes back to a trusted "
            "state with a lower learning rate; a step with poison rows starts the count again."
        },
    )
    reexecute_attempts: Annotated[int, Setting("nonfinite", at_least=0, at_most=10)] = field(
        default=1,
        metadata={
            "help": "Times the micro-batches of a non-finite step are computed again from their saved random states "
            "before the fault counts as persistent."
        },
    )
    drop_poison_rows: Annotated[bool, Setting("nonfinite")] = field(
        default=True,
        metadata={
            "help": "Drop the rows that make a step non-finite by themselves and renormalise the rest. If False, the "
            "whole step is skipped instead.",
            "action": Switch,
            "aliases": ["--no_drop_poison_rows", "--no-drop-poison-rows"],
        },
    )
    max_poison_fraction: Annotated[float, Setting("nonfinite", above=0, at_most=1)] = field(
        default=0.5,
        metadata={
            "help": "Largest share of the rows of a step that may be blamed on the data. Above it the fault counts as "
            "numerical, unless a batch that was healthy before still is."
        },
    )
    max_skipped_fraction: Annotated[float, Setting("nonfinite", above=0, at_most=1)] = field(
        default=0.1,
        metadata={"help": "The run stops when more than this share of the last `skip_window` steps was skipped."},
    )
    skip_window: Annotated[int, Setting("nonfinite", at_least=1)] = field(
        default=100,
        metadata={"help": "Steps over which `max_skipped_fraction` and `max_quarantined_fraction` are measured."},
    )
    max_quarantined_fraction: Annotated[float, Setting("nonfinite", above=0, at_most=1)] = field(
        default=0.25,
        metadata={
            "help": "The run stops when more than this share of the rows of the last `skip_window` steps was dropped."
        },
    )
    scaler_patience: Annotated[int, Setting("nonfinite", at_least=1)] = field(
        default=3,
        metadata={
            "help": "fp16 only: consecutive overflowing steps that count as a fault; fewer are left to the "
            "GradScaler, whose own skipping is normal."
        },
    )

    on_spike: Annotated[Literal["heal", "warn"], Setting("detection")] = field(
        default="heal",
        metadata={
            "help": "What to do about a step whose gradient is far outside of what is usual: `heal` computes it again "
            "and, if it comes out the same, clips it to the usual norm or, if the loss is a spike as well, leaves it "
            "out; `warn` only reports it."
        },
    )
    loss_spike_z: Annotated[float, Setting("detection", above=0)] = field(
        default=8.0,
        metadata={
            "help": "Robust z of the log-loss above which a loss is a spike. No checkpoint is written until "
            "it is over."
        },
    )
    loss_spike_factor: Annotated[float, Setting("detection", at_least=0)] = field(
        default=0.0,
        metadata={"help": "Multiple of its baseline above which a loss is a spike whatever its z; 0 for none."},
    )
    gradient_spike_z: Annotated[float, Setting("detection", above=0)] = field(
        default=10.0, metadata={"help": "Robust z of the log gradient norm above which it is a spike."}
    )
    gradient_explosion: Annotated[float, Setting("detection", at_least=0)] = field(
        default=1e4,
        metadata={
            "help": "Gradient norm before clipping above which it has exploded, unless such norms are usual "
            "in the run; 0 for none."
        },
    )
    max_spike_skips: Annotated[int, Setting("detection", at_least=0)] = field(
        default=3,
        metadata={
            "help": "Steps among the last `skip_window` that may be left out for a spike of loss and gradient "
            "together; further ones are clipped to the usual norm."
        },
    )
    on_divergence: Annotated[Literal["heal", "warn", "stop"], Setting("detection")] = field(
        default="heal",
        metadata={
            "help": "What to do about a loss that rises and stays up, unless trusted weights show that the data are "
            "harder: `heal` goes back to a trusted state if it is the weights, `warn` reports it and writes no "
            "checkpoint until it is back, `stop` ends the run with a postmortem."
        },
    )
    divergence_slack: Annotated[float, Setting("detection", above=0)] = field(
        default=0.5, metadata={"help": "Part of each robust z of the loss that a CUSUM forgives."}
    )
    divergence_limit: Annotated[float, Setting("detection", above=0)] = field(
        default=11.0, metadata={"help": "Sum of what is not forgiven at which a loss has diverged."}
    )
    divergence_patience: Annotated[int, Setting("detection", at_least=1)] = field(
        default=100,
        metadata={
            "help": "Steps after which a diverged loss that keeps to another level is taken to have settled there."
        },
    )
    vanishing_gradient_steps: Annotated[int, Setting("detection", at_least=1)] = field(
        default=20, metadata={"help": "Steps in a row with a gradient norm below 1e-7 that are reported."}
    )
    on_dead_loss: Annotated[Literal["stop", "warn"], Setting("detection")] = field(
        default="stop",
        metadata={
            "help": "What to do about a loss of exactly 0.0, which is a wiring bug: `stop` ends the run with a "
            "postmortem, `warn` reports it."
        },
    )
    dead_loss_steps: Annotated[int, Setting("detection", at_least=1)] = field(
        default=20, metadata={"help": "Steps in a row with a loss of exactly 0.0 that make it dead."}
    )
    plateau_window: Annotated[int, Setting("detection", at_least=0)] = field(
        default=500, metadata={"help": "Steps without progress that are reported as a plateau; 0 for never."}
    )
    overfitting_evaluations: Annotated[int, Setting("detection", at_least=1)] = field(
        default=3,
        metadata={"help": "Evaluation losses in a row that rise while the training loss falls before it is reported."},
    )
    rules_file: Annotated[str | None, Setting("detection")] = field(
        default=None,
        metadata={
            "help": "TOML file of metric rules, merged over the table in the package. `self-healing rules` "
            "prints both."
        },
    )
    on_red_flag: Annotated[Literal["act", "warn"], Setting("detection")] = field(
        default="act",
        metadata={
            "help": "What to do when a metric rule fires whose action is to stop or to roll back: `act` does it, "
            "`warn` reports it."
        },
    )

    zclip_mode: Annotated[Literal["off", "observe", "clip"], Setting("clipping")] = field(
        default="observe",
        metadata={
            "help": "Adaptive clipping by what is usual in the run, below `max_grad_norm`: `observe` keeps the "
            "statistic and logs what would be clipped, `clip` clips."
        },
    )
    clip_algorithm: Annotated[Literal["zclip", "adagc"], Setting("clipping")] = field(
        default="zclip",
        metadata={
            "help": "`zclip` clips the norm of the whole gradient by its z-score, `adagc` the gradient of each "
            "parameter by the running mean of its norm (not for LoRA)."
        },
    )
    zclip_variant: Annotated[Literal["reciprocal", "mean", "percentile"], Setting("clipping")] = field(
        default="reciprocal",
        metadata={
            "help": "What an outlier is clipped to: `reciprocal` (the further out, the closer to the mean), "
            "`mean`, or `percentile` (to the threshold)."
        },
    )
    zclip_z: Annotated[float, Setting("clipping", above=0)] = field(
        default=2.5, metadata={"help": "z-score above which a gradient norm is an outlier."}
    )
    zclip_decay: Annotated[float, Setting("clipping", above=0, at_most=0.9999)] = field(
        default=0.97, metadata={"help": "Share of the running mean and variance that each step keeps."}
    )
    zclip_warmup_steps: Annotated[int, Setting("clipping", at_least=2)] = field(
        default=25, metadata={"help": "Steps the statistic starts from, in which nothing is clipped."}
    )

    snapshots: Annotated[bool, Setting("rollback")] = field(
        default=True,
        metadata={
            "help": "Keep trusted states in host memory. If False, and where memory is short, a run goes back to its "
            "newest trusted checkpoint on disk."
        },
    )
    snapshot_interval: Annotated[int, Setting("rollback", at_least=0)] = field(
        default=0,
        metadata={"help": "Steps between two snapshots; 0 to choose them by `snapshot_overhead_budget`."},
    )
    snapshot_overhead_budget: Annotated[float, Setting("rollback", above=0, at_most=1)] = field(
        default=0.01, metadata={"help": "Share of the training time that copying snapshots may take."}
    )
    snapshot_verify_steps: Annotated[int, Setting("rollback", at_least=1)] = field(
        default=6, metadata={"help": "Healthy steps after which a snapshot or a checkpoint is trusted."}
    )
    lr_reduce_factor: Annotated[float, Setting("rollback", above=0, at_most=0.95)] = field(
        default=0.5,
        metadata={"help": "What the learning rate is multiplied with when going back alone did not help."},
    )
    max_lr_reductions: Annotated[int, Setting("rollback", at_least=0)] = field(
        default=4,
        metadata={"help": "Reductions in force at the same time; when they do not suffice, the run stops."},
    )
    lr_hold_steps: Annotated[int, Setting("rollback", at_least=0)] = field(
        default=0,
        metadata={
            "help": "Steps the rate stays down, but no more than a tenth of the run; 0 for 100, or as long as the "
            "optimizer's second moments remember, if that is longer."
        },
    )
    lr_ramp_steps: Annotated[int, Setting("rollback", at_least=0)] = field(
        default=0,
        metadata={
            "help": "Steps in which the rate grows back in a straight line afterwards; 0 for as many as it was held."
        },
    )
    lr_increase_factor: Annotated[float, Setting("rollback", at_least=1, at_most=3)] = field(
        default=1.0,
        metadata={
            "help": "What the learning rate is multiplied with, once, when the loss has reached a plateau; 1 for "
            "never."
        },
    )

    on_oom: Annotated[Literal["heal", "raise"], Setting("memory")] = field(
        default="heal",
        metadata={
            "help": "What to do when memory runs out: `heal` frees what can be freed, tries once more, and then runs "
            "the model over fewer rows at a time, with the same result; `raise` lets the error pass."
        },
    )
    oom_probe_steps: Annotated[int, Setting("memory", at_least=1)] = field(
        default=50,
        metadata={
            "help": "Steps after which rows that did not fit are tried again, and twice as many whenever that failed."
        },
    )
    oom_activation_checkpointing: Annotated[bool, Setting("memory")] = field(
        default=True,
        metadata={
            "help": "Whether activation checkpointing may be switched on for the rest of the run when a single row "
            "does not fit."
        },
    )
    oom_reduce_batch: Annotated[bool, Setting("memory")] = field(
        default=True,
        metadata={
            "help": "Whether `SelfHealingTrainer` may, when nothing else helped, divide "
            "`per_device_train_batch_size` by what it multiplies `gradient_accumulation_steps` with, and go on from "
            "an emergency checkpoint."
        },
    )
    optimizer_step_backup: Annotated[bool, Setting("memory")] = field(
        default=False,
        metadata={
            "help": "Copy weights and optimizer state to the host before every `optimizer.step()`, so that one that "
            "ran out of memory half-way can be undone bit for bit. Costs one such copy a step."
        },
    )
    oom_memory_snapshot: Annotated[bool, Setting("memory")] = field(
        default=False,
        metadata={
            "help": "Record the history of the CUDA allocator and write it next to the journal at the first failure."
        },
    )

    on_bad_sample: Annotated[Literal["quarantine", "raise"], Setting("data")] = field(
        default="quarantine",
        metadata={
            "help": "What to do about a sample that raises while it is loaded or collated, twice, or that is empty: "
            "write it to quarantine.jsonl and put another one in its place, or let the error pass."
        },
    )
    max_bad_data_fraction: Annotated[float, Setting("data", above=0, at_most=1)] = field(
        default=0.1,
        metadata={
            "help": "Share of the samples drawn so far (of at least 100 of them, or of all if there are fewer); when "
            "more of them were bad, the run stops and lists them."
        },
    )

    max_recovery_attempts: Annotated[int, Setting("recovery", at_least=0)] = field(
        default=6,
        metadata={"help": "Rollbacks and re-entries into `train()` without progress before giving up."},
    )
    budget_refund_steps: Annotated[int, Setting("recovery", at_least=1)] = field(
        default=50, metadata={"help": "Healthy steps beyond the failure that give the recovery attempts back."}
    )
    emergency_checkpoint: Annotated[bool, Setting("recovery")] = field(
        default=True,
        metadata={
            "help": "Write an exactly resumable checkpoint when an exception ends `train()`. If False, the run falls "
            "back on the newest regular checkpoint."
        },
    )
    retry_initial_seconds: Annotated[float, Setting("recovery", at_least=0)] = field(
        default=5.0,
        metadata={
            "help": "Upper bound of the first wait, in seconds, before re-entering after a network or service "
            "failure. The bound doubles with every further attempt, and each wait is drawn at random below it."
        },
    )
    retry_max_seconds: Annotated[float, Setting("recovery", at_least=0)] = field(
        default=300.0,
        metadata={
            "help": "Longest wait, in seconds, before re-entering after a network or service failure. At least "
            "`retry_initial_seconds`."
        },
    )

    retry_attempts: Annotated[int, Setting("recovery", at_least=1)] = field(
        default=8,
        metadata={
            "help": "Times a call of a service (reward function, streamed data, vLLM server, Hub) is made in place, "
            "with such waits in between, before its error surfaces."
        },
    )
    retry_total_seconds: Annotated[float, Setting("recovery", at_least=0)] = field(
        default=900.0,
        metadata={"help": "Longest time such a call may take with all its attempts and waits, in seconds."},
    )
    on_save_failure: Annotated[Literal["continue", "raise"], Setting("recovery")] = field(
        default="continue",
        metadata={
            "help": "What to do when a checkpoint cannot be written because of the disk: remove what there is of it, "
            "raise an alert, train on and try again at the next save, or let the error pass."
        },
    )
    make_room_for_checkpoints: Annotated[bool, Setting("recovery")] = field(
        default=False,
        metadata={"help": "Whether the oldest checkpoint that is not verified may be removed when the disk is full."},
    )
    keep_verified_checkpoints: Annotated[int, Setting("recovery", at_least=0)] = field(
        default=2,
        metadata={
            "help": "Verified checkpoints that are kept where rotation cannot take them; 0 for none. They give way "
            "before a save is given up."
        },
    )

    hang_action: Annotated[Literal["recover", "notify", "off"], Setting("hangs")] = field(
        default="recover",
        metadata={
            "help": "What to do when a part of a step takes much longer than it ever did: write down the stacks of "
            "all threads, interrupt the step and go on (`SelfHealingTrainer`; where it cannot be interrupted and a "
            "launcher restarts the job, end with exit code 75); only write down and raise an alert; or do not watch."
        },
    )
    hang_factor: Annotated[float, Setting("hangs", at_least=1)] = field(
        default=10.0, metadata={"help": "Multiple of the longest time seen that counts as a hang."}
    )
    hang_floor_seconds: Annotated[float, Setting("hangs", above=0)] = field(
        default=60.0, metadata={"help": "Shortest time that counts as a hang, in seconds."}
    )
    hang_learning_steps: Annotated[int, Setting("hangs", at_least=1)] = field(
        default=3,
        metadata={
            "help": "Times a part of a step is seen (data, forward and backward, optimizer, save, ...) before it is "
            "watched."
        },
    )
    hang_grace_seconds: Annotated[float, Setting("hangs", above=0)] = field(
        default=30.0, metadata={"help": "Time a step has to answer to an interrupt, in seconds."}
    )

    resume_after_restart: Annotated[bool, Setting("restarts")] = field(
        default=True,
        metadata={
            "help": "Whether `train()` of a `SelfHealingTrainer` that a launcher has started again (torchrun, SLURM) "
            "resumes from the newest checkpoint of its own run that can be trusted."
        },
    )
    launcher_restarts: Annotated[Literal["auto", "yes", "no"], Setting("restarts")] = field(
        default="auto",
        metadata={
            "help": "Whether a process that ends with exit code 75 is started again; `auto` takes it from the "
            "environment (torchrun with restarts left)."
        },
    )
    on_preemption: Annotated[Literal["save", "ignore"], Setting("restarts")] = field(
        default="save",
        metadata={
            "help": "What to do on SIGTERM or SIGUSR1: finish the step, write a checkpoint and leave, or leave the "
            "signals alone."
        },
    )
    preemption_deadline: Annotated[float, Setting("restarts", above=0)] = field(
        default=30.0, metadata={"help": "Time between the signal and the end of the process, in seconds."}
    )

    healing_dir: Annotated[str | None, Setting("journal")] = field(
        default=None,
        metadata={
            "help": "Directory for healing_events.jsonl, quarantine.jsonl and postmortem.json. Left out, the "
            "`output_dir` of the training arguments."
        },
    )
    save_offending_batch: Annotated[bool, Setting("journal")] = field(
        default=True,
        metadata={
            "help": "Keep the batch of a step that computing it again did not heal, so that it can be replayed."
        },
    )
    quarantine_text: Annotated[bool, Setting("journal")] = field(
        default=True,
        metadata={
            "help": "Write down the text of quarantined rows and samples. If not, only their place and a hash, and no "
            "batch is kept."
        },
    )
    upload_healing_files: Annotated[bool, Setting("journal")] = field(
        default=False,
        metadata={"help": "Upload journal, quarantine, kept batches and checkpoints to the Hub with everything else."},
    )
    trackio_alerts: Annotated[bool, Setting("journal")] = field(
        default=True, metadata={"help": "Send an alert for each incident when the run reports to Trackio."}
    )
    healing_metrics: Annotated[bool, Setting("journal")] = field(
        default=True,
        metadata={"help": "Add healing/* metrics to what the trainer logs, from the first incident on."},
    )
    outcome_steps: Annotated[int, Setting("journal", at_least=1)] = field(
        default=5, metadata={"help": "Healthy steps after an incident before its outcome is judged."}
    )

    healing_preset: Annotated[Literal["default", "aggressive", "conservative"], Setting("preset")] = field(
        default="default",
        metadata={"help": "The preset that gives the settings which are left out. What is given wins over it."},
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
        Returns settings for unattended runs that should reach their end: more attempts, longer waits, lower learning
        rates, more steps and rows given up.

        Args:
            overrides:
                Settings that differ from the preset, by name.
        """
        return cls.from_dict({"healing_preset": "aggressive", **overrides})

    @classmethod
    def conservative(cls, **overrides: Any) -> Self:
        """
        Returns settings for runs that should stop rather than train on other data than was asked for: no row is
        dropped, and few steps are.

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
            `ConfigurationError`: if a name is unknown, stands in the wrong section or twice, or a value is not
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
                f"There is no file {path} to read the settings from (looked for from {Path.cwd()}). Please check the "
                "path; `self-healing config > healing.toml` writes such a file."
            ) from error
        except OSError as error:
            raise type(error)(
                f"The settings in {path} cannot be read: {error.strerror}. Please name a TOML file that you may read; "
                "`self-healing config > healing.toml` writes one."
            ) from error
        try:
            return cls.from_dict(config)
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: {error}") from None
