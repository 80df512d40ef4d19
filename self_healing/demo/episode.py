"""One run of the demo: the plain trainer, the healed one, or the fault-free twin."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import torch
import transformers
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import SFTConfig, SFTTrainer

from ..chaos.callback import Chaos
from ..chaos.faults import Fault, Ledger
from ..journal.incident import Incident
from ..trainer import SelfHealingTrainer
from .events import Ended, Event, Healed, Ruined, Stepped, Stopped, Struck
from .faults import DemoFault
from .model import small_llama, train_tokenizer
from .runs import HEALED, TWIN, Episode
from .text import BROKEN_CHARACTER, Corpus


Tell = Callable[[Event], object]


class _Teller(TrainerCallback):
    """Tells of each step as it is logged, of weights that are no numbers any more, and of each incident."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._ruined = False

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "loss" not in logs:
            return
        tensors = list(kwargs["model"].parameters())
        norm = float(logs.get("grad_norm", math.nan))
        self._tell(Stepped(state.global_step, float(logs["loss"]), norm, _digest(tensors)))
        bad = sum(not bool(torch.isfinite(tensor).all()) for tensor in tensors)
        if bad and not self._ruined:
            self._ruined = True
            self._tell(Ruined(state.global_step, f"{bad} of {len(tensors)} weight tensors"))

    def on_instability(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, incident: Incident, **kwargs: Any
    ) -> None:
        self._tell(Healed(state.global_step, incident.to_dict()))


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    content = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        content.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


class _AnnouncedStrikes(Ledger):
    """Announces each strike before it is written down."""

    def __init__(self, path: Path, faults: Sequence[DemoFault], tell: Tell) -> None:
        super().__init__(path)
        self._faults = {fault.kind: fault for fault in faults}
        self._tell = tell

    def strike(self, fault: str, kind: str, step: int, count: int, detail: Mapping[str, Any]) -> None:
        self._tell(Struck(step, self._faults[kind].what))
        super().strike(fault, kind, step, count, detail)


def run_episode(episode: Episode, corpus: Corpus, tell: Tell) -> None:
    """
    Trains one run to its end, or to the exception that ends it.

    Args:
        episode ([`Episode`]):
            Which run.
        corpus ([`Corpus`]):
            Its text.
        tell (`Callable[[Event], object]`):
            Called with all that happens; the last is an [`Ended`].
    """
    with _quiet(), tempfile.TemporaryDirectory() as scratch:
        # The plain runs write nothing; TRL wants a directory all the same.
        directory = Path(episode.output_dir if episode.name == HEALED else scratch)
        trainer, token = _trainer(episode, corpus, directory, tell)
        ledger = _AnnouncedStrikes(Path(scratch) / "chaos.jsonl", episode.faults, tell)
        if episode.name != TWIN:
            Chaos([_injected(fault, token) for fault in episode.faults], ledger=ledger).attach(trainer)
        # The healer of this run alone.
        healer = SelfHealingTrainer(trainer, episode.config) if episode.name == HEALED else None
        try:
            (healer or trainer).train()
        except Exception as error:
            tell(Stopped(int(trainer.state.global_step), type(error).__name__, str(error)))
        loss = float(trainer.evaluate()["eval_loss"])
        incidents = [] if healer is None else healer.get_report().incidents
        struck = frozenset(strike.kind for strike in ledger.strikes())
        tell(Ended(int(trainer.state.global_step), loss, struck, incidents))


def _injected(fault: DemoFault, broken_token: int) -> Fault:
    # Only the row that holds this token is poison.
    return Fault(fault.kind, at=fault.step, token=broken_token if fault.kind == "poison_samples" else None)


def _trainer(episode: Episode, corpus: Corpus, directory: Path, tell: Tell) -> tuple[Any, int]:
    """The trainer of a run, and the token of the broken character."""
    size = episode.size
    tokenizer = train_tokenizer(corpus.all, size.vocabulary)
    args = SFTConfig(
        output_dir=str(directory),
        seed=episode.seed,
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
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        # So small a model is not faster on a GPU, and the CPU computes each step bitwise alike.
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = SFTTrainer(
        model=small_llama(tokenizer, size, episode.seed),
        args=args,
        train_dataset=Dataset.from_dict({"text": corpus.training}),
        eval_dataset=Dataset.from_dict({"text": corpus.held_out}),
        processing_class=tokenizer,
        callbacks=[_Teller(tell)],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer, tokenizer.vocab[BROKEN_CHARACTER]


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
