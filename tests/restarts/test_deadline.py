"""What becomes of a signal: as it comes in, and until the deadline, on a clock that is made up."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from self_healing.failures.recipes import Interruption
from self_healing.healers.restarts import preemption as module
from self_healing.healers.restarts.preemption import Preemption


TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


class Clock:
    """Time that passes while it is waited for the end of the run, which comes when it is told to."""

    def __init__(self) -> None:
        self.now, self.over_at = 100.0, float("inf")
        # What happens meanwhile, by the time it does.
        self.events: dict[float, Callable[[], Any]] = {}

    def wait(self, seconds: float) -> bool:
        self.now = round(min(self.now + seconds, max(self.over_at, self.now)), 6)
        for at in [at for at in self.events if at <= self.now]:
            self.events.pop(at)()
        return self.is_set()

    def is_set(self) -> bool:
        return self.now >= self.over_at

    def set(self) -> None:
        self.over_at = self.now

    def monotonic(self) -> float:
        return self.now


class Exits(Exception):
    """The process ends."""


class Process:
    """A process that is asked to leave 30 s before it has to be gone; what is done to it is written down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, longest_save: float = 0.0) -> None:
        self.clock = Clock()
        self.done: list[tuple[float, str]] = []
        self.preemption = Preemption(30.0, lambda: True, lambda: longest_save, lambda frame: True, self._note)
        self.preemption._over = self.clock  # type: ignore[assignment]
        self.preemption._waits, self.preemption._wake = os.pipe()
        self.preemption._main = threading.get_ident()
        self.preemption._pid = os.getpid()
        # Whether the main thread runs Python code.
        self.answers = True
        monkeypatch.setattr(module, "time", self.clock)
        monkeypatch.setattr(signal, "pthread_kill", self._kill)
        monkeypatch.setattr(signal, "getsignal", lambda signum: self.preemption._on_signal)
        monkeypatch.setattr(module, "logging", SimpleNamespace(shutdown=lambda: None))
        monkeypatch.setattr(os, "_exit", self._exit)

    def written(self, *numbers: int) -> None:
        os.write(self.preemption._wake, bytes(numbers))

    def waits(self) -> list[tuple[float, str]]:
        self.preemption._keep_the_deadline()
        return self.done

    def _note(self, why: str) -> None:
        self.done.append((self.clock.now, why))

    def _kill(self, thread: int | None, signum: signal.Signals) -> None:
        assert thread == threading.get_ident()
        self.done.append((self.clock.now, signum.name))
        if self.answers and signum == self.preemption._probe:
            self.preemption._on_signal(signum, None)

    def _exit(self, code: int) -> None:
        self.done.append((self.clock.now, str(code)))
        raise Exits

    def close(self) -> None:
        os.close(self.preemption._waits)
        os.close(self.preemption._wake)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Process]]:
    begun: list[Process] = []

    def start(**settings: Any) -> Process:
        begun.append(Process(monkeypatch, **settings))
        return begun[-1]

    yield start
    for process in begun:
        process.close()


class TestTheDeadline:
    @pytest.mark.parametrize(
        ("longest_save", "left_at"), [(0.0, 128.0), (5.0, 118.0), (6.5, 115.0), (7.0, 115.0), (90.0, 115.0)]
    )
    def test_a_step_is_left_in_time_for_twice_the_longest_save_but_not_before_half_of_it(
        self, start: Callable[..., Process], longest_save: float, left_at: float
    ) -> None:
        process = start(longest_save=longest_save)
        process.preemption.requested = TERM
        process.written(TERM)
        process.clock.over_at = left_at + 1
        assert process.waits() == [(left_at, "SIGTERM")]
        # Which the handler takes for the end of the step, and not for one more request.
        assert process.preemption._interrupting

    def test_where_it_has_no_end_the_process_is_ended(self, start: Callable[..., Process]) -> None:
        process = start()
        process.preemption.requested = USR1
        process.written(USR1)
        with pytest.raises(Exits):
            process.waits()
        interrupted, noted, ended = process.done
        assert (interrupted, ended) == ((128.0, "SIGUSR1"), (130.0, "75"))
        assert noted == (
            130.0,
            "The process did not come to an end within 30 s of SIGUSR1 (preemption_deadline) and is ended now; a "
            "restart goes on from the newest complete checkpoint.",
        )

    def test_a_note_that_cannot_be_made_does_not_keep_it(self, start: Callable[..., Process]) -> None:
        process = start()
        process.preemption._note = lambda why: 1 / 0  # type: ignore[assignment,return-value]
        process.preemption.requested = TERM
        process.written(TERM)
        with pytest.raises(Exits):
            process.waits()
        assert process.done[-1] == (130.0, "143")

    def test_a_run_that_ends_in_time_is_left_alone(self, start: Callable[..., Process]) -> None:
        process = start()
        process.preemption.requested = TERM
        process.written(TERM)
        process.clock.over_at = 127.0
        assert process.waits() == []

    def test_without_a_signal_nothing_is_done_when_the_run_is_over(self, start: Callable[..., Process]) -> None:
        process = start()
        process.clock.over_at = 100.0
        process.written(0)
        assert process.waits() == []

    def test_other_numbers_are_none_of_ours(self, start: Callable[..., Process]) -> None:
        process = start()
        process.preemption.requested = TERM
        process.written(signal.SIGCHLD, 0, TERM)
        process.clock.over_at = 129.0
        assert process.waits() == [(128.0, "SIGTERM")]


class TestASignalThatNoHandlerHasSeen:
    def test_in_native_code_it_counts_from_when_it_was_written(self, start: Callable[..., Process]) -> None:
        process = start()
        process.answers = False
        process.written(TERM)
        with pytest.raises(Exits):
            process.waits()
        # Asked whether it is there; what it does then is left, and ended.
        assert [entry for entry in process.done if len(entry[1]) < 10] == [
            (100.2, "SIGUSR1"),
            (pytest.approx(128.2, abs=0.2), "SIGTERM"),
            (130.0, "143"),
        ]
        assert process.preemption.requested is TERM

    def test_of_a_forked_child_it_is_not_meant_for_the_run(self, start: Callable[..., Process]) -> None:
        process = start()
        assert process.preemption._is_meant(TERM, 100.0) is False
        assert process.done == [(100.2, "SIGUSR1")]
        assert process.preemption.requested is None

    def test_of_a_handler_that_comes_a_moment_later_it_is(self, start: Callable[..., Process]) -> None:
        process = start()
        process.clock.events[100.2] = lambda: process.preemption._on_signal(TERM, None)
        assert process.preemption._is_meant(TERM, 100.0)
        assert process.done == []

    def test_it_is_not_waited_for_an_answer_once_the_run_is_over(self, start: Callable[..., Process]) -> None:
        process = start()
        process.answers = False
        process.clock.over_at = 101.0
        assert not process.preemption._is_meant(TERM, 100.0)
        assert process.clock.now == 101.0

    def test_the_next_one_is_still_listened_to(self, start: Callable[..., Process]) -> None:
        process = start()
        process.clock.events[100.5] = lambda: process.preemption._on_signal(TERM, None)
        process.clock.over_at = 110.0
        process.written(TERM, TERM)
        assert process.waits() == [(100.2, "SIGUSR1")]
        assert process.preemption.requested is TERM


def made_up(**answers: Any) -> Preemption:
    given: dict[str, Any] = {
        "may_interrupt": lambda: True,
        "longest_save": lambda: 0.0,
        "still_training": lambda frame: True,
        "note": lambda why: None,
    }
    return Preemption(3600.0, **(given | answers))


@pytest.fixture
def listening() -> Iterator[Callable[..., Preemption]]:
    """Listens to the signals of this process, until the test is over."""
    found: list[Preemption] = []
    before = {signum: signal.getsignal(signum) for signum in (TERM, USR1)}

    def listen(**answers: Any) -> Preemption:
        found.append(made_up(**answers))
        found[-1].listen()
        return found[-1]

    yield listen
    for each in reversed(found):
        each.release()
    after = {signum: signal.getsignal(signum) for signum in before}
    for signum, handler in before.items():
        signal.signal(signum, handler)
    assert after == before


class TestAHandlerIsCalled:
    @pytest.mark.parametrize(("signum", "code"), [(TERM, 143), (USR1, 75)])
    def test_the_first_signal_asks_and_says_with_which_code_is_left(
        self, listening: Callable[..., Preemption], signum: signal.Signals, code: int
    ) -> None:
        preemption = listening()
        assert (preemption.requested, preemption.exit_code) == (None, 143)
        os.kill(os.getpid(), signum)
        os.kill(os.getpid(), TERM)
        assert (preemption.requested, preemption.exit_code) == (signum, code)

    def test_of_what_earlier_handlers_raise_the_first_is_kept(self, listening: Callable[..., Preemption]) -> None:
        raised = [SystemExit(3), SystemExit(4)]
        left = list(raised)

        def earlier(signum: int, frame: Any) -> None:
            raise left.pop(0)

        theirs = signal.signal(TERM, earlier)
        preemption = listening()
        os.kill(os.getpid(), TERM)
        os.kill(os.getpid(), TERM)
        preemption.release()
        signal.signal(TERM, theirs)
        assert left == []
        assert preemption.raised is raised[0]

    def test_the_step_is_interrupted_once(self, listening: Callable[..., Preemption]) -> None:
        preemption = listening()
        preemption._interrupting = True
        with pytest.raises(Interruption, match="did not end in time"):
            preemption._on_signal(TERM, None)
        assert preemption.requested is None
        preemption._on_signal(TERM, None)
        assert preemption.requested is TERM

    def test_it_is_not_where_weights_would_be_torn(self, listening: Callable[..., Preemption]) -> None:
        preemption = listening(may_interrupt=lambda: False)
        preemption._interrupting = True
        preemption._on_signal(TERM, None)
        assert (preemption.requested, preemption._interrupting) == (None, False)

    def test_nor_once_the_run_is_over(self, listening: Callable[..., Preemption]) -> None:
        preemption = listening()
        preemption._interrupting = True
        preemption._over.set()
        preemption._on_signal(TERM, None)
        assert preemption.requested is None

    def test_of_a_run_that_was_left_without_a_word_signals_are_what_they_were(
        self, listening: Callable[..., Preemption]
    ) -> None:
        called: list[int] = []
        theirs = signal.signal(TERM, lambda signum, frame: called.append(signum))
        preemption = listening(still_training=lambda frame: False)
        os.kill(os.getpid(), TERM)
        assert (called, preemption.requested, preemption._thread) == ([TERM], None, None)
        signal.signal(TERM, theirs)

    def test_a_handler_set_since_that_passes_a_signal_on_reaches_the_one_before(
        self, listening: Callable[..., Preemption]
    ) -> None:
        called: list[int] = []
        before = signal.signal(TERM, lambda signum, frame: called.append(signum))
        preemption = listening(still_training=lambda frame: False)
        ours = signal.signal(TERM, lambda signum, frame: preemption._on_signal(signum, frame))
        os.kill(os.getpid(), TERM)
        assert called == [TERM]
        signal.signal(TERM, ours)
        preemption.release()
        signal.signal(TERM, before)

    def test_what_is_forgotten_asks_nothing_of_its_run_any_more(self, listening: Callable[..., Preemption]) -> None:
        asked: list[str] = []
        preemption = listening(
            may_interrupt=lambda: asked.append("interrupt"),
            longest_save=lambda: asked.append("save"),
            still_training=lambda frame: asked.append("training"),
            note=asked.append,
        )
        thread = preemption._thread
        assert thread is not None
        preemption.forget()
        thread.join(10)
        assert not thread.is_alive()
        assert preemption._must_be_left_by(0.0) == 3598.0
        assert not preemption._may_interrupt()
        assert not preemption._still_training(None)
        preemption._note("a deadline")
        assert asked == []

    def test_a_thread_is_waited_for_before_what_it_listens_to_is_closed(
        self, listening: Callable[..., Preemption]
    ) -> None:
        preemption = listening()
        real, waits, wake = preemption._thread, preemption._waits, preemption._wake
        assert real is not None
        steps: list[str] = []

        def join(seconds: float) -> None:
            steps.append(f"joined while open: {os.fstat(waits).st_mode > 0}")
            real.join()

        preemption._thread = SimpleNamespace(join=join, is_alive=lambda: not steps)  # type: ignore[assignment]
        preemption.release()
        assert steps == ["joined while open: True"]
        for each in (waits, wake):
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(each)

    def test_one_that_does_not_end_keeps_what_it_listens_to(self, listening: Callable[..., Preemption]) -> None:
        preemption = listening()
        real, waits, wake = preemption._thread, preemption._waits, preemption._wake
        assert real is not None
        preemption._thread = SimpleNamespace(join=lambda seconds: None, is_alive=lambda: True)  # type: ignore[assignment]
        preemption.release()
        os.fstat(waits)
        real.join()
        os.close(waits)
        os.close(wake)

    def test_a_forked_child_ends_as_it_would_without_us(self, listening: Callable[..., Preemption]) -> None:
        called: list[int] = []
        theirs = signal.signal(TERM, lambda signum, frame: called.append(signum))
        preemption = listening()
        preemption._pid = -1
        os.kill(os.getpid(), TERM)
        assert (called, preemption.requested) == ([TERM], None)
        signal.signal(TERM, theirs)

    def test_only_the_first_signal_is_written_to_the_thread(self, start: Callable[..., Process]) -> None:
        preemption = start().preemption
        preemption._on_signal(TERM, None)
        preemption._on_signal(USR1, None)
        os.set_blocking(preemption._waits, False)
        assert os.read(preemption._waits, 9) == bytes([TERM])

    def test_nothing_is_given_back_that_was_not_taken(self) -> None:
        before = signal.getsignal(TERM)
        preemption = made_up()
        preemption.release()
        preemption.forget()
        assert signal.getsignal(TERM) is before


class TestWhereTheInterpreterWritesSignals:
    """To the thread, unless it writes them somewhere else already."""

    @pytest.fixture
    def theirs(self) -> Iterator[int]:
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        before = signal.set_wakeup_fd(-1)
        yield writing
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)

    def now(self) -> int:
        found = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(found)
        return found

    def test_it_is_taken_and_given_back(self, theirs: int, listening: Callable[..., Preemption]) -> None:
        preemption = listening()
        assert self.now() == preemption._wake
        assert preemption._thread is not None
        assert preemption._thread.daemon
        preemption.release()
        assert self.now() == -1
        preemption.release()

    def test_what_is_there_stays(self, theirs: int, listening: Callable[..., Preemption]) -> None:
        signal.set_wakeup_fd(theirs)
        preemption = listening()
        assert self.now() == theirs
        preemption.release()
        assert self.now() == theirs
        made_up().release()
        assert self.now() == theirs

    def test_what_was_set_since_stays(self, theirs: int, listening: Callable[..., Preemption]) -> None:
        preemption = listening()
        signal.set_wakeup_fd(theirs)
        preemption.release()
        assert self.now() == theirs

    def test_that_of_a_run_left_without_a_word_is_taken_over(
        self, theirs: int, listening: Callable[..., Preemption]
    ) -> None:
        over: list[bool] = []
        left = listening(still_training=lambda frame: not over)
        before = left._earlier[TERM]
        over.append(True)
        preemption = listening()
        assert self.now() == preemption._wake
        # Its thread has ended, and it does not give back what is no longer its own.
        assert left._thread is None
        left.release()
        assert self.now() == preemption._wake
        # Its handler is not that of a run any more.
        assert preemption._earlier[TERM] == before
