"""
What the examples share: their flags, the tiny model of `--offline-tiny`, and what is printed in the end.

Nothing in here is needed to heal a run; look at any of the other files for that.
"""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from datasets import Dataset
from rich.console import Console
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available
from trl import ModelConfig, ScriptArguments, TrlParser

from self_healing import HealingConfig, SelfHealingTrainer
from self_healing.tools.demo.model import (
    TINY,
    TINY_LEARNING_RATE,
    small_llama,
    stdlib_docstrings,
    train_tokenizer,
)


_STEPS = 160
# What `--offline-tiny` sets; flags and a YAML file of your own go before it.
TINY_DEFAULTS = {
    "adam_beta2": 0.95,
    "bf16": False,
    "gradient_checkpointing": False,
    "learning_rate": TINY_LEARNING_RATE,
    "logging_steps": 5,
    "lr_scheduler_type": "cosine",
    "max_length": TINY.tokens,
    "max_steps": _STEPS,
    "per_device_train_batch_size": TINY.rows,
    "report_to": "none",
    "use_cpu": True,
    "warmup_steps": _STEPS // 10,
}


@dataclass
class OfflineArguments:
    """
    What the examples add to the settings of TRL and of the healing.

    Args:
        offline_tiny (`bool`, *optional*, defaults to `False`):
            Train a tiny model with random weights on docstrings of the standard library: no Hub, no GPU, a minute.
    """

    offline_tiny: bool = field(
        default=False,
        metadata={"help": "Train a tiny model with random weights on docstrings of the standard library instead."},
    )


def parse(config_class: type[TrainingArguments], **tiny_defaults: Any) -> tuple[Any, ...]:
    """
    Reads the command line: every setting of the dataset, the training, the model and the healing is a flag.

    Args:
        config_class (`type[TrainingArguments]`):
            Of the trainer.
        tiny_defaults (`Any`):
            Defaults of this example with `--offline-tiny`, beside [`TINY_DEFAULTS`].

    Returns:
        `tuple`: `ScriptArguments`, the config, `ModelConfig`, `HealingConfig`, `OfflineArguments`.
    """
    parser = TrlParser((ScriptArguments, config_class, ModelConfig, HealingConfig, OfflineArguments))
    # TRL trains in bf16 unless told otherwise, and refuses to start where there is none.
    parser.set_defaults(bf16=is_torch_bf16_gpu_available())
    if {"--offline_tiny", "--offline-tiny"} & set(sys.argv):
        known = {each.name for each in fields(config_class)}
        wanted = {**TINY_DEFAULTS, **tiny_defaults}
        parser.set_defaults(**{name: value for name, value in wanted.items() if name in known})
    found = parser.parse_args_and_config()
    script, model, offline = found[0], found[2], found[4]
    if not offline.offline_tiny and (model.model_name_or_path is None or script.dataset_name is None):
        raise SystemExit("Please name --model_name_or_path and --dataset_name, or set --offline_tiny.")
    return found


@dataclass(frozen=True, slots=True)
class Tiny:
    """A tiny model with random weights, the tokenizer trained on its text, and the text, in rows."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast
    training: list[str]
    held_out: list[str]


def tiny(seed: int = 0) -> Tiny:
    """Builds a tiny model and 640 rows of text, those held out included; `seed` is that of the weights."""
    texts = stdlib_docstrings(most=640)
    # Neighbours are of one file: those held out are from everywhere.
    held_out = texts[:: len(texts) // TINY.held_out][: TINY.held_out]
    apart = frozenset(held_out)
    tokenizer = train_tokenizer(texts, TINY.vocabulary)
    return Tiny(small_llama(tokenizer, TINY, seed), tokenizer, [text for text in texts if text not in apart], held_out)


def text_of(tiny: Tiny) -> dict[str, Dataset]:
    """The docstrings as `train_dataset` and `eval_dataset`."""
    return {
        "train_dataset": Dataset.from_dict({"text": tiny.training}),
        "eval_dataset": Dataset.from_dict({"text": tiny.held_out}),
    }


def unigram_loss(tiny: Tiny) -> float:
    """Held-out loss of a model that knows how frequent each token is, and nothing else, in nats."""

    def tokens(texts: Sequence[str]) -> list[int]:
        # The first token of a row is given, never predicted.
        cut: Any = tiny.tokenizer(list(texts), truncation=True, max_length=TINY.tokens)["input_ids"]
        return [token for row in cut for token in row[1:]]

    training, held_out, vocabulary = tokens(tiny.training), tokens(tiny.held_out), len(tiny.tokenizer)
    # Each of the vocabulary is counted once more, so that none is impossible.
    counts, total = Counter(training), len(training) + vocabulary
    return -sum(math.log((counts[token] + 1) / total) for token in held_out) / len(held_out)


def show(healer: SelfHealingTrainer, tiny: Tiny | None = None) -> None:
    """Prints what was healed and, of the tiny model, what it has learned."""
    # On every rank, where there are several: an evaluation is done by all of them.
    loss = None if tiny is None else healer.trainer.evaluate()["eval_loss"]
    if not healer.trainer.is_world_process_zero():
        return
    report = healer.get_report()
    console = Console(highlight=False)
    print(f"{report}\nJournal: {report.journal}")
    if tiny is not None:
        console.print(
            f"Held-out loss: {loss:.3f}; the frequencies of tokens alone would give {unigram_loss(tiny):.3f}."
        )
