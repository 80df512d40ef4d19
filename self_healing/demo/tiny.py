"""
A tiny language model on text that every machine has: what the rehearsal and the examples train, offline.

In 80 steps, some seconds on one core, its loss falls a nat below what the frequencies of tokens alone would give: it
has learned enough for damage to its weights to show.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from .model import small_llama, train_tokenizer
from .size import DemoSize
from .text import stdlib_docstrings


TINY = DemoSize(steps=80, rows=8, tokens=64, vocabulary=512, width=64, layers=2)
# What so small a model is trained with; that of a real one is a hundredth of it.
TINY_LEARNING_RATE = 6e-3
_HELD_OUT = 32


@dataclass(frozen=True, slots=True)
class Tiny:
    """
    A tiny model, its tokenizer and its text.

    Args:
        model ([`~transformers.LlamaForCausalLM`]):
            With random weights.
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]):
            Trained on the text.
        training (`list[str]`), held_out (`list[str]`):
            Docstrings of the standard library.
    """

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast
    training: list[str]
    held_out: list[str]

    @property
    def unigram_loss(self) -> float:
        """Loss on the held-out rows of a model that knows how frequent each token is, and nothing else."""
        return unigram_loss(self._tokens(self.training), self._tokens(self.held_out), len(self.tokenizer))

    def _tokens(self, texts: Sequence[str]) -> list[int]:
        # The first token of a row is given, never predicted.
        cut: Any = self.tokenizer(list(texts), truncation=True, max_length=TINY.tokens)["input_ids"]
        return [token for row in cut for token in row[1:]]


def tiny(seed: int = 0, rows: int = 640) -> Tiny:
    """
    Builds a tiny model with all that it needs for training.

    Args:
        seed (`int`, *optional*, defaults to 0):
            Of the weights.
        rows (`int`, *optional*, defaults to 640):
            Docstrings of the text, those held out included.
    """
    texts = stdlib_docstrings(most=rows)
    # Neighbours are of one file: those held out are from everywhere.
    held_out = texts[:: len(texts) // _HELD_OUT][:_HELD_OUT]
    apart = frozenset(held_out)
    tokenizer = train_tokenizer(texts, TINY.vocabulary)
    return Tiny(small_llama(tokenizer, TINY, seed), tokenizer, [text for text in texts if text not in apart], held_out)


def unigram_loss(training: Sequence[int], held_out: Sequence[int], vocabulary: int) -> float:
    """
    Gives the mean negative log-likelihood of tokens by their frequency elsewhere, in nats.

    Args:
        training (`Sequence[int]`):
            Tokens that are counted; each of the vocabulary once more, so that none is impossible.
        held_out (`Sequence[int]`):
            Tokens that are predicted.
        vocabulary (`int`):
            Number of tokens there are.
    """
    counts, total = Counter(training), len(training) + vocabulary
    return -sum(math.log((counts[token] + 1) / total) for token in held_out) / len(held_out)
