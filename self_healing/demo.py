"""
The demo: a small language model learns real text, three faults strike, and the terminal shows what becomes of them.

Nothing in it is acted. The model trains, the faults are injected where real ones arise, and the table at the end is
read from the run's own report; what the run did not show is printed as a failure of the demo.
"""

from __future__ import annotations

import ast
import contextlib
import logging
import math
import os
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import torch
import transformers
from datasets import Dataset
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from trl import SFTConfig, SFTTrainer

from .chaos import Chaos, Fault, Ledger
from .config import HealingConfig
from .failures import FailureType
from .journal.incident import Incident
from .journal.journal import EVENTS_FILE
from .trainer import SelfHealingTrainer


# What a decoder writes for bytes it cannot read: the commonest trace of a broken file in scraped text.
BROKEN_CHARACTER = "\ufffd"

# Folders of the standard library that hold other people's packages, or tests.
_NOT_READ = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSize:
    """
    Size of model, text and run. The defaults take two CPU cores about a minute, the fault-free twin included.

    Args:
        steps (`int`, *optional*, defaults to 120):
            Optimizer steps, at least 8; the training set is as large as they need for one epoch.
        rows (`int`, *optional*, defaults to 8):
            Rows of a micro-batch. A step has two micro-batches.
        tokens (`int`, *optional*, defaults to 128):
            Longest row, in tokens.
        vocabulary (`int`, *optional*, defaults to 2048):
            Size of the tokenizer's vocabulary, at least 300.
        width (`int`, *optional*, defaults to 160):
            Size of the hidden states; a multiple of 8.
        layers (`int`, *optional*, defaults to 2):
            Transformer blocks.
        held_out (`int`, *optional*, defaults to 128):
            Rows the loss is compared on at the end.
    """

    steps: int = 120
    rows: int = 8
    tokens: int = 128
    vocabulary: int = 2048
    width: int = 160
    layers: int = 2
    held_out: int = 128

    def __post_init__(self) -> None:
        if self.steps < 8:
            raise ValueError(f"steps is {self.steps}; please give at least 8, so that three faults have room.")

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step."""
        return 2

    @property
    def training_rows(self) -> int:
        """Rows of the training set: one epoch."""
        return self.steps * self.rows * self.accumulation


@dataclass(frozen=True, slots=True)
class DemoResult:
    """
    Outcome of the demo.

    Args:
        problems (`list[str]`):
            What should have been seen and was not; empty if all is well.
        incidents (`list[dict]`):
            The incidents of the run, as [`HealingReport`] gives them.
        held_out_loss (`float`):
            Loss of the trained model on rows it has not seen; NaN if the model is ruined.
        twin_loss (`float` or `None`):
            The same for the fault-free twin, trained by the plain trainer.
    """

    problems: list[str] = field(default_factory=list)
    incidents: list[dict[str, Any]] = field(default_factory=list)
    held_out_loss: float = math.nan
    twin_loss: float | None = None


# ---- model and text ----


def stdlib_docstrings(least: int = 80) -> list[str]:
    """
    Collects the docstrings of Python's standard library, each once, in the order of files and lines.

    The files are parsed, never imported.

    Args:
        least (`int`, *optional*, defaults to 80):
            Shortest docstring that is taken, in characters.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: dict[str, None] = {}
    for path in sorted(root.rglob("*.py")):
        if _NOT_READ.intersection(path.relative_to(root).parts):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            # Some files are there to be wrong: bad syntax or encodings, for the tests of lib2to3.
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text is not None and len(text) >= least and BROKEN_CHARACTER not in text:
                    texts[text] = None
    return list(texts)


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """
    Trains a byte-level BPE tokenizer on the spot; the broken character is a token of its own.

    Args:
        texts (`Sequence[str]`):
            What it learns from.
        vocabulary (`int`):
            How many tokens it gets.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", "<eos>", BROKEN_CHARACTER],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def small_llama(tokenizer: Any, size: DemoSize, seed: int) -> LlamaForCausalLM:
    """
    Builds a Llama with random weights.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]):
            Gives the vocabulary and the special tokens.
        size ([`DemoSize`]):
            Gives width and depth.
        seed (`int`):
            Of the weights.
    """
    set_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=size.width,
            intermediate_size=3 * size.width,
            num_hidden_layers=size.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=2 * size.tokens,
            tie_word_embeddings=True,
            # Three times the usual: so narrow a model starts faster with it.
            initializer_range=0.06,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


# ---- the faults ----


@dataclass(frozen=True, slots=True)
class DemoFault:
    """
    One fault of the demo.

    Args:
        name (`str`):
            As the table has it.
        what (`str`):
            What it does, in a sentence.
        injected ([`~self_healing.chaos.Fault`]):
            What [`~self_healing.chaos.Chaos`] injects for it, at a step of its own.
        failure ([`FailureType`]):
            What it should be diagnosed as.
    """

    name: str
    what: str
    injected: Fault
    failure: FailureType

    @property
    def step(self) -> int:
        """Optimizer steps finished when it strikes."""
        return int(self.injected.at)


def demo_faults(steps: int, broken_token: int) -> tuple[DemoFault, ...]:
    """
    Gives the three faults of a run, a quarter of it apart.

    Args:
        steps (`int`):
            Of the run.
        broken_token (`int`):
            The token of the broken character, which only the poison sample has.
    """
    return (
        DemoFault(
            "transient NaN",
            "one forward pass answers NaN",
            Fault("nan_loss", at=steps // 4),
            FailureType.NONFINITE_TRANSIENT,
        ),
        DemoFault(
            "poison sample",
            "the model's answer to one row is NaN, every time",
            Fault("poison_samples", at=steps // 2, token=broken_token),
            FailureType.NONFINITE_POISON_ROWS,
        ),
        DemoFault(
            "dropped connection",
            "the connection to a server that the forward pass asks drops",
            Fault("network_error", at=3 * steps // 4),
            FailureType.NETWORK,
        ),
    )


class _AnnouncedStrikes(Ledger):
    """Announces each strike before it is written down."""

    def __init__(self, path: Path, faults: Sequence[DemoFault], announce: Callable[[str], None]) -> None:
        super().__init__(path)
        self._faults = {fault.injected.kind: fault for fault in faults}
        self._announce = announce

    def strike(self, fault: str, kind: str, step: int, count: int, detail: Mapping[str, Any]) -> None:
        self._announce(self._faults[kind].what)
        super().strike(fault, kind, step, count, detail)


# ---- what the terminal shows ----


class _Storyteller(TrainerCallback):
    """Prints about ten lines of progress, and every incident as it is dealt with."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._step = 0

    def say(self, text: str) -> None:
        self._console.print(f"  {self._step:>4}/{self._steps}  {text}")

    def strikes(self, text: str) -> None:
        self.say(f"[bold yellow]fault[/]    {text}")

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._step = state.global_step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._step = state.global_step

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is not None and "loss" in logs:
            norm = "" if math.isfinite(logs.get("grad_norm", 0.0)) else f"   gradient norm {logs['grad_norm']}"
            self.say(f"[dim]loss {float(logs['loss']):.4f}{norm}[/]")

    def on_instability(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        incident: Incident,
        **kwargs: Any,
    ) -> None:
        self.say(f"[bold]cause[/]    {escape(_cause(incident.to_dict()))}")
        self.say(
            f"[bold green]remedy[/]   {_words(incident.actions) or 'none'}; "
            f"{incident.steps_lost} steps, {incident.seconds_lost:.2f} s lost"
        )


class _WeightWatch(TrainerCallback):
    """For the run without healing: notes the step after which the weights are no longer numbers."""

    def __init__(self, storyteller: _Storyteller) -> None:
        self._storyteller = storyteller
        self.ruined_at: int | None = None
        self.ruined_tensors = ""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.ruined_at is not None:
            return
        tensors = list(kwargs["model"].parameters())
        bad = sum(not bool(torch.isfinite(tensor).all()) for tensor in tensors)
        if bad:
            self.ruined_at = state.global_step
            self.ruined_tensors = f"{bad} of {len(tensors)} weight tensors"
            self._storyteller.say(f"[bold red]ruined[/]   {self.ruined_tensors} now hold NaN")


def _words(actions: Sequence[str]) -> str:
    return ", ".join(action.replace("_", " ") for action in actions)


def _cause(incident: Mapping[str, Any]) -> str:
    """The cause with what names it: the row, or the exception."""
    rows = [str(row["dataset_index"]) for row in incident["evidence"].get("rows", ())]
    if rows:
        return f"{incident['cause']}: row {', '.join(rows)}"
    return f"{incident['cause']}: {incident['symptom'].replace('_', ' ')}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Mutes what the libraries would say in between, and keeps them off the network."""
    offline = huggingface_hub.constants.HF_HUB_OFFLINE
    verbosity = transformers.logging.get_verbosity()
    loggers = [logging.getLogger(name) for name in ("self_healing", "trl", "accelerate", "datasets")]
    levels = [logger.level for logger in loggers]
    bars = not datasets.are_progress_bars_disabled(), transformers.logging.is_progress_bar_enabled()
    # Set here and not in the environment, which the Hub client read when it was imported.
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
    for logger in loggers:
        # The story tells of incidents; an error of the library itself has to be seen.
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        huggingface_hub.constants.HF_HUB_OFFLINE = offline
        transformers.logging.set_verbosity(verbosity)
        if bars[0]:
            datasets.enable_progress_bars()
        if bars[1]:
            transformers.logging.enable_progress_bar()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# ---- the runs ----


class _Stage:
    """Text, tokenizer and sizes that all runs of one demo share, and the builder of their trainers."""

    def __init__(self, size: DemoSize, seed: int) -> None:
        self.size, self.seed = size, seed
        texts = stdlib_docstrings()
        needed = size.training_rows + size.held_out
        if len(texts) < needed:
            raise RuntimeError(
                f"The demo needs {needed} docstrings and found {len(texts)} in {sysconfig.get_paths()['stdlib']}. "
                "Please run it with a Python that has the source of its standard library beside it."
            )
        self.tokenizer = train_tokenizer(texts, size.vocabulary)
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
        chosen = [texts[index] for index in order[:needed]]
        self.held_out, self.training = chosen[: size.held_out], chosen[size.held_out :]
        self.faults = demo_faults(size.steps, self.tokenizer.vocab[BROKEN_CHARACTER])
        self.poison_row = self.faults[1].step * size.rows * size.accumulation + size.rows // 2
        self.training[self.poison_row] = f"{BROKEN_CHARACTER} {self.training[self.poison_row]}"
        self.parameters = sum(parameter.numel() for parameter in small_llama(self.tokenizer, size, seed).parameters())

    def trainer(self, output_dir: Path, storyteller: _Storyteller) -> Any:
        size = self.size
        args = SFTConfig(
            output_dir=str(output_dir),
            seed=self.seed,
            max_steps=size.steps,
            max_length=size.tokens,
            per_device_train_batch_size=size.rows,
            gradient_accumulation_steps=size.accumulation,
            # Rows come in the order they were shuffled into, so that the poison sample comes half way.
            train_sampling_strategy="sequential",
            learning_rate=6e-3,
            adam_beta2=0.95,
            warmup_steps=size.steps // 10,
            lr_scheduler_type="cosine",
            logging_steps=max(size.steps // 10, 1),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            bf16=False,
            gradient_checkpointing=False,
        )
        if args.n_gpu > 1:
            # Without a launcher the Trainer would spread each batch over all GPUs, and make it larger.
            args._n_gpu = 1
        trainer = SFTTrainer(
            model=small_llama(self.tokenizer, size, self.seed),
            args=args,
            train_dataset=Dataset.from_dict({"text": self.training}),
            eval_dataset=Dataset.from_dict({"text": self.held_out}),
            processing_class=self.tokenizer,
            callbacks=[storyteller],
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    @contextlib.contextmanager
    def struck(self, trainer: Any, storyteller: _Storyteller) -> Iterator[Ledger]:
        """Lets the faults strike a trainer, and gives the ledger of what has struck."""
        with tempfile.TemporaryDirectory() as scratch:
            ledger = _AnnouncedStrikes(Path(scratch) / "chaos.jsonl", self.faults, storyteller.strikes)
            Chaos([fault.injected for fault in self.faults], ledger=ledger).attach(trainer)
            yield ledger


def run_demo(
    output_dir: str | os.PathLike[str],
    *,
    healing: bool = True,
    seed: int = 0,
    size: DemoSize | None = None,
    config: HealingConfig | None = None,
    console: Console | None = None,
) -> DemoResult:
    """
    Trains a small language model while three faults strike, and prints what happens.

    Args:
        output_dir (`str` or `os.PathLike`):
            Where the run writes its journal. Should not hold an earlier run.
        healing (`bool`, *optional*, defaults to `True`):
            Whether [`SelfHealingTrainer`] trains, or the plain trainer.
        seed (`int`, *optional*, defaults to 0):
            Of weights and order.
        size ([`DemoSize`], *optional*):
            How much is trained.
        config ([`HealingConfig`], *optional*):
            Of the healing. Defaults to the default configuration with a short wait before the reconnection.
        console ([`~rich.console.Console`], *optional*):
            Where to print.

    Returns:
        [`DemoResult`]: with the expectations that were not met, if any.
    """
    size, console = size or DemoSize(), console or Console(highlight=False)
    # The default first wait is up to 5 seconds: right for a server, long for an audience.
    config = config or HealingConfig(retry_initial_seconds=1.0)
    with _quiet():
        stage = _Stage(size, seed)
        first, second, third = (fault.step for fault in stage.faults)
        console.print(
            f"\n[bold]SFTTrainer teaches a {stage.parameters / 1e6:.1f}M-parameter Llama {size.training_rows:,} "
            f"docstrings of Python's library.[/]\nThree faults: transient NaN (step {first}), "
            f"poison sample ({second}), lost connection ({third})."
        )
        if healing:
            return _healed(stage, Path(output_dir), config, console)
        return _unhealed(stage, Path(output_dir), console)


def _healed(stage: _Stage, output_dir: Path, config: HealingConfig, console: Console) -> DemoResult:
    console.print("They are healed; a fault-free twin under the plain trainer is the measure.\n")
    storyteller = _Storyteller(console, stage.size.steps)
    trainer = stage.trainer(output_dir, storyteller)
    problems = []
    with stage.struck(trainer, storyteller) as ledger:
        healer = SelfHealingTrainer(trainer, config)
        try:
            healer.train()
        except Exception as error:
            storyteller.say(f"[bold red]stopped[/]  {escape(f'{type(error).__name__}: {error}')}")
            problems.append(f"the run ended with {type(error).__name__}")
        struck = {strike.kind for strike in ledger.strikes()}
    loss = float(trainer.evaluate()["eval_loss"])

    console.print("\nThe fault-free twin: the same seed and settings, the plain trainer.\n")
    with tempfile.TemporaryDirectory() as scratch:
        twin = stage.trainer(Path(scratch), _Storyteller(console, stage.size.steps))
        twin.train()
        twin_loss = float(twin.evaluate()["eval_loss"])

    incidents = healer.get_report().incidents
    problems += _unmet(stage, struck, incidents, int(trainer.state.global_step), loss, twin_loss)
    console.print()
    console.print(_table(stage.faults, struck, incidents))
    console.print(
        f"Held-out loss: [bold]{loss:.4f}[/] healed, [bold]{twin_loss:.4f}[/] fault-free twin "
        f"({100 * (loss / twin_loss - 1):+.2f} %).\nThe twin had no fault, so it also learned from the poison sample."
    )
    console.print(f"Journal: {output_dir / EVENTS_FILE}", soft_wrap=True)
    if not problems:
        console.print("[bold green]Every fault was found and healed, and no step was lost.[/]")
    for problem in problems:
        console.print(f"[bold red]Not as it should be:[/] {escape(problem)}.", soft_wrap=True)
    return DemoResult(problems, incidents, loss, twin_loss)


def _unhealed(stage: _Stage, output_dir: Path, console: Console) -> DemoResult:
    console.print("The plain trainer meets them: nothing is healed.\n")
    storyteller = _Storyteller(console, stage.size.steps)
    trainer = stage.trainer(output_dir, storyteller)
    watch = _WeightWatch(storyteller)
    trainer.add_callback(watch)
    died: Exception | None = None
    with stage.struck(trainer, storyteller):
        try:
            trainer.train()
        except Exception as error:
            died = error
            storyteller.say(f"[bold red]dead[/]     {escape(f'{type(error).__name__}: {error}')}")
    step = int(trainer.state.global_step)
    loss = float(trainer.evaluate()["eval_loss"])

    console.print("\n[bold]What became of the run[/]\n")
    if watch.ruined_at is not None:
        console.print(
            f"Weights: {watch.ruined_tensors} hold NaN since step {watch.ruined_at}; the steps after it were in vain."
        )
    else:
        console.print("Weights: all finite.")
    if died is not None:
        console.print(
            f"Run: killed by {type(died).__name__} at step {step} of {stage.size.steps}; no checkpoint was written."
        )
    else:
        console.print(f"Run: reached its last step, {step}.")
    console.print(f"Held-out loss: [bold]{loss:.4f}[/].")
    if watch.ruined_at is not None or died is not None:
        console.print("The same faults with healing: [bold]self-healing demo[/]")
    return DemoResult(held_out_loss=loss)


def _unmet(
    stage: _Stage,
    struck: Set[str],
    incidents: Sequence[Mapping[str, Any]],
    step: int,
    loss: float,
    twin_loss: float,
) -> list[str]:
    """Lists what a run that healed everything would show, and this one did not."""
    problems = []
    if step != stage.size.steps:
        problems.append(f"{step} of {stage.size.steps} steps were trained")
    for fault in stage.faults:
        if fault.injected.kind not in struck:
            problems.append(f"the {fault.name} never struck")
            continue
        found = _incidents_of(fault, incidents)
        if len(found) != 1:
            problems.append(f"the {fault.name} is the cause of {len(found)} incidents, not of one")
        problems += [
            f"the {fault.name} at step {incident['step']} was not healed without loss: {incident['outcome']}, "
            f"{incident['steps_lost']} steps lost"
            for incident in found
            if incident["outcome"] != "resolved" or incident["steps_lost"]
        ]
    known = {fault.failure.value for fault in stage.faults}
    problems += [
        f"an incident that no fault explains, at step {incident['step']}: {incident['symptom']}, {incident['cause']}"
        for incident in incidents
        if incident["failure"] not in known
    ]
    blamed = [row["dataset_index"] for incident in incidents for row in incident["evidence"].get("rows", ())]
    if blamed != [stage.poison_row]:
        problems.append(f"rows {blamed} were blamed, row {stage.poison_row} is the poison sample")
    if not abs(loss - twin_loss) <= 0.02 * twin_loss:
        problems.append(f"the held-out loss, {loss:.4f}, is more than 2 % off the twin's, {twin_loss:.4f}")
    return problems


def _incidents_of(fault: DemoFault, incidents: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [incident for incident in incidents if incident["failure"] == fault.failure.value]


def _table(faults: Sequence[DemoFault], struck: Set[str], incidents: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(header_style="bold")
    for column in ("fault", "cause found", "remedy", "steps\nlost", "seconds\nlost"):
        table.add_column(column, justify="right" if "lost" in column else "left")
    for fault in faults:
        name = f"{fault.name}\n(step {fault.step})"
        found = _incidents_of(fault, incidents)
        for incident in found:
            table.add_row(
                name,
                escape(_cause(incident)),
                _words(incident["actions"]) or "nothing",
                str(incident["steps_lost"]),
                f"{incident['seconds_lost']:.2f}",
            )
        if not found:
            missing = "not found" if fault.injected.kind in struck else "never struck"
            table.add_row(name, f"[bold red]{missing}[/]", "", "", "")
    return table


def fresh_run_dir(parent: str | os.PathLike[str] = "outputs") -> Path:
    """A directory named by the time, so that the journals of two demos do not run into one."""
    return Path(parent) / time.strftime("demo-%Y%m%d-%H%M%S")
