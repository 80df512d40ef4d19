"""The step of a saved incident, computed again in another process."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import DefaultFlowCallback, Trainer, TrainerCallback

from ..checkpoints.marker import checkpoints_in, load_marker, number_of, speaks_for
from ..checkpoints.vetting import vet_weights
from ..failures.recipes import TrainingFault
from ..healers.dry_run import preserved, quiet_arguments
from ..healers.numerics.diagnosis import find_poison_rows
from ..healers.numerics.experiments import Origin, StepExperiments, watching_gradients
from ..healers.numerics.healer import KEPT_BATCHES
from ..hf.adapter import Instrument
from ..hf.batches import select_rows
from ..hf.hooks import Hooks
from ..hf.patching import give_batches
from ..hf.step import Window
from ..journal.incident import Incident
from ..report.journals import incident_of, lines_of_incidents, read_journals
from ..system.random_state import RandomState
from ..trainer import SelfHealingTrainer
from .replay_model import IN_PYTHON, ReplayError, WeightsChoice, build_model, build_trainer, put_weights


logger = logging.getLogger(__name__)

# Rows that are looked into one by one; a model that fails on all of them fails on each alike.
_ROWS_LOOKED_INTO = 8


# ---- the report ----


@dataclass(frozen=True, slots=True)
class RowFound:
    """A row that is not finite by itself."""

    micro_batch: int
    row: int
    source: dict[str, Any]
    origin: Origin | None

    def __str__(self) -> str:
        known = [f"{name.replace('_', ' ')} {value}" for name, value in self.source.items() if value is not None]
        at = f"micro-batch {self.micro_batch}, row {self.row}" + (f" ({', '.join(known)})" if known else "")
        return f"{at}: {'where it begins could not be found' if self.origin is None else self.origin}"


@dataclass(slots=True, kw_only=True)
class ReplayReport:
    """
    What came of a replay.

    Args:
        incident (`str`), step (`int`), what (`str`):
            The incident, the steps finished before it, and what the journal says it was.
        came_back (`bool`):
            Whether loss or gradient were not finite again; of a spike, whether the gradient norm was at least half of
            what it was.
        loss (`float`), grad_norm (`float`, *optional*), finite (`bool`):
            What the step gives.
        weights (`str`), exact_weights (`bool`):
            The weights it was computed with, and whether they are known to be those of the step.
        computed (`str`):
            The model, the trainer and the precision.
        notes (`list[str]`):
            What else is not as it was.
        spiked_to (`float`, *optional*):
            The gradient norm of the step, where it was finite and a spike.
        rows_in_step (`int`, *optional*), poison_rows (`int`), rows (`list[RowFound]`):
            The rows of the step, how many of them are not finite by themselves, and the first of those.
        origin (`Origin`, *optional*):
            Where the step as a whole is first not finite.
    """

    incident: str
    step: int
    what: str
    came_back: bool
    loss: float
    grad_norm: float | None
    finite: bool
    weights: str
    exact_weights: bool
    computed: str
    notes: list[str]
    spiked_to: float | None = None
    rows_in_step: int | None = None
    poison_rows: int = 0
    rows: list[RowFound] = field(default_factory=list)
    origin: Origin | None = None

    @property
    def verdict(self) -> str:
        """Whether it came back, and what follows from that, in a sentence or two."""
        if self.finite and self.spiked_to is not None:
            so = "It comes back" if self.came_back else "It did not come back"
            return f"{so}: the step was a spike, and all of it is finite; its gradient norm was {self.spiked_to:.6g}."
        if not self.came_back:
            if self.exact_weights and not self.notes:
                return (
                    "It did not come back: with the same weights, rows and random numbers all of it is finite. The "
                    "fault was neither in the data nor in the model, but in the process or the machine it ran on."
                )
            return (
                "It did not come back: all of it is finite. It was not computed exactly as before (see above), so a "
                "fault that depends on the difference could not show."
            )
        if self.rows_in_step is None:
            return "It comes back. It cannot be split into rows."
        if not self.rows:
            return f"It comes back, and none of its {self.rows_in_step} rows is at fault by itself."
        are = "is not finite by itself" if self.poison_rows == 1 else "are not finite by themselves"
        return f"It comes back: {self.poison_rows} of {self.rows_in_step} rows of the step {are}."

    def __str__(self) -> str:
        norm = "" if self.grad_norm is None else f", gradient norm {self.grad_norm:.6g}"
        lines = [
            f"Incident {self.incident}, step {self.step}: {self.what}",
            f"  computed: {self.computed}",
            f"  weights:  {self.weights}",
            *(f"  but:      {note}" for note in self.notes),
            f"  gives:    loss {self.loss:.6g}{norm}",
            self.verdict,
            *(f"  {row}" for row in self.rows),
        ]
        if self.poison_rows > len(self.rows):
            lines.append(f"  and {self.poison_rows - len(self.rows)} more rows")
        if not self.rows and self.origin is not None:
            lines.append(f"  the step as a whole: {self.origin}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


# ---- the step, computed again ----


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
            Where the model comes from, if not from where it came: a directory, or a name on the Hub.

    Returns:
        [`ReplayReport`]: Whether it comes back, and in which module and row.

    Raises:
        ReplayError: If the incident cannot be replayed; the message says what to do.
        Exception: What the training code raises.
    """
    found = find_incident(run_dir, incident)
    kept = found.load()
    blueprint = kept.get("blueprint") or {}
    if trainer is None and not blueprint:
        raise ReplayError(f"How the step was computed was not kept with incident {found.id}. {IN_PYTHON}")
    weights = choose_weights(found, kept, Path(run_dir), checkpoint)
    notes: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        if trainer is None:
            network = build_model(blueprint, weights, model, bool(kept.get("all_weights")))
            return _compute(found, kept, build_trainer(blueprint, network, scratch, notes), weights, notes, scratch)
        given = trainer.trainer if isinstance(trainer, SelfHealingTrainer) else trainer
        with preserved(given):
            return _compute(found, kept, given, weights, notes, scratch)


def _compute(
    found: KeptIncident, kept: Mapping[str, Any], trainer: Any, weights: WeightsChoice, notes: list[str], scratch: str
) -> ReplayReport:
    trainer.args = quiet_arguments(trainer.args, 1, scratch)
    if weights.tensors:
        put_weights(trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False), weights.tensors)
    device = trainer.accelerator.device
    states = RandomState.from_plain(kept["rng"])
    if states.devices and (states.device_type != device.type or len(states.devices) > 1):
        notes.append("the random states of its device cannot be set here, so dropout is another one")
        states.devices.clear()
    indices = sorted(kept["micro_batches"])
    trainer.args.gradient_accumulation_steps = len(indices)

    def look(window: Window) -> ReplayReport:
        signals = window.signals()
        spiked = found.spiked_to is not None and (signals.grad_norm or 0.0) >= 0.5 * found.spiked_to
        report = ReplayReport(
            incident=found.id,
            step=found.incident.step,
            what=found.what,
            came_back=not signals.finite or spiked,
            loss=signals.loss,
            grad_norm=signals.grad_norm,
            finite=signals.finite,
            weights=weights.told,
            exact_weights=weights.exact,
            computed=_computed_by(trainer),
            notes=notes,
            spiked_to=found.spiked_to,
        )
        if not signals.finite:
            _look_into(window, report, kept.get("rows", {}))
        return report

    batches = [kept["micro_batches"][index] for index in indices]
    give_batches(trainer, batches, kept["items"][indices[0]], weights.checkpoint)
    stage = _Stage(trainer, states, look)
    trainer.callback_handler.callbacks = [DefaultFlowCallback(), stage]
    trainer.train()
    if stage.error is not None:
        raise stage.error
    assert stage.report is not None
    return stage.report


class _Stage(TrainerCallback, Hooks):
    """Attaches an instrument to the call of `train()`, and has its one step judged."""

    def __init__(self, trainer: Any, random_state: RandomState, look: Callable[[Window], ReplayReport]) -> None:
        self._trainer = trainer
        self._random_state = random_state
        self._look = look
        self.report: ReplayReport | None = None
        self.error: Exception | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.instrument = Instrument(self._trainer, self, heals_exceptions=True, started_at=0.0)
        self.instrument.attach()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._random_state.restore()
        self.instrument.reentry.after_fetch_rng = self._random_state

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.instrument.detach()

    def judge(self, window: Window) -> None:
        try:
            self.report = self._look(window)
        except Exception as error:
            # What is raised here would be taken for a failure that training has to be kept from.
            self.error = error.error if isinstance(error, TrainingFault) else error
        finally:
            window.skip(None)


class _Origins(StepExperiments):
    """Looks into the backward as well, and at single rows."""

    def origin_in_row(self, index: int, row: int) -> Origin | None:
        layout = self.layout(index)

        def pick(batch: Any) -> Any:
            return select_rows(batch, layout, layout.alone(row))

        return self.window.until_it_fits(lambda: self.origin_in(index, pick))

    def origin_in(self, index: int, pick: Callable[[Any], Any] = lambda batch: batch) -> Origin | None:
        found = super().origin_in(index, pick)
        if found is None or found.place != "gradient":
            return found
        try:
            with watching_gradients(self.models()) as seen:
                self.window.compute_micro_batch(index, pick, last=True, synchronise=False)
        except TrainingFault as fault:
            # Such hooks put views around what modules give, and code that writes over it in place does not allow them.
            logger.info("The backward could not be looked into.", exc_info=fault.error)
            return found
        finally:
            self.window.rewind()
        return Origin("gradient", found.names, seen[0].details if seen else {})


def _computed_by(trainer: Any) -> str:
    precision = str(trainer.accelerator.mixed_precision)
    mixed = f" with {precision}" if precision != "no" and trainer.accelerator.native_amp else ""
    dtype = next((str(each.dtype).removeprefix("torch.") for each in trainer.model.parameters()), "no weights")
    return f"{type(trainer.model).__name__} in {dtype}{mixed}, by {type(trainer).__name__}"


def _look_into(window: Window, report: ReplayReport, sources: Mapping[int, Sequence[Mapping[str, Any]]]) -> None:
    """Looks for the first number of a step that is not finite, in which module and for which rows."""
    # Prepared micro-batches are noted when a step is computed again.
    window.recompute()
    with window.engine.retry.experiment():
        experiments = _Origins(window)
        report.origin = experiments.origin()
        layouts = [window.layout(index) for index in range(window.size)]
        if any(layout is None for layout in layouts):
            return
        sizes = [layout.rows for layout in layouts if layout is not None]
        report.rows_in_step = sum(sizes)
        # A batch of a shape that is never trained on may raise.
        with contextlib.suppress(TrainingFault):
            poison = find_poison_rows(experiments, sizes, window.engine.view.device)
            places = [(index, row) for index, rows in poison.items() for row in rows]
            report.poison_rows = len(places)
            for index, row in places[:_ROWS_LOOKED_INTO]:
                known = list(sources.get(index, ()))
                source = dict(known[row]) if row < len(known) else {}
                report.rows.append(RowFound(index, row, source, experiments.origin_in_row(index, row)))


# ---- which incident ----


@dataclass(frozen=True, slots=True)
class KeptIncident:
    """An incident whose batch was kept in a file."""

    incident: Incident
    path: Path

    @property
    def id(self) -> str:
        return self.incident.id

    @property
    def what(self) -> str:
        """The symptom and its cause in a few words."""
        return f"{self.incident.symptom}, {self.incident.cause}".replace("_", " ")

    @property
    def spiked_to(self) -> float | None:
        """The gradient norm of a step that was finite and spiked; `None` for one that was not finite."""
        norm = self.incident.evidence.get("again", {}).get("grad_norm")
        # One that is not finite is written as a text.
        return float(norm) if isinstance(norm, int | float) else None

    def load(self) -> dict[str, Any]:
        """Reads what was kept: tensors and plain values, no code."""
        try:
            content: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True)
        except Exception as error:
            # Not its text: torch advises to load what is damaged with `weights_only=False`, which runs code from it.
            raise ReplayError(f"{self.path} cannot be read; is it complete? ({type(error).__name__})") from None
        return content

    def __str__(self) -> str:
        return f"{self.id}  step {self.incident.step}  {self.what}"


def kept_incidents(run_dir: str | Path) -> list[KeptIncident]:
    """Lists the incidents of a run whose batch was kept, in the order in which they came."""
    try:
        journals = read_journals(run_dir)
    except (OSError, ValueError) as error:
        raise ReplayError(str(error)) from None
    files = {path.stem: path for path in (journals.path.parent / "incidents").glob("*.pt")}
    found = lines_of_incidents(journals.events).items()
    return [KeptIncident(incident_of(lines), files[name]) for name, lines in found if name in files]


def find_incident(run_dir: str | Path, wanted: str | int | None = None) -> KeptIncident:
    """Finds the incident that is meant."""
    kept = kept_incidents(run_dir)
    name = str(wanted)
    found = kept[-1:] if wanted is None else [each for each in kept if name in (each.id, str(each.incident.step))]
    if len(found) == 1:
        return found[0]
    if found:
        raise ReplayError(f"{len(found)} incidents are of step {name}. Please name one by its id:{_listed(found)}")
    which = "any incident" if wanted is None else f"an incident {name!r}"
    those = f" Those with a batch:{_listed(kept)}" if kept else ""
    raise ReplayError(
        f"No batch was kept for {which} in {run_dir}. Batches are kept of steps whose loss or gradient is not finite, "
        f"or spikes, with quarantine_text=True (the default): of at most {KEPT_BATCHES} incidents.{those}"
    )


def _listed(kept: Sequence[KeptIncident]) -> str:
    return "".join(f"\n  {each}" for each in kept)


# ---- which weights ----


def choose_weights(
    found: KeptIncident, kept: Mapping[str, Any], run_dir: Path, checkpoint: str | Path | None
) -> WeightsChoice:
    """
    Chooses the weights: a checkpoint that was asked for, those kept with the incident, or the newest checkpoint from
    before it that is not suspect and whose weights are finite.
    """
    at = found.incident.step
    if checkpoint is not None:
        why = vet_weights(Path(checkpoint)) if Path(checkpoint).is_dir() else "there is no such directory"
        if why is not None:
            raise ReplayError(f"--checkpoint {checkpoint}: its weights cannot be loaded ({why}).")
        return _of_checkpoint(Path(checkpoint), at)
    if kept.get("weights"):
        return WeightsChoice("those of the step itself, kept with the incident", True, None, kept["weights"])
    # The incident may be in a `healing_dir`.
    blueprint = kept.get("blueprint") or {"directory": run_dir, "arguments": {"output_dir": "."}}
    output_dir = Path(blueprint["directory"], blueprint["arguments"]["output_dir"])
    candidates = {*checkpoints_in(run_dir), *checkpoints_in(output_dir)}
    for path in sorted(candidates, key=lambda each: number_of(each) or 0, reverse=True):
        marker = load_marker(path)
        before = (number_of(path) or 0) <= at
        if before and (marker is None or speaks_for(marker)) and vet_weights(path) is None:
            return _of_checkpoint(path, at)
    told = "those of the model that training began with: no checkpoint from before the incident is there"
    return WeightsChoice(told, at == 0, None, {})


def _of_checkpoint(path: Path, at: int) -> WeightsChoice:
    step = number_of(path)
    if step is None:
        told = f"those in {path}, of a step that is not known"
    elif step == at:
        told = f"those of the step itself, from {path}"
    else:
        apart = abs(at - step)
        when = "before" if step < at else "after"
        told = f"those of step {step}, {apart} step{'' if apart == 1 else 's'} {when} the incident, from {path}"
    return WeightsChoice(told, step == at, str(path), {})
