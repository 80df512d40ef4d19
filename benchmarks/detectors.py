"""
How often the detectors cry wolf, and what they catch: on loss curves of real public runs, next to simple alternatives.

```bash
python benchmarks/detectors.py          # measures, and writes the tables into docs/benchmarks.md
python benchmarks/detectors.py --docs   # writes the tables anew from the figures there are
python benchmarks/detectors.py --power  # measures the curves of power alone
```

False alarms are counted on the healthy curves as they are and on block-bootstrap resamples of them: the trend of a
curve (local quadratic, 31 points) plus blocks of 20 residuals drawn from it, in log-loss and log-norm, so that noise,
its tails and its short memory stay what they were. Alarms less than 10 steps apart count once.

Power is measured by putting a fault into each healthy curve at every fifth position and asking whether there is an
alarm in time. "Matched" is our power with all thresholds scaled by one factor, the best of those with no more false
alarms than the alternative has: what the statistic can do, whatever one thinks of the thresholds.

What the public curves do not show is simulated: data that are not shuffled (correlated from one batch to the next, in
shards, sorted within each epoch, grouped by length), rare rows, heavy tails, a bump while the rate warms up, and
smaller batches half-way. Of these, and of the public curves, one of them of unshuffled data, the alarms that act are
counted: a step left out or clipped, and a divergence, which in a run an experiment with trusted weights would follow.
As the runs are healthy, the detectors are told what it would find. What nobody knows of a public curve is whether a
gradient of ten times the usual norm is a fault: it is noticed, as asked for below, and counted by itself.

The thresholds were chosen on the healthy curves in `tests/data/curves`. Those in `held_out`, from other repositories,
were collected afterwards and nothing was tuned on them.
"""

import argparse
import csv
import gzip
import json
import math
import pickle
import platform
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.table import Table

import self_healing
from self_healing import StepSignals
from self_healing.healers.numerics.detectors.divergence import DivergenceDetector
from self_healing.healers.numerics.detectors.panel import DetectorPanel
from self_healing.healers.numerics.detectors.spikes import NonFiniteDetector
from self_healing.hf.objective import BY_CLASS_NAME


CURVES = Path(__file__).parent.parent / "tests" / "data" / "curves"
HELD_OUT = CURVES / "held_out"
UNSHUFFLED = CURVES / "unshuffled_nanogpt_per_step.csv.gz"
RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
TREND_POINTS = 31
BLOCK = 20
REFRACTORY = 10
TEN_TIMES = 10.0
# Where a fault may be put first: the detectors have their baseline by then. Earlier ones are measured apart.
FIRST_POSITION = 50
EARLY_POSITION = 20
ALARMS = frozenset({"loss_spike", "divergence", "dead_loss"})
# A loss spike by itself holds checkpoints back, and nothing else.
ACTING = ALARMS - {"loss_spike"}


@dataclass(frozen=True)
class Curve:
    """Losses (nats) and, where they were logged, gradient norms of a run."""

    name: str
    losses: tuple[float, ...]
    norms: tuple[float, ...] | None

    def signals(self) -> Iterator[StepSignals]:
        for step, loss in enumerate(self.losses):
            yield StepSignals(step, loss, None if self.norms is None else self.norms[step])


def read_curve(path: Path) -> Curve:
    with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["loss"] and row.get("grad_norm") != ""]
    norms = tuple(float(row["grad_norm"]) for row in rows) if "grad_norm" in rows[0] else None
    return Curve(path.name.partition(".")[0], tuple(float(row["loss"]) for row in rows), norms)


def healthy_curves(directory: Path = CURVES, objective: str = "sft") -> list[Curve]:
    return [read_curve(path) for path in sorted(directory.glob(f"healthy_{objective}_*.csv"))]


def healthy_everywhere() -> list[Curve]:
    """The public SFT curves that are called healthy and whose norms are all finite, held-out ones included."""
    curves = healthy_curves() + healthy_curves(HELD_OUT)
    return [curve for curve in curves if all(signals.finite for signals in curve.signals())]


# ---- bootstrap ----


def trend(values: np.ndarray) -> np.ndarray:
    """Local quadratic fit at each point."""
    count, half = len(values), TREND_POINTS // 2
    fitted = np.empty(count)
    for i in range(count):
        first = max(0, min(i - half, count - TREND_POINTS))
        window = np.arange(first, min(first + TREND_POINTS, count))
        fitted[i] = np.polyval(np.polyfit(window - i, values[window], 2), 0)
    return fitted


def resamples(curve: Curve, steps: int, rng: np.random.Generator) -> Iterator[Curve]:
    """Curves with the trend of this one and residuals drawn from it in blocks, until there are `steps` in all."""
    columns = np.log(np.array([curve.losses] if curve.norms is None else [curve.losses, curve.norms]))
    trends = np.array([trend(column) for column in columns])
    # A fit of three parameters to 31 points takes a little of the noise with it.
    residuals = (columns - trends) * math.sqrt(TREND_POINTS / (TREND_POINTS - 3))
    count = len(curve.losses)
    for number in range(-(-steps // count)):
        starts = rng.integers(0, count - BLOCK + 1, size=-(-count // BLOCK))
        drawn = np.concatenate([residuals[:, start : start + BLOCK] for start in starts], axis=1)[:, :count]
        values = np.exp(trends + drawn)
        norms = None if curve.norms is None else tuple(values[1].tolist())
        yield Curve(f"{curve.name}/{number}", tuple(values[0].tolist()), norms)


# ---- simulated runs ----


@dataclass(frozen=True)
class Simulation:
    """
    Healthy runs of one kind: `make` gives what is added to log-loss and log-norm of a run of so many steps, of which
    the loss falls from 2.5 to 1.5 in half of the runs and is 2 in the others, with noise of 5 %, and the norm is 1
    with noise of 20 %.
    """

    name: str
    make: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]
    noisy: bool = True

    def curve(self, seed: int, steps: int) -> Curve:
        rng = np.random.default_rng(seed)
        losses, norms = self.make(rng, steps)
        losses = losses + (np.log(1.5 + np.exp(-np.arange(steps) / 1000)) if seed % 2 else math.log(2.0))
        if self.noisy:
            losses, norms = losses + 0.05 * rng.normal(size=steps), norms + 0.2 * rng.normal(size=steps)
        return Curve(self.name, tuple(np.exp(losses).tolist()), tuple(np.exp(norms).tolist()))


def _loss_only(losses: Callable[[np.random.Generator, int], np.ndarray], name: str, noisy: bool = True) -> Simulation:
    return Simulation(name, lambda rng, steps: (losses(rng, steps), np.zeros(steps)), noisy)


def _correlated(correlation: float) -> Simulation:
    def make(rng: np.random.Generator, steps: int) -> tuple[np.ndarray, np.ndarray]:
        values, innovations = np.empty(steps), rng.normal(size=steps) * math.sqrt(1 - correlation**2)
        value = rng.normal()
        for step in range(steps):
            value = correlation * value + innovations[step]
            values[step] = value
        return 0.05 * values, 0.2 * rng.normal(size=steps)

    return Simulation(f"neighbours alike, r = {correlation}", make, noisy=False)


def _in_shards(shortest: int, longest: int) -> Simulation:
    def losses(rng: np.random.Generator, steps: int) -> np.ndarray:
        pieces: list[np.ndarray] = []
        while sum(map(len, pieces)) < steps:
            pieces.append(np.full(rng.integers(shortest, longest), 0.1 * rng.normal()))
        return np.concatenate(pieces)[:steps]

    return _loss_only(losses, f"shards of {shortest} to {longest} steps, ± 10 %")


def _rare(share: float, factor: float, norm_factor: float) -> Simulation:
    def make(rng: np.random.Generator, steps: int) -> tuple[np.ndarray, np.ndarray]:
        rare = rng.random(steps) < share
        return rare * math.log(factor), rare * math.log(norm_factor)

    return Simulation(f"{100 * share:g} % of the batches with {factor:g} times the loss", make)


def _heavy_tails(rng: np.random.Generator, steps: int) -> tuple[np.ndarray, np.ndarray]:
    values = rng.standard_t(2, size=steps)
    return 0.05 * values, 0.2 * values + 0.1 * rng.normal(size=steps)


def _bump(highest_at: int) -> Simulation:
    def losses(rng: np.random.Generator, steps: int) -> np.ndarray:
        since = np.arange(steps) / highest_at
        return math.log(1.3) * np.where(since < 1, since, np.exp(np.minimum(1 - since, 0)))

    return _loss_only(losses, f"bump of 30 % at step {highest_at}")


def _smaller_batches(rng: np.random.Generator, steps: int) -> tuple[np.ndarray, np.ndarray]:
    wider = np.where(np.arange(steps) < steps // 2, 1.0, math.sqrt(8))
    norms = 0.2 * wider * rng.normal(size=steps) + np.log(wider)
    return 0.05 * wider * rng.normal(size=steps), norms


SIMULATIONS = (
    _loss_only(lambda rng, steps: np.zeros(steps), "shuffled"),
    *map(_correlated, (0.2, 0.4, 0.6, 0.8, 0.9)),
    _rare(0.03, 2, 4),
    _rare(0.01, 30, 30),
    Simulation("heavy tails (t, 2 degrees of freedom)", _heavy_tails, noisy=False),
    *map(_bump, (15, 25, 40)),
    Simulation("accumulation from 8 to 1", _smaller_batches, noisy=False),
    _loss_only(lambda rng, steps: 0.4 * (np.arange(steps) % 50 / 50 - 0.5), "grouped by length, ± 20 % in 50 steps"),
    _loss_only(lambda rng, steps: 0.3 * (np.arange(steps) % 1000 / 1000 - 0.5), "sorted in each epoch, ± 15 %"),
    _in_shards(100, 400),
    _in_shards(10, 50),
)
# What the detectors learn about a run they learn once: a run is as long as the public one on unshuffled data.
SIMULATED_STEPS = 20_000


# ---- detectors ----


class Alarm(Protocol):
    """Says of each step whether it is alarming."""

    def observe(self, signals: StepSignals) -> bool: ...


class Ours:
    """
    The detectors as the callback uses them for SFT: all that open an incident, or those that act, with or without
    having been told that a divergence was tried out and found harmless.
    """

    def __init__(
        self,
        factor: float = 1.0,
        apply: Collection[str] = DetectorPanel.DETECTORS,
        wanted: Collection[str] = ALARMS,
        tried_out: bool = False,
    ) -> None:
        self.wanted = wanted
        self.tried_out = tried_out
        self.panel = DetectorPanel(apply=apply, vocabulary=32_000)
        self.panel.loss_spike.threshold *= factor
        self.panel.gradient_spike.threshold *= factor
        self.panel.gradient_trend.reject_above *= factor
        self.panel.divergence = DivergenceDetector(
            limit=11.0 * factor, vocabulary=32_000 if "above_chance" in self.panel.apply else None
        )
        self.panel.co_spike_z *= factor
        self.nonfinite = NonFiniteDetector()
        self.rises = 0

    def observe(self, signals: StepSignals) -> bool:
        if self.nonfinite.observe(signals) is not None:
            return True
        alarm = self.panel.alarming(signals)
        self.panel.remember_spike(signals)
        if alarm is not None:
            return True  # left out, or clipped: no spike of the loss has to be looked for
        names = [symptom.name for symptom in self.panel.observe(signals)]
        if "divergence" in names:
            self.rises += 1
            if self.tried_out:
                self.panel.divergence.prove_harmless()
        return any(name in self.wanted for name in names)


class Rolling:
    """Mean + `sigmas` standard deviations of the last 128 losses and norms (OLMo-core's SkipStepOptimizer)."""

    def __init__(self, sigmas: float = 6.0, window: int = 128) -> None:
        self.sigmas = sigmas
        self.histories: list[deque[float]] = [deque(maxlen=window), deque(maxlen=window)]

    def observe(self, signals: StepSignals) -> bool:
        alarm = False
        for history, value in zip(self.histories, (signals.loss, signals.grad_norm), strict=True):
            if value is None:
                continue
            if len(history) >= 64:
                past = np.array(history)
                alarm = alarm or bool(value > past.mean() + self.sigmas * past.std(ddof=1))
            history.append(value)
        return alarm


class Ratio:
    """More than twice the median of the last 100 losses or norms."""

    def __init__(self) -> None:
        self.histories: list[deque[float]] = [deque(maxlen=100), deque(maxlen=100)]

    def observe(self, signals: StepSignals) -> bool:
        alarm = False
        for history, value in zip(self.histories, (signals.loss, signals.grad_norm), strict=True):
            if value is None:
                continue
            alarm = alarm or (len(history) >= 10 and value > 2 * median(history))
            history.append(value)
        return alarm


class EmaZ:
    """z above 2.5 of exponential moving averages of mean and variance, decay 0.97, after 25 steps."""

    def __init__(self) -> None:
        self.moments: list[list[float] | None] = [None, None]
        self.seen = 0

    def observe(self, signals: StepSignals) -> bool:
        alarm = False
        self.seen += 1
        for index, value in enumerate((signals.loss, signals.grad_norm)):
            if value is None:
                continue
            moments = self.moments[index]
            if moments is None:
                self.moments[index] = [value, 0.0]
                continue
            mean, variance = moments
            alarm = alarm or (self.seen > 25 and value > mean + 2.5 * math.sqrt(variance))
            mean = 0.97 * mean + 0.03 * value
            self.moments[index] = [mean, 0.97 * variance + 0.03 * (value - mean) ** 2]
        return alarm


class Fixed:
    """Loss above 5 for 3 steps in a row (as Axolotl's `loss_watchdog_threshold` is commonly set)."""

    def __init__(self) -> None:
        self.above = 0

    def observe(self, signals: StepSignals) -> bool:
        self.above = self.above + 1 if signals.loss > 5.0 else 0
        return self.above >= 3


ALTERNATIVES: dict[str, Callable[[], Alarm]] = {
    "OLMo mean + 6σ (128)": Rolling,
    "ratio > 2 × median": Ratio,
    "EMA z > 2.5": EmaZ,
    "fixed threshold 5.0": Fixed,
}


# ---- faults ----


@dataclass(frozen=True)
class Fault:
    """Changes the steps from a position on; has to be noticed within `within` steps."""

    name: str
    within: int
    change: Callable[[int, StepSignals], StepSignals]
    needs_norm: bool = False


def _add(nats: Callable[[int], float]) -> Callable[[int, StepSignals], StepSignals]:
    return lambda since, signals: replace(signals, loss=signals.loss + nats(since))


def _multiply_norm(times: float, since: int, signals: StepSignals) -> StepSignals:
    norm = signals.grad_norm
    return signals if since or norm is None else replace(signals, grad_norm=times * norm)


FAULTS = (
    Fault("spike +1", 1, _add(lambda since: 0.0 if since else 1.0)),
    Fault("spike +3", 1, _add(lambda since: 0.0 if since else 3.0)),
    Fault("shift +0.5", 10, _add(lambda since: 0.5)),
    Fault("ramp 0.01/step", 25, _add(lambda since: 0.01 * (since + 1))),
    Fault("NaN", 1, lambda since, signals: signals if since else replace(signals, loss=math.nan)),
    Fault("gradient × 10", 1, partial(_multiply_norm, 10), needs_norm=True),
)


# ---- figures ----


def alarms(curve: Curve, alarm: Alarm) -> list[int]:
    """Steps at which an alarm begins."""
    began: list[int] = []
    last = -math.inf
    for signals in curve.signals():
        if alarm.observe(signals):
            if signals.step - last > REFRACTORY:
                began.append(signals.step)
            last = signals.step
    return began


def delays(curve: Curve, make: Callable[[], Alarm], fault: Fault, positions: Sequence[int]) -> list[int | None]:
    """For each position, in which step of the fault it was noticed (1 is its first), `None` if not in time."""
    if fault.needs_norm and curve.norms is None:
        return []
    found: list[int | None] = []
    steps, alarm, wanted = list(curve.signals()), make(), set(positions)
    for position, signals in enumerate(steps):
        if position in wanted:
            copy = pickle.loads(pickle.dumps(alarm))
            window = steps[position : position + fault.within]
            changed = (fault.change(since, each) for since, each in enumerate(window))
            noticed = (since for since, each in enumerate(changed, start=1) if copy.observe(each))
            found.append(next(noticed, None))
        alarm.observe(signals)
    return found


def power(curves: Sequence[Curve], make: Callable[[], Alarm], fault: Fault, every: int = 5) -> dict[str, float]:
    """Share of the positions at which a fault is noticed in time, for each curve."""
    shares = {}
    for curve in curves:
        positions = range(FIRST_POSITION, len(curve.losses) - fault.within + 1, every)
        found = delays(curve, make, fault, positions)
        if found:
            shares[curve.name] = sum(delay is not None for delay in found) / len(found)
    return shares


# By what is changed: how soon it has to be noticed, and what a size of it does.
SIZED: dict[str, tuple[str, int, Sequence[float], Callable[[float], Callable[[int, StepSignals], StepSignals]]]] = {
    "spike": ("nats, in one step", 1, (0.25, 0.5, 0.75, 1, 1.5, 2, 3), lambda nats: _add(lambda s: 0 if s else nats)),
    "shift": ("nats, for 10 steps", 10, (0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1), lambda nats: _add(lambda _: nats)),
    "ramp": (
        "nats a step, for 25 steps",
        25,
        (0.002, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05),
        lambda nats: _add(lambda since: nats * (since + 1)),
    ),
    "gradient": (
        "times its norm, in one step",
        1,
        (1.5, 2, 3, 4, 6, 8, 10),
        lambda times: partial(_multiply_norm, times),
    ),
}


def power_curves(every: int) -> dict[str, Any]:
    """Power by the size of the fault: ours, and the alternative that is closest to it."""
    curves, found = healthy_curves(), dict[str, Any]()
    for name, (unit, within, sizes, change) in SIZED.items():
        faults = [Fault(f"{name} {size}", within, change(size), name == "gradient") for size in sizes]
        lines = {
            who: [fmean(power(curves, make, fault, every).values()) for fault in faults]
            for who, make in {"self_healing": Ours, "OLMo mean + 6σ (128)": Rolling}.items()
        }
        found[name] = {"unit": unit, "sizes": sizes, "power": lines}
    return found


def figures(make: Callable[[], Alarm], curves: Sequence[Curve], bank: Sequence[Curve], every: int) -> dict[str, Any]:
    """False alarms and power of one detector."""
    healthy_steps = sum(len(curve.losses) for curve in curves)
    healthy = sum(len(alarms(curve, make())) for curve in curves)
    steps = sum(len(curve.losses) for curve in bank)
    false = sum(len(alarms(curve, make())) for curve in bank)
    result: dict[str, Any] = {
        "false_alarms_on_curves": healthy,
        "false_alarms_per_1000_steps_on_curves": 1000 * healthy / healthy_steps,
        "false_alarms_on_bootstrap": false,
        "bootstrap_steps": steps,
        "false_alarms_per_1000_steps_on_bootstrap": 1000 * false / steps,
        "power": {},
        "power_by_curve": {},
        "median_delay": {},
        "power_from_step_20_to_49": {},
    }
    for fault in FAULTS:
        shares = power(curves, make, fault, every)
        early, late = [], []
        for curve in curves:
            early += delays(curve, make, fault, range(EARLY_POSITION, FIRST_POSITION, 5))
            late += delays(curve, make, fault, range(FIRST_POSITION, len(curve.losses) - fault.within + 1, every))
        noticed = [delay for delay in late if delay is not None]
        result["power"][fault.name] = fmean(shares.values())
        result["power_by_curve"][fault.name] = shares
        result["median_delay"][fault.name] = median(noticed) if noticed else None
        result["power_from_step_20_to_49"][fault.name] = sum(delay is not None for delay in early) / len(early)
    return result


def held_out(directory: Path = HELD_OUT) -> dict[str, Any]:
    """Alarms on the curves nothing was tuned on, with the detectors that apply to each objective."""
    detectors = {each.name: each.detectors for each in BY_CLASS_NAME.values() if each.name in ("sft", "dpo", "grpo")}
    found: dict[str, Any] = {}
    for path in sorted(directory.glob("*.csv")):
        curve = read_curve(path)
        apply = detectors[path.stem.split("_")[1]]
        # A norm that is not finite is a fault of that run and no false alarm.
        seen = alarms(curve, Ours(apply=apply))
        nonfinite = {signals.step for signals in curve.signals() if not signals.finite}
        found[path.stem] = {"steps": len(curve.losses), "alarms": [step for step in seen if step not in nonfinite]}
    return found


def ten_times_the_usual(run: Curve, step: int) -> bool:
    """Whether the gradient norm of a step is ten times the median of the hundred before."""
    if run.norms is None or step == 0:
        return False
    return run.norms[step] >= TEN_TIMES * median(run.norms[max(0, step - 100) : step])


def acting_alarms(runs: Sequence[Curve], public: bool = False) -> dict[str, Any]:
    """
    Alarms that act, on healthy runs of one kind; each counts, however near the last. A divergence does so by way of an
    experiment with trusted weights, and is also counted by itself; so are, on public runs, tenfold gradients.
    """
    by_run, rises, tenfold = [], 0, 0
    for run in runs:
        ours = Ours(wanted=ACTING, tried_out=True)
        found = [signals.step for signals in run.signals() if ours.observe(signals)]
        tenfold += sum(public and ten_times_the_usual(run, step) for step in found)
        by_run.append(len(found))
        rises += ours.rises
    steps, alarms = sum(len(run.losses) for run in runs), sum(by_run)
    return {
        "steps": steps,
        "alarms": alarms,
        "divergences": rises,
        "tenfold_gradients": tenfold,
        "by_run": by_run,
        "false_per_1000_steps": 1000 * (alarms - tenfold) / steps,
    }


def unshuffled(seeds: Sequence[int], simulations: Sequence[Simulation] = SIMULATIONS) -> dict[str, Any]:
    """Alarms that act on a public run on unshuffled data, and on simulated ones of each kind."""
    found = {UNSHUFFLED.name.partition(".")[0]: acting_alarms([read_curve(UNSHUFFLED)], public=True)}
    for simulation in simulations:
        runs = [simulation.curve(seed, SIMULATED_STEPS) for seed in seeds]
        found[simulation.name] = acting_alarms(runs)
    return found


# For the trade-off curve, and to match the false alarms of the alternatives.
FACTORS = (0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.5)


def least_gain(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[float, float]:
    """How far our power is above theirs for the fault where that is least, and on average."""
    gains = [ours["power"][fault.name] - theirs["power"][fault.name] for fault in FAULTS]
    return min(gains), fmean(gains)


def measure(steps: int, every: int, seed: int, runs: int) -> dict[str, Any]:
    curves = healthy_curves()
    rng = np.random.default_rng(seed)
    bank = [each for curve in curves for each in resamples(curve, -(-steps // len(curves)), rng)]
    trade_off = {factor: figures(lambda factor=factor: Ours(factor), curves, bank, every) for factor in FACTORS}
    alternatives = {}
    for name, make in ALTERNATIVES.items():
        theirs = figures(make, curves, bank, every)
        allowed = theirs["false_alarms_on_bootstrap"]
        no_worse = [factor for factor in FACTORS if trade_off[factor]["false_alarms_on_bootstrap"] <= allowed]
        # None has as few as the fixed threshold, which has no alarms at all: then ours with the fewest.
        matched = max(no_worse or FACTORS[-1:], key=lambda factor: least_gain(trade_off[factor], theirs))
        alternatives[name] = {
            **theirs,
            "matched": {
                "factor": matched,
                "false_alarms_on_bootstrap": trade_off[matched]["false_alarms_on_bootstrap"],
                "power": trade_off[matched]["power"],
            },
        }
    return {
        "what": "false alarms and power of the step detectors on public loss curves",
        "command": f"python benchmarks/detectors.py --steps {steps} --every {every} --seed {seed} --runs {runs}",
        "curves": {curve.name: len(curve.losses) for curve in curves},
        "ours": trade_off[1.0],
        "held_out": held_out(),
        "acting": {
            **{curve.name: acting_alarms([curve], public=True) for curve in healthy_everywhere()},
            **unshuffled(range(runs)),
        },
        "alternatives": alternatives,
        "trade_off": {
            str(factor): {key: each[key] for key in ("false_alarms_on_bootstrap", "power")}
            for factor, each in trade_off.items()
        },
        "power_curves": power_curves(every),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "self_healing": self_healing.__version__,
        },
    }


def markdown(result: dict[str, Any]) -> str:
    """The table of `docs/benchmarks.md`."""
    names = [fault.name for fault in FAULTS]
    lines = [
        f"| detector | false alarms in {result['ours']['bootstrap_steps']:,} steps | {' | '.join(names)} |",
        "|---|---|" + "---|" * len(names),
    ]

    def row(title: str, false: int, power: dict[str, float]) -> str:
        return f"| {title} | {false:,} | " + " | ".join(f"{100 * power[name]:.1f} %" for name in names) + " |"

    ours = result["ours"]
    lines.append(row("**self_healing**", ours["false_alarms_on_bootstrap"], ours["power"]))
    for name, each in result["alternatives"].items():
        lines.append(row(name, each["false_alarms_on_bootstrap"], each["power"]))
        matched = each["matched"]
        lines.append(
            row(f"… ours, matched (× {matched['factor']})", matched["false_alarms_on_bootstrap"], matched["power"])
        )
    return "\n".join(lines)


def by_curve(result: dict[str, Any]) -> str:
    """Our power curve by curve."""
    names = [fault.name for fault in FAULTS]
    lines = [f"| curve | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for curve in result["curves"]:
        shares = (result["ours"]["power_by_curve"][name].get(curve) for name in names)
        cells = " | ".join("–" if share is None else f"{100 * share:.1f} %" for share in shares)
        lines.append(f"| `{curve}` | {cells} |")
    return "\n".join(lines)


def page_with_tables(page: str, result: dict[str, Any]) -> str:
    """The page with the text between its marks replaced by the tables."""
    for mark, table in (
        ("detectors", markdown(result)),
        ("curves", by_curve(result)),
        ("acting", acting(result)),
        ("held out", elsewhere(result)),
    ):
        begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n\n{table}\n\n{end}{after}"
    return page


def acting(result: dict[str, Any]) -> str:
    """Alarms that act, on what is not in the bootstrap."""
    lines = [
        "| healthy runs | steps | acting alarms | of these divergences, tried out first | gradients of ten times the "
        "usual norm | the others, per 1,000 steps |",
        "|---|---|---|---|---|---|",
    ]
    for name, each in result["acting"].items():
        shown = f"`{name}`" if "_" in name else name
        runs = len(each["by_run"])
        steps = f"{runs} × {each['steps'] // runs:,}" if runs > 1 else f"{each['steps']:,}"
        counted = f"{each['alarms']} | {each['divergences']} | {each['tenfold_gradients']}"
        lines.append(f"| {shown} | {steps} | {counted} | {each['false_per_1000_steps']:.2f} |")
    return "\n".join(lines)


def elsewhere(result: dict[str, Any]) -> str:
    """Alarms on the curves that nothing was tuned on."""
    lines = ["| curve | steps | alarms begin at row |", "|---|---|---|"]
    for name, each in result["held_out"].items():
        lines.append(f"| `{name}` | {each['steps']:,} | {', '.join(map(str, each['alarms'])) or '–'} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--steps", type=int, default=100_000, help="bootstrap steps, over all curves")
    parser.add_argument("--every", type=int, default=5, help="distance between the positions of a fault")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    parser.add_argument("--runs", type=int, default=6, help="simulated runs of each kind")
    parser.add_argument("--output", type=Path, default=RESULTS / "detectors.json", help="JSON file")
    parser.add_argument("--docs", action="store_true", help="only write the tables of docs/benchmarks.md anew")
    parser.add_argument("--power", action="store_true", help="only measure power by the size of a fault anew")
    options = parser.parse_args()
    if options.docs or options.power:
        result = json.loads(options.output.read_text(encoding="utf-8"))
    else:
        result = measure(options.steps, options.every, options.seed, options.runs)
    if options.power:
        result["power_curves"] = power_curves(options.every)
    if not options.docs:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if options.output == RESULTS / "detectors.json":
        PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8"), result), encoding="utf-8")
    table = Table(title="Detectors: false alarms and power", header_style="bold")
    for line, row in enumerate(markdown(result).splitlines()):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if line == 0:
            for cell in cells:
                table.add_column(cell, justify="right" if table.columns else "left")
        elif line > 1:
            table.add_row(*cells)
    console = Console(highlight=False)
    console.print(table)
    console.print(f"Written to {options.output}", soft_wrap=True)


if __name__ == "__main__":
    main()
