"""The step of a saved incident, computed again in another process."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from ..checkpoints.marker import checkpoints_in, load_marker, speaks_for, written_at
from ..checkpoints.vetting import finished_steps, vet_weights
from ..failures.recipes import TrainingFault
from ..healers.dry_run import quiet_arguments
from ..healers.numerics.diagnosis import find_poison_rows
from ..hf.engine import Origin
from ..hf.experiments import StepExperiments, compute_one_step
from ..hf.step import Window
from ..hf.trainer_state import preserved
from ..report.healing_report import HealingReport
from ..system.files import rank_in
from ..system.random_state import RandomState
from ..trainer import SelfHealingTrainer
from .replay_model import ReplayError, WeightsChoice, build_model, build_trainer, in_python, put_weights


# ---- replay: computes the step of a saved incident again, and says where its first non-finite number appears ----


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


# ---- looking: looks into a step for the first number that is not finite: in which module, and for which rows ----


# Rows that are looked into one by one; a model that fails on all of them fails on each alike.
_ROWS_LOOKED_INTO = 8


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

    def to_dict(self) -> dict[str, Any]:
        origin = None if self.origin is None else {**self.origin.to_dict(), "told": str(self.origin)}
        return {**asdict(self), "origin": origin}


@dataclass(slots=True)
class Look:
    """What was seen of a step."""

    loss: float
    grad_norm: float | None
    finite: bool
    rows_in_step: int | None = None
    poison: int = 0
    rows: list[RowFound] = field(default_factory=list)
    origin: Origin | None = None
    full_precision: bool | None = None


def look_into(window: Window, sources: Mapping[int, Sequence[Mapping[str, Any]]]) -> Look:
    """Looks into a step that was computed; its gradients are gone on return."""
    signals = window.signals()
    look = Look(signals.loss, signals.grad_norm, signals.finite)
    if look.finite:
        return look
    # Prepared micro-batches are noted when a step is computed again.
    window.reexecute()
    with window.experiment():
        experiments = StepExperiments(window)
        look.full_precision = experiments.finite_in_full_precision()
        look.origin = experiments.origin(backward=True)
        layouts = [window.layout(index) for index in range(window.size)]
        if any(layout is None for layout in layouts):
            return look
        sizes = [layout.rows for layout in layouts if layout is not None]
        look.rows_in_step = sum(sizes)
        # A batch of a shape that is never trained on may raise.
        with contextlib.suppress(TrainingFault):
            poison = find_poison_rows(experiments, sizes, window.engine.view.device)
            look.poison = sum(len(rows) for rows in poison.values())
            places = [(index, row) for index, rows in poison.items() for row in rows]
            for index, row in places[:_ROWS_LOOKED_INTO]:
                known = list(sources.get(index, ()))
                source = dict(known[row]) if row < len(known) else {}
                look.rows.append(RowFound(index, row, source, experiments.origin_in_row(index, row)))
    return look


# ---- incidents: finds the incidents of a run whose batch was kept, and reads it ----


@dataclass(frozen=True, slots=True)
class KeptIncident:
    """An incident whose batch was kept."""

    id: str
    step: int
    path: Path
    entry: dict[str, Any] = field(default_factory=dict)

    @property
    def what(self) -> str:
        """The symptom and its cause in a few words."""
        told = [str(self.entry[name]).replace("_", " ") for name in ("symptom", "cause") if self.entry.get(name)]
        return ", ".join(told) or "not in the journal"

    @property
    def spiked_to(self) -> float | None:
        """The gradient norm of a step that was finite and spiked; `None` for one that was not finite."""
        again = (self.entry.get("evidence") or {}).get("again")
        norm = again.get("grad_norm") if isinstance(again, Mapping) else None
        # One that is not finite is written as a text.
        return float(norm) if isinstance(norm, int | float) else None

    def __str__(self) -> str:
        return f"{self.id}  step {self.step}  {self.what}"


def find_incident(run_dir: Path, wanted: str | int | None = None) -> KeptIncident:
    """Finds the incident that is meant."""
    entries = _journaled(run_dir)
    kept = kept_incidents(run_dir, entries)
    if wanted is None:
        if not kept:
            raise ReplayError(_none_kept(run_dir, entries))
        return kept[-1]
    name = str(wanted)
    found = (
        [each for each in kept if each.id == name]
        or [each for each in kept if each.id.startswith(f"{name}.rank")]
        or [each for each in kept if str(each.step) == name]
    )
    if len(found) == 1:
        return found[0]
    if found:
        of_it = f"step {name}" if str(found[0].step) == name else name
        raise ReplayError(f"{len(found)} incidents are of {of_it}. Please name one by its id:{_listed(found)}")
    for entry in entries.values():
        if name in (entry["incident"], str(entry["step"])):
            raise ReplayError(
                f"Of incident {entry['incident']} (step {entry['step']}: {entry['symptom']}, {entry['cause']}) no "
                f"batch was kept: there is nothing to replay. {_why_not_kept(entry)}{_others(kept)}"
            )
    raise ReplayError(
        f"There is no incident {name!r} in {run_dir}.{_others(kept) or ' ' + _none_kept(run_dir, entries)}"
    )


def kept_incidents(run_dir: Path, entries: Mapping[str, dict[str, Any]] | None = None) -> list[KeptIncident]:
    """Lists the incidents of a run whose batch was kept, in the order in which they came."""
    entries = _journaled(run_dir) if entries is None else entries
    files = sorted((file.stat().st_mtime, file) for folder in _folders(run_dir) for file in folder.glob("*.pt"))
    found = {}
    for _, file in files:
        name = file.name.removesuffix(".pt")
        entry = entries.get(name, {})
        step = entry.get("step")
        found[name] = KeptIncident(name, _load(file)["step"] if step is None else int(step), file, entry)
    return list(found.values())


def load_kept(incident: KeptIncident) -> dict[str, Any]:
    """Reads what was kept of an incident: tensors and plain values, no code."""
    content = _load(incident.path)
    if not {"micro_batches", "rng", "items"} <= content.keys():
        raise ReplayError(
            f"{incident.path} was kept by an earlier version of self_healing, without what a replay needs. It holds "
            "the micro-batches: torch.load(path)['micro_batches']."
        )
    return content


def _load(file: Path) -> dict[str, Any]:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        # Not its text: torch advises to load what is damaged with `weights_only=False`, which runs code from the file.
        raise ReplayError(f"{file} cannot be read; is it complete? ({type(error).__name__})") from None
    if not isinstance(content, dict) or "step" not in content:
        raise ReplayError(f"{file} is not the batch of an incident.")
    return content


def _folders(run_dir: Path) -> list[Path]:
    if not run_dir.is_dir():
        raise ReplayError(f"There is no directory {run_dir}. Please name the output_dir (or healing_dir) of a run.")
    places = [run_dir]
    try:
        journal = HealingReport.from_run_dir(run_dir).journal
    except (OSError, ValueError):
        journal = None
    if journal is not None and Path(journal).parent.resolve() != run_dir.resolve():
        places.append(Path(journal).parent)
    return [folder for place in places if (folder := place / "incidents").is_dir()]


def _journaled(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Incidents by the name of the file that their batch would be kept in."""
    try:
        first = HealingReport.from_run_dir(run_dir)
    except (OSError, ValueError):
        return {}
    found = {entry["incident"]: entry for entry in first.incidents}
    for other in sorted(Path(str(first.journal)).parent.glob("healing_events.rank*.jsonl")):
        with contextlib.suppress(OSError, ValueError):
            incidents = HealingReport.from_run_dir(other).incidents
            # An earlier version has given incidents of several ranks one name.
            suffix = f".rank{rank_in(other)}"
            found |= {f"{entry['incident'].removesuffix(suffix)}{suffix}": entry for entry in incidents}
    return found


def _none_kept(run_dir: Path, entries: Mapping[str, dict[str, Any]]) -> str:
    if not entries:
        return (
            f"There is no incident in {run_dir}: nothing to replay. Please name the output_dir of a run that had one."
        )
    last = list(entries.values())[-1]
    return f"No batch was kept for any incident in {run_dir}. {_why_not_kept(last)}"


def _why_not_kept(entry: Mapping[str, Any]) -> str:
    if str(entry.get("failure", "")).startswith(("nonfinite", "gradient_spike")):
        return (
            "Batches are kept with quarantine_text=True (the default), for at "
            "most 20 incidents of a run, and 5 transient ones among them."
        )
    return (
        "Batches are kept for steps whose loss or gradient is not finite, or spikes; other faults do not depend on a "
        "batch."
    )


def _others(kept: list[KeptIncident]) -> str:
    return f" Those with a batch:{_listed(kept)}" if kept else ""


def _listed(kept: list[KeptIncident]) -> str:
    return "".join(f"\n  {each}" for each in kept)


# ---- weights ----


def choose_weights(
    incident: KeptIncident, kept: Mapping[str, Any], places: list[Path], checkpoint: str | None
) -> WeightsChoice:
    """
    Chooses the weights: a checkpoint that was asked for, those kept with the incident, or the newest checkpoint from
    before it that is not suspect and whose weights are finite.
    """
    if checkpoint is not None:
        why = vet_weights(Path(checkpoint)) if Path(checkpoint).is_dir() else "there is no such directory"
        if why is not None:
            raise ReplayError(f"--checkpoint {checkpoint}: its weights cannot be loaded ({why}).")
        step = _step_of(Path(checkpoint))
        return WeightsChoice(_of_checkpoint(checkpoint, step, incident.step), step == incident.step, checkpoint, {})
    if kept.get("weights"):
        return WeightsChoice("those of the step itself, kept with the incident", True, None, kept["weights"])
    candidates = []
    for path in dict.fromkeys(each for place in places for each in checkpoints_in(place)):
        step = _step_of(path)
        if step is not None and step <= incident.step and _may_be_of(incident, kept, path):
            candidates.append((step, path))
    for step, path in sorted(candidates, key=lambda each: each[0], reverse=True):
        if vet_weights(path) is None:
            told = _of_checkpoint(str(path), step, incident.step)
            return WeightsChoice(told, step == incident.step, str(path), {})
    told = "those of the model that training began with: no checkpoint from before the incident is there"
    return WeightsChoice(told, incident.step == 0, None, {})


def _may_be_of(incident: KeptIncident, kept: Mapping[str, Any], checkpoint: Path) -> bool:
    """Whether a checkpoint is not suspect, nor of a later run into the same directory, as far as its marker tells."""
    marker = load_marker(checkpoint)
    if marker is None:
        return True
    earlier = written_at(checkpoint) <= kept.get("time", incident.path.stat().st_mtime)
    return speaks_for(marker) and (earlier or marker.get("run") == incident.id.rpartition("-")[0])


def _of_checkpoint(path: str, step: int | None, at: int) -> str:
    if step is None:
        return f"those in {path}, of a step that is not known"
    if step == at:
        return f"those of the step itself, from {path}"
    apart = abs(at - step)
    when = "before" if step < at else "after"
    return f"those of step {step}, {apart} step{'' if apart == 1 else 's'} {when} the incident, from {path}"


def _step_of(checkpoint: Path) -> int | None:
    try:
        return finished_steps(checkpoint)
    except Exception:
        # Weights alone have no step, and a directory that cannot be read is refused elsewhere.
        return None
