"""Every setting of the library in one flat dataclass, its presets, and what users may pass in its place."""

from __future__ import annotations

import functools
import html
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
        "nan_patience": 8,
        "max_skipped_fraction": 0.25,
        "zclip_mode": "clip",
        "max_lr_reductions": 6,
        "max_bad_fraction": 0.25,
        "max_recovery_attempts": 20,
        "api_retry_max_delay": 900.0,
        "api_retry_attempts": 20,
    },
    "conservative": {
        "nan_patience": 2,
        "max_skipped_fraction": 0.02,
        "max_bad_fraction": 0.05,
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


def setting(default: Any, meaning: str) -> Any:
    """Declares the default of a setting, and what it does as `--help` and the docs say it."""
    return field(default=default, metadata={"help": meaning})


@starts_from_preset
@dataclass(frozen=True, kw_only=True, slots=True)
class HealingConfig:
    """
    Settings of [`SelfHealingCallback`] and [`SelfHealingTrainer`]: what they may do, and when they give up.

    The values are checked when the object is made and cannot be changed afterwards: make another one with
    `dataclasses.replace`. Next to a TRL config, [`~transformers.HfArgumentParser`] and [`~trl.TrlParser`] read the
    settings from the command line and from YAML; [`HealingConfig.from_toml`] reads them from a file of their own.
    What each setting means is in its `help`, and in docs/configuration.md.

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

    on_nonfinite: Annotated[Literal["heal", "skip", "warn", "watch", "raise"], Setting("nonfinite")] = setting(
        "heal",
        "When loss or gradient norm of a step is not finite: `heal` finds the cause by experiment and repairs the "
        "step, `skip` (or `warn`) skips it undiagnosed, `watch` reports and applies it, `raise` stops before it is "
        "applied.",
    )
    nan_patience: Annotated[int, Setting("nonfinite", at_least=1)] = setting(
        3,
        "After this many skipped steps in a row without a known cause, the run rolls back with a lower learning rate; "
        "with `on_nonfinite='skip'` it stops. A step with poison rows resets the count.",
    )
    max_skipped_fraction: Annotated[float, Setting("nonfinite", above=0, at_most=1)] = setting(
        0.1, "The run stops when more than this share of the last 100 steps was skipped; of 100 in a shorter run, too."
    )

    on_spike: Annotated[Literal["heal", "warn"], Setting("detection")] = setting(
        "heal",
        "When the gradient norm is far above normal: `heal` computes the step again and, if nothing changes, clips to "
        "the usual norm, or skips the step if the loss spikes too or the gradient has exploded; `warn` only reports "
        "it.",
    )
    loss_spike_factor: Annotated[float, Setting("detection", at_least=0)] = setting(
        0.0, "A loss above this multiple of its baseline is a spike, whatever its z-score. 0: off."
    )
    grad_explosion_threshold: Annotated[float, Setting("detection", at_least=0)] = setting(
        1e4, "Gradient norm above which the gradient has exploded, unless such norms are usual. 0: off."
    )
    on_divergence: Annotated[Literal["heal", "warn", "stop"], Setting("detection")] = setting(
        "heal",
        "When the loss rises and stays up, and not because the data have become harder: `heal` rolls back if the "
        "weights are at fault, `warn` saves no checkpoint until the loss is back, `stop` ends the run with a "
        "postmortem.",
    )
    divergence_patience: Annotated[int, Setting("detection", at_least=1)] = setting(
        100, "Steps after which a diverged loss that stays at a new level has settled there."
    )
    rules_file: Annotated[str | None, Setting("detection")] = setting(
        None,
        "TOML file with metric rules, merged over the built-in table. `self-healing rules` prints what is in force.",
    )
    on_red_flag: Annotated[Literal["act", "warn"], Setting("detection")] = setting(
        "act",
        "When a metric rule fires whose action is `stop` or `rollback`, or the loss of SFT is exactly 0.0 (a wiring "
        "bug): `act` carries it out, or stops; `warn` only reports it.",
    )

    zclip_mode: Annotated[Literal["off", "observe", "clip"], Setting("clipping")] = setting(
        "observe",
        "Clipping by the norms usual in the run, below `max_grad_norm`: `off`, `observe` logs what it would clip, "
        "`clip` clips.",
    )
    zclip_z_threshold: Annotated[float, Setting("clipping", above=0)] = setting(
        2.5, "z-score above which a gradient norm is an outlier."
    )
    zclip_ema_decay: Annotated[float, Setting("clipping", above=0, at_most=0.9999)] = setting(
        0.97, "Weight of the past in the running mean and variance."
    )

    snapshots: Annotated[bool, Setting("rollback")] = setting(
        True,
        "Keep trusted states in host memory. If false, or if memory is short, a run rolls back to its newest trusted "
        "checkpoint.",
    )
    snapshot_interval: Annotated[int, Setting("rollback", at_least=0)] = setting(
        0, "Steps between two snapshots. 0 chooses it so that they take a 400th of the training time."
    )
    snapshot_verify_steps: Annotated[int, Setting("rollback", at_least=1)] = setting(
        6, "Healthy steps after which a snapshot or a checkpoint is trusted."
    )
    lr_reduce_factor: Annotated[float, Setting("rollback", above=0, at_most=0.95)] = setting(
        0.5, "The learning rate is multiplied by this factor when rolling back alone did not help."
    )
    max_lr_reductions: Annotated[int, Setting("rollback", at_least=0)] = setting(
        4, "Most reductions in force at the same time. If they do not suffice, the run stops."
    )
    lr_ramp_steps: Annotated[int, Setting("rollback", at_least=0)] = setting(
        0,
        "Steps in which a reduced learning rate grows back linearly. 0: as many as it was held, which is 100 or as "
        "long as the optimizer's second moments remember, but a tenth of the run at most.",
    )

    on_oom: Annotated[Literal["heal", "backup", "raise"], Setting("memory")] = setting(
        "heal",
        "When memory runs out: `heal` frees memory, tries again, then runs the model over fewer rows at a time with "
        "the same result; `backup` also copies weights and optimizer state to host memory before every "
        "`optimizer.step()`, to undo one that runs out half-way; `raise` raises the error.",
    )
    oom_reduce_batch: Annotated[bool, Setting("memory")] = setting(
        True,
        "Allow `SelfHealingTrainer`, as a last resort, a smaller `per_device_train_batch_size` with as many times "
        "more `gradient_accumulation_steps`, from an emergency checkpoint.",
    )
    on_bad_sample: Annotated[Literal["quarantine", "raise"], Setting("data")] = setting(
        "quarantine",
        "A sample that raises twice while it is loaded or collated: `quarantine` writes it to quarantine.jsonl and "
        "uses another one in its place, `raise` raises the error and names it.",
    )
    max_bad_fraction: Annotated[float, Setting("data", above=0, at_most=1)] = setting(
        0.1,
        "The run stops when more than this share of the rows of 100 steps was dropped in the last 100 (in a shorter "
        "run, too: 0.1 lets one of 60 steps lose the rows of ten), or of the samples so far was bad (of at least 100, "
        "or of the whole data set if it is smaller).",
    )

    max_recovery_attempts: Annotated[int, Setting("recovery", at_least=0)] = setting(
        6,
        "How often a run may roll back, or `SelfHealingTrainer` enter `train()` again, without progress before it "
        "gives up. 50 healthy steps beyond the failure give all attempts back.",
    )
    api_retry_base_delay: Annotated[float, Setting("recovery", at_least=0)] = setting(
        5.0,
        "Upper bound in seconds of the first wait after a network or service failure. It doubles with every attempt; "
        "each wait is random below it.",
    )
    api_retry_max_delay: Annotated[float, Setting("recovery", at_least=0)] = setting(
        300.0, "Longest such wait, in seconds. At least `api_retry_base_delay`."
    )
    api_retry_attempts: Annotated[int, Setting("recovery", at_least=1)] = setting(
        8,
        "How often a call to a service (reward function, stream, vLLM server, Hub) is tried before its error is "
        "raised: within 15 minutes, or three times `api_retry_max_delay` if that is longer.",
    )
    on_save_failure: Annotated[Literal["continue", "make_room", "raise"], Setting("recovery")] = setting(
        "continue",
        "When the disk refuses a checkpoint: `continue` removes the partial one, raises an alert and trains on; "
        "`make_room` also removes the oldest unverified one first if the disk is full; `raise` raises the error.",
    )
    keep_verified_checkpoints: Annotated[int, Setting("recovery", at_least=0)] = setting(
        2,
        "Verified checkpoints to keep in `last-known-good/`, where rotation cannot remove them. They make room before "
        "a save is given up.",
    )

    on_hang: Annotated[Literal["recover", "notify", "off"], Setting("hangs")] = setting(
        "recover",
        "When part of a step takes far longer than ever before: `recover` writes the stacks of all threads to disk, "
        "interrupts the step and goes on (`SelfHealingTrainer`; where that fails under a launcher that restarts, it "
        "exits with code 75), `notify` writes the stacks and raises an alert, `off` does not watch.",
    )
    hang_floor_seconds: Annotated[float, Setting("hangs", above=0)] = setting(
        60.0, "Shortest time that counts as a hang, in seconds."
    )
    collective_timeout_check_seconds: Annotated[float, Setting("hangs", at_least=0)] = setting(
        20.0,
        "On several ranks, seconds for a sum of known numbers before the first step: a wrong or late one ends the "
        "run. 0: off; otherwise at least 10.",
    )

    resume_after_restart: Annotated[bool, Setting("restarts")] = setting(
        True,
        "Resume from the newest trusted checkpoint of the run when a launcher (torchrun, SLURM) has restarted a "
        "`SelfHealingTrainer`.",
    )
    launcher_restarts: Annotated[Literal["auto", "yes", "no"], Setting("restarts")] = setting(
        "auto",
        "Whether a process that exits with code 75 is started again: `yes`, `no`, or `auto`, by the environment "
        "(torchrun with restarts left).",
    )
    on_preemption: Annotated[Literal["save", "ignore"], Setting("restarts")] = setting(
        "save",
        "On SIGTERM, SIGUSR1 and, in a job of one process, a first Ctrl-C: `save` finishes the step, writes a "
        "checkpoint and exits, `ignore` leaves the signals alone.",
    )
    preemption_deadline: Annotated[float, Setting("restarts", above=0)] = setting(
        30.0, "Seconds between the signal and the end of the process, at most."
    )

    healing_dir: Annotated[str | None, Setting("journal")] = setting(
        None,
        "Directory for journal, quarantine.jsonl, postmortem.json and report. Defaults to the `output_dir` of the "
        "training arguments, where checkpoints and the record of the run always stay.",
    )
    quarantine_text: Annotated[bool, Setting("journal")] = setting(
        True,
        "Write the text of quarantined rows and samples, and batches of bad steps for `self-healing replay`, to disk. "
        "If false: only positions and hashes.",
    )
    upload_healing_files: Annotated[bool, Setting("journal")] = setting(
        False,
        "Upload the files of this library (journal, quarantine, batches, kept checkpoints) to the Hub with everything "
        "else.",
    )

    healing_preset: Annotated[Literal["default", "aggressive", "conservative"], Setting("preset")] = setting(
        "default", "Where the settings you leave out start: `default`, `aggressive` or `conservative`."
    )

    def __post_init__(self) -> None:
        schema = schema_of(HealingConfig)
        for name, declared in schema.items():
            object.__setattr__(self, name, declared.converted(getattr(self, name)))
        raise_if_any(value_problems(schema, {name: getattr(self, name) for name in schema}))
        for name, declared in schema.items():
            if declared.kind is float:
                object.__setattr__(self, name, float(getattr(self, name)))

    def _changed(self) -> dict[str, tuple[Any, Any]]:
        """The settings that are not those of the preset, and those; first the preset, unless it is the default."""
        preset = asdict(HealingConfig(healing_preset=self.healing_preset)) | {"healing_preset": "default"}
        usual = {"healing_preset": "default", **preset}
        return {name: (value, usual[name]) for name in usual if (value := getattr(self, name)) != usual[name]}

    def __repr__(self) -> str:
        return f"HealingConfig({', '.join(f'{name}={value!r}' for name, (value, _) in self._changed().items())})"

    def _repr_html_(self) -> str:
        """What was set, as a notebook shows it."""
        changed = [(name, *map(repr, values)) for name, values in self._changed().items()]
        rows = [("HealingConfig", "set to", "instead of"), *(changed or [("nothing was set", "", "")])]
        cells = ("".join(f"<td>{html.escape(cell, quote=False)}</td>" for cell in row) for row in rows)
        return f"<table><tr>{'</tr><tr>'.join(cells)}</tr></table>"

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
        Returns settings for runs that should stop rather than train on other data than you asked for: few rows are
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
        except OSError as error:
            raise type(error)(
                f"The settings in {path} cannot be read: {error.strerror}. Please name a readable TOML file (working "
                f"directory: {Path.cwd()}); `self-healing config > healing.toml` writes one."
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
    if isinstance(given, str) and given in PRESETS:
        meant = f"Did you mean HealingConfig(healing_preset={given!r})?"
    elif isinstance(given, str | os.PathLike):
        meant = f"If it is a file, did you mean HealingConfig.from_toml({str(given)!r})?"
    else:
        meant = "Please leave it out for the defaults."
    raise ConfigurationError(
        f"The config is {reprlib.repr(given)} ({type(given).__name__}), but must be a HealingConfig or a dict of "
        f"settings. {meant}"
    )
