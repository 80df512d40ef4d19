"""What was taken out of the training, and where it came from: rows of a step and samples, in `quarantine.jsonl`."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..classify import describe_exception, text_of
from ..files import append_line, parse_lines


logger = logging.getLogger(__name__)

QUARANTINE_FILE = "quarantine.jsonl"
PREVIEW_LENGTH = 200

# How a sample is named: by its index, or as `shard:ordinal@stage` of a stream.
SampleName = int | str


@dataclass(frozen=True, slots=True)
class QuarantinedRow:
    """
    One row that makes a step non-finite by itself. What is not known is `None`.

    Args:
        dataset_index (`int` or `None`):
            Its position in `trainer.train_dataset`, as the batch sampler gave it (after TRL's filtering and packing).
        segment (`int` or `None`):
            Which of the sequences packed into that position.
        stream_ordinal (`int` or `None`):
            For an iterable dataset: how many rows the stream gave before it in this epoch.
        content_hash (`str`):
            SHA-256 of what the row holds, padding apart.
        prompt (`str` or `None`):
            For trainers that generate: the prompt.
        preview (`str` or `None`):
            The beginning of its text.
        micro_batch (`int`), row (`int`):
            Its place in the step.
    """

    dataset_index: int | None
    segment: int | None
    stream_ordinal: int | None
    content_hash: str
    prompt: str | None
    preview: str | None
    micro_batch: int
    row: int


@dataclass(frozen=True, slots=True)
class BadSample:
    """
    One sample that cannot be used. What is not known is `None`.

    Args:
        problem (`str`):
            `"loading"` or `"collation"` (it raised, twice), `"empty"` (a sequence of length 0) or `"no_labels"` (none
            of its tokens counts).
        error_type (`str`), error (`str`):
            What was raised.
        raised_at (`str`, *optional*):
            File and line.
        dataset_index (`int`, *optional*):
            Its position in the training data, for data that can be indexed.
        shard (`int`, *optional*), stream_ordinal (`int`, *optional*):
            For a stream: the shard it is in (without shards: the data loader worker), and how many samples come before
            it there.
        stage (`int`, *optional*):
            For a stream: which of its functions raised, from the source on.
        preview (`str`, *optional*):
            The beginning of its text.
        attempts (`int`, *optional*, defaults to 2):
            Times it was tried.
        replaced_by (`int`, *optional*):
            The index of the sample in its place; in a stream it is the one that comes next.
        worker (`int`, *optional*):
            The data loader worker that found it; `None` for the training process.
        text_hash (`str`, *optional*):
            What tells it apart where neither its text nor that of the exception is kept.
    """

    problem: str
    error_type: str
    error: str
    raised_at: str | None = None
    dataset_index: int | None = None
    shard: int | None = None
    stream_ordinal: int | None = None
    stage: int | None = None
    preview: str | None = None
    attempts: int = 2
    replaced_by: int | None = None
    worker: int | None = None
    text_hash: str | None = None

    @property
    def name(self) -> SampleName:
        """What it is known by."""
        if self.dataset_index is not None:
            return self.dataset_index
        if self.stream_ordinal is None:
            # Unknown where it is: told apart from others by what it looks like.
            return f"?:{self.text_hash or content_name(self.preview, self.error)}"
        stage = "" if self.stage is None else f"@{self.stage}"
        return f"{self.shard}:{self.stream_ordinal}{stage}"

    @property
    def why(self) -> str:
        """What is wrong with it, in a line."""
        return ": ".join(part for part in (self.error_type, self.error) if part)

    def without_text(self) -> BadSample:
        """The same without its text, and without that of what was raised, which may quote it."""
        if self.text_hash is not None:
            return self
        # Without a type, the text is our own.
        error = "" if self.error_type else self.error
        return replace(self, preview=None, error=error, text_hash=content_name(self.preview, self.error))

    def __str__(self) -> str:
        return f"{describe_name(self.name)} ({self.why[:PREVIEW_LENGTH]})"


def content_name(*parts: str | None) -> str:
    """A short name for what is known of something."""
    return hashlib.sha256("\0".join(str(part) for part in parts).encode()).hexdigest()[:12]


def describe_name(name: SampleName) -> str:
    """A name in words."""
    if isinstance(name, int):
        return f"sample {name}"
    shard, _, rest = name.partition(":")
    if shard == "?":
        return "a sample of the stream"
    return f"sample {rest.partition('@')[0]} of shard {shard}"


def what_was_raised(error: BaseException) -> dict[str, Any]:
    """Type, message and place of an exception, as a [`BadSample`] keeps them."""
    trace = traceback.extract_tb(error.__traceback__)
    place = f"{trace[-1].filename}:{trace[-1].lineno}" if trace else None
    return {"error_type": type(error).__name__, "error": text_of(error)[:500], "raised_at": place}


def preview_of(sample: Any) -> str | None:
    """The first characters of a sample's text, or of its `repr`."""
    try:
        if isinstance(sample, Mapping):
            for key in ("text", "prompt", "messages", "content", "question", "instruction", "completion"):
                if key in sample:
                    return str(sample[key])[:PREVIEW_LENGTH]
        return repr(sample)[:PREVIEW_LENGTH]
    except Exception:
        return None


def dataset_fingerprint(dataset: Any) -> str:
    """What has to be the same for the index of a sample to mean the same sample."""
    own = getattr(dataset, "_fingerprint", None)
    if isinstance(own, str):
        return own
    try:
        length: int | None = len(dataset)
    except Exception:
        length = None
    return f"{type(dataset).__module__}.{type(dataset).__qualname__}:{length}"


class Findings:
    """
    The bad samples of one data set: told by guards, in whatever process they are, and known to all of them.

    A guard in a data loader worker has no other way to the training process than a line in `quarantine.jsonl`, which
    is read when it has grown. Nothing is created before there is something to write.

    Args:
        path (`Path`):
            `quarantine.jsonl`.
        run (`str`):
            The run; only its own lines are believed, as the data may have been repaired since an earlier one.
        fingerprint (`str`):
            Of the data set; lines about another one are not believed.
        blocked (`dict[int | str, str]`):
            What is not to be used, by name, and why. Shared with whoever keeps it.
        rank (`int`, *optional*, defaults to 0):
            This process.
        keep_text (`bool`, *optional*, defaults to `True`):
            Whether the text of samples may be written down.
        dropped_in (`dict[int | str, int]`, *optional*):
            The step in which a row was dropped first, by name. Shared likewise.
    """

    def __init__(
        self,
        path: Path,
        run: str,
        fingerprint: str,
        blocked: dict[SampleName, str],
        rank: int = 0,
        keep_text: bool = True,
        dropped_in: dict[SampleName, int] | None = None,
    ) -> None:
        self._keep_text = keep_text
        self.path = str(path)
        self.run = run
        self.fingerprint = fingerprint
        self.blocked = blocked
        self.dropped_in = {} if dropped_in is None else dropped_in
        self.rank = rank
        # Since they were last taken: found by this process, or by its workers.
        self.new: list[BadSample] = []
        self.retried: list[str] = []
        # Rows that an earlier process has dropped in steps that are done again, as the quarantine knows them.
        self.ahead: set[str] = set()
        self._read = 0
        self._unwritable = False

    @property
    def bad(self) -> dict[SampleName, str]:
        """Those of the blocked that could not be loaded or collated; the others made a step non-finite."""
        return {name: why for name, why in self.blocked.items() if why != POISON}

    def use_another_file(self, path: Path) -> None:
        """Where the processes tell each other of what they find, if it cannot be `quarantine.jsonl`."""
        self.path, self._read = str(path), 0

    def as_written(self, sample: BadSample) -> BadSample:
        """A sample with what may be said about it."""
        return sample if self._keep_text else sample.without_text()

    def add(self, sample: BadSample) -> None:
        """Takes in a sample, and writes it down for the other processes. A file that cannot be written is reported."""
        sample = self.as_written(sample)
        if sample.name in self.blocked:
            return
        self.blocked[sample.name] = sample.why
        self.new.append(sample)
        line = {
            "kind": "bad_sample",
            "time": time.time(),
            "run": self.run,
            "fingerprint": self.fingerprint,
            "rank": self.rank,
            **asdict(sample),
        }
        try:
            append_line(self.path, line)
        except OSError as error:
            if not self._unwritable:
                self._unwritable = True
                logger.warning(
                    "%s could not be written (%s); the samples are replaced all the same.", self.path, error
                )

    def loaded_after_all(self, what: str, error: BaseException) -> None:
        """A second attempt has succeeded."""
        raised = describe_exception(error) if self._keep_text else type(error).__name__
        self.retried.append(f"{what} ({raised})")
        logger.warning("%s raised %s; the second attempt succeeded.", what, raised)

    def learn(self, before: int | None = None) -> None:
        """
        Reads what other processes have written since the last time, if they have.

        Args:
            before (`int`, *optional*):
                Where the run goes on from: a row that was dropped in a later step is dropped there again. With another
                one in its place, that step would be another one.
        """
        try:
            if os.stat(self.path).st_size <= self._read:
                return
            with open(self.path, "rb") as file:
                file.seek(self._read)
                lines, newline, _ = file.read().rpartition(b"\n")
        except OSError:
            return
        self._read += len(lines) + len(newline)
        entries, torn = parse_lines(lines.decode("utf-8", errors="replace"))
        if torn:
            logger.warning(
                "%s: %d line(s) cannot be read, probably because a process was killed while it wrote them; a sample "
                "named there is found again when it is drawn.",
                self.path,
                torn,
            )
        for entry in entries:
            self._believe(entry, before)

    def _believe(self, entry: dict[str, Any], before: int | None) -> None:
        if entry.get("run") != self.run or entry.get("fingerprint") != self.fingerprint:
            return
        if entry.get("kind") != "bad_sample":
            at = entry.get("step")
            if before is not None and isinstance(at, int) and at >= before:
                self.ahead.add(_key_of(entry))
            elif entry.get("dataset_index") is not None and entry.get("segment") is None:
                self.blocked.setdefault(entry["dataset_index"], POISON)
                if isinstance(at, int):
                    self.dropped_in.setdefault(entry["dataset_index"], at)
            return
        sample = BadSample(**{field.name: entry[field.name] for field in fields(BadSample) if field.name in entry})
        if sample.name not in self.blocked:
            self.blocked[sample.name] = sample.why
            if entry.get("rank") == self.rank:
                self.new.append(sample)

    def take(self) -> tuple[list[BadSample], list[str]]:
        """What was found since the last time, and what could be loaded at the second attempt."""
        new, retried = self.new, self.retried
        self.new, self.retried = [], []
        return new, retried


POISON = "it makes a step non-finite"


def _key_of(row: Mapping[str, Any]) -> str:
    """What tells a row from all others."""
    return ":".join(str(row.get(name)) for name in ("content_hash", "dataset_index", "segment", "stream_ordinal"))


def why_not_appendable(path: Path) -> OSError | None:
    """What stands in the way of appending to a file; nothing is left behind."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
        else:
            # Not the file itself: another process may be the one that creates it.
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        return error
    return None


class Quarantine:
    """
    What is not to be used any more, for as long as the run lasts and in its checkpoints.

    A row seen again in a later epoch is counted, not written twice.

    Args:
        directory (`Path`):
            The run directory.
        keep_text (`bool`, *optional*, defaults to `True`):
            Whether the text of rows and samples may be written down.
    """

    def __init__(self, directory: Path, keep_text: bool = True) -> None:
        self.path = directory / QUARANTINE_FILE
        self._keep_text = keep_text
        self.seen: set[str] = set()
        # By the fingerprint of the data set.
        self.blocked: dict[str, dict[SampleName, str]] = {}
        # Likewise.
        self._dropped_in: dict[str, dict[SampleName, int]] = {}
        self.findings: Findings | None = None

    def watch(self, run: str, fingerprint: str, rank: int = 0, step: int | None = None) -> Findings:
        """
        From here on the samples of a data set are guarded.

        Args:
            run (`str`):
                The run.
            fingerprint (`str`):
                Of the data set.
            rank (`int`, *optional*, defaults to 0):
                This process.
            step (`int`, *optional*):
                Optimizer steps finished: what was dropped in a later one comes again, and is dropped there again.
        """
        blocked = self.blocked.setdefault(fingerprint, {})
        dropped_in = self._dropped_in.setdefault(fingerprint, {})
        for name in [name for name, at in dropped_in.items() if step is not None and at >= step]:
            blocked.pop(name, None)
            del dropped_in[name]
        self.findings = Findings(self.path, run, fingerprint, blocked, rank, self._keep_text, dropped_in)
        self.findings.learn(before=step)
        # They are written down already.
        self.seen |= self.findings.ahead
        return self.findings

    def add(self, rows: Iterable[QuarantinedRow], step: int, epoch: float | None, incident: str) -> None:
        """Writes rows down. A file that cannot be written is reported, not raised."""
        lines = []
        findings = self.findings
        of_the_run = {} if findings is None else {"run": findings.run, "fingerprint": findings.fingerprint}
        for row in rows:
            if findings is not None and row.dataset_index is not None and row.segment is None:
                findings.blocked.setdefault(row.dataset_index, POISON)
                findings.dropped_in.setdefault(row.dataset_index, step)
            key = _key_of(asdict(row))
            if key in self.seen:
                continue
            self.seen.add(key)
            line = {"time": time.time(), "incident": incident, "step": step, "epoch": epoch, **asdict(row)}
            lines.append(line | of_the_run)
        try:
            for line in lines:
                append_line(str(self.path), line)
        except OSError:
            logger.warning("%s could not be written; the rows were dropped all the same.", self.path, exc_info=True)

    def state_dict(self) -> dict[str, Any]:
        blocked = {name: [[*entry] for entry in names.items()] for name, names in self.blocked.items() if names}
        dropped_in = {name: [[*entry] for entry in steps.items()] for name, steps in self._dropped_in.items() if steps}
        return {"seen": sorted(self.seen), "blocked": blocked, "dropped_in": dropped_in}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = set(state["seen"])
        # Written by an earlier version of the library, it holds no samples.
        for fingerprint, entries in state.get("blocked", {}).items():
            self.blocked.setdefault(fingerprint, {}).update({name: why for name, why in entries})
        for fingerprint, entries in state.get("dropped_in", {}).items():
            self._dropped_in.setdefault(fingerprint, {}).update({name: step for name, step in entries})
