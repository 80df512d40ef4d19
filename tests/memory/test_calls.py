"""A call of a model that is split gives the outputs, losses and gradients of the whole call, or is made whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import TEXTS, tiny_config, tiny_model
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaForSequenceClassification,
    set_seed,
)

from self_healing.healers.oom.calls import KnownSizes, ModelCalls


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def only(rows: int, kinds: tuple[str, ...] = ("train", "forward", "generate")) -> KnownSizes:
    """A memory of sizes that allows so many rows of whatever length."""
    sizes = KnownSizes(probe_steps=10**6)
    sizes.load_state_dict({kind: {"fits": [(rows, 1 << 29)], "fails": [(rows + 1, 1)]} for kind in kinds})
    return sizes


@contextmanager
def split(module: Any, rows: int) -> Iterator[KnownSizes]:
    """Splits the calls of a module, and its generation."""
    sizes = only(rows)
    calls = ModelCalls(module, sizes, torch.device("cpu"))
    call, generate = module._call_impl, getattr(module, "generate", None)
    module._call_impl = lambda *args, **kwargs: calls.call(call, *args, **kwargs)
    if generate is not None:
        module.generate = lambda *args, **kwargs: calls.generate(generate, *args, **kwargs)
    yield sizes
    del module._call_impl
    if generate is not None:
        del module.generate


def batch_of(tokenizer: Any, rows: int = 5) -> dict[str, torch.Tensor]:
    batch = tokenizer(TEXTS[:rows], padding=True, return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}


def flattened(tokenizer: Any) -> dict[str, Any]:
    ids = [tokenizer(text)["input_ids"] for text in TEXTS[:5]]
    tokens = torch.cat([torch.tensor(each) for each in ids])[None]
    positions = torch.cat([torch.arange(len(each)) for each in ids])[None]
    labels = tokens.masked_fill(positions == 0, -100)
    return {"input_ids": tokens, "position_ids": positions, "labels": labels, "use_cache": False}


def computed(model: torch.nn.Module, batch: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    model.zero_grad()
    output = model(**batch)
    (output.loss if output.loss is not None else output.logits.square().mean()).backward()
    return output, {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def assert_split_alike(model: torch.nn.Module, batch: dict[str, Any], rows: int) -> None:
    expected, of_all = computed(model, batch)
    with split(model, rows) as sizes:
        found, gradients = computed(model, batch)
    assert sizes.pieces > 1, sizes.refused
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert gradients.keys() == of_all.keys()
    for name, value in of_all.items():
        torch.testing.assert_close(gradients[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("items", [None, torch.tensor(50)], ids=["a mean", "a sum over the items of the step"])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_causal_model_with_its_own_loss(tokenizer: Any, rows: int, items: Any) -> None:
    batch = batch_of(tokenizer) | ({} if items is None else {"num_items_in_batch": items})
    assert_split_alike(tiny_model(tokenizer, dropout=0.0), batch, rows)


def test_a_classifier_and_a_model_without_a_loss(tokenizer: Any) -> None:
    set_seed(0)
    batch = batch_of(tokenizer)
    labels = torch.tensor([0, 2, 1, 1, 0])
    classifier = LlamaForSequenceClassification(tiny_config(tokenizer, 0.0, num_labels=3)).eval()
    assert_split_alike(classifier, batch | {"labels": labels}, 2)
    del batch["labels"]
    assert_split_alike(tiny_model(tokenizer, dropout=0.0).eval(), batch, 2)


def test_a_loss_past_the_loss_function_is_computed_whole(tokenizer: Any) -> None:
    set_seed(0)
    model, batch = BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **SMALL)).eval(), batch_of(tokenizer)
    expected = model(**batch).loss
    with split(model, 2) as sizes:
        assert model(**batch).loss == expected
    assert "one value for all rows" in sizes.refused


def test_a_forward_that_other_ranks_take_part_in_is_made_as_often_as_theirs(tokenizer: Any) -> None:
    model, batch = tiny_model(tokenizer, dropout=0.0), batch_of(tokenizer)
    with split(model, 2) as sizes:
        sizes.made_together = True
        model(**batch)
    assert sizes.pieces == 1
    assert "other ranks take part in a forward" in sizes.refused


@pytest.mark.parametrize("tokens", [25, 35])
def test_a_flattened_batch_is_cut_between_its_sequences(tokenizer: Any, tokens: int) -> None:
    assert_split_alike(tiny_model(tokenizer, dropout=0.0), flattened(tokenizer), tokens)


def test_random_states_are_those_of_the_first_time(tokenizer: Any) -> None:
    """With dropout, the gradients are those of the outputs that the loss has seen."""
    model = tiny_model(tokenizer, dropout=0.5)
    with split(model, 2) as sizes:
        set_seed(1)
        output = model(**batch_of(tokenizer))
        # In between, something else is drawn.
        torch.rand(3)
        output.loss.backward()
        found = model.lm_head.weight.grad.clone()
        set_seed(1)
        with torch.no_grad():
            again = model(**batch_of(tokenizer))
    assert sizes.pieces == 3
    assert again.loss == output.loss
    assert found.isfinite().all()


def test_generation_is_the_same_row_by_row(tokenizer: Any) -> None:
    batch = tokenizer([TEXTS[0], TEXTS[1]] * 2, padding=True, padding_side="left", return_tensors="pt")
    model = tiny_model(tokenizer).eval()
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], **options)
    with split(model, 1) as sizes:
        found = model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], **options)
    assert torch.equal(found, expected)
    assert sizes.pieces == 4
