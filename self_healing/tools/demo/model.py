"""A small Llama with random weights, its tokenizer and its text: what demo, examples and benchmarks train, offline."""

from __future__ import annotations

import ast
import functools
import sysconfig
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed


# What a decoder writes for bytes it cannot read: the commonest trace of a broken file in scraped text.
BROKEN_CHARACTER = "\ufffd"
# What so small a model is trained with; that of a real one is a hundredth of it.
TINY_LEARNING_RATE = 6e-3
# Folders of the standard library that hold other people's packages, or tests.
_NOT_READ = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSize:
    """How large model, batch and run are; a `width` of eights, a `vocabulary` from 300, `steps` from 8 on."""

    steps: int = 120
    rows: int = 8
    tokens: int = 96
    vocabulary: int = 1024
    width: int = 128
    layers: int = 2
    held_out: int = 128


# In 80 steps, some seconds on one core, its loss falls a nat below what the frequencies of tokens alone would give:
# it has learned enough for damage to its weights to show.
TINY = DemoSize(steps=80, tokens=64, vocabulary=512, width=64, held_out=32)


@functools.cache
def stdlib_docstrings(most: int | None = None) -> list[str]:
    """Collects the docstrings of Python's standard library, each once, in the order of files and lines."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: dict[str, None] = {}
    for path in sorted(root.rglob("*.py")):
        if most is not None and len(texts) >= most:
            break
        if _NOT_READ.intersection(path.relative_to(root).parts):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            # Some files are there to be wrong: bad syntax or encodings, for the tests of lib2to3.
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text is not None and len(text) >= 80 and BROKEN_CHARACTER not in text:
                    texts[text] = None
    return list(texts)[:most]


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer on the spot; the broken character is a token of its own."""
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
    """Builds a Llama with random weights."""
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
