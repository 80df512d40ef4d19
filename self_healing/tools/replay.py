"""`replay`: computes the step of a saved incident again, and says where its first non-finite number appears."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import Trainer

from ..healers.dry_run import quiet_arguments
from ..hf.experiments import compute_one_step
from ..hf.trainer_state import preserved
from ..replaying.incidents import KeptIncident, ReplayError, find_incident, load_kept
from ..replaying.looking import Look, look_into
from ..replaying.weights import WeightsChoice, choose_weights
from ..system.random_state import RandomState
from ..trainer import SelfHealingTrainer
from .replay_model import build_model, build_trainer, in_python, put_weights


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """
    What came of a replay.

    Args:
        incident (`str`), step (`int`), what (`str`):
            The incident, the steps finished before it, and what the journal says it was.
        came_back (`bool`):
            Whether loss or gradient were not finite again; of a spike, whether the gradient norm was at least half of
            what it was.
        look ([`Look`]):
            What was seen: loss, gradient norm, rows and modules.
        weights (`str`), exact (`bool`):
            The weights it was computed with, and whether they are known to be those of the step.
        computed (`str`):
            The model, the trainer and the precision.
        notes (`list[str]`):
            What else is not as it was.
        spiked_to (`float`, *optional*):
            The gradient norm of the step, where it was finite and a spike.
    """

    incident: str
    step: int
    what: str
    came_back: bool
    look: Look
    weights: str
    exact: bool
    computed: str
    notes: list[str] = field(default_factory=list)
    spiked_to: float | None = None

    @property
    def verdict(self) -> str:
        """Whether it came back, and what follows from that, in a sentence or two."""
        if self.look.finite and self.spiked_to is not None:
            so = "It comes back" if self.came_back else "It did not come back"
            return f"{so}: the step was a spike, and all of it is finite; its gradient norm was {self.spiked_to:.6g}."
        if not self.came_back:
            if self.exact and not self.notes:
                return (
                    "It did not come back: with the same weights, rows and random numbers all of it is finite. The "
                    "fault was neither in the data nor in the model, but in the process or the machine it ran on."
                )
            return (
                "It did not come back: all of it is finite. It was not computed exactly as before (see above), so a "
                "fault that depends on the difference could not show."
            )
        look = self.look
        if look.rows:
            of = "" if look.rows_in_step is None else f" of {look.rows_in_step}"
            if look.poison == 1:
                return f"It comes back: 1{of} rows of the step is not finite by itself."
            return f"It comes back: {look.poison}{of} rows of the step are not finite by themselves."
        if look.rows_in_step is None:
            return "It comes back. It cannot be split into rows."
        return f"It comes back, and none of its {look.rows_in_step} rows is at fault by itself."

    def __str__(self) -> str:
        norm = "" if self.look.grad_norm is None else f", gradient norm {self.look.grad_norm:.6g}"
        lines = [
            f"Incident {self.incident}, step {self.step}: {self.what}",
            f"  computed: {self.computed}",
            f"  weights:  {self.weights}",
            *(f"  but:      {note}" for note in self.notes),
            f"  gives:    loss {self.look.loss:.6g}{norm}",
            self.verdict,
        ]
        if not self.look.finite:
            lines += [f"  {row}" for row in self.look.rows]
            if self.look.poison > len(self.look.rows):
                lines.append(f"  and {self.look.poison - len(self.look.rows)} more rows")
            if not self.look.rows and self.look.origin is not None:
                lines.append(f"  the step as a whole: {self.look.origin}")
            if self.look.full_precision:
                lines.append("  Without mixed precision the same step is finite.")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        origin = self.look.origin
        return {
            "incident": self.incident,
            "step": self.step,
            "what": self.what,
            "came_back": self.came_back,
            "verdict": self.verdict,
            "loss": self.look.loss,
            "grad_norm": self.look.grad_norm,
            "weights": self.weights,
            "exact_weights": self.exact,
            "computed": self.computed,
            "notes": self.notes,
            "spiked_to": self.spiked_to,
            "rows_in_step": self.look.rows_in_step,
            "poison_rows": self.look.poison,
            "rows": [row.to_dict() for row in self.look.rows],
            "origin": None if origin is None else {**origin.to_dict(), "told": str(origin)},
            "finite_in_full_precision": self.look.full_precision,
        }


def replay(
    run_dir: str | Path,
    incident: str | int | None = None,
    *,
    trainer: Trainer | None = None,
    checkpoint: str | Path | None = None,
    model: str | None = None,
) -> ReplayReport:
    """
    Computes the step of a saved incident again: the batch that was kept, from the random states it began with, in
    train mode and the precision of the run. Nothing is applied, and nothing in the run directory is changed.

    Args:
        run_dir (`str` or `Path`):
            The `output_dir` or `healing_dir` of the run.
        incident (`str` or `int`, *optional*):
            Its id or its step. Defaults to the newest one whose batch was kept.
        trainer ([`~transformers.Trainer`], *optional*):
            The trainer of the run, built as in its script, for models and losses that no file describes. It is put
            back as it was. Defaults to one that is built from what was written down with the incident.
        checkpoint (`str` or `Path`, *optional*):
            The weights to compute with. Defaults to those kept with the incident, or else to the newest checkpoint
            from before it whose weights are finite and that is not suspect.
        model (`str`, *optional*):
            Where the model comes from, if not from where it came: a directory, a name on the Hub, or
            `"module:function"`.

    Returns:
        [`ReplayReport`]: Whether it comes back, and in which module and row.

    Raises:
        ReplayError: If the incident cannot be replayed; the message says what to do.
        Exception: What the training code raises.
    """
    place = Path(run_dir)
    found = find_incident(place, incident)
    kept = load_kept(found)
    blueprint = kept.get("blueprint") or {}
    if trainer is None and not blueprint:
        raise ReplayError(f"How the step was computed was not kept with incident {found.id}. {in_python()}")
    weights = choose_weights(found, kept, _places(place, blueprint), None if checkpoint is None else str(checkpoint))
    notes: list[str] = []
    if trainer is not None:
        network = trainer.trainer if isinstance(trainer, SelfHealingTrainer) else trainer
        with preserved(network), tempfile.TemporaryDirectory() as scratch:
            network.args = quiet_arguments(network.args, 1, scratch)
            return _compute(found, kept, network, weights, weights.checkpoint, notes)
    with tempfile.TemporaryDirectory() as scratch, _random_states_kept():
        built = build_model(blueprint, weights, model, bool(kept.get("all_weights")))
        made = build_trainer(blueprint, built, scratch, notes)
        made.args = quiet_arguments(made.args, 1, scratch)
        return _compute(found, kept, made, weights, weights.checkpoint, notes)


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    before = RandomState.capture()
    try:
        yield
    finally:
        before.restore()


def _compute(
    found: KeptIncident,
    kept: dict[str, Any],
    trainer: Any,
    weights: WeightsChoice,
    load_from: str | None,
    notes: list[str],
) -> ReplayReport:
    blueprint = kept.get("blueprint") or {}
    if weights.tensors:
        put_weights(trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False), weights.tensors)
    device = trainer.accelerator.device
    states = RandomState.from_plain(kept["rng"])
    if states.devices and (states.device_type != device.type or len(states.devices) > 1):
        notes.append("the random states of its device cannot be set here, so dropout is another one")
        states.devices.clear()
    indices = sorted(kept["micro_batches"])
    batches = [kept["micro_batches"][index] for index in indices]
    trainer.args.gradient_accumulation_steps = len(batches)
    looks: list[Look] = []
    compute_one_step(
        trainer,
        batches,
        kept["items"][indices[0]],
        states,
        lambda window: looks.append(look_into(window, kept.get("rows", {}))),
        load_from,
    )
    precision = str(trainer.accelerator.mixed_precision)
    cast = precision != "no" and bool(trainer.accelerator.native_amp)
    if blueprint.get("autocast") and not cast:
        notes.append(f"it was computed in {blueprint['precision']}, which this device does not support")
    dtype = next((str(each.dtype).removeprefix("torch.") for each in trainer.model.parameters()), "no weights")
    computed = (
        f"{type(trainer.model).__name__} in {dtype}{f' with {precision}' if cast else ''}, by {type(trainer).__name__}"
    )
    look = looks[0]
    spiked = found.spiked_to is not None and (look.grad_norm or 0.0) >= 0.5 * found.spiked_to
    return ReplayReport(
        found.id,
        found.step,
        found.what,
        not look.finite or spiked,
        look,
        weights.told,
        weights.exact,
        computed,
        notes,
        found.spiked_to,
    )


def _places(run_dir: Path, blueprint: dict[str, Any]) -> list[Path]:
    """Where checkpoints of the run may lie: the incident may be in a `healing_dir`."""
    told = blueprint.get("arguments", {}).get("output_dir")
    return [run_dir] if told is None else list(dict.fromkeys([run_dir, Path(blueprint["directory"], told)]))
