"""Out of memory for real: a device whose memory is limited to less than what a batch needs."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import WORDS, common_arguments, count_of_the, journal, losses, tiny_model
from constants import settings_among
from datasets import Dataset
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from self_healing import HealingConfig, SelfHealingCallback, SelfHealingTrainer, Target
from self_healing.healers.oom.healer import SIZES_FILE
from self_healing.hf.state import live_state_of
from self_healing.rollback.host_memory import TRANSFERS, Transfer
from self_healing.rollback.ring import SnapshotRing
from self_healing.rollback.snapshots import size_of
from self_healing.system.random_state import RandomState


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# 34M parameters: with their gradients and moments 0.5 GB, of which a batch needs several times as much.
MODEL = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}
ON_DEVICE = {"use_cpu": False, "bf16": True}
TOKENS = 512


@dataclass(eq=False)
class Memory(TrainerCallback):
    """
    The device's memory in the phases of a step, in bytes.

    Args:
        peak (`int`), reserved (`int`):
            The most that was allocated, and that the allocator has reserved.
        in_update (`int`), in_generation (`int`), in_training (`int`):
            The most that was allocated in the update, while generating, and in forward and backward.
        at_rest (`int`):
            Allocated between two steps.
        failures (`int`):
            Out-of-memory errors.
    """

    peak: int = 0
    reserved: int = 0
    in_update: int = 0
    in_generation: int = 0
    in_training: int = 0
    at_rest: int = 0
    failures: int = 0
    _failures_before: int = field(default=0, repr=False)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._failures_before = torch.cuda.memory_stats().get("num_ooms", 0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step:
            self.at_rest = max(self.at_rest, torch.cuda.memory_allocated())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.in_training = max(self.in_training, self.take())

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.in_update = max(self.in_update, self.take())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.take()
        self.failures = torch.cuda.memory_stats().get("num_ooms", 0) - self._failures_before

    def take(self) -> int:
        """The peak since the last time."""
        peak = torch.cuda.max_memory_allocated()
        self.peak = max(self.peak, peak)
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())
        torch.cuda.reset_peak_memory_stats()
        return peak

    def watch_generation(self, model: Any) -> None:
        """Measures `generate` by itself."""
        original = model.generate

        def generate(*args: Any, **kwargs: Any) -> Any:
            self.in_training = max(self.in_training, self.take())
            try:
                return original(*args, **kwargs)
            finally:
                self.in_generation = max(self.in_generation, self.take())

        model.generate = generate


class Device:
    """The device, and how much of it this process may have."""

    def limit(self, nbytes: float) -> None:
        self.empty()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(nbytes / total, 1.0))

    def lift(self) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0)
        self.empty()

    def empty(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def memory(self) -> Memory:
        return Memory()

    def leave(self, nbytes: float) -> list[torch.Tensor]:
        """Takes all but so much of what there is, also of what lies in parts that the allocator has reserved."""
        torch.cuda.empty_cache()
        size, pieces = 2**21, []
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                pieces.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        del pieces[len(pieces) - math.ceil(nbytes / size) :]
        return pieces


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device()
    device.empty()
    yield device
    device.lift()


def words(index: int, number: int) -> str:
    return " ".join(WORDS[(index * 7 + place * (1 + index % 5)) % len(WORDS)] for place in range(number))


def build(task: str, directory: Path, tokenizer: Any, callbacks: Any = None, **arguments: Any) -> Any:
    dropout = arguments.pop("dropout", 0.0)
    number = arguments.pop("words", TOKENS)
    rows = 16 if task == "sft" else 8
    settings = {"per_device_train_batch_size": rows, "learning_rate": 1e-4, **ON_DEVICE, **arguments}
    common = {"processing_class": tokenizer, "callbacks": callbacks}
    if task == "sft":
        texts = [words(index, TOKENS) for index in range(64)]
        return SFTTrainer(
            model=tiny_model(tokenizer, dropout, **MODEL),
            args=SFTConfig(**common_arguments(directory, max_length=TOKENS, **settings)),
            train_dataset=Dataset.from_dict({"text": texts}),
            **common,
        )
    if task == "dpo":
        pairs = {
            "prompt": [words(index, 8) for index in range(64)],
            "chosen": [" " + words(index, TOKENS) for index in range(64)],
            "rejected": [" " + words(index + 1, TOKENS) for index in range(64)],
        }
        return DPOTrainer(
            model=tiny_model(tokenizer, dropout, **MODEL),
            ref_model=tiny_model(tokenizer, dropout, **MODEL),
            args=DPOConfig(**common_arguments(directory, max_length=TOKENS, **settings)),
            train_dataset=Dataset.from_dict(pairs),
            **common,
        )
    settings = {"max_completion_length": TOKENS // 4, "num_generations": 4, "max_steps": 3, **settings}
    return GRPOTrainer(
        model=tiny_model(tokenizer, dropout, **MODEL),
        reward_funcs=count_of_the,
        args=GRPOConfig(**common_arguments(directory, **{**settings, "learning_rate": 1e-5})),
        train_dataset=Dataset.from_dict({"prompt": [words(index, number // 2) for index in range(64)]}),
        **common,
    )


@dataclass
class Ended:
    """What is kept of a run, without the run: its memory is needed for the next one."""

    losses: list[float]
    gradient_norms: list[float]
    steps: int
    batch: int
    split_into: int
    memory: Memory


def train(trainer: Any, device: Device, wrapped: bool = False) -> Ended:
    memory = device.memory()
    trainer.add_callback(memory)
    if hasattr(trainer.args, "num_generations"):
        memory.watch_generation(trainer.model)
    (SelfHealingTrainer(trainer) if wrapped else trainer).train()
    history = trainer.state.log_history
    return Ended(
        losses=losses(trainer),
        gradient_norms=[entry["grad_norm"] for entry in history if "grad_norm" in entry],
        steps=trainer.state.global_step,
        batch=trainer._train_batch_size * trainer.args.gradient_accumulation_steps,
        split_into=max((entry.get("healing/split_into", 1) for entry in history), default=1),
        memory=memory,
    )


def limit_below(memory: Memory, share: float = 0.5) -> int:
    """Half of what the batch needs beside what is there anyway; the update and the generation fit."""
    limit = memory.at_rest + share * (memory.in_training - memory.at_rest)
    limit = max(limit, 1.15 * memory.in_update, 1.2 * memory.in_generation)
    assert limit < 0.9 * memory.in_training, f"the batch is too small to run out of memory: {memory}"
    return int(limit)


def assert_same_steps(healed: Ended, full: Ended, limit: float) -> None:
    assert healed.memory.failures >= 2, "it did fit"
    assert healed.steps == full.steps
    assert healed.batch == full.batch
    assert healed.memory.reserved <= limit


def assert_same_run(healed: Ended, full: Ended, limit: float) -> None:
    assert_same_steps(healed, full, limit)
    assert healed.losses == pytest.approx(full.losses, abs=1e-2)


def places(directory: Path) -> set[str]:
    return {event["evidence"]["place"] for event in journal(directory, "detected")}


def assert_nothing_lost(directory: Path) -> None:
    outcomes = journal(directory, "outcome")
    assert outcomes
    for outcome in outcomes:
        assert (outcome["failure"], outcome["outcome"], outcome["steps_lost"]) == ("out_of_memory", "resolved", 0)


class TestTooLargeABatch:
    @pytest.mark.parametrize("task", ["sft", "dpo", "grpo"])
    def test_the_run_is_the_same_as_with_all_of_the_memory(
        self, tmp_path: Path, tokenizer: Any, device: Device, task: str
    ) -> None:
        full = train(build(task, tmp_path / "full", tokenizer), device)
        limit = limit_below(full.memory)
        device.limit(limit)
        trainer = build(task, tmp_path / "healed", tokenizer, callbacks=[SelfHealingCallback()])
        healed = train(trainer, device)
        assert_same_run(healed, full, limit)
        # Of the first step, before any difference could grow.
        assert healed.gradient_norms[0] == pytest.approx(full.gradient_norms[0], rel=5e-2)
        assert healed.split_into > 1
        assert places(tmp_path / "healed") <= {"forward", "backward"}
        assert_nothing_lost(tmp_path / "healed")

    def test_the_wrapper_does_the_same(self, tmp_path: Path, tokenizer: Any, device: Device) -> None:
        full = train(build("sft", tmp_path / "full", tokenizer), device)
        limit = limit_below(full.memory)
        device.limit(limit)
        healed = train(build("sft", tmp_path / "healed", tokenizer), device, wrapped=True)
        assert_same_run(healed, full, limit)
        assert_nothing_lost(tmp_path / "healed")

    def test_larger_pieces_are_found(
        self, tmp_path: Path, tokenizer: Any, device: Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        full = train(build("sft", tmp_path / "full", tokenizer, max_steps=16), device)
        limit = limit_below(full.memory, share=0.6)
        device.limit(limit)
        callback = SelfHealingCallback(HealingConfig(**settings_among({"PROBE_STEPS": 2}, monkeypatch.setattr)))
        trainer = build("sft", tmp_path / "healed", tokenizer, callbacks=[callback], max_steps=16)
        rows: list[int] = []
        trainer.model.register_forward_pre_hook(
            lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape[0]), with_kwargs=True
        )
        healed = train(trainer, device)
        assert_same_run(healed, full, limit)
        assert 1 < rows[-1] < 16
        assert_nothing_lost(tmp_path / "healed")


class TestGeneration:
    def test_for_fewer_prompts_at_a_time(self, tmp_path: Path, tokenizer: Any, device: Device) -> None:
        """Long prompts, many at once for generation and one at a time for training."""
        settings: dict[str, Any] = {
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 64,
            "num_generations": 2,
            "max_completion_length": 16,
            "max_steps": 2,
            "words": 2 * TOKENS,
        }
        full = train(build("grpo", tmp_path / "full", tokenizer, **settings), device)
        memory = full.memory
        limit = max(1.2 * max(memory.in_training, memory.in_update), 0.5 * memory.in_generation)
        assert limit < 0.9 * memory.in_generation, f"generation needs too little to run out of memory: {memory}"
        device.limit(limit)
        trainer = build("grpo", tmp_path / "healed", tokenizer, callbacks=[SelfHealingCallback()], **settings)
        healed = train(trainer, device)
        # Other tokens are drawn, of the same distribution.
        assert_same_steps(healed, full, limit)
        assert len(healed.losses) == len(full.losses)
        assert all(math.isfinite(loss) for loss in healed.losses)
        assert places(tmp_path / "healed") == {"generation"}
        assert_nothing_lost(tmp_path / "healed")


class Hog(TrainerCallback):
    """Takes memory once, and leaves it to Python's garbage collector, which is switched off, to give it back."""

    def __init__(self, event: str, step: int, device: Device, leave: float) -> None:
        self.struck = False

        def handler(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step and not self.struck:
                self.struck = True
                cycle: list[Any] = device.leave(leave)
                cycle.append(cycle)

        setattr(self, event, handler)


@pytest.fixture
def no_garbage_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collector")
class TestTransient:
    def test_is_tried_again_at_full_size_with_the_same_draws(
        self, tmp_path: Path, tokenizer: Any, device: Device
    ) -> None:
        full = train(build("sft", tmp_path / "full", tokenizer, dropout=0.1), device)
        memory = full.memory
        limit = 1.5 * memory.reserved
        device.limit(limit)
        hog = Hog("on_step_begin", 2, device, 0.4 * (memory.in_training - memory.at_rest))
        callbacks = [SelfHealingCallback(), hog]
        healed = train(build("sft", tmp_path / "healed", tokenizer, callbacks, dropout=0.1), device)
        assert hog.struck
        # Its own, and that of what took all.
        assert healed.memory.failures == 2
        assert healed.losses == pytest.approx(full.losses, abs=1e-3)
        assert healed.split_into == 1
        assert [event["action"] for event in journal(tmp_path / "healed", "action")] == ["free_memory"]
        assert not (tmp_path / "healed" / SIZES_FILE).exists()
        assert_nothing_lost(tmp_path / "healed")

    def test_in_the_optimizer_step_is_undone_from_the_copy(
        self, tmp_path: Path, tokenizer: Any, device: Device
    ) -> None:
        # All parameters at once: that takes memory for as many again, when half of the state has been changed.
        full = train(build("sft", tmp_path / "full", tokenizer, optim="adamw_torch"), device)
        limit = 1.5 * full.memory.reserved
        device.limit(limit)
        parameters = sum(4 * each.numel() for each in tiny_model(tokenizer, **MODEL).parameters())
        hog = Hog("on_pre_optimizer_step", 3, device, 0.3 * parameters)
        callbacks = [SelfHealingCallback(HealingConfig(on_oom="backup", snapshots=False)), hog]
        healed = train(build("sft", tmp_path / "healed", tokenizer, callbacks, optim="adamw_torch"), device)
        assert hog.struck
        # Its own, and that of what took all.
        assert healed.memory.failures == 2
        assert healed.steps == full.steps
        assert healed.losses == pytest.approx(full.losses, abs=1e-3)
        assert places(tmp_path / "healed") == {"optimizer step"}
        assert_nothing_lost(tmp_path / "healed")


class Slow(Transfer):
    """A copy that begins half a second late."""

    def __init__(self, device: torch.device, work: Callable[[], None]) -> None:
        def late() -> None:
            torch.cuda._sleep(10**9)
            work()

        super().__init__(device, late)


class TestCopies:
    def test_a_snapshot_lies_in_pinned_memory_and_comes_back_bitwise(
        self, tmp_path: Path, tokenizer: Any, device: Device
    ) -> None:
        trainer = build("sft", tmp_path, tokenizer, max_steps=2)
        trainer.train()
        live = live_state_of(trainer)
        moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
        expected = [tensor.detach().clone() for tensor in [*live.parameters.values(), *moments]]
        ring = SnapshotRing(generations=1)
        snapshot = ring.take(live, 2, {})
        # The next step may begin while the copy is under way; what changes the weights waits for it.
        ring.join()
        with torch.no_grad():
            for tensor in [*live.parameters.values(), *moments]:
                tensor.add_(1.0)
        ring.restore(snapshot, live)
        found = [*live.parameters.values(), *moments]
        assert all(torch.equal(tensor, other) for tensor, other in zip(found, expected, strict=True))
        kept = [copy.host for _, copy in snapshot.copies() if copy.host.numel() > 1]
        assert kept
        assert all(buffer.is_pinned() for buffer in kept)
        assert snapshot.seconds > 0
        assert ring.nbytes == size_of(live)
        del snapshot
        ring.release()
        assert not any(buffer.is_pinned() for buffer in kept)

    def test_a_copy_under_way_holds_what_was_there_before_another_state_was_put_back(
        self, tmp_path: Path, tokenizer: Any, device: Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer = build("sft", tmp_path, tokenizer, max_steps=2)
        trainer.train()
        live = live_state_of(trainer)
        ring = SnapshotRing()
        trusted = ring.take(live, 2, {})
        ring.promote()
        ring.join()
        with torch.no_grad():
            for tensor in live.parameters.values():
                tensor.add_(1.0)
        expected = {name: tensor.detach().clone() for name, tensor in live.parameters.items()}
        monkeypatch.setitem(TRANSFERS, "cuda", Slow)
        aside = ring.take(live, 3, {})
        ring.restore(trusted, live)
        ring.restore(aside, live)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in live.parameters.items())
        ring.release()

    def test_batches_that_have_left_the_device_are_applied_again(
        self, tmp_path: Path, tokenizer: Any, device: Device
    ) -> None:
        healing = SelfHealingCallback()

        class InTheMiddle(TrainerCallback):
            def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step != 3:
                    return
                run, window = healing.run, healing.run.instrument.window
                before = torch.cuda.memory_allocated()
                self.freed = run.rollback.free_batches(of_host=False)
                self.less = before - torch.cuda.memory_allocated()
                run.rollback.go_back(Target.NEWEST, window.step, "incident")
                self.replayed = run.rollback.replay(window, lambda signals: True)

        full = train(build("sft", tmp_path / "full", tokenizer, max_steps=5), device)
        middle = InTheMiddle()
        healed = train(build("sft", tmp_path / "healed", tokenizer, [healing, middle], max_steps=5), device)
        assert middle.replayed.steps == 3
        # All but the batch of the step itself.
        assert 0 < middle.freed * 0.5 < middle.less
        assert healed.losses == pytest.approx(full.losses, abs=1e-3)

    def test_the_generator_of_the_device_is_set_back(self) -> None:
        here = torch.device("cuda", torch.cuda.current_device())
        state = RandomState.capture(here)
        drawn = torch.rand(1000, device=here), torch.rand(1000)
        state.restore()
        again = torch.rand(1000, device=here), torch.rand(1000)
        assert all(torch.equal(first, second) for first, second in zip(drawn, again, strict=True))
