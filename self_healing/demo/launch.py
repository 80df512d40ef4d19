"""Starts the runs of the demo beside each other, and passes on what they tell."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from .events import Ended, Event, Loaded
from .runs import Episode
from .text import Corpus


# Matrices this small only get slower when they are spread over many cores.
_MOST_THREADS = 4
# What the interpreter of a run that is over has for its own end.
_PARTING_SECONDS = 10.0


# Gives the events of all runs as they come, each with the name of its run.
Launch = Callable[[Sequence[Episode], Callable[[], Corpus]], Iterator[tuple[str, Event]]]


def in_turn(episodes: Sequence[Episode], corpus: Callable[[], Corpus]) -> Iterator[tuple[str, Event]]:
    """Runs one after the other in this process."""
    from .episode import run_episode

    text = corpus()
    for episode in episodes:
        told: list[Event] = []
        run_episode(episode, text, told.append)
        for event in told:
            yield episode.name, event


def in_processes(episodes: Sequence[Episode], corpus: Callable[[], Corpus]) -> Iterator[tuple[str, Event]]:
    """
    Runs all of them at the same time, each in a process of its own.

    The text is read in this process while the others import torch and TRL. None of them outlives this generator.

    Raises:
        RuntimeError: If a process ends before its run does; with the end of what it has written to the terminal.
    """
    # A fresh interpreter: torch and the tokenizer have threads, which do not survive a fork.
    context = multiprocessing.get_context("spawn")
    # As many for each: with other numbers, sums are rounded otherwise.
    threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // len(episodes)))
    with tempfile.TemporaryDirectory() as scratch:
        open_ends: dict[Any, str] = {}
        processes = []
        try:
            for episode in episodes:
                ours, theirs = context.Pipe()
                log = Path(scratch) / f"{episode.name}.log"
                process = context.Process(target=_begin, args=(episode, theirs, str(log), threads), daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                open_ends[ours] = episode.name
            text = corpus()
            while open_ends:
                for end in wait(list(open_ends)):
                    assert isinstance(end, Connection)
                    name = open_ends[end]
                    try:
                        event = end.recv()
                    except EOFError:
                        raise RuntimeError(_told_by(name, Path(scratch) / f"{name}.log")) from None
                    if isinstance(event, Loaded):
                        end.send(text)
                    elif isinstance(event, Ended):
                        del open_ends[end]
                    yield name, event
            for process in processes:
                # One that is ended in the middle of its own end leaves semaphores behind, and Python says so.
                process.join(_PARTING_SECONDS)
        finally:
            for process in processes:
                process.terminate()
                process.join()


def _begin(episode: Episode, connection: Any, log: str, threads: int) -> None:
    """In the process of a run: what it writes to the terminal would tear what is shown there."""
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import torch

    from .episode import run_episode

    torch.set_num_threads(threads)
    connection.send(Loaded())
    run_episode(episode, connection.recv(), connection.send)


def _told_by(name: str, log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join([f"The {name} run ended without a result. The last it has written:", *lines[-15:]])
