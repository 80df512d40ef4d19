"""Guards the training data, opens incidents for bad samples, and ends a run that has too many of them."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from ...failures.recipes import Action, FailureType
from ...failures.retry import RetryPolicy
from ...hf.dataloader import TrainingLoader
from ...run.healer import Healer, HealingContext
from ...run.run import Run
from ...system import processes
from ..inspection import digest_of
from .datasets import GuardedCollator, GuardedDataset
from .guard import DataSourceError, Guard
from .quarantine import BadSample, KnownBadSamples, Quarantine, describe_name
from .streams import GivenLast, GuardedStream


logger = logging.getLogger("self_healing")

# `max_bad_fraction` is of this many samples at least: the first batch of a run says little.
_FEWEST_SAMPLES = 100
# Bad samples that are named where a run ends.
_LISTED = 20


class SampleHealer(Healer):
    """Guards the data of a run, and reports what the guards find."""

    def __init__(self, run: Run, calls: Any) -> None:
        # `ServiceCalls`, of a family that this one does not import.
        self.run = run
        self.config = run.config
        self.actions = run.remedies
        self.calls = calls
        self._quarantine = run.part(Quarantine)
        self._loading: TrainingLoader | None = None
        # Where bad samples are replaced.
        self._known: KnownBadSamples | None = None

    def attach(self, first: bool) -> None:
        """Guards the training data. A loader of a kind that cannot be guarded is left as it is."""
        instrument, run = self.run.instrument, self.run
        loading, args = TrainingLoader(instrument.trainer), instrument.trainer.args
        if loading.dataset is None:
            logger.info("The training data are not guarded: their loader is of a kind that cannot be.")
            return
        fingerprint = dataset_fingerprint(loading.dataset)
        names_only = self.config.on_bad_sample == "raise"
        if names_only:
            known = KnownBadSamples(
                str(self._quarantine.path), run.run_id, fingerprint, {}, keep_text=self.config.quarantine_text
            )
        else:
            known = self._quarantine.watch(run.run_id, fingerprint, args.process_index, instrument.view.step)
            known.take()
        seed = args.seed if args.data_seed is None else args.data_seed
        guard = Guard(known, int(seed), self._retry(loading), names_only, loading.has_workers)
        if not loading.has_workers:
            guard.alive = run.heartbeat.start_over
            guard.began = self._stream_began
        guarded: GuardedStream | GuardedDataset
        if loading.streams:
            guarded = GuardedStream(loading.dataset, guard, None if loading.has_workers else self._given(loading))
        else:
            guarded = GuardedDataset(loading.dataset, guard)
        loading.read_from(guarded, GuardedCollator(loading.collate, guard, guarded))
        instrument.on_detach.append(loading.restore)
        instrument.on_detach.append(partial(setattr, guard, "off", True))
        if names_only:
            return
        self._loading, self._known = loading, known
        if isinstance(guarded, GuardedDataset):
            instrument.position.actual = guarded.actual

    def _retry(self, loading: TrainingLoader) -> Callable[..., Any]:
        if loading.has_workers:
            # It goes to another process, where there is no journal.
            return RetryPolicy.of(self.config).call
        # A sample that could not be loaded leaves nothing behind that would have to be rewound.
        return partial(self.calls.call, "the training data", lambda: None)

    def _given(self, loading: TrainingLoader) -> GivenLast | None:
        """What the stream gave last, where `train()` may be entered again: the batches that were not trained on."""
        if not self.run.wrapped or processes.world_size() > 1:
            return None
        if self._quarantine.given is None:
            # Those of a step, and one that is fetched ahead; another one for a step that was just finished.
            batches = int(self.run.instrument.trainer.args.gradient_accumulation_steps) + 2
            self._quarantine.given = GivenLast(deque(maxlen=batches * loading.samples_per_batch))
        given: GivenLast = self._quarantine.given
        return given

    def _stream_began(self, sample: Any) -> bool:
        """Whether a stream begins with another row than before; read on from there, it may be at the wrong place."""
        journal, row = self.run.journal, digest_of({"row": sample})
        epoch = int((self.run.instrument.trainer.state.epoch or 0) + 1e-6)
        elsewhere = self._quarantine.first_rows.setdefault(epoch, row) != row
        if elsewhere and journal.incidents:
            journal.doubt = (
                "the stream has not begun again at its first row, and is read on from where it stands: unless that is "
                "where it was left, rows may have been skipped twice"
            )
            journal.dealt_with(journal.incidents[-1])
        return elsewhere

    def fetch_failed(self, error: BaseException) -> None:
        # The others of several ranks wait: there it ends the job like any error, and the next start goes on.
        alone = processes.world_size() == 1
        if alone and self._known is not None and isinstance(error, DataSourceError):
            self._end("broken_data_source", {"message": str(error)[:2000]}, str(error), error)

    def fetched(self) -> None:
        loading, known = self._loading, self._known
        if loading is None or known is None:
            return
        if loading.has_workers:
            known.read_new_lines()
        if known.new or known.retried:
            self._take_in(loading, known)

    def _take_in(self, loading: TrainingLoader, known: KnownBadSamples) -> None:
        """Reports what the guards have found since the last step, and ends the run if it is too much."""
        new, retried = known.take()
        self._quarantine.share([(sample.name, sample.why) for sample in new])
        given_up = self.calls.take_back() if new else None
        if given_up is not None:
            # The call was that of a sample which has been replaced: there is nothing left to enter again for.
            self.run.dealing_with(given_up).close("resolved")
        self._report(new, retried)
        # By all ranks, as the bad samples are those of all.
        steps, accumulation = self.run.step + 1, int(self.run.trainer.args.gradient_accumulation_steps)
        drawn = steps * accumulation * loading.samples_per_batch * processes.world_size()
        whole = math.inf if loading.samples is None else loading.samples
        bad, limit = known.bad, self.config.max_bad_fraction * min(whole, max(drawn, _FEWEST_SAMPLES))
        if len(bad) > limit:
            self._end_for_too_many(bad, limit, drawn)

    def _report(self, new: Sequence[BadSample], retried: Sequence[str]) -> None:
        evidence: dict[str, Any] = {"samples": [asdict(sample) for sample in new]}
        if retried:
            evidence["retried"] = list(retried)
        named = [str(sample) for sample in new] or list(retried)
        cause = "; ".join(named[:5]) + (f"; and {len(named) - 5} more" if len(named) > 5 else "")
        with self.run.incident(self.run.instrument.view.step, "bad_sample", evidence) as opened:
            opened.diagnosed(FailureType.BAD_DATA, cause)
            opened.acted(Action.RETRY_CALL)
            if new:
                path = str(self._quarantine.path)
                opened.acted(Action.QUARANTINE_SAMPLE, file=path, samples=[each.name for each in new])
                opened.acted(Action.REPLACE_SAMPLE, by=[each.replaced_by for each in new])
            opened.close("resolved")

    def _end_for_too_many(self, bad: dict[Any, str], limit: float, drawn: int) -> None:
        listed = "; ".join(f"{describe_name(name)} ({why[:120]})" for name, why in list(bad.items())[:_LISTED])
        more = f"; and {len(bad) - _LISTED} more in {self._quarantine.path}" if len(bad) > _LISTED else ""
        verdict = (
            f"{len(bad)} samples among {drawn} drawn so far and their substitutes cannot be used, which is more than "
            f"max_bad_fraction={self.config.max_bad_fraction:g} allows ({int(limit)}): {listed}{more}"
        )
        self._end("too_many_bad_samples", {"bad": len(bad), "limit": limit, "drawn": drawn}, verdict, None)

    def _end(self, symptom: str, evidence: dict[str, Any], verdict: str, error: Exception | None) -> None:
        instrument = self.run.instrument
        with self.run.incident(instrument.view.step, symptom, evidence) as opened:
            opened.diagnosed(FailureType.BAD_DATA, symptom.replace("_", " "))
            context = HealingContext(opened.incident, instrument, verdict=verdict, error=error)
            self.actions.apply((Action.EMERGENCY_CHECKPOINT, Action.STOP), context, instrument.trainer.args)


def dataset_fingerprint(dataset: Any) -> str:
    """Fingerprint of a data set: where it is the same, an index names the same sample."""
    own = getattr(dataset, "_fingerprint", None)
    if isinstance(own, str):
        return own
    try:
        length: int | None = len(dataset)
    except Exception:
        length = None
    return f"{type(dataset).__module__}.{type(dataset).__qualname__}:{length}"
