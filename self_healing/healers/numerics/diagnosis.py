"""What made a step non-finite, found out by experiment: compute it again, scan the state, bisect the rows."""

from __future__ import annotations

import bisect
import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...failures.classify import describe_exception
from ...failures.recipes import Cause, FailureType, TrainingFault
from ...hf.adapter import Instrument
from ...hf.batches import Layout
from ...hf.objective import StepSignals
from ...hf.step import Window
from ...hf.view import is_compiled
from ...ranks import votes
from ...rollback.ring import StepReplayer
from ...rollback.rollback import Rollback
from ...run.incidents import Diagnosis
from ...system import processes
from .experiments import StepExperiments


logger = logging.getLogger(__name__)

# Rows from elsewhere in the data that are tried where no earlier batch can be compared with. If none of so many is
# finite, it is not a few bad rows.
_CONTROL_ROWS = 16
# Where more than this share of a step's rows is non-finite, other rows tell whether the model is.
_MOST_POISON = 0.5
# By micro-batch, what its modules gave, in their order, summed up to (B, T).
_Sums = dict[int, list[torch.Tensor]]
# By the place where a computation fails that no update can be to blame for.
_BEHIND_THE_PLACE = {
    "inputs": Cause.DATA,
    "module": Cause.MODEL,
    "loss": Cause.LOSS_OR_LABELS,
    "gradient": Cause.GRADIENT,
}


def diagnose(window: Window, instrument: Instrument, healthy_inputs: Any) -> Diagnosis:
    sums = _recompute_watched(window)
    if window.signals().finite:
        return Diagnosis(FailureType.NONFINITE_TRANSIENT, Cause.TRANSIENT, {"reexecutions": 1})
    device = instrument.view.device
    # What a failing forward left in batch norm statistics is a consequence, not a cause.
    window.restore_buffers()
    # Whatever comes of the step, these are not applied; what is done next may need their memory.
    window.discard()
    corrupted = instrument.view.nonfinite_tensors()
    if votes.any_rank("the state is corrupted", bool(corrupted), device):
        return Diagnosis(
            FailureType.CORRUPTED_STATE,
            Cause.CORRUPTED_STATE,
            {"tensors": corrupted[:20], "tensors_total": len(corrupted)},
        )
    found = _look_at_rows(window, sums, healthy_inputs, device)
    if window.kept is not None:
        # It is finite without them, and is applied like this.
        return found
    # A fault may last for longer than one computation, and strike in the experiments: before data or numbers are
    # blamed for it, the whole is computed once more.
    window.recompute()
    if window.signals().finite:
        return Diagnosis(FailureType.NONFINITE_TRANSIENT, Cause.TRANSIENT, {"reexecutions": 2})
    return found


def _recompute_watched(window: Window) -> _Sums:
    """Computes the step again, and sums up in passing what its modules give, by row and position."""
    sums: _Sums = {}
    modules = list(window.calls[0][0].modules())
    # A block says as much as the layers in it.
    blocks = {module for module in modules if any(module.children())}

    def add(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if module not in blocks:
            return
        with contextlib.suppress(Exception):
            given = list(output.values()) if isinstance(output, Mapping) else output
            for each in given if isinstance(given, (list, tuple)) else [given]:
                if isinstance(each, torch.Tensor) and each.is_floating_point() and each.dim() > 1:
                    by_position = each.detach()[..., None].sum(tuple(range(2, each.dim() + 1)), dtype=torch.float32)
                    sums.setdefault(window.computing, []).append(by_position)

    if processes.world_size() > 1 or any(map(is_compiled, modules)):
        # Several ranks try each row alone; what is compiled would be computed otherwise than it was.
        window.recompute()
        return sums
    # For all modules there are: a hook of its own would be copied with a module.
    hook = torch.nn.modules.module.register_module_forward_hook(add)
    try:
        window.recompute()
    finally:
        hook.remove()
    return sums


def _suspects(sums: Sequence[torch.Tensor], layout: Layout) -> list[int]:
    """The rows of a micro-batch for which a module gave what is not finite, where for others it was."""
    for each in sums:
        bad, rows = ~each.isfinite(), []
        if layout.kind == "segments" and each.size(1) == layout.starts[-1]:
            places = bad.any(0).nonzero().flatten().tolist()
            rows = sorted({bisect.bisect(layout.starts, place) - 1 for place in places})
        elif layout.kind != "segments" and len(each) % layout.rows == 0:
            rows = bad.any(1).reshape(-1, layout.rows).any(0).nonzero().flatten().tolist()
        if 0 < len(rows) < max(layout.rows, 2):
            return rows
    return []


def _look_at_rows(window: Window, sums: _Sums, healthy_inputs: Any, device: torch.device) -> Diagnosis:
    """Finds out whether some rows are non-finite by themselves, and others are not."""
    layouts = [window.layout(index) for index in range(window.size)]
    if votes.any_rank("rows cannot be told apart", any(layout is None for layout in layouts), device):
        return _numerical("the rows of this batch cannot be told apart")
    sizes = [layout.rows for layout in layouts if layout is not None]
    try:
        with window.engine.retry.experiment():
            experiments = StepExperiments(window)
            return _convict(experiments, sums, sizes) or _poison_rows(experiments, healthy_inputs, device, sizes)
    except TrainingFault as fault:
        # A batch of a shape the user never trains on: what it raises is our doing.
        logger.info("Rows could not be tried alone.", exc_info=fault.error)
        return _numerical(f"its rows cannot be tried alone: {describe_exception(fault.error)}")


def _convict(experiments: StepExperiments, sums: _Sums, sizes: Sequence[int]) -> Diagnosis | None:
    """
    Finds the rows guilty that were seen to give what is not finite: alone each does so, before and after another row
    does not, and without them the step is finite. It is left computed like that.
    """
    window, layout, alone = experiments.window, experiments.layout, experiments.probe_row
    try:
        suspects = [(index, row) for index, seen in sums.items() for row in _suspects(seen, layout(index))]
    except Exception:
        # A tensor without numbers (meta, sparse, inside of a transform of torch.func).
        return None
    if window.raised or not 0 < len(suspects) <= _MOST_POISON * sum(sizes):
        return None
    guilty = [each for each in suspects if not alone(*each)]
    others = ((index, row) for index, size in enumerate(sizes) for row in range(size) if (index, row) not in suspects)
    if not guilty or not alone(*next(others)) or any(alone(*each) for each in guilty):
        return None
    poison = {index: [row for at, row in guilty if at == index] for index, _ in guilty}
    window.recompute(experiments.rows_without(poison))
    return _poisoned(window, poison, len(guilty), sum(sizes)) if window.signals().finite else None


def _poisoned(window: Window, poison: dict[int, list[int]], count: int, total: int) -> Diagnosis:
    failure = FailureType.BAD_DATA if window.raising else FailureType.NONFINITE_POISON_ROWS
    evidence = {"poison_rows": count, "rows_in_step": total}
    return Diagnosis(failure, Cause.POISON_ROWS, evidence, poison=poison, rows=total, poison_rows=count)


def _poison_rows(
    experiments: StepExperiments, healthy_inputs: Any, device: torch.device, sizes: Sequence[int]
) -> Diagnosis:
    poison = find_poison_rows(experiments, sizes, device)
    counts = [sum(sizes), sum(len(rows) for rows in poison.values())]
    total, count, *_ = map(round, votes.sum_over_ranks("rows, and poison among them", counts, device))
    if count == 0:
        return _numerical("no row is non-finite by itself")
    if not votes.all_ranks("has a healthy batch", healthy_inputs is not None, device):
        healthy_inputs = None
    if count > _MOST_POISON * total:
        # Many bad rows look the same as a model that overflows on most of them. Rows that are fine tell.
        controls = experiments.rows_elsewhere(_CONTROL_ROWS) if healthy_inputs is None else [healthy_inputs]
        tried = round(votes.smallest("controls", len(controls), device))
        finite = "another batch is finite"
        if not any(votes.all_ranks(finite, experiments.probe_batch(each), device) for each in controls[:tried]):
            others = f"so are {tried} others of the data" if healthy_inputs is None else "so is an earlier batch"
            compared = others if tried else "there is no earlier batch to compare with"
            found = _numerical(f"{count} of {total} rows are non-finite, and {compared}")
            # Where an earlier batch was finite with weights like these, it may pass.
            return replace(found, everywhere=healthy_inputs is None and tried > 0 and count == total)
    return _poisoned(experiments.window, poison, count, total)


def diagnose_start(window: Window, why: str) -> Diagnosis:
    """
    Finds out where a computation fails with weights that no update has changed yet: in the batch, in a module (the
    first whose output is not finite), in the loss, in its gradient, or only in mixed precision.
    """
    failure, experiments = FailureType.NONFINITE_FROM_THE_START, StepExperiments(window)
    try:
        with window.engine.retry.experiment():
            in_full_precision = experiments.finite_in_full_precision()
            origin = experiments.origin()
    except TrainingFault as fault:
        logger.info("The step could not be looked into.", exc_info=fault.error)
        in_full_precision = origin = None
    evidence: dict[str, Any] = {"why": why} | ({} if origin is None else origin.to_dict())
    if in_full_precision is not None:
        evidence["finite_in_full_precision"] = in_full_precision
    told = [str(origin)] if origin is not None else []
    told += ["without mixed precision the same step is finite"] if in_full_precision else []
    evidence["diagnosis"] = f"{'; '.join(told)}." if told else "Where it begins could not be seen."
    evidence["diagnosis"] = evidence["diagnosis"][0].upper() + evidence["diagnosis"][1:]
    if in_full_precision:
        return Diagnosis(failure, Cause.PRECISION, evidence)
    if origin is None:
        return Diagnosis(failure, Cause.MODEL_PRECISION_OR_DATA, evidence)
    return Diagnosis(failure, _BEHIND_THE_PLACE[origin.place], evidence)


def rows_that_raise(window: Window, healthy_inputs: Any) -> list[int]:
    """
    Rows of the micro-batch that was computed last that raise, each by itself and every time, where others do not: what
    all rows raise, or rows only together, is the code's.
    """
    index, experiments = len(window.calls) - 1, StepExperiments(window)
    try:
        with window.engine.retry.experiment():
            # Few: where it is the code, all of them raise, and the run has to end at once.
            others = experiments.rows_elsewhere(4) if healthy_inputs is None else [healthy_inputs]
            again = experiments.probe_batch(window.calls[index][1])
            layout = window.layout(index)
            if again or layout is None or (others and not any(map(experiments.probe_batch, others))):
                return []
            found = _bisect(experiments, index, list(range(layout.rows)), nonfinite=True)
            bad = [row for row in found if not experiments.probe_row(index, row)]
            return bad if len(bad) <= layout.rows * (1 if others else _MOST_POISON) else []
    except TrainingFault as fault:
        logger.info("Rows could not be tried alone.", exc_info=fault.error)
        return []


def _numerical(why: str) -> Diagnosis:
    return Diagnosis(FailureType.NONFINITE_NUMERICAL, Cause.NUMERICAL, {"why": why})


def find_poison_rows(experiments: StepExperiments, sizes: Sequence[int], device: Any) -> dict[int, list[int]]:
    """Finds the rows of each micro-batch that are non-finite by themselves, in forward or backward."""
    if processes.world_size() > 1:
        once = _probe_in_lockstep(experiments, [range(size) for size in sizes], device)
        twice = _probe_in_lockstep(experiments, once, device)
    else:
        # Every micro-batch, also those with a finite loss: a row may be bad in its gradient alone.
        once = [
            _bisect(experiments, index, list(range(size)), experiments.is_nonfinite(index))
            for index, size in enumerate(sizes)
        ]
        twice = [[row for row in rows if not experiments.probe_row(index, row)] for index, rows in enumerate(once)]
    return {index: rows for index, rows in enumerate(twice) if rows}


def _bisect(experiments: StepExperiments, index: int, rows: list[int], nonfinite: bool) -> list[int]:
    """Finds the rows that are non-finite by themselves among some that are known to be so together, or may be."""
    if len(rows) == 1:
        return [] if experiments.probe_row(index, rows[0]) else rows
    if not nonfinite and experiments.probe(index, rows):
        return []
    middle = len(rows) // 2
    found = _bisect(experiments, index, rows[:middle], nonfinite=False)
    # Where the first half has none, the other one must.
    return found + _bisect(experiments, index, rows[middle:], nonfinite=not found)


def _probe_in_lockstep(
    experiments: StepExperiments, candidates: Sequence[Sequence[int]], device: Any
) -> list[list[int]]:
    """Of some rows of each micro-batch, those that are non-finite by themselves."""
    found: list[list[int]] = [[] for _ in candidates]
    for index, rows in enumerate(candidates):
        place = 0
        while votes.any_rank("there is another row", place < len(rows), device):
            # A rank with fewer of them computes one all the same.
            finite = experiments.probe_row(index, rows[place] if place < len(rows) else 0)
            if not finite and place < len(rows):
                found[index].append(rows[place])
            place += 1
    return found


_UNEXPLAINED = Diagnosis(FailureType.DIVERGENCE, Cause.NOT_LOOKED_FOR)


def diagnose_rise(window: Window, rollback: Rollback, loss: float, level: float, scale: float) -> Diagnosis:
    """Finds out why a loss has risen and stays up, by computing the same batch with the weights of trusted states."""
    if not min(loss, level) > 0:
        return _UNEXPLAINED
    rise = max(math.log(loss / level), 2 * scale)

    def experiment() -> Diagnosis:
        before = rollback.last_healthy()
        evidence: dict[str, Any] = {"loss_now": loss}
        unharmed = None
        if before is not None:
            again = StepReplayer(window).loss_of(before)
            evidence["last_healthy_batch"] = {"loss_then": before.loss, "loss_now": again}
            unharmed = before if _rise(before.loss, again) < 0.5 * rise else None

        def better(then: StepSignals) -> bool:
            gained = _rise(then.loss, loss)
            if unharmed is not None and gained >= 0.5 * rise:
                gained -= max(_rise(unharmed.loss, StepReplayer(window).loss_of(unharmed)), 0.0)
            # Half of the rise, because the other half may be this batch.
            return gained >= 0.5 * rise

        found = _try_trusted_states(window, rollback, better)
        found.evidence.update(evidence)
        if found.cause is Cause.WEIGHTS:
            return found
        # A batch from before the rise, with weights from before it.
        control = rollback.try_snapshot(rollback.states.generations()[0])
        if control is None:
            return found
        again = StepReplayer(window).loss_of(control)
        found.evidence["earlier_batch"] = {"loss_then": control.loss, "loss_now": again}
        if _rise(control.loss, again) >= 0.5 * rise:
            return Diagnosis(FailureType.DIVERGENCE, Cause.COMPUTATION, found.evidence)
        return Diagnosis(FailureType.HARDER_DATA, Cause.HARDER_DATA, found.evidence)

    return _as_experiment(window, rollback, experiment)


def diagnose_stillness(
    window: Window, rollback: Rollback, still: StepSignals, first: float, scale: float
) -> Diagnosis:
    """
    Finds out why there is practically no gradient: with weights that a too high learning rate has driven out of reach
    there is none, and with those of a trusted state there is, and a lower loss.
    """
    least = max(1000 * (still.grad_norm or 0.0), 1e-4)
    # Weights that know no more than those the run began with are given up for any that can learn.
    nothing_learned = still.loss >= first * math.exp(-scale) > 0

    def better(then: StepSignals) -> bool:
        # By the least that counts as a rise, too.
        return (then.grad_norm or 0.0) >= least and (nothing_learned or _rise(then.loss, still.loss) >= scale)

    return _as_experiment(window, rollback, lambda: _try_trusted_states(window, rollback, better))


def _as_experiment(window: Window, rollback: Rollback, experiment: Callable[[], Diagnosis]) -> Diagnosis:
    """Runs what puts other weights in place; weights, gradients and random states are as before on return."""
    if window.objective.online or not rollback.states.set_aside(window.step):
        return _UNEXPLAINED
    try:
        with window.engine.retry.experiment():
            diagnosis = experiment()
    except TrainingFault as fault:
        logger.info("The step could not be computed with trusted weights.", exc_info=fault.error)
        diagnosis = _UNEXPLAINED
    finally:
        # Whatever happened, an interruption included: the weights are the run's own again.
        rollback.end_trial()
    if window.recompute_with_retry().finite:
        window.accept()
    else:
        # It was, when the run came to it: not applied like this.
        window.skip(None)
    return diagnosis


def _try_trusted_states(window: Window, rollback: Rollback, better: Callable[[StepSignals], bool]) -> Diagnosis:
    """The newest trusted state whose weights do better on the same batch; newer ones are not trusted any more."""
    tried: dict[str, Any] = {}
    for snapshot in rollback.states.generations():
        rollback.try_snapshot(snapshot)
        then = window.recompute_with_retry()
        tried[f"weights of step {snapshot.step}"] = {"loss": then.loss, "grad_norm": then.grad_norm}
        if better(then):
            rollback.prefer(snapshot)
            return Diagnosis(FailureType.DIVERGENCE, Cause.WEIGHTS, {"same_batch": tried})
    return Diagnosis(FailureType.DIVERGENCE, Cause.UNCLEAR, {"same_batch": tried})


def _rise(before: float, after: float) -> float:
    """How far a loss has risen, in logarithms; without end if it is not finite any more."""
    if not math.isfinite(after):
        return math.inf
    return math.log(after / before) if before > 0 and after > 0 else -math.inf
