"""Finds the incidents of a run whose batch was kept, and reads it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..report.healing_report import HealingReport
from ..system.files import rank_in


class ReplayError(ValueError):
    """An incident that cannot be replayed; the message says what to do."""


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
            "Batches are kept with save_offending_batch=True and quarantine_text=True (both are the default), for at "
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
