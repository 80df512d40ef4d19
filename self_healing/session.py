"""What one run remembers, however often `train()` is entered: journal, trend, policy, budget, where to resume."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from . import consensus
from .attempts import Attempts
from .budget import RecoveryBudget
from .checkpoints.checksums import ChecksumQueue
from .checkpoints.choice import newest_checkpoint_of
from .checkpoints.marker import step_of
from .checkpoints.owed import bookkeeping_now
from .claims import Claimant
from .classify import describe_exception
from .config import HealingConfig
from .data import Quarantine
from .failures import Action, FailureType
from .incident import Incident
from .instrument import Instrument, ResumePoint, is_training, save_generated
from .instrument.sections import Heartbeat
from .journal import Journal
from .memory_remedies import MemoryState
from .microbatch import SizeMemory
from .numerics_state import NumericsState
from .preemption import Preemption
from .rollback import Rollback
from .run.context import RunContext
from .run.outcomes import Outcomes
from .run.remedies import Remedies
from .run_record import Ending
from .run_status import RunState, StatusKeeper
from .saved_state import take_over_whole
from .watchdog import Watchdog


if TYPE_CHECKING:
    from .disk import SaveHealer
    from .reporting import Reporting

logger = logging.getLogger("self_healing")


class Session:
    """
    The memory of one run.

    Args:
        config ([`HealingConfig`]):
            The configuration in force.
        directory (`Path`):
            Where journal, quarantine and postmortem go.
        rank (`int`, *optional*, defaults to 0):
            This process.
        sleep (`Callable[[float], None]`, *optional*):
            How waiting is done, in seconds. Defaults to `time.sleep`, cut short by a preemption.
        run_id (`str`, *optional*):
            Of the run that an earlier process began; a new one otherwise, on which all ranks agree: they have to come
            here together.
        may_enter_again (`bool`, *optional*, defaults to `False`):
            Whether an exception may leave `train()` to be healed outside, where it is entered again.
    """

    def __init__(
        self,
        config: HealingConfig,
        directory: Path,
        rank: int = 0,
        sleep: Callable[[float], None] | None = None,
        run_id: str | None = None,
        may_enter_again: bool = False,
    ) -> None:
        self.config = config
        heartbeat = Heartbeat(config.hang_learning_steps)
        run_id = run_id or new_run_id()
        journal = Journal(directory, config, run_id, rank)
        self.run = RunContext(
            config=config,
            directory=directory,
            run_id=run_id,
            started_at=time.time(),
            may_enter_again=may_enter_again,
            journal=journal,
            outcomes=Outcomes(
                journal,
                config.outcome_steps,
                lambda: self.numerics.detector.trend(),
                lambda: self.numerics.early_limit,
            ),
            remedies=Remedies(journal),
            budget=RecoveryBudget(config),
            heartbeat=heartbeat,
            sleep=heartbeat.pausing(sleep or self._sleep_until_preempted),
            leave_asked=lambda: self.preempted,
        )
        self.quarantine = Quarantine(directory, config.quarantine_text)
        self.numerics = NumericsState(config, self.journal, self.budget, self.outcomes)
        self.attempts = Attempts(self.run, self.numerics)
        self.rollback = Rollback(config, self.journal, self.numerics.remember, self.numerics.recall)
        self.memory = MemoryState(SizeMemory(config.oom_probe_steps))
        self.memory_metrics: Callable[[], dict[str, float]] = dict
        # Asked in this order whose an exception is that leaves `train()`.
        self.claimants: tuple[Claimant, ...] = ()
        self.saves: SaveHealer | None = None
        # What keeps trackers and Hub from training for the time of the wrapper's `train()`.
        self.reporting: Reporting | None = None
        self.checksums = ChecksumQueue()
        self.resume_point: ResumePoint | None = None
        self.broken = False
        # What lies on the device is neither touched nor freed any more.
        self.device_lost = False
        # Told to whoever looks; by the first process.
        self.status: StatusKeeper | None = None
        self.leaving = False
        self.preemption = Preemption(
            config.preemption_deadline,
            self._may_be_interrupted,
            lambda: 0.0 if self.instrument is None else self.instrument.saves.longest,
            self._still_training,
            self._end_at_the_deadline,
        )
        self.watchdog: Watchdog | None = None

    @property
    def directory(self) -> Path:
        return self.run.directory

    @property
    def run_id(self) -> str:
        return self.run.run_id

    @property
    def journal(self) -> Journal:
        return self.run.journal

    @property
    def outcomes(self) -> Outcomes:
        return self.run.outcomes

    @property
    def remedies(self) -> Remedies:
        return self.run.remedies

    @property
    def budget(self) -> RecoveryBudget:
        return self.run.budget

    @property
    def heartbeat(self) -> Heartbeat:
        return self.run.heartbeat

    @property
    def sleep(self) -> Callable[[float], None]:
        return self.run.sleep

    @property
    def started_at(self) -> float:
        return self.run.started_at

    @property
    def may_enter_again(self) -> bool:
        return self.run.may_enter_again

    @property
    def instrument(self) -> Instrument | None:
        return self.run.attachment.instrument

    @instrument.setter
    def instrument(self, instrument: Instrument | None) -> None:
        self.run.attachment.instrument = instrument

    @property
    def stop_for(self) -> Incident | None:
        return self.run.stop.incident

    @stop_for.setter
    def stop_for(self, incident: Incident | None) -> None:
        self.run.stop.incident = incident

    def watch_for_hangs(self, instrument: Instrument) -> Watchdog:
        """Watches the signs of life of one `train()` call, until the trainer is itself again."""
        if self.watchdog is None:
            self.watchdog = Watchdog(
                self.config,
                self.heartbeat,
                self.journal,
                may_recover=lambda: self.may_enter_again,
                before_exit=self.about_to_be_restarted,
                step=lambda: self.run.step,
                still_training=self._still_training,
                at_the_end=lambda: self.instrument is not None and self.instrument.view.at_the_end,
                over=self._ended_without_a_word,
                counts_attempts=lambda: self.attempts.record is not None,
            )
        try:
            self.watchdog.start()
        except Exception:
            logger.warning("Hangs are not watched for in this run.", exc_info=True)
        instrument.on_detach.append(self.watchdog.stop)
        if self.attempts.entries > 1 and instrument.view.streams:
            # Skipping what a stream has given takes no longer than consuming it did.
            self.heartbeat.be_patient("data", at_least=time.time() - self.started_at)
        if instrument.view.loader_workers > 0:
            # They wait before another attempt as well, and cannot say so from where they are.
            self.heartbeat.allow("data", self.config.retry_total_seconds + self.config.hang_floor_seconds)
        return self.watchdog

    def tell_status(self, output_dir: Path, max_steps: int) -> None:
        """Tells whoever looks into the `output_dir` that the run goes on, until the trainer is itself again."""
        instrument = self.instrument
        if self.journal.rank != 0 or instrument is None:
            return
        if self.attempts.record is not None and not self.attempts.record.kept:
            # The status is that of the process that trained there first, as the record is.
            return
        self.status = self.status or StatusKeeper(output_dir)
        self.status.begin(
            self.run_id, self.journal.path, instrument.view.step, max_steps, marks=self.attempts.record is None
        )
        if self.attempts.record is None:
            instrument.on_detach.append(lambda: self._left(instrument))

    def _left(self, instrument: Instrument) -> None:
        """The trainer is given back; without the wrapper, an exception on its way out of `train()` is the end."""
        error = sys.exc_info()[1]
        if error is not None and not instrument.failsafe.switched_off and self.status is not None:
            self.status.end(RunState.STOPPED, instrument.view.step, describe_exception(error))

    def _ended_without_a_word(self) -> None:
        self.preemption.forget()
        if self.status is not None:
            step = self.run.step
            self.status.end(RunState.STOPPED, step, "an exception that this callback was not told of")

    def metrics(self, training: bool, summary: bool = False) -> dict[str, float]:
        """What is added to the trainer's logs; the statistic of clipping only to those of training steps."""
        # The log that sums up the run is written before what is open is closed.
        found = self.journal.metrics(self.outcomes.resolved_at_the_end if summary else 0)
        if self.config.healing_metrics:
            found |= self.memory_metrics()
        return found | self.numerics.metrics(None if self.instrument is None else self.instrument.view.step, training)

    def about_to_be_restarted(self, why: str) -> None:
        """The process is about to end, and a launcher starts it again."""
        self.end_attempt(Ending.RESTART, why)

    # ---- the machine is asked for back ----

    @property
    def preempted(self) -> bool:
        """Whether this process was asked to leave."""
        return self.preemption.requested is not None

    def _sleep_until_preempted(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while not self.preempted and (left := ends - time.monotonic()) > 0:
            time.sleep(min(left, 0.5))

    def _may_be_interrupted(self) -> bool:
        """Whether the step can be left where it is: only where `train()` is entered again is anything saved of it."""
        return self.may_enter_again and self.instrument is not None and self.instrument.may_be_left

    def _still_training(self, frame: Any) -> bool:
        # The wrapper takes its handlers back whatever happens.
        return self.attempts.record is not None or (
            self.instrument is not None and is_training(self.instrument.trainer, frame)
        )

    def leave(self, step: int, output_dir: str, checkpoint: str | None = None) -> NoReturn:
        """
        The machine was asked for back and what there is to save is saved: the process ends.

        Args:
            step (`int`):
                Optimizer steps finished.
            output_dir (`str`):
                Where checkpoints lie.
            checkpoint (`str`, *optional*):
                What a restart goes on from. Defaults to the newest of the run.

        Raises:
            SystemExit: With 143 after SIGTERM and 75 after SIGUSR1, or whatever a handler that was there before ours
                has raised.
        """
        preemption, journal = self.preemption, self.journal
        name = "another process was asked to leave" if preemption.requested is None else preemption.requested.name
        checkpoint = checkpoint or newest_checkpoint_of(self.run_id, output_dir)
        incident = journal.open(step, "preempted", {"signal": name})
        journal.diagnosed(incident, FailureType.PREEMPTED, name, {})
        code = preemption.exit_code
        journal.acted(incident, Action.SAVE_AND_LEAVE.value, checkpoint=checkpoint, exit_code=code)
        incident.steps_repeated = step if checkpoint is None else max(step - step_of(checkpoint, default=step), 0)
        self.close_outcomes()
        journal.dealt_with(incident)
        journal.closed(incident, "unresolved" if checkpoint is None else "resolved")
        self.end_attempt(Ending.PREEMPTED, name)
        if self.status is not None:
            self.status.end(RunState.LEFT, step, name)
        if preemption.raised is not None:
            raise preemption.raised
        raise SystemExit(code)

    def _end_at_the_deadline(self, why: str) -> None:
        self.journal.event("preemption_deadline", self.run.step, why=why)
        self.end_attempt(Ending.PREEMPTED, why)

    # ---- outcomes ----

    def close_outcomes(self, unfollowed: str | None = None) -> None:
        """
        At the end of the run, or of this process's part in it: judges what is still open by the steps there were.

        Args:
            unfollowed (`str`, *optional*):
                The outcome of what ended an earlier process, where the run has not come beyond it. Left open by
                default, for the next process to judge.
        """
        # No healthy step has come after them.
        self.numerics.repeatability.tell(self.run.step)
        self.outcomes.close(unfollowed)
        self.numerics.watch.end()

    def close_as_fatal(self, incident: Incident) -> None:
        """The run ends with this incident: it is closed, and with it what was still waiting to be judged."""
        self.outcomes.drop(incident)
        if self.numerics.watch.incident is incident:
            self.numerics.watch.forget()
        self.close_outcomes(unfollowed="unresolved")
        self.journal.closed(incident, "fatal")

    # ---- state that outlives the process ----

    def begin_from_older(self, checkpoint: str, step: int) -> None:
        """
        The checkpoint that was resumed from is damaged: what was learned from it is forgotten, and read anew from an
        older one when `train()` is entered the next time, as a new process would.
        """
        self.outcomes.nothing_lost_since(step)
        self.rollback.start_over()
        self.numerics.forget()
        self.outcomes.trust_again()
        self.stop_for = self.resume_point = None
        self.attempts.begin_from_older(checkpoint, step)

    def about_to_save(self, step: int) -> None:
        """
        A regular checkpoint is about to be written. It is one as soon as the Trainer has written its state, last of
        all: a process that is killed before it is marked must have left by then what belongs to it.
        """
        self.rollback.about_to_save(step)
        if self.instrument is None:
            return
        checkpoint = Path(self.instrument.trainer.args.output_dir) / f"checkpoint-{step}"
        self.attempts.about_to_write(checkpoint, bookkeeping_now(self.instrument))
        # Written once more with the marker: there the disk may have room that rotation has made.
        with contextlib.suppress(OSError, RuntimeError):
            save_generated(self.instrument.trainer, checkpoint)

    def end_attempt(self, ending: Ending, why: str = "") -> None:
        """Writes down how this process's part in the run ends; what was written first counts."""
        self.attempts.end(ending, why, self.status)

    def state_dict(self) -> dict[str, Any]:
        return {
            **self.outcomes.state_dict(),
            "rate_after_reduction": self.numerics.rate_after_reduction,
            **{name: part.state_dict() for name, part in self._parts().items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        reduced = state.get("rate_after_reduction")
        self.numerics.rate_after_reduction = reduced if isinstance(reduced, float) else None
        if not self.attempts.taken_up:
            self.outcomes.load_state_dict(state)
        for name, part in self._parts().items():
            # Written by an earlier version of the library, or with other settings.
            if name in state and not take_over_whole(part, state[name]):
                logger.warning(
                    "What %r has learned cannot be taken from the checkpoint (it is damaged, or of another version of "
                    "this library): it begins anew.",
                    name,
                )
        if self.numerics.panel is not None and self.numerics.panel.divergence.alarmed:
            # The incident is not taken along: what still holds is seen again, and opens one in this run's journal.
            self.numerics.panel.divergence.alarmed = False

    def _parts(self) -> dict[str, Any]:
        return self.numerics.detectors() | {
            "policy": self.numerics.policy,
            "quarantine": self.quarantine,
            "learning_rate": self.numerics.learning_rate,
            "budget": self.budget,
            "ladder": self.numerics.ladder,
            "missing_steps": self.numerics.missing,
        }


def new_run_id() -> str:
    """A name for a run that begins: the same on every rank, so all of them have to ask. Collective."""
    return str(consensus.from_first_rank(f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"))
