"""Memory that runs out in a vLLM engine beside the training: TRL's own code, and an engine that keeps its books."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import assert_same_weights, grpo_trainer, journal, weights
from test_memory import TooManyRows, out_of_memory
from trl.generation.vllm_generation import VLLMGeneration

from self_healing import SelfHealingCallback, SelfHealingTrainer, UnrecoverableTrainingError
from self_healing.healers.oom.calls import KnownSizes
from self_healing.healers.oom.healer import SIZES_FILE, MemoryState
from self_healing.hf.batches import CallShape
from self_healing.hf.memory import caught


class Engine:
    """What `LLM` does with requests: they stay until they are answered or aborted, and are answered in their order."""

    def __init__(self, strike: Any) -> None:
        self.calls = 0
        self._strike = strike
        self._given = 0
        self.requests: dict[str, list[int]] = {}
        self.output_processor = SimpleNamespace(request_states=self.requests)
        self.model_executor = SimpleNamespace(
            driver_worker=SimpleNamespace(
                model_runner=SimpleNamespace(model=SimpleNamespace(load_weights=lambda weights: None))
            )
        )

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def abort_request(self, request_ids: list[str]) -> None:
        for each in request_ids:
            del self.requests[each]

    def generate(self, prompts: list[dict[str, Any]], sampling_params: Any, use_tqdm: bool) -> list[Any]:
        for prompt in prompts:
            self.requests[str(self._given)] = prompt["prompt_token_ids"]
            self._given += 1
        self.calls += 1
        if self._strike(self.calls):
            raise out_of_memory(len(prompts))
        return [self._answer(self.requests.pop(each)) for each in sorted(self.requests, key=int)]

    def _answer(self, prompt: list[int]) -> Any:
        # What follows from the prompt alone, and draws that are the same when the step is begun again.
        tokens = [prompt[-1], *(int(token) for token in torch.randint(3, 100, (3,)))]
        logprobs = [{token: SimpleNamespace(rank=1, logprob=-1.0)} for token in tokens]
        return SimpleNamespace(prompt_token_ids=prompt, outputs=[SimpleNamespace(token_ids=tokens, logprobs=logprobs)])


@dataclass
class Parameters:
    """`SamplingParams` of vLLM."""

    options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, **options: Any) -> None:
        self.options = options


@pytest.fixture(autouse=True)
def _parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl.generation.vllm_generation.SamplingParams", Parameters, raising=False)


def build(directory: Path, tokenizer: Any, strike: Any = lambda call: False, **arguments: Any) -> tuple[Any, Engine]:
    trainer = grpo_trainer(directory, tokenizer, **arguments)
    engine = Engine(strike)
    generation = VLLMGeneration.__new__(VLLMGeneration)
    vars(generation).update(
        model=trainer.model,
        accelerator=trainer.accelerator,
        mode="colocate",
        llm=SimpleNamespace(generate=engine.generate, llm_engine=engine, reset_prefix_cache=lambda: None),
        tensor_parallel_size=1,
        enable_sleep_mode=False,
        structured_outputs_regex=None,
        generation_kwargs={},
        logprobs=0,
        **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length")),
    )
    generation._iter_named_params = lambda: iter(())
    trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, generation, -1
    return trainer, engine


def test_a_passing_failure_is_begun_again_and_answers_the_right_prompts(tmp_path: Path, tokenizer: Any) -> None:
    plain, _ = build(tmp_path / "plain", tokenizer)
    plain.train()
    healed, engine = build(tmp_path / "healed", tokenizer, lambda call: call == 3, callbacks=[SelfHealingCallback()])
    healed.train()
    assert engine.calls > 4
    assert_same_weights(weights(healed), weights(plain))
    (found,) = journal(tmp_path / "healed", "detected")
    assert found["evidence"]["place"] == "vLLM"
    assert [each["outcome"] for each in journal(tmp_path / "healed", "outcome")] == ["resolved"]
    assert not (tmp_path / "healed" / SIZES_FILE).exists()


@pytest.mark.parametrize("wrapped", [False, True], ids=["callback alone", "wrapper"])
def test_a_lasting_failure_ends_the_run_and_says_nothing_about_the_batch(
    tmp_path: Path, tokenizer: Any, wrapped: bool
) -> None:
    callback = SelfHealingCallback()
    trainer, _ = build(tmp_path, tokenizer, lambda call: call >= 3, callbacks=[callback])
    TooManyRows(trainer.model, 2, unless=lambda: not torch.is_grad_enabled())
    with pytest.raises(UnrecoverableTrainingError, match="vllm_gpu_memory_utilization"):
        (SelfHealingTrainer(trainer) if wrapped else trainer).train()
    assert callback.run is not None
    # What training needs was learned from training.
    sizes = callback.run.part(MemoryState).sizes.state_dict()
    assert [rows for rows, _ in sizes["train"]["fails"]] == [4]
    assert not sizes["generate"]["fails"]
    assert not sizes["forward"]["fails"]
    assert not callback.run.healers.has_claim


def test_an_engine_that_keeps_its_requests_is_not_called_again(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Engine, "abort_request")
    trainer, engine = build(tmp_path, tokenizer, lambda call: call == 2, callbacks=[SelfHealingCallback()])
    with pytest.raises(UnrecoverableTrainingError, match="kept requests of the call that failed"):
        trainer.train()
    assert engine.calls == 2


def generate(rows: int) -> None:
    raise out_of_memory(rows)


def test_a_function_that_has_the_name_is_no_generation() -> None:
    with pytest.raises(torch.OutOfMemoryError) as failure:
        generate(4)
    found = caught(failure.value, torch.device("cpu"))
    assert found is not None
    assert found.place == "forward"


@pytest.mark.parametrize("ends", ["on_success", "forget_attempt"])
def test_what_has_ended_is_not_blamed_for_what_fails_later(ends: str) -> None:
    sizes = KnownSizes(probe_steps=100)
    sizes.begins(CallShape("train", 8, 64))
    getattr(sizes, ends)()
    assert sizes.last_begun() is None
