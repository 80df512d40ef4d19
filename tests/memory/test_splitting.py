"""A call of a model that is split gives the gradients, losses and metrics of the whole call, or is refused."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    TEXTS,
    common_arguments,
    dpo_trainer,
    grpo_trainer,
    kto_trainer,
    logged,
    plain_trainer,
    reward_trainer,
    rloo_trainer,
    sft_trainer,
    tiny_config,
    tiny_model,
)
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForTokenClassification,
    CLIPConfig,
    CLIPModel,
    DynamicCache,
    GenerationConfig,
    LlamaForSequenceClassification,
    LlamaModel,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    set_seed,
)

from self_healing.memory.splitting import CallShape, ComputedOtherwise, KnownSizes, SplitCalls, SplitGeneration
from self_healing.memory.splitting.recomputing import recomputed
from self_healing.memory.splitting.slicing import goes_on


# ---- a memory of sizes that allows so many rows, and models whose calls are split by it ----


def only(rows: int, kinds: tuple[str, ...] = ("train", "forward", "generate")) -> KnownSizes:
    """A memory of sizes that allows so many rows of whatever length."""
    sizes = KnownSizes(probe_steps=10**6)
    sizes.load_state_dict({kind: {"fits": [(rows, 1 << 29)], "fails": [(rows + 1, 1)]} for kind in kinds})
    sizes.begin_step(1)
    return sizes


@contextmanager
def split(module: Any, sizes: KnownSizes, loss_only: bool = False) -> Iterator[SplitCalls]:
    """Splits the calls of a module, and its generation."""
    calls, original = SplitCalls(module, sizes, loss_only), module._call_impl
    module._call_impl = lambda *args, **kwargs: calls.call(original, *args, **kwargs)
    if hasattr(module, "generate"):
        generation, generate = SplitGeneration(module, sizes, calls), module.generate
        module.generate = lambda *args, **kwargs: generation.call(generate, *args, **kwargs)
    yield calls
    del module._call_impl
    if hasattr(module, "generate"):
        del module.generate


def split_trainer(trainer: Trainer, rows: int) -> list[SplitCalls]:
    """Splits the calls of all models of a trainer."""
    models = {id(value): value for value in vars(trainer).values() if isinstance(value, torch.nn.Module)}
    # Other chunks of prompts would draw other completions.
    sizes = only(rows, kinds=("train", "forward"))
    contexts = [split(model, sizes, loss_only=type(trainer) is Trainer) for model in models.values()]
    # Never left: the trainer is thrown away.
    trainer.kept = contexts  # type: ignore[attr-defined]
    return [context.__enter__() for context in contexts]


class _Gradients(TrainerCallback):
    """Keeps the gradients of the first optimizer step."""

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.found = gradients(model)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Of all gradients together, relative to the second."""
    assert one.keys() == other.keys()
    square = sum(float(((one[name] - other[name]).double() ** 2).sum()) for name in other)
    return float((square / sum(float((each.double() ** 2).sum()) for each in other.values())) ** 0.5)


Made = tuple[dict[str, torch.Tensor], dict[str, Any], list[SplitCalls]]


def one_step(make: Callable[..., Trainer], directory: Path, tokenizer: Any, rows: int, **arguments: Any) -> Made:
    """One optimizer step, dropout off, in double precision: gradients, what was logged, who split."""
    seen = _Gradients()
    prepare: Callable[[Trainer], None] = arguments.pop("prepare", lambda trainer: None)
    defaults = {"dropout": 0.0, "max_steps": 1, "max_grad_norm": 0.0, "gradient_accumulation_steps": 1}
    trainer = make(directory / "run", tokenizer, callbacks=[seen], **{**defaults, **arguments})
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is not None:
            model.double()
    prepare(trainer)
    calls = split_trainer(trainer, rows) if rows else []
    trainer.train()
    return seen.found, logged(trainer)[0], calls


def assert_parity(
    make: Callable[..., Trainer],
    directory: Path,
    tokenizer: Any,
    chunks: tuple[int, ...],
    tolerance: float = 1e-5,
    **arguments: Any,
) -> None:
    """Gradients and everything that is logged are those of the whole, for chunks of these numbers of rows."""
    whole, log, _ = one_step(make, directory, tokenizer, 0, **arguments)
    for rows in chunks:
        parts, split_log, calls = one_step(make, directory, tokenizer, rows, **arguments)
        assert max(each.pieces for each in calls) > 1
        assert not any(each.refused for each in calls)
        assert distance(parts, whole) < tolerance
        assert split_log == pytest.approx(log, rel=1e-5, abs=1e-6, nan_ok=True)


# ---- the Trainer's own loss ----


class WithoutCounts(Trainer):
    """A mean per micro-batch, not one over all labels of the accumulated ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False


class SortedLoss(Trainer):
    """A loss that is not a sum over rows: every second of the sorted losses of the rows."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits[:, :-1].transpose(1, 2)
        per_token = torch.nn.functional.cross_entropy(logits, labels[:, 1:], reduction="none")
        return per_token.mean(1).sort().values[::2].mean()


def _spread(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Depends on all rows at once: the standard deviation over the batch."""
    return outputs.logits.mean((1, 2)).std() + outputs.logits.pow(2).mean()


def _mask_rows(trainer: Trainer) -> None:
    """No labels in the first row of a batch and in the last: means over the labels of some rows only are 0 / 0."""
    collate = trainer.data_collator

    def masked(features: list[dict[str, Any]]) -> dict[str, Any]:
        batch = collate(features)
        batch["labels"][[0, -1]] = -100
        return batch

    trainer.data_collator = masked


PLAIN: dict[str, dict[str, Any]] = {
    "num_items_in_batch": {},
    "means": {"trainer_class": WithoutCounts},
    "rows without labels": {"trainer_class": WithoutCounts, "prepare": _mask_rows},
    "label smoothing": {"label_smoothing_factor": 0.2},
    "compute_loss": {"trainer_class": SortedLoss},
    "compute_loss_func": {"trainer_kwargs": {"compute_loss_func": _spread}},
}


def _exact(arguments: dict[str, Any]) -> float:
    """Models of transformers compute their loss in float32: the mean over some of its rows is rounded once more."""
    return 1e-7 if arguments.get("trainer_class") is WithoutCounts else 1e-10


@pytest.mark.parametrize("name", PLAIN)
def test_gradients_of_the_trainers_loss_are_those_of_the_whole(name: str, tmp_path: Path, tokenizer: Any) -> None:
    # 6 rows: 2, 3 and 6 chunks.
    arguments = {"per_device_train_batch_size": 6, **PLAIN[name]}
    assert_parity(plain_trainer, tmp_path, tokenizer, (3, 2, 1), tolerance=_exact(arguments), **arguments)


@pytest.mark.parametrize("trainer_class", [Trainer, WithoutCounts])
def test_accumulated_gradients_are_those_of_the_whole(trainer_class: Any, tmp_path: Path, tokenizer: Any) -> None:
    arguments = {"trainer_class": trainer_class, "gradient_accumulation_steps": 4}
    assert_parity(plain_trainer, tmp_path, tokenizer, (3,), tolerance=_exact(arguments), **arguments)


# ---- TRL ----


def _without_counts(trainer: Trainer) -> None:
    trainer.model_accepts_loss_kwargs = False


SFT: dict[str, dict[str, Any]] = {
    "sft": {},
    "sft, accumulated": {"gradient_accumulation_steps": 4},
    "sft, means": {"prepare": _without_counts, "gradient_accumulation_steps": 2},
    "sft, rows without labels": {"prepare": _mask_rows},
    "sft, dft": {"loss_type": "dft"},
    "sft, padding-free": {"padding_free": True, "max_length": None},
    "sft, packed": {"packing": True, "packing_strategy": "bfd", "max_length": 40},
}
DPO: dict[str, dict[str, Any]] = {
    **{f"dpo, {loss}": {"loss_type": [loss]} for loss in ("sigmoid", "aot", "aot_unpaired", "ipo", "hinge")},
    "dpo, two losses": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    "dpo, accumulated": {"gradient_accumulation_steps": 4},
    "dpo, robust": {"loss_type": ["robust"], "label_smoothing": 0.1},
}
GRPO_LOSSES = ("grpo", "dr_grpo", "sapo", "luspo", "dapo", "cispo", "vespo", "bnpo")
GRPO: dict[str, dict[str, Any]] = {
    **{f"grpo, {loss}": {"loss_type": loss} for loss in GRPO_LOSSES},
    "grpo, entropy bonus": {"entropy_coef": 0.1},
    "grpo, uncertain tokens": {"top_entropy_quantile": 0.5},
    "grpo, accumulated": {"gradient_accumulation_steps": 4, "loss_type": "dapo"},
}
ALL = [
    *((sft_trainer, name, arguments) for name, arguments in SFT.items()),
    *((dpo_trainer, name, arguments) for name, arguments in DPO.items()),
    (kto_trainer, "kto", {}),
    (kto_trainer, "kto, accumulated", {"gradient_accumulation_steps": 4}),
    (reward_trainer, "reward", {}),
    (reward_trainer, "reward, accumulated", {"gradient_accumulation_steps": 4}),
    *((grpo_trainer, name, arguments) for name, arguments in GRPO.items()),
    (rloo_trainer, "rloo", {}),
    (rloo_trainer, "rloo, accumulated", {"gradient_accumulation_steps": 4}),
]
# A part of each family for every run of the tests; the others, and all sizes of chunks, are slow.
QUICK = (
    "sft",
    "sft, means",
    "sft, rows without labels",
    "sft, padding-free",
    "dpo, sigmoid",
    "dpo, aot",
    "kto",
    "reward",
    "grpo, dapo",
    "grpo, uncertain tokens",
    "rloo",
)


@pytest.mark.parametrize(("make", "name", "arguments"), [each for each in ALL if each[1] in QUICK], ids=QUICK)
def test_gradients_and_metrics_of_trl_are_those_of_the_whole(
    make: Any, name: str, arguments: Any, tmp_path: Path, tokenizer: Any
) -> None:
    assert_parity(make, tmp_path, tokenizer, (3,), **arguments)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "name", "arguments"), ALL, ids=[name for _, name, _ in ALL])
def test_every_loss_of_trl_in_chunks_of_every_size(
    make: Any, name: str, arguments: Any, tmp_path: Path, tokenizer: Any
) -> None:
    assert_parity(make, tmp_path, tokenizer, (1, 2, 3), **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("loss", GRPO_LOSSES)
def test_grpo_with_a_reference_model(loss: str, tmp_path: Path, tokenizer: Any) -> None:
    # The reference model is loaded from where the model came from.
    model = tiny_model(tokenizer, dropout=0.0)
    model.save_pretrained(tmp_path / "model")
    arguments = {"loss_type": loss, "beta": 0.1, "top_entropy_quantile": 0.5}

    def make(*args: Any, **kwargs: Any) -> Trainer:
        fresh = tiny_model(tokenizer, dropout=0.0)
        fresh.config._name_or_path = str(tmp_path / "model")
        return grpo_trainer(*args, model=fresh, **kwargs)

    assert_parity(make, tmp_path, tokenizer, (1, 3), **arguments)


# ---- single calls ----


def batch_of(tokenizer: Any, rows: int = 6, length: int = 24) -> dict[str, torch.Tensor]:
    """Rows of different lengths, padded on the right; the last is short, so that chunks can be trimmed."""
    encoded = [tokenizer(text)["input_ids"][:length] for text in TEXTS[:rows]]
    encoded[-1], encoded[-2] = encoded[-1][:5], encoded[-2][:7]
    padded = [ids + [tokenizer.pad_token_id] * (length - len(ids)) for ids in encoded]
    ids = torch.tensor(padded)
    mask = torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids in encoded])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def one_call(
    module: Any, rows: int, loss_only: bool = False, loss: Any = None, seed: int = 0, args: Any = (), **inputs: Any
) -> tuple[Any, dict[str, torch.Tensor], SplitCalls]:
    """Output and gradients of one call; `rows` of 0 do not split it."""
    module.zero_grad()
    set_seed(seed)
    with split(module, only(rows) if rows else KnownSizes(1), loss_only) as calls:
        output = module(*args, **inputs)
        (loss or (lambda given: given["loss"]))(output).backward()
    return output, gradients(module), calls


def assert_same_call(module: Any, rows: int = 2, tolerance: float = 1e-6, **arguments: Any) -> None:
    """Loss, outputs and gradients are those of the whole."""
    whole, expected, _ = one_call(module, 0, **arguments)
    parts, found, calls = one_call(module, rows, **arguments)
    assert calls.refused == ""
    assert calls.pieces > 1
    assert distance(found, expected) < tolerance
    if not arguments.get("loss_only"):
        assert_same_output(parts, whole, tolerance)


CACHES = {"past_key_values", "cache"}
CACHE = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"


def assert_same_output(one: Any, other: Any, tolerance: float = 1e-6) -> None:
    assert type(one) is type(other)
    if isinstance(other, torch.Tensor):
        assert one.shape == other.shape
        assert torch.allclose(one.double(), other.double(), rtol=tolerance, atol=tolerance)
    elif isinstance(other, dict):
        # A cache is of no use of some rows only; transformers 5.24 calls it `cache`.
        names = set(other) - CACHES
        assert set(one) - CACHES == names
        for key in names:
            assert_same_output(one[key], other[key], tolerance)
    elif isinstance(other, (tuple, list)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same_output(left, right, tolerance)


def assert_refused(module: Any, reason: str, rows: int = 2, args: Any = (), **inputs: Any) -> None:
    """The call runs whole, and it is said why."""
    set_seed(0)
    with torch.no_grad():
        expected = module(*args, **inputs)
    seen: list[int] = []
    set_seed(0)
    with split(module, only(rows)) as calls, rows_of_calls(module, seen), torch.no_grad():
        found = module(*args, **inputs)
    assert reason in calls.refused
    assert calls.pieces == 1
    assert_same_output(found, expected)


@contextmanager
def rows_of_calls(module: torch.nn.Module, seen: list[int]) -> Iterator[None]:
    """Rows of all tensors that any part of a module is called with."""

    def note(part: Any, args: Any, kwargs: Any) -> None:
        seen.extend(
            each.size(0) for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor) and each.dim() > 1
        )

    handles = [each.register_forward_pre_hook(note, with_kwargs=True) for each in module.modules()]
    yield
    for handle in handles:
        handle.remove()


class Scorer(torch.nn.Module):
    """A model of nobody's library, with a loss of its own."""

    def __init__(self, reduction: str, dropout: float = 0.0) -> None:
        super().__init__()
        set_seed(0)
        self.embedding = torch.nn.Embedding(400, 16)
        self.dropout = torch.nn.Dropout(dropout)
        self.head = torch.nn.Linear(16, 400)
        self.reduction = reduction

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.head(self.dropout(self.embedding(input_ids)).cumsum(1))
        if labels is None:
            return logits
        per_token = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        kept = (labels != -100).sum(1)
        if self.reduction == "sum":
            loss = per_token.sum()
        elif self.reduction == "rows":
            loss = (per_token.sum(1) / kept).mean()
        elif self.reduction == "tokens":
            loss = per_token.sum() / kept.sum()
        else:
            loss = per_token.sum(1).pow(2).mean().sqrt()
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("reduction", ["sum", "rows", "tokens"])
def test_how_the_loss_of_an_unknown_model_adds_up_is_found_out(reduction: str, rows: int, tokenizer: Any) -> None:
    batch = batch_of(tokenizer)
    batch.pop("attention_mask")
    assert_same_call(Scorer(reduction).double(), rows, tolerance=1e-10, **batch)


def test_a_loss_that_does_not_add_up_is_refused(tokenizer: Any) -> None:
    batch = batch_of(tokenizer)
    batch.pop("attention_mask")
    assert_refused(Scorer("root mean square"), "rows depend on each other", **batch)


@pytest.mark.parametrize("fault", ["NaN", "another number", "out of memory"])
@pytest.mark.parametrize("nth", [1, 3])
def test_what_strikes_the_experiment_once_is_not_taken_for_an_answer(tokenizer: Any, nth: int, fault: str) -> None:
    calls = 0

    def strike(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        nonlocal calls
        calls += 1
        if calls != nth:
            return None
        if fault == "out of memory":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return output * (float("nan") if fault == "NaN" else 2.0)

    batch = batch_of(tokenizer)
    batch.pop("attention_mask")
    _, expected, _ = one_call(Scorer("rows").double(), 0, **batch)
    scorer = Scorer("rows").double()
    scorer.embedding.register_forward_hook(strike)
    _, found, split_calls = one_call(scorer, 2, **batch)
    assert split_calls.refused == ""
    assert split_calls.pieces == 3
    assert distance(found, expected) < 1e-10


class Switched(torch.nn.Module):
    """A model of which the mode is another one in the backward pass than in the forward pass, as adapters may be."""

    def __init__(self) -> None:
        super().__init__()
        set_seed(0)
        self.layer = torch.nn.Linear(8, 8)
        self.mode = 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) * self.mode


def test_what_seemed_otherwise_is_forgotten_once_an_attempt_goes_through() -> None:
    model, inputs = Switched(), torch.randn(6, 8)
    with split(model, only(2)) as calls:
        for _ in range(3):
            model.mode = 1.0
            output = model(inputs).sum()
            model.mode = 2.0
            with pytest.raises(ComputedOtherwise):
                output.backward()
            model(inputs).sum().backward()
            calls.on_success()
        assert not calls.given_up


def test_an_answer_about_some_labels_is_not_taken_for_others(tokenizer: Any) -> None:
    """As long as all rows are as long, means over rows and over tokens are the same: later they are not."""
    batch = batch_of(tokenizer)
    full = {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}
    model = Scorer("tokens").double()
    _, whole, _ = one_call(model, 0, input_ids=batch["input_ids"], labels=batch["labels"])
    with split(model, only(2)) as calls:
        model(**full)["loss"].backward()
        model.zero_grad()
        model(input_ids=batch["input_ids"], labels=batch["labels"])["loss"].backward()
    assert calls.refused == ""
    assert distance(gradients(model), whole) < 1e-10


def test_an_answer_is_found_again_where_the_calls_seen_so_far_leave_it_open(tokenizer: Any) -> None:
    """Without labels for first tokens, it does not show whether they count."""
    batch = batch_of(tokenizer)
    without = batch["labels"].clone()
    without[:, 0] = -100
    model = Scorer("tokens").double()
    inputs = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
    _, whole, _ = one_call(model, 0, **inputs)
    with split(model, only(2)) as calls:
        # The fifth call is none of those that are tried again in any case.
        for _ in range(4):
            model(input_ids=batch["input_ids"], labels=without)
        model.zero_grad()
        model(**inputs)["loss"].backward()
    assert calls.refused == ""
    assert distance(gradients(model), whole) < 1e-10


def test_outputs_of_which_the_rows_are_not_known_are_refused(tokenizer: Any) -> None:
    class Result:
        def __init__(self, logits: torch.Tensor) -> None:
            self.logits = logits

    class Wrapped(Scorer):
        def forward(self, input_ids: Any, labels: Any = None) -> Any:
            return Result(super().forward(input_ids))

    assert_refused(Wrapped("sum"), "Result", input_ids=batch_of(tokenizer)["input_ids"])


@pytest.mark.parametrize("reduction", ["sum", "rows", "tokens"])
def test_it_is_found_out_in_numbers_of_few_bits_as_well(reduction: str, tokenizer: Any) -> None:
    """All means are nearly the same at the start of training; kernels in bfloat16 differ by more than these do."""
    batch = batch_of(tokenizer)
    batch.pop("attention_mask")
    model = Scorer(reduction).bfloat16()
    model.head.weight.data *= 0.01

    class Cast(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            logits = self.inner(input_ids).float()
            return _loss_of(reduction, logits, labels)

    assert_same_call(Cast(), tolerance=0.02, **batch)


def _loss_of(reduction: str, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    per_token = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    kept = (labels != -100).sum(1)
    losses = {"sum": per_token.sum(), "rows": (per_token.sum(1) / kept).mean(), "tokens": per_token.sum() / kept.sum()}
    return {"loss": losses[reduction]}


def test_what_only_looks_like_rows_is_not_cut(tokenizer: Any) -> None:
    """A weight for each token, when there happen to be as many tokens as rows."""

    class Weighted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, inputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return self.layer(inputs) * weights[:, None]

    model = Weighted()
    assert_same_call(model, loss=lambda out: out.pow(2).sum(), inputs=torch.randn(6, 5, 4), weights=torch.randn(5))
    assert_refused(model, "could not be tried", inputs=torch.randn(6, 6, 4), weights=torch.randn(6))
    assert_refused(model, "could not be tried", rows=1, inputs=torch.randn(6, 6, 4), weights=torch.randn(6))


def test_arguments_of_which_the_rows_are_not_known_are_refused(tokenizer: Any) -> None:
    class Settings:
        pass

    class Configured(Scorer):
        def forward(self, input_ids: Any, labels: Any = None, settings: Any = None) -> Any:  # type: ignore[override]
            return super().forward(input_ids, labels)

    ids = batch_of(tokenizer)["input_ids"]
    assert_refused(Configured("sum"), "rows are not known", input_ids=ids, settings=Settings())


class OwnPadding(Scorer):
    """A mean over what is not padding, by a rule that the labels do not show."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.head(self.embedding(input_ids).cumsum(1)).transpose(1, 2)
        return {"loss": torch.nn.functional.cross_entropy(logits, input_ids, ignore_index=0)}


def test_a_loss_with_an_ignored_label_of_its_own_is_refused(tokenizer: Any) -> None:
    ids = batch_of(tokenizer)["input_ids"]
    assert_refused(OwnPadding("tokens"), "depend on each other", input_ids=ids, labels=ids)
    # Also where the first rows are all full, and do not show it.
    ids[:2] = torch.randint(3, 300, (2, 24))
    assert_refused(OwnPadding("tokens"), "depend on each other", input_ids=ids, labels=ids)


class Contrastive(torch.nn.Module):
    """Compares every row with every other."""

    def __init__(self) -> None:
        super().__init__()
        set_seed(0)
        self.left, self.right = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.left(left) @ self.right(right).T
        return {"loss": torch.nn.functional.cross_entropy(scores, torch.arange(len(scores)))}


class Centred(torch.nn.Module):
    """Subtracts the mean over the batch: the shapes of what it gives do not show it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.layer(inputs)
        return found - found.mean(0)


class Counting(torch.nn.Module):
    """Keeps a count of its calls that its outputs depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(inputs.mean(0), alpha=0.1)
        return self.layer(inputs) - self.mean


class Hardest(torch.nn.Module):
    """The mean over the three quarters of the rows that are hardest: of two rows, the mean over both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        losses = self.layer(inputs).squeeze(-1).square()
        return {"loss": losses.topk(math.ceil(0.75 * len(losses))).values.mean()}


class Undecided(torch.nn.Module):
    """A classifier that has learned nothing: each row has the same loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 3)
        torch.nn.init.zeros_(self.layer.weight)
        torch.nn.init.zeros_(self.layer.bias)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(inputs)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_one_label_for_each_row_makes_no_mean_over_next_tokens() -> None:
    assert_same_call(Undecided(), rows=1, inputs=torch.randn(4, 8), labels=torch.tensor([0, 1, 2, 0]))


def test_a_loss_that_treats_many_rows_otherwise_than_two_is_refused() -> None:
    assert_refused(Hardest(), "depend on each other", inputs=torch.randn(6, 8))


def test_models_whose_rows_depend_on_each_other_are_refused() -> None:
    set_seed(0)
    assert_refused(Contrastive(), "depend on each other", left=torch.randn(6, 8), right=torch.randn(6, 8))
    assert_refused(Centred(), "depend on each other", inputs=torch.randn(6, 8))
    assert_refused(Centred(), "depend on each other", args=(torch.randn(6, 8),))


def test_clip_is_refused() -> None:
    tiny = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**tiny, "vocab_size": 50, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2}
    vision = {**tiny, "image_size": 8, "patch_size": 4}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
    pixels, ids = torch.randn(4, 3, 8, 8), torch.randint(3, 50, (4, 5))
    assert_refused(model, "depend on each other", input_ids=ids, pixel_values=pixels)
    assert_refused(model, "depend on each other", input_ids=ids, pixel_values=pixels, return_loss=True)


def test_batch_normalisation_is_refused_in_training_only() -> None:
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    inputs = torch.randn(6, 8)
    assert_refused(model, "batch normalisation", args=(inputs,))
    model.eval()
    assert_same_call(model, args=(inputs,), loss=lambda output: output.pow(2).mean())


def test_a_model_that_keeps_something_of_every_call_is_refused() -> None:
    with split(Counting(), only(2)) as calls:
        calls._module(torch.randn(6, 8))
    assert "depend on each other" in calls.refused


def test_the_balance_of_a_mixture_of_experts_is_refused(tokenizer: Any) -> None:
    config = MixtralConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        pad_token_id=tokenizer.pad_token_id,
    )
    set_seed(0)
    model = MixtralForCausalLM(config)
    assert_same_call(model, **batch_of(tokenizer))
    assert_refused(model, "mixture of experts", **batch_of(tokenizer), output_router_logits=True)
    model.config.output_router_logits = True
    assert_refused(model, "mixture of experts", **batch_of(tokenizer))


def test_images_laid_out_by_patch_are_refused(tokenizer: Any) -> None:
    class Seeing(Scorer):
        def forward(self, input_ids: Any, labels: Any = None, pixel_values: Any = None) -> Any:  # type: ignore[override]
            return super().forward(input_ids, labels)

    batch = batch_of(tokenizer)
    inputs = {"input_ids": batch["input_ids"], "labels": batch["labels"], "pixel_values": torch.randn(40, 12)}
    assert_refused(Seeing("sum"), "laid out by patch", **inputs)


def flattened_batch(tokenizer: Any, boundaries: bool) -> dict[str, torch.Tensor]:
    """Three sequences in one row; with `boundaries`, their first tokens are predicted from the sequence before."""
    sequences = [torch.tensor(tokenizer(text)["input_ids"]) for text in TEXTS[:3]]
    labels = [sequence.clone() for sequence in sequences]
    if not boundaries:
        for each in labels:
            each[0] = -100
    return {
        "input_ids": torch.cat(sequences)[None],
        "labels": torch.cat(labels)[None],
        "position_ids": torch.cat([torch.arange(len(sequence)) for sequence in sequences])[None],
    }


def test_a_flattened_batch_is_split_between_sequences(tokenizer: Any) -> None:
    model = tiny_model(tokenizer, dropout=0.0, attn_implementation="sdpa").double()
    flat = flattened_batch(tokenizer, boundaries=False)
    rows = flat["input_ids"].size(1) // 3 + 2
    assert_same_call(model, rows=rows, use_cache=False, **flat)
    # With a cache, attention goes across.
    assert_refused(model, "see each other", rows=rows, **flat)
    assert_refused(model, "first token of the next one", rows=9, **flattened_batch(tokenizer, boundaries=True))


def cache_of(model: Any, ids: torch.Tensor | None = None) -> Any:
    """An empty one, or one that holds the keys and values of some rows."""
    cache = DynamicCache(config=model.config)
    if ids is not None:
        with torch.no_grad():
            model.model(ids, **{CACHE: cache}, use_cache=True)
    return cache


@pytest.mark.parametrize("filled", [True, False])
def test_no_call_that_goes_on_from_a_cache_is_split(filled: bool, tokenizer: Any) -> None:
    model = tiny_model(tokenizer, dropout=0.0, attn_implementation="sdpa").eval()
    ids, flat = batch_of(tokenizer)["input_ids"], flattened_batch(tokenizer, boundaries=False)
    for batch in (flat, {"input_ids": ids}, {"input_ids": ids, "labels": ids}):
        before = batch["input_ids"][:, :3] if filled else None
        given = {**batch, CACHE: cache_of(model, before), "use_cache": False}
        with split(model, only(2)) as calls:
            found = model(**given)
        assert (calls.refused, calls.pieces) == ("the call goes on from cached keys and values", 1)
        assert_same_output(found, model(**{**given, CACHE: cache_of(model, before)}))


@pytest.mark.parametrize("filled", [True, False])
def test_no_generation_that_goes_on_from_a_cache_is_split(filled: bool, tokenizer: Any) -> None:
    model, ids = tiny_model(tokenizer).eval(), torch.arange(5, 21).view(4, 4)
    before, settings = ids[:, :3] if filled else None, {"max_new_tokens": 2, "do_sample": False}
    expected = model.generate(ids, **{CACHE: cache_of(model, before)}, **settings)
    with split(model, only(2)) as calls:
        found = model.generate(ids, **{CACHE: cache_of(model, before)}, **settings)
    assert (calls.refused, calls.pieces) == ("it goes on from cached keys and values", 1)
    assert torch.equal(found, expected)


def test_recurrent_states_of_an_earlier_call_are_a_cache_as_well() -> None:
    states = tuple(torch.zeros(4, 2, 8) for _ in range(2))
    assert goes_on((), {"mems": states})
    assert goes_on((DynamicCache(),), {})
    assert not goes_on((torch.ones(2),), {"cache": False, "mems": None})


def test_calls_that_cannot_be_cut_are_refused(tokenizer: Any) -> None:
    model, batch = tiny_model(tokenizer, dropout=0.0), batch_of(tokenizer)
    ids = batch["input_ids"]
    assert_refused(model, "use_cache", input_ids=ids, use_cache=True)
    growing = tiny_model(tokenizer, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    growing.eval()
    assert_refused(growing, "largest position", input_ids=ids, position_ids=torch.arange(24).expand(6, 24))
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    with split(model, only(2)) as calls:
        model(inputs_embeds=embedded).logits.sum().backward()
    assert "inputs need gradients" in calls.refused
    assert embedded.grad is not None


# ---- models of transformers ----


def _bert(kind: Any, **overrides: Any) -> Any:
    set_seed(0)
    tiny = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return kind(BertConfig(**tiny, vocab_size=400, pad_token_id=0, **overrides)).double().eval()


def test_token_losses_of_bidirectional_models(tokenizer: Any) -> None:
    batch = batch_of(tokenizer)
    assert_same_call(_bert(BertForMaskedLM), **batch)
    assert_same_call(_bert(BertForMaskedLM), **batch, num_items_in_batch=torch.tensor(77))
    batch["labels"] = batch["labels"].clamp(max=2)
    assert_same_call(_bert(BertForTokenClassification, num_labels=3), **batch)


@pytest.mark.parametrize("count", [None, 6])
@pytest.mark.parametrize(
    ("labels", "targets"),
    [(3, torch.tensor([0, 1, 2, 0, 1, 2])), (1, torch.randn(6)), (2, torch.randint(2, (6, 2)).float())],
    ids=["single label", "regression", "multi-label"],
)
def test_sequence_classification(labels: int, targets: torch.Tensor, count: int | None, tokenizer: Any) -> None:
    set_seed(0)
    model = LlamaForSequenceClassification(tiny_config(tokenizer, 0.0, num_labels=labels)).double()
    batch = {**batch_of(tokenizer), "labels": targets.double() if targets.is_floating_point() else targets}
    extra = {} if count is None else {"num_items_in_batch": torch.tensor(count)}
    assert_same_call(model, **batch, **extra)
    assert_same_call(model, rows=4, **batch, **extra)


@pytest.mark.parametrize("target_length", [9, 24])
def test_an_encoder_with_a_decoder(target_length: int, tokenizer: Any) -> None:
    """Labels of another length than the inputs, and (accidentally) of the same."""
    set_seed(0)
    tiny = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2, "num_layers": 1, "dropout_rate": 0.0}
    model = T5ForConditionalGeneration(T5Config(**tiny, vocab_size=400, decoder_start_token_id=0)).double()
    batch = batch_of(tokenizer)
    labels = batch_of(tokenizer, length=target_length)["labels"].flip(0)
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}
    assert_same_call(model, **inputs)
    assert_same_call(model, loss_only=True, **inputs)
    encoded = model.get_encoder()(batch["input_ids"], attention_mask=batch["attention_mask"])
    encoded["last_hidden_state"] = encoded["last_hidden_state"].detach()
    assert_same_call(model, encoder_outputs=encoded, attention_mask=batch["attention_mask"], labels=labels)


def _sum_of_logits(output: Any) -> torch.Tensor:
    logits: torch.Tensor = output["logits"] if isinstance(output, dict) else output[-1]
    return (logits * torch.linspace(-1, 1, logits.size(-1))).pow(2).mean((1, 2)).sort().values[::2].sum()


def test_arguments_of_all_sorts(tokenizer: Any) -> None:
    model, batch = tiny_model(tokenizer, dropout=0.0).double(), batch_of(tokenizer)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    assert_same_call(model, **batch, return_dict=False, use_cache=False, loss=lambda output: output[0])
    assert_same_call(model, **batch, output_hidden_states=True, output_attentions=True, loss_only=False)
    assert_same_call(model, args=(ids, mask), use_cache=False, loss=_sum_of_logits)
    # As many rows as tokens, and as many positions that are kept as rows.
    square = {name: value[:, :6] for name, value in batch.items()}
    assert_same_call(model, **square)
    keep = torch.arange(6)
    assert_same_call(model, input_ids=ids, attention_mask=mask, logits_to_keep=keep, loss=_sum_of_logits)
    assert_same_call(model, input_ids=ids, attention_mask=mask, logits_to_keep=2, loss=_sum_of_logits)
    positions = torch.arange(24)
    assert_same_call(model, **batch, position_ids=positions.expand(6, 24))
    assert_same_call(model, **batch, position_ids=positions[None])
    assert_same_call(model, input_ids=ids, labels=batch["labels"], position_ids=positions[None])
    assert_same_call(model, input_ids=ids[:, :1], loss=_sum_of_logits)
    # A mask of all pairs of tokens, and labels that have been shifted.
    pairs = torch.ones(24, 24).tril().bool()[None, None].expand(6, 1, 24, 24)
    assert_same_call(model, input_ids=ids, labels=batch["labels"], attention_mask=pairs)
    shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    assert_same_call(model, **batch, shift_labels=shifted, loss_only=True)


def test_one_row_is_never_split(tokenizer: Any) -> None:
    model = tiny_model(tokenizer, dropout=0.0)
    _, _, calls = one_call(model, 1, **batch_of(tokenizer, rows=2) | {})
    assert calls.pieces == 2
    alone = {name: value[:1] for name, value in batch_of(tokenizer, rows=2).items()}
    _, _, calls = one_call(model, 1, **alone)
    assert calls.pieces == 1


def test_positions_in_three_dimensions(tokenizer: Any) -> None:
    class Placed(Scorer):
        def forward(self, input_ids: Any, labels: Any = None, position_ids: Any = None) -> Any:  # type: ignore[override]
            places = position_ids.sum(0)
            return super().forward((input_ids + places) % 400, labels)

    batch = batch_of(tokenizer, rows=3)
    batch.pop("attention_mask")
    # (3, B, T), and B is 3.
    positions = torch.randint(0, 50, (3, 3, 24))
    assert_same_call(Placed("sum").double(), rows=2, **batch, position_ids=positions)


def test_padding_on_the_right_is_cut_off_where_only_the_loss_is_used(tokenizer: Any) -> None:
    model, batch = tiny_model(tokenizer, dropout=0.0).double(), batch_of(tokenizer)
    assert_same_call(model, loss_only=True, **batch)
    widths: list[int] = []
    handle = model.model.embed_tokens.register_forward_pre_hook(lambda _, args: widths.append(args[0].size(1)))
    one_call(model, 2, loss_only=True, **batch)
    one_call(model, 2, loss_only=False, **batch)
    handle.remove()
    # The last two rows have 7 tokens and 5; the first three calls, the backward pass of two of them, and not cut.
    assert min(widths) == 8
    assert widths[-5:] == [24] * 5


def test_padding_stays_where_positions_depend_on_the_length(tokenizer: Any) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    model = tiny_model(tokenizer, dropout=0.0, rope_parameters=rope, max_position_embeddings=16).double()
    assert_same_call(model, loss_only=True, **batch_of(tokenizer))


def test_a_label_after_the_mask_is_not_cut_off(tokenizer: Any) -> None:
    model, batch = tiny_model(tokenizer, dropout=0.0).double(), batch_of(tokenizer)
    batch["labels"][-1, 20] = 5
    assert_same_call(model, loss_only=True, **batch)


# ---- ways to train ----


def test_lower_precision_under_autocast(tokenizer: Any) -> None:
    model, batch = tiny_model(tokenizer, dropout=0.0), batch_of(tokenizer)

    dtypes: list[torch.dtype] = []
    model.lm_head.register_forward_hook(lambda _, args, output: dtypes.append(output.dtype))

    def cast(rows: int) -> dict[str, torch.Tensor]:
        model.zero_grad()
        with split(model, only(rows) if rows else KnownSizes(1)):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**batch).loss
            loss.backward()
        return gradients(model)

    assert distance(cast(2), cast(0)) < 0.01
    # Three chunks, two of them again (outside of the context), and the whole.
    assert dtypes == [torch.bfloat16] * 6


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("error:None of the inputs have requires_grad")
def test_gradient_checkpointing(reentrant: bool, tokenizer: Any) -> None:
    model, batch = tiny_model(tokenizer, dropout=0.0).double().train(), batch_of(tokenizer)
    _, expected, _ = one_call(model, 0, **batch)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    _, found, calls = one_call(model, 2, **batch, use_cache=False)
    assert calls.pieces == 3
    assert distance(found, expected) < 1e-7


def test_tied_weights(tokenizer: Any) -> None:
    assert_same_call(tiny_model(tokenizer, dropout=0.0, tie_word_embeddings=True).double(), **batch_of(tokenizer))


def _lora() -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters(checkpointing: bool, tokenizer: Any) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model(tokenizer, dropout=0.0).double(), _lora()).double()
    if checkpointing:
        model.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
        model.train()
    assert_same_call(model, rows=2, tolerance=1e-7, **batch_of(tokenizer))


def test_virtual_tokens_in_front_count_the_first_label(tokenizer: Any) -> None:
    peft = pytest.importorskip("peft")
    set_seed(0)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(tiny_model(tokenizer, dropout=0.0).double(), config).double()
    assert_same_call(model, rows=2, tolerance=1e-7, **batch_of(tokenizer))


def test_dpo_with_the_model_without_its_adapter_as_reference(tmp_path: Path, tokenizer: Any) -> None:
    from trl import DPOConfig, DPOTrainer

    def make(output_dir: Path, tokenizer: Any, *, callbacks: Any, dropout: float, **arguments: Any) -> Trainer:
        usual = dpo_trainer(output_dir, tokenizer)
        torch.manual_seed(0)
        return DPOTrainer(
            model=tiny_model(tokenizer, dropout),
            args=DPOConfig(**common_arguments(output_dir, max_length=64, **arguments)),
            train_dataset=usual.train_dataset,
            processing_class=tokenizer,
            callbacks=callbacks,
            peft_config=_lora(),
        )

    assert_parity(make, tmp_path, tokenizer, (3,))


def test_noise_on_the_embeddings_is_drawn_again_as_it_was(tmp_path: Path, tokenizer: Any) -> None:
    """NEFTune draws for each chunk, and the same in the backward pass."""
    model, batch = tiny_model(tokenizer, dropout=0.0).double().train(), batch_of(tokenizer)

    def noisy(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + torch.empty_like(output).uniform_(-0.5, 0.5)

    model.get_input_embeddings().register_forward_hook(noisy)
    _assert_slope(model, batch)


def test_dropout_draws_the_same_masks_again(tokenizer: Any) -> None:
    model = tiny_model(tokenizer, dropout=0.5).double().train()
    _assert_slope(model, batch_of(tokenizer))


def _assert_slope(model: Any, batch: dict[str, torch.Tensor]) -> None:
    """The gradient of a split call, from the same seed, is the slope of its loss; and the same seed gives the same."""
    output, found, calls = one_call(model, 2, seed=3, **batch)
    again, same, _ = one_call(model, 2, seed=3, **batch)
    assert calls.pieces == 3
    assert torch.equal(output.loss, again.loss)
    assert all(torch.equal(found[name], same[name]) for name in found)
    step, names = 1e-3, dict(model.named_parameters())
    norm = sum(float((each**2).sum()) for each in found.values()) ** 0.5
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            for name, gradient in found.items():
                names[name].add_(gradient, alpha=sign * step / norm)
        losses.append(one_call(model, 2, seed=3, **batch)[0].loss.item())
        with torch.no_grad():
            for name, gradient in found.items():
                names[name].sub_(gradient, alpha=sign * step / norm)
    # The loss is computed in float32.
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(norm, rel=0.01)


def test_the_state_of_random_numbers_goes_on_as_after_the_forward_pass(tokenizer: Any) -> None:
    model, batch = tiny_model(tokenizer, dropout=0.5).train(), batch_of(tokenizer)
    with split(model, only(2)):
        loss = model(**batch).loss
        before = torch.get_rng_state()
        loss.backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_evaluation_is_split_as_well(tokenizer: Any) -> None:
    model, batch = tiny_model(tokenizer).double().eval(), batch_of(tokenizer)
    with torch.no_grad():
        expected = model(**batch)
        with split(model, only(4)) as calls:
            found = model(**batch)
    assert calls.pieces == 2
    assert torch.allclose(found.logits, expected.logits)
    assert torch.allclose(found.loss, expected.loss)


def test_hooks_on_parameters_see_whole_gradients(tokenizer: Any) -> None:
    """Clipping in a hook, or an optimizer in the backward pass, must not be given gradients in portions."""
    model, batch = tiny_model(tokenizer, dropout=0.0).double(), batch_of(tokenizer)
    seen: list[float] = []
    handle = model.lm_head.weight.register_hook(lambda gradient: seen.append(float(gradient.norm())))
    _, expected, _ = one_call(model, 0, **batch)
    _, found, calls = one_call(model, 2, **batch)
    handle.remove()
    assert calls.pieces == 3
    assert seen[1:] == pytest.approx(seen[:1])
    assert distance(found, expected) < 1e-6


def test_gradients_that_are_seen_whole_are_of_the_same_draws(tokenizer: Any) -> None:
    model, batch = tiny_model(tokenizer, dropout=0.5).double().train(), batch_of(tokenizer)
    _, expected, _ = one_call(model, 2, seed=3, **batch)
    model.lm_head.weight.register_hook(lambda gradient: None)
    _, found, calls = one_call(model, 2, seed=3, **batch)
    assert calls.pieces == 3
    assert distance(found, expected) < 1e-10


def test_gradients_for_some_inputs_only_are_an_error(tokenizer: Any) -> None:
    model, batch = tiny_model(tokenizer, dropout=0.0), batch_of(tokenizer)
    with split(model, only(2)), pytest.raises(RuntimeError, match=r"split because it did not fit"):
        torch.autograd.grad(model(**batch).loss, list(model.parameters()))


def test_outputs_may_be_changed_in_place_and_used_in_part(tokenizer: Any) -> None:
    model, batch = tiny_model(tokenizer, dropout=0.0).double(), batch_of(tokenizer)
    batch.pop("labels")

    def in_place(output: Any) -> torch.Tensor:
        logits: torch.Tensor = output["logits"]
        logits.div_(0.7)
        # Rows of the first chunk only.
        return logits[:1].pow(3).mean()

    whole, expected, _ = one_call(model, 0, loss=in_place, **batch)
    parts, found, _ = one_call(model, 2, loss=in_place, **batch)
    assert torch.allclose(whole.logits, parts.logits)
    assert distance(found, expected) < 1e-10


# ---- memory ----


def test_no_part_of_the_model_sees_more_rows_than_are_allowed(tokenizer: Any) -> None:
    model, seen = tiny_model(tokenizer, dropout=0.0), list[int]()
    with split(model, only(2)), rows_of_calls(model, seen):
        model(**batch_of(tokenizer)).loss.backward()
    assert max(seen) == 2


def test_activations_of_one_chunk_are_alive_at_a_time(tokenizer: Any) -> None:
    """What the forward keeps for the backward pass: as many bytes as one of six rows needs, not six times as many."""
    model, batch = tiny_model(tokenizer, dropout=0.0, num_hidden_layers=6), batch_of(tokenizer)

    def most_alive(rows: int) -> int:
        alive, most, kept = 0, 0, weakref.WeakSet[Any]()

        class Saved:
            def __init__(self, tensor: torch.Tensor) -> None:
                nonlocal alive, most
                self.tensor, self.bytes = tensor, tensor.numel() * tensor.element_size()
                # Weights are saved as well, and are there anyway.
                self.bytes = 0 if isinstance(tensor, torch.nn.Parameter) or tensor._base is not None else self.bytes
                alive += self.bytes
                most = max(most, alive)
                kept.add(self)

            def __del__(self) -> None:
                nonlocal alive
                alive -= self.bytes

        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            one_call(model, rows, loss_only=True, **batch)
        return most

    assert most_alive(1) < most_alive(0) / 4


def test_what_is_not_needed_again_is_freed_before_the_backward_pass() -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    weight = torch.ones(4, requires_grad=True)

    def run() -> torch.Tensor:
        inner = weight * 2
        made.append(weakref.ref(inner))
        return inner.exp() * 3

    given = recomputed(run, torch.device("cpu"), [weight], otherwise=pytest.fail)
    assert made[0]() is None
    given.sum().backward()
    assert len(made) == 2
    assert weight.grad is not None
    assert torch.allclose(weight.grad, 6 * (2 * torch.ones(4)).exp())


def test_the_last_chunk_is_not_computed_again(tokenizer: Any) -> None:
    model, calls = tiny_model(tokenizer, dropout=0.0), list[int]()
    model.model.embed_tokens.register_forward_pre_hook(lambda *_: calls.append(1))
    one_call(model, 2, **batch_of(tokenizer))
    assert len(calls) == 3 + 2


def test_a_size_that_fails_is_the_one_of_the_chunk(tokenizer: Any) -> None:
    model, sizes = tiny_model(tokenizer, dropout=0.0), only(2)
    with split(model, sizes):
        model(**batch_of(tokenizer)).loss.backward()
    assert sizes.last_begun == CallShape("train", 2, 24)


# ---- generation ----


@pytest.mark.parametrize("sequences", [1, 2])
def test_generation_is_split_by_prompts(sequences: int, tokenizer: Any) -> None:
    """Greedy, or by beams for several sequences of each prompt: the same tokens, padded as if it were one batch."""
    model = tiny_model(tokenizer).eval()
    prompts = {name: value.flip(1) for name, value in batch_of(tokenizer, length=12).items() if name != "labels"}
    # Sequences end at different lengths.
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] += 0.05
    config = GenerationConfig(
        max_new_tokens=10,
        do_sample=False,
        num_beams=sequences,
        num_return_sequences=sequences,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    expected = model.generate(**prompts, generation_config=config)
    seen: list[int] = []
    with split(model, only(2)) as calls, rows_of_calls(model, seen):
        found = model.generate(**prompts, generation_config=config)
        positional = model.generate(prompts["input_ids"], config, attention_mask=prompts["attention_mask"])
    assert calls.pieces == 3
    assert max(seen) == 2 * sequences
    assert torch.equal(found, expected)
    assert torch.equal(positional, expected)


def test_chunks_of_different_lengths_are_padded_with_the_padding_token(tokenizer: Any) -> None:
    model, sizes = tiny_model(tokenizer).eval(), only(1)
    calls = SplitCalls(model, sizes)
    lengths = iter([2, 5, 3])

    def original(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.cat([input_ids, torch.full((len(input_ids), next(lengths)), 9)], dim=1)

    found = SplitGeneration(model, sizes, calls).call(original, input_ids=torch.ones(3, 2).long(), pad_token_id=7)
    assert found.tolist() == [[1, 1, 9, 9, 7, 7, 7], [1, 1, 9, 9, 9, 9, 9], [1, 1, 9, 9, 9, 7, 7]]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: list(range(20 + row))}, "prefix_allowed_tokens_fn"),
    ],
)
def test_generation_that_looks_at_the_batch_is_refused(arguments: Any, reason: str, tokenizer: Any) -> None:
    model, ids = tiny_model(tokenizer).eval(), torch.ones(4, 3).long()
    expected = model.generate(ids, max_new_tokens=2, do_sample=False, **arguments)
    with split(model, only(2)) as calls:
        found = model.generate(ids, max_new_tokens=2, do_sample=False, **arguments)
    assert reason in calls.refused
    assert_same_output(found, expected)


# ---- what looks exact and is not ----


class SeenInTrainingOnly(torch.nn.Module):
    """Compares each row with the others of its batch, in training; in evaluation it only embeds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        embedded = self.layer(inputs)
        if not self.training:
            return {"embedded": embedded}
        return {"loss": torch.nn.functional.cross_entropy(embedded @ embedded.T, torch.arange(len(inputs)))}


def test_a_loss_that_there_is_in_training_only_is_tried_in_training() -> None:
    assert_refused(SeenInTrainingOnly(), "depend on each other", inputs=torch.randn(6, 8))


class WeightedClasses(torch.nn.Module):
    """Its mean is divided by the weights of the classes there are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(inputs)
        loss = torch.nn.functional.cross_entropy(logits, labels, weight=torch.tensor([1.0, 9.0]))
        return {"loss": loss, "logits": logits}


def test_weighted_classes_are_refused_whatever_rows_come_first() -> None:
    labels = torch.tensor([0, 0, 0, 0, 1, 0])
    assert_refused(WeightedClasses(), "depend on each other", inputs=torch.randn(6, 8), labels=labels)


def test_a_hook_that_adds_to_the_loss_is_not_counted_once_for_each_chunk(tokenizer: Any) -> None:
    model = tiny_model(tokenizer, 0.0).double()

    def add(module: Any, inputs: Any, output: Any) -> Any:
        output["loss"] = output["loss"] + module.lm_head.weight.pow(2).sum()
        return output

    model.register_forward_hook(add)
    batch = batch_of(tokenizer)
    whole, expected, _ = one_call(model, 0, **batch, num_items_in_batch=100)
    parts, found, _ = one_call(model, 2, **batch, num_items_in_batch=100)
    assert float(parts["loss"]) == pytest.approx(float(whole["loss"]))
    assert distance(found, expected) < 1e-7


def test_a_mode_that_changes_before_the_backward_pass_is_refused_at_the_second_attempt(tokenizer: Any) -> None:
    model = tiny_model(tokenizer, 0.5)
    with split(model, only(2)) as calls:
        for refused in (False, True):
            model.eval()
            loss = model(**batch_of(tokenizer))["loss"]
            model.train()
            with pytest.raises(ComputedOtherwise, match="computed again in the backward pass"):
                loss.backward()
            assert bool(calls.given_up) == refused
        model.zero_grad()
        model.eval()
        model(**batch_of(tokenizer))["loss"].backward()
    assert "another adapter or mode" in calls.refused


def test_what_the_model_gives_without_a_gradient_has_none() -> None:
    class Telling(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            hidden = self.layer(inputs)
            return {"hidden": hidden, "seen": hidden.detach().softmax(-1)}

    model = Telling()
    with split(model, only(2)) as calls:
        output = model(torch.randn(6, 8))
        assert calls.pieces == 3
        assert output["seen"].numpy().shape == (6, 8)
        assert output["hidden"].requires_grad


def test_a_refusal_leaves_buffers_and_random_states_as_they_were() -> None:
    class Noisy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            self.calls += 1
            return {"hidden": self.layer(inputs), "noise": torch.rand(())}

    model = Noisy()
    torch.manual_seed(3)
    with split(model, only(2)) as calls:
        found = model(torch.ones(6, 8))
    assert calls.refused
    assert float(model.calls) == 1
    torch.manual_seed(3)
    assert float(found["noise"]) == float(torch.rand(()))
