"""
`RunReport` and its parts: what is known of a run, as plain records that anything can be made of.

Steps are counted as incidents count them: optimizer steps finished before the one that is spoken of, so the first step
of a run is step 0. Times are in seconds since the epoch, sizes in bytes. What is not known is `None`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..files import jsonable
from ..journal.incident import lost_steps


# Named in every JSON file and output; the number goes up when a key is renamed, removed, or means something else.
SCHEMA = "self_healing.report/1"


@dataclass(frozen=True, slots=True)
class State:
    """
    What has become of a run.

    Args:
        name (`str`):
            `"running"`; `"ended"` (it reached its last step); `"stopped"` (an exception, or the end of the script,
            came before); `"left"` (asked to leave, or to be started again); `"died"` (its process is gone without a
            word); or `"unknown"` (it was on another machine, or nothing tells).
        step (`int`):
            Optimizer steps finished.
        max_steps (`int`, *optional*):
            Those it is to have.
        since (`float`, *optional*):
            Of a run that goes on or died, its last sign of life; else when it ended.
        pid (`int`, *optional*), host (`str`, *optional*):
            Its newest process.
        why (`str`):
            What ended it, in words; empty if nothing did.
        told (`str`):
            All of it in a sentence.
    """

    name: str
    step: int = 0
    max_steps: int | None = None
    since: float | None = None
    pid: int | None = None
    host: str | None = None
    why: str = ""
    told: str = ""


@dataclass(frozen=True, slots=True)
class FileNamed:
    """
    A file or directory that belongs to a run, or to one of its incidents.

    Args:
        what (`str`):
            What it is, for a person: `"journal"`, `"offending batch"`, `"stacks of all threads"`, ...
        path (`str`):
            Relative to the directory of the journal where it lies below it, else absolute.
        bytes (`int`, *optional*):
            Its size; `None` for a directory, or where it is gone.
    """

    what: str
    path: str
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RowNamed:
    """
    A row of a batch or a sample of the data that is left out of training.

    Args:
        name (`str`):
            For a person: `"row 17 of train_dataset"`, `"sample 5 of shard 2"`, ...
        kind (`str`):
            `"row"` (dropped from a batch that it made non-finite) or `"sample"` (could not be loaded or collated).
        why (`str`):
            The reason, in a few words.
        step (`int`, *optional*), epoch (`float`, *optional*), time (`float`, *optional*):
            When it was found.
        incident (`str`, *optional*):
            The incident in which it was.
        dataset_index (`int`, *optional*):
            Its position in `trainer.train_dataset`.
        content_hash (`str`, *optional*):
            SHA-256 of its content.
        preview (`str`, *optional*):
            The beginning of its text, where it may be kept (`quarantine_text`).
        details (`dict`):
            All that `quarantine.jsonl` says of it.
    """

    name: str
    kind: str
    why: str
    step: int | None = None
    epoch: float | None = None
    time: float | None = None
    incident: str | None = None
    dataset_index: int | None = None
    content_hash: str | None = None
    preview: str | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoryLine:
    """
    One moment of an incident: what was seen, found, done, or came of it.

    Args:
        part (`str`):
            `"evidence"` (what was seen), `"experiment"` (what was tried to find the cause), `"cause"`, `"remedy"` or
            `"outcome"`.
        text (`str`):
            For a person, one sentence.
        time (`float`, *optional*):
            When.
        happened (`bool`):
            `False` for a remedy that was tried in vain.
        details (`dict`):
            What the journal says of it, besides.
    """

    part: str
    text: str
    time: float | None = None
    happened: bool = True
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class IncidentStory:
    """
    One incident, from what was seen to what came of it.

    Args:
        id (`str`):
            Unique within the run directory.
        step (`int`):
            Optimizer steps finished when it was seen.
        symptom (`str`), failure (`str`, *optional*), cause (`str`):
            What was seen, the kind of failure it was found to be ([`FailureType`]), and why.
        severity (`str`):
            `"info"`, `"warning"` or `"error"`.
        outcome (`str`):
            `"open"`, `"resolved"`, `"self_recovered"`, `"unresolved"`, `"reported"` or `"fatal"`.
        actions (`list[str]`):
            Names of the actions that were carried out, in order.
        steps_lost (`int`), steps_repeated (`int`), seconds_lost (`float`):
            What it cost: steps that are missing from the weights, steps that were done again, time.
        title (`str`):
            In a few words, without the step: `"loss not finite: poison rows"`.
        text (`str`):
            In a paragraph, for a person at 3 a.m.
        diagnosis (`str`):
            What it means, in a sentence or two.
        advice (`str`):
            What to do about it; empty if nothing is.
        time (`float`, *optional*), closed (`float`, *optional*):
            When it was seen, and when its outcome was known.
        rank (`int`), attempt (`int`):
            The process that saw it, and which entry into `train()` it was in.
        evidence (`dict`):
            The values and experiments behind the diagnosis, as the journal has them.
        story (`list[StoryLine]`):
            What happened, in order.
        rows (`list[RowNamed]`):
            Rows and samples it put into quarantine.
        files (`list[FileNamed]`):
            What it left on disk: batch, stacks, postmortem.
    """

    id: str
    step: int
    symptom: str
    failure: str | None
    cause: str
    severity: str
    outcome: str
    actions: list[str] = field(default_factory=list)
    steps_lost: int = 0
    steps_repeated: int = 0
    seconds_lost: float = 0.0
    title: str = ""
    text: str = ""
    diagnosis: str = ""
    advice: str = ""
    time: float | None = None
    closed: float | None = None
    rank: int = 0
    attempt: int = 0
    evidence: dict[str, Any] = field(default_factory=dict)
    story: list[StoryLine] = field(default_factory=list)
    rows: list[RowNamed] = field(default_factory=list)
    files: list[FileNamed] = field(default_factory=list)

    @property
    def lost(self) -> str:
        """How many steps it has cost, in words."""
        return lost_steps(self.steps_lost, self.evidence)


@dataclass(frozen=True, slots=True)
class Notice:
    """
    Something worth knowing that needed no action: a plateau, overfitting, a checkpoint passed over.

    Args:
        step (`int`):
            When.
        name (`str`):
            What: a symptom, or the kind of an event of the journal.
        text (`str`):
            For a person, one sentence.
        time (`float`, *optional*), rank (`int`):
            When, and which process says so.
    """

    step: int
    name: str
    text: str
    time: float | None = None
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Goodput:
    """
    Where the wall time of a run went, in seconds. The parts add up to `wall`.

    Args:
        wall (`float`):
            From the beginning of the first process to the end of the newest, or to now.
        useful (`float`):
            Steps that are in the weights.
        lost_steps (`float`):
            Steps that are not: skipped, gone back from, or done again.
        healing (`float`):
            Diagnosis and remedies.
        down (`float`):
            Between two processes.
        other (`float`):
            The rest: start-up, evaluation, checkpoints.
        share (`float`, *optional*):
            `useful / wall`, between 0 and 1; `None` where step times are not known.
        steps_useful (`int`), steps_done (`int`):
            Steps in the weights, and all that were computed.
    """

    wall: float
    useful: float
    lost_steps: float
    healing: float
    down: float
    other: float
    share: float | None
    steps_useful: int
    steps_done: int


@dataclass(frozen=True, slots=True)
class Budget:
    """
    How often something may still happen before the run ends.

    Args:
        name (`str`):
            What, for a person: `"recoveries without progress"`.
        setting (`str`):
            The setting it comes from.
        used (`float`), limit (`float`):
            Both in the same unit.
        told (`str`):
            What is counted, and what happens when it is spent.
    """

    name: str
    setting: str
    used: float
    limit: float
    told: str

    @property
    def left(self) -> float:
        return max(self.limit - self.used, 0)


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """
    One process's part in a run, or, of a run without a record, one call of `train()`.

    Args:
        number (`int`):
            From 1.
        pid (`int`, *optional*), host (`str`, *optional*):
            Where.
        began (`float`, *optional*), ended (`float`, *optional*):
            When; `None` for one that goes on, or whose end is not known.
        first_step (`int`), last_step (`int`):
            Optimizer steps finished at its beginning and end.
        resumed_from (`str`, *optional*):
            The checkpoint it went on from.
        ending (`str`):
            `"running"`, `"finished"`, `"preempted"`, `"interrupted"`, `"restart"`, `"failed"`, `"gave_up"`, `"died"`
            or `"unknown"`.
        why (`str`):
            In words.
    """

    number: int
    pid: int | None
    host: str | None
    began: float | None
    ended: float | None
    first_step: int
    last_step: int
    resumed_from: str | None
    ending: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class RankRow:
    """
    One process of a distributed job, as far as it has written anything.

    Args:
        rank (`int`):
            Which.
        step (`int`, *optional*), seen (`float`, *optional*):
            The step and time of the last thing it wrote down.
        incidents (`int`):
            Those in its journal.
        error (`str`, *optional*):
            What ended it.
        journal (`str`, *optional*), postmortem (`str`, *optional*):
            Its files.
    """

    rank: int
    step: int | None = None
    seen: float | None = None
    incidents: int = 0
    error: str | None = None
    journal: str | None = None
    postmortem: str | None = None


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """
    A checkpoint on disk, as its marker has it. Nothing of it is read through: `self-healing check` does that.

    Args:
        path (`str`):
            Relative to the `output_dir`.
        step (`int`):
            Optimizer steps finished.
        standing (`str`):
            `"verified"`, `"unverified"`, `"suspect"`, `"damaged"` (its marker cannot be read), or `"unmarked"` (no
            marker: not complete, or not written with this library).
        complete (`bool`):
            Whether every file its marker names is there with its size.
        emergency (`bool`), pinned (`bool`):
            Written because of an exception; kept in `last-known-good/`.
        finite (`bool`, *optional*):
            Whether its state was found to be finite.
        time (`float`, *optional*), bytes (`int`, *optional*):
            When it was written, and its size.
        run (`str`, *optional*), of_this_run (`bool`):
            Which run wrote it.
        incident (`str`, *optional*):
            What made it suspect.
    """

    path: str
    step: int
    standing: str
    complete: bool
    emergency: bool = False
    pinned: bool = False
    finite: bool | None = None
    time: float | None = None
    bytes: int | None = None
    run: str | None = None
    of_this_run: bool = True
    incident: str | None = None


@dataclass(frozen=True, slots=True)
class NextStep:
    """
    One thing to do, most pressing first.

    Args:
        text (`str`):
            A sentence in the imperative.
        why (`str`):
            The reason.
        command (`str`, *optional*):
            A line for the shell or for the training script.
        incidents (`list[str]`):
            Those it is about, oldest first.
    """

    text: str
    why: str = ""
    command: str | None = None
    incidents: list[str] = field(default_factory=list)


Number = float | None


@dataclass(frozen=True, slots=True)
class StepColumns:
    """
    The steps of a run in columns of the same length, in the order of their steps; a row is one step, or several next
    to each other of a long run.

    Args:
        step (`list[int]`):
            The first step of each row; strictly increasing.
        steps (`list[int]`):
            How many steps each row holds.
        skipped (`list[int]`):
            How many of them are not in the weights.
        time (`list[float]`):
            When the last of them was over.
        seconds (`list[float]`):
            Mean wall time of a step, from the end of the one before, evaluation and checkpoints included.
        busy (`list[float]`):
            How much of it was forward, backward and update.
        loss (`list[float]`), loss_max (`list[float]`):
            Mean and maximum of the true loss, as it was applied: of each step, not the average that the trainer logs.
            `None` where none was finite.
        grad_norm (`list[float]`), grad_norm_max (`list[float]`):
            The same of the gradient norm before clipping.
        grad_norm_usual (`list[float]`), grad_norm_bound (`list[float]`):
            What is usual by then, and above what a step is looked into.
        learning_rate (`list[float]`), learning_rate_scale (`list[float]`):
            The rate in force, and how much of the schedule's that is (1 unless it was reduced).
        memory (`list[float]`), memory_peak (`list[float]`), host_memory (`list[float]`):
            Bytes that tensors take on the accelerator between backward and update, the most they have taken so far,
            and resident memory of the process.
        attempt (`list[int]`):
            In which entry into `train()`.
    """

    step: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    time: list[float] = field(default_factory=list)
    seconds: list[Number] = field(default_factory=list)
    busy: list[Number] = field(default_factory=list)
    loss: list[Number] = field(default_factory=list)
    loss_max: list[Number] = field(default_factory=list)
    grad_norm: list[Number] = field(default_factory=list)
    grad_norm_max: list[Number] = field(default_factory=list)
    grad_norm_usual: list[Number] = field(default_factory=list)
    grad_norm_bound: list[Number] = field(default_factory=list)
    learning_rate: list[Number] = field(default_factory=list)
    learning_rate_scale: list[Number] = field(default_factory=list)
    memory: list[Number] = field(default_factory=list)
    memory_peak: list[Number] = field(default_factory=list)
    host_memory: list[Number] = field(default_factory=list)
    attempt: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, slots=True)
class LoggedMetric:
    """
    One metric as the trainer logged it.

    Args:
        step (`list[int]`):
            Optimizer steps finished, as the trainer counts them: after the step.
        value (`list[float]`):
            Its values.
    """

    step: list[int] = field(default_factory=list)
    value: list[Number] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Series:
    """
    What can be drawn of a run.

    Args:
        source (`str`):
            `"steps"` (every step was written down), `"logs"` (only what the trainer logged) or `"none"`.
        kept (`StepColumns`):
            The steps that lead to the weights there are.
        discarded (`list[StepColumns]`):
            Stretches that the run went back from, or that another process did again; oldest first.
        logged (`dict[str, LoggedMetric]`):
            What the trainer logged, by name: `eval_loss`, `rewards/...`; of the newest checkpoint.
        memory_total (`float`, *optional*):
            Bytes of the accelerator.
    """

    source: str = "none"
    kept: StepColumns = field(default_factory=StepColumns)
    discarded: list[StepColumns] = field(default_factory=list)
    logged: dict[str, LoggedMetric] = field(default_factory=dict)
    memory_total: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """
    What is known of the weights that a run has left.

    Args:
        name (`str`):
            `"good"`, `"look first"` or `"do not use"`.
        why (`list[str]`):
            What it rests on, most pressing first.
        learned (`str`):
            What the run has learned as far as its logs say, and what to do, in a sentence.
    """

    name: str
    why: list[str]
    learned: str = ""

    @property
    def reasons(self) -> str:
        """What it rests on, in a sentence."""
        told = "; ".join(self.why)
        return f"{told[:1].upper()}{told[1:]}."

    def __str__(self) -> str:
        return f"{self.name.capitalize()}: {'; '.join(self.why)}. {self.learned}".rstrip()


@dataclass(frozen=True, slots=True)
class RunBrief:
    """
    One of several runs that wrote into the same directory.

    Args:
        run (`str`):
            Its name.
        began (`float`, *optional*), step (`int`), incidents (`int`), state (`str`):
            When it began, how far it came, how many incidents it had, and what became of it ([`State`]).
    """

    run: str
    began: float | None
    step: int
    incidents: int
    state: str


@dataclass(frozen=True, slots=True)
class RunReport:
    """
    All that is known of one run.

    Args:
        run (`str`):
            Its name.
        directory (`str`), output_dir (`str`):
            Where its journal lies, and where its checkpoints do; absolute.
        made (`float`):
            When this was read.
        state ([`State`]):
            What has become of it.
        objective (`str`, *optional*):
            What is trained: `"sft"`, `"dpo"`, ...
        detectors (`list[str]`), rules (`list[str]`):
            What was watched.
        began (`float`, *optional*):
            When its first process began.
        incidents (`list[IncidentStory]`):
            In the order in which they were seen, of all processes.
        notices (`list[Notice]`), goodput ([`Goodput`]), budgets (`list[Budget]`), attempts (`list[AttemptRow]`):
            As they say.
        ranks (`list[RankRow]`), quarantine (`list[RowNamed]`), checkpoints (`list[CheckpointRow]`):
            As they say; checkpoints newest first.
        learning_rate (`str`):
            What became of the rate, in a sentence; empty if it is the schedule's.
        verdict ([`Verdict`], *optional*):
            What is known of its weights; `None` as long as the run goes on, or may.
        next_steps (`list[NextStep]`):
            What to do, most pressing first; never empty.
        series ([`Series`]):
            What can be drawn.
        files (`list[FileNamed]`):
            What the run has left.
        remarks (`list[str]`):
            What could not be read, and other things to know about this report.
        other_runs (`list[RunBrief]`):
            Further runs into the same directory, oldest first.
    """

    run: str
    directory: str
    output_dir: str
    made: float
    state: State
    objective: str | None = None
    detectors: list[str] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    began: float | None = None
    incidents: list[IncidentStory] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    goodput: Goodput | None = None
    budgets: list[Budget] = field(default_factory=list)
    attempts: list[AttemptRow] = field(default_factory=list)
    ranks: list[RankRow] = field(default_factory=list)
    quarantine: list[RowNamed] = field(default_factory=list)
    checkpoints: list[CheckpointRow] = field(default_factory=list)
    learning_rate: str = ""
    verdict: Verdict | None = None
    next_steps: list[NextStep] = field(default_factory=list)
    series: Series = field(default_factory=Series)
    files: list[FileNamed] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    other_runs: list[RunBrief] = field(default_factory=list)

    @property
    def steps_lost(self) -> int:
        """Optimizer steps that are missing from the weights."""
        return sum(incident.steps_lost for incident in self.incidents)

    @property
    def lost(self) -> str:
        """How many steps are missing from the weights, in words."""
        return lost_steps(self.steps_lost, *(each.evidence for each in self.incidents))

    @property
    def steps_repeated(self) -> int:
        """Optimizer steps that were finished, were in no checkpoint, and had to be done again."""
        return sum(incident.steps_repeated for incident in self.incidents)

    @property
    def seconds_lost(self) -> float:
        """Seconds that diagnosis and remedies took."""
        return float(sum(incident.seconds_lost for incident in self.incidents))

    def to_dict(self, series: bool = True) -> dict[str, Any]:
        """
        Returns all of it as strict JSON.

        Args:
            series (`bool`, *optional*, defaults to `True`):
                Whether what can be drawn is part of it: most of the size.
        """
        content: dict[str, Any] = jsonable(asdict(self if series else replace(self, series=Series())))
        if not series:
            del content["series"]
        totals = {
            "steps_lost": self.steps_lost,
            "steps_repeated": self.steps_repeated,
            "seconds_lost": round(self.seconds_lost, 3),
        }
        return {"schema": SCHEMA, **content, **totals}
