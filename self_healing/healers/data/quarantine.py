"""Samples and rows that are bad: their names, what is wrong with them, where they are written down."""

from __future__ import annotations

import hashlib
import logging
import os
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from ...failures.classify import describe_exception
from ...failures.recipes import Action, text_of
from ...hf.batches import content_hash, row_text
from ...hf.dataloader import RowSource
from ...hf.step import Window
from ...journal.incident import Incident
from ...run.healer import CarryOut, HealingContext
from ...run.run import RankNotices
from ...system.files import append_line, parse_lines


logger = logging.getLogger(__name__)


# ---- one sample ----


PREVIEW_LENGTH = 200


@dataclass(frozen=True, slots=True)
class BadSample:
    """One sample that cannot be used, as it is journalled and written down."""

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
        if self.dataset_index is not None:
            return self.dataset_index
        if self.stream_ordinal is None:
            # Unknown where it is: told from others by what it looks like.
            return f"?:{self.text_hash or content_name(self.preview, self.error)}"
        stage = "" if self.stage is None else f"@{self.stage}"
        return f"{self.shard}:{self.stream_ordinal}{stage}"

    @property
    def why(self) -> str:
        return ": ".join(part for part in (self.error_type, self.error) if part)

    def without_text(self) -> BadSample:
        # Nor that of what was raised, which may quote it.
        if self.text_hash is not None:
            return self
        # Without a type, the text is our own.
        error = "" if self.error_type else self.error
        return replace(self, preview=None, error=error, text_hash=content_name(self.preview, self.error))

    def __str__(self) -> str:
        return f"{describe_name(self.name)} ({self.why[:PREVIEW_LENGTH]})"


def content_name(*parts: str | None) -> str:
    return hashlib.sha256("\0".join(str(part) for part in parts).encode()).hexdigest()[:12]


def preview_of(sample: Any) -> str | None:
    """Shows the first characters of a sample's text, or of its `repr`."""
    try:
        if isinstance(sample, Mapping):
            for key in ("text", "prompt", "messages", "content", "question", "instruction", "completion"):
                if key in sample:
                    return str(sample[key])[:PREVIEW_LENGTH]
        return repr(sample)[:PREVIEW_LENGTH]
    except Exception:
        return None


# ---- those of one data set, shared by the processes that load it ----


# Why a row is not used that a step has failed for, and not the data.
POISON = "it makes a step non-finite"


@dataclass
class KnownBadSamples:
    """Samples of one data set that are not to be used: added by the guards of any process, and known to all."""

    path: str
    run: str
    fingerprint: str
    blocked: dict[SampleName, str]
    rank: int = 0
    keep_text: bool = True
    # Found by this process or its workers since they were last taken.
    new: list[BadSample] = field(default_factory=list)
    retried: list[str] = field(default_factory=list)
    # Rows that an earlier process has dropped in steps that are done again, as the quarantine knows them.
    ahead: set[str] = field(default_factory=set)
    _read: int = 0

    @property
    def bad(self) -> dict[SampleName, str]:
        """Those of the blocked that could not be loaded or collated; the others made a step non-finite."""
        return {name: why for name, why in self.blocked.items() if why != POISON}

    @property
    def whose(self) -> dict[str, Any]:
        return {"run": self.run, "fingerprint": self.fingerprint, "rank": self.rank}

    def that_raised(self, problem: str, error: BaseException, **where: Any) -> BadSample:
        """A sample that raised, without text if that may not be kept."""
        trace = traceback.extract_tb(error.__traceback__)
        raised_at = f"{trace[-1].filename}:{trace[-1].lineno}" if trace else None
        sample = BadSample(problem, type(error).__name__, text_of(error)[:500], raised_at, **where)
        return sample if self.keep_text else sample.without_text()

    def add(self, *samples: BadSample, replaced_by: SampleName | None = None) -> None:
        """Blocks samples, and writes them down for the other processes."""
        for sample in samples:
            if isinstance(replaced_by, int):
                sample = replace(sample, replaced_by=replaced_by)
            if not self.keep_text:
                sample = sample.without_text()
            if sample.name in self.blocked:
                continue
            self.blocked[sample.name] = sample.why
            self.new.append(sample)
            line = {"kind": "bad_sample", "time": time.time(), **self.whose, **asdict(sample)}
            _write_down(self.path, [line], "%s could not be written; the sample is replaced all the same.")

    def loaded_on_retry(self, what: str, error: BaseException) -> None:
        raised = describe_exception(error) if self.keep_text else type(error).__name__
        self.retried.append(f"{what} ({raised})")
        # The incident tells of it.
        logger.info("%s raised %s; the second attempt succeeded.", what, raised)

    def read_new_lines(self, before: int | None = None) -> None:
        """Reads what other processes have written since the last time; rows of steps after `before` come again."""
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
            self._take_in(entry, before)

    def _take_in(self, entry: dict[str, Any], before: int | None) -> None:
        if entry.get("run") != self.run or entry.get("fingerprint") != self.fingerprint:
            return
        if entry.get("kind") != "bad_sample":
            at = entry.get("step")
            if before is not None and isinstance(at, int) and at >= before:
                self.ahead.add(row_key(entry))
            elif entry.get("dataset_index") is not None and entry.get("segment") is None:
                self.blocked.setdefault(entry["dataset_index"], POISON)
            return
        sample = BadSample(**{each.name: entry[each.name] for each in fields(BadSample) if each.name in entry})
        if sample.name not in self.blocked:
            self.blocked[sample.name] = sample.why
            if entry.get("rank") == self.rank:
                self.new.append(sample)

    def take(self) -> tuple[list[BadSample], list[str]]:
        """Returns what was found since the last call, and what could be loaded at the second attempt."""
        new, retried = self.new, self.retried
        self.new, self.retried = [], []
        return new, retried


def _write_down(path: str, lines: Iterable[dict[str, Any]], otherwise: str) -> None:
    try:
        for line in lines:
            append_line(path, line)
    except OSError:
        logger.warning(otherwise, path, exc_info=True)


def row_key(row: Mapping[str, Any]) -> str:
    return ":".join(str(row.get(name)) for name in ("content_hash", "dataset_index", "segment", "stream_ordinal"))


# ---- names: an index, or `shard:ordinal@stage` in a stream ----


SampleName = int | str


def describe_name(name: SampleName) -> str:
    if isinstance(name, int):
        return f"sample {name}"
    shard, _, rest = name.partition(":")
    if shard == "?":
        return "a sample of the stream"
    return f"sample {rest.partition('@')[0]} of shard {shard}"


# ---- quarantine ----


QUARANTINE_FILE = "quarantine.jsonl"


class Quarantine:
    """Rows and samples that a run does not use any more, also after it was resumed from a checkpoint."""

    def __init__(self, directory: Path, keep_text: bool = True, news: RankNotices | None = None) -> None:
        self.path = directory / QUARANTINE_FILE
        self._keep_text = keep_text
        self.seen: set[str] = set()
        # By the fingerprint of the data set, and by name: why.
        self.blocked: dict[str, dict[SampleName, str]] = {}
        self.known: KnownBadSamples | None = None
        # By the epoch: a digest of the row that a stream began with.
        self.first_rows: dict[int, bytes | None] = {}
        # What a stream gave last (`GivenLast`), for a re-entry.
        self.given: Any = None
        self._news = news
        if news is not None:
            news.on("quarantine", self.take_in)

    def watch(self, run: str, fingerprint: str, rank: int = 0, step: int | None = None) -> KnownBadSamples:
        """Begins to keep the bad samples of a data set."""
        blocked = self.blocked.setdefault(fingerprint, {})
        self.known = KnownBadSamples(str(self.path), run, fingerprint, blocked, rank, self._keep_text)
        self.known.read_new_lines(before=step)
        # They are written down already.
        self.seen |= self.known.ahead
        return self.known

    def add(self, rows: Iterable[dict[str, Any]], step: int, epoch: float | None, incident: str) -> None:
        """Writes rows down, and tells the other ranks of them."""
        lines, blocked, keys = [], list[tuple[SampleName, str]](), list[str]()
        known = self.known
        for row in rows:
            index = row["dataset_index"]
            if known is not None and index is not None and row["segment"] is None:
                known.blocked.setdefault(index, POISON)
                blocked.append((index, POISON))
            key = row_key(row)
            if key in self.seen:
                continue
            self.seen.add(key)
            keys.append(key)
            line = {"time": time.time(), "incident": incident, "step": step, "epoch": epoch}
            lines.append(line | row | ({} if known is None else known.whose))
        self.share(blocked, keys)
        _write_down(str(self.path), lines, "%s could not be written; the rows were dropped all the same.")

    def add_completions(self, given: Mapping[str, Any], reward: str, error: BaseException, incident: Incident) -> None:
        """Writes down completions that a reward function raises for, of what it is given for them."""
        about: dict[str, Any] = dict.fromkeys(("dataset_index", "segment", "stream_ordinal"))
        about |= {"kind": "completion", "problem": f"{reward} raises for it", "error_type": type(error).__name__}
        lines = []
        for prompt, completion in zip_longest(given.get("prompts", ()), given["completions"]):
            text = {"prompt": str(prompt), "preview": str(completion), "error": text_of(error)[:500]}
            known = text if self._keep_text else dict.fromkeys(text)
            lines.append(about | known | {"content_hash": content_name(text["prompt"], text["preview"])})
        self.add(lines, incident.step, None, incident.id)

    def share(self, blocked: Sequence[tuple[SampleName, str]], keys: Sequence[str] = ()) -> None:
        """Tells the other ranks which samples, and why, and which rows this one does not use any more."""
        known = self.known
        if known is not None and self._news is not None and (blocked or keys):
            record = {"fingerprint": known.fingerprint, "blocked": blocked, "seen": keys}
            self._news.tell("quarantine", lambda: record)

    def take_in(self, rank: int, record: Mapping[str, Any]) -> None:
        """Takes in what another rank does not use any more."""
        blocked = self.blocked.setdefault(record["fingerprint"], {})
        for name, why in record["blocked"]:
            blocked.setdefault(name, why)
        self.seen.update(record["seen"])

    def table(self) -> dict[Action, CarryOut]:
        """Maps the action to the method that carries it out."""
        return {Action.QUARANTINE_ROWS: self._quarantine_rows}

    def _quarantine_rows(self, context: HealingContext, _: TrainingArguments) -> dict[str, Any]:
        window, diagnosis, trainer = context.step_in_hand, context.diagnosis, context.running.trainer
        assert diagnosis is not None, "it names the rows"
        rows = _rows_of(window, diagnosis.poison, trainer.processing_class, self._keep_text)
        self.add(rows, window.step, window.epoch, context.incident.id)
        named = ("dataset_index", "content_hash", "prompt")
        context.incident.evidence["rows"] = [{name: row[name] for name in named} for row in rows]
        return {"rows": context.incident.evidence["rows"], "file": str(self.path)}

    def state_dict(self) -> dict[str, Any]:
        blocked = {name: [[*entry] for entry in names.items()] for name, names in self.blocked.items() if names}
        return {"seen": sorted(self.seen), "blocked": blocked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = set(state["seen"])
        for fingerprint, entries in state["blocked"].items():
            self.blocked.setdefault(fingerprint, {}).update({name: why for name, why in entries})


def _rows_of(window: Window, poison: Mapping[int, list[int]], tokenizer: Any, keep_text: bool) -> list[dict[str, Any]]:
    """Describes the rows to be dropped, without their text if that is not to be kept."""
    prompt_keys = ("prompt_ids", "prompt_input_ids") if window.objective.online and keep_text else ()
    text_keys = ("input_ids", "completion_ids", "prompt_ids") if keep_text else ()
    rows = []
    for index, bad in poison.items():
        layout, batch, sources = window.layout(index), window.prepared[index], window.sources(index)
        assert layout is not None, "its rows were tried one by one"
        for row in bad:
            source = sources[row] if row < len(sources) else RowSource()
            text = row_text(batch, layout, row, tokenizer, text_keys)
            rows.append(
                {
                    **asdict(source),
                    "content_hash": content_hash(batch, layout, row),
                    "prompt": row_text(batch, layout, row, tokenizer, prompt_keys),
                    "preview": None if text is None else text[:PREVIEW_LENGTH],
                    "micro_batch": index,
                    "row": row,
                    **({"raises": window.raising} if window.raising else {}),
                }
            )
    return rows
