"""A tokenizer trained on the spot and a small Llama with random weights: the models of demo and examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from .size import DemoSize
from .text import BROKEN_CHARACTER


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
