"""
Run by test_faults_healed_in_place.py under torchrun: one run after the other under one strategy, each struck by one
fault on one of two ranks.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from conftest import (
    POISON_WORD,
    TEXTS,
    DiskThatFills,
    OutputFault,
    PoisonToken,
    RaisingAt,
    build_tokenizer,
    grpo_trainer,
    journal,
    leave_together,
    losses,
    lost_connection,
    sft_trainer,
)
from datasets import Dataset
from strategies import arguments_of, own_weights, prepare, trained_as, whole_weights
from transformers import TrainerCallback, set_seed
from transformers.integrations import TensorBoardCallback
from trl import SFTTrainer
from two_processes import digest_of
from two_sharded_processes import PoisonGradient

from self_healing import HealingConfig, SelfHealingTrainer


# Of a run; what is usual of its gradients is known after thirty. A fault strikes in the step after so many.
STEPS, LONGER, POLICY_STEPS, AFTER = 14, 36, 10, 8
# Of a run that has learned what it can when it is struck.
CONVERGED = {"max_steps": 75, "learning_rate": 1e-2, "eval_strategy": "no", "save_strategy": "no"}
CONVERGED_AFTER = 60
# A checkpoint is written every so many.
SAVE_EVERY = 5
# Two in each epoch, of which each rank draws some.
BAD_ROWS = (5, 17, 30, 44)
# Compared with the run of another name, which is struck by nothing.
BASELINES = {
    "none": "plain",
    "gradient_spike": "longer",
    "reward_retried": "rewarded",
    "nan_policy": "rewarded",
    "scrambled_weights": "converged",
    "learning_rate": "converged",
}
# Faults that take some minutes more.
TAKE_LONG = {"scrambled_weights", "learning_rate"}

Strike = Callable[[Any], Any]


class Changing(TrainerCallback):
    """Weights of a layer are others on this rank after a step."""

    def __init__(
        self, trainer: Any, change: Callable[[torch.Tensor], Any], layer: torch.nn.Module, after: int = AFTER
    ) -> None:
        self.fired = 0
        self._trainer, self._change, self._layer, self._after = trainer, change, layer, after
        trainer.add_callback(self)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._after and not self.fired:
            self.fired += 1
            for weight in own_weights(self._trainer, self._layer):
                self._change(weight)


class UnreachableTracker(TensorBoardCallback):
    """A tracker whose server cannot be reached from this rank."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(tb_writer=SimpleNamespace(add_scalar=lambda *_: None, close=lambda: None))
        self.fired = 0
        trainer.add_callback(self)

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        self.fired += 1
        raise lost_connection()

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        pass

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        pass


class RaisingRows(torch.utils.data.Dataset):
    """Some rows of this rank cannot be loaded."""

    def __init__(self, rows: Any, struck: bool) -> None:
        self.fired = 0
        self._rows, self._struck = rows, struck

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._struck and index in BAD_ROWS:
            self.fired += 1
            raise ValueError(f"cannot decode {index}")
        return dict(self._rows[index])


class AwayTwice:
    """A service that cannot be reached at the second and third call of this rank."""

    def __init__(self, struck: bool, answer: Callable[..., Any]) -> None:
        self.fired, self._calls = 0, 0
        self._struck, self._answer = struck, answer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        if self._struck and self._calls in (2, 3):
            self.fired += 1
            raise lost_connection()
        return self._answer(*args, **kwargs)


class Runs:
    """
    Trains the same model again and again, and notes what became of it.

    Args:
        directory (`Path`):
            Each run has one of its own in it.
        strategy (`str`):
            One of `STRATEGIES`.
    """

    def __init__(self, directory: Path, strategy: str) -> None:
        self.directory, self.strategy = directory, strategy
        self.rank = torch.distributed.get_rank()
        self.tokenizer = build_tokenizer()
        self.poison = self.tokenizer.convert_tokens_to_ids(POISON_WORD)
        self.results: dict[str, Any] = {}

    def see(self, name: str) -> None:
        """Runs what a fault is compared with, unless that was done, and then the fault."""
        for each in (BASELINES.get(name, "none"), name):
            if each not in self.results:
                self.results[each] = {}
                try:
                    self.results[each] = RUNS[each](self, each)
                except BaseException as error:
                    self.results[each] = {"error": f"{type(error).__name__}: {error}"[:500]}
                    raise
                finally:
                    content = json.dumps(self.results)
                    (self.directory / f"results.{self.rank}.json").write_text(content)

    # ---- one run ----

    def train(
        self,
        name: str,
        strike: Strike = lambda trainer: None,
        on: tuple[int, ...] = (1,),
        poisoned: tuple[int, ...] = (),
        trainer_class: type[SFTTrainer] = SFTTrainer,
        compute_metrics: Callable[[Any], dict[str, float]] = lambda predicted: {
            "rows": float(len(predicted.label_ids))
        },
        healed: bool = True,
        resume: bool = False,
        settings: Mapping[str, Any] = {},
        **arguments: Any,
    ) -> dict[str, Any]:
        """Trains a model that is evaluated and saved; on some ranks it is struck."""
        set_seed(1234)
        trainer = sft_trainer(
            self.directory / name,
            self.tokenizer,
            texts=[f"{text} {POISON_WORD}" if index in poisoned else text for index, text in enumerate(TEXTS)],
            trainer_class=trainer_class,
            trainer_kwargs={
                "eval_dataset": Dataset.from_dict({"text": TEXTS[:8]}),
                "compute_metrics": compute_metrics,
            },
            **{
                **arguments_of(self.strategy),
                "max_steps": STEPS,
                "gradient_accumulation_steps": 1,
                "lr_scheduler_type": "constant",
                "save_strategy": "steps",
                "save_steps": SAVE_EVERY,
                "eval_strategy": "steps",
                "eval_steps": SAVE_EVERY,
                **arguments,
            },
        )
        struck = strike(trainer) if self.rank in on else None
        return self.result(name, trainer, struck, healed, resume, settings)

    def train_policy(self, name: str, away: bool = False, strike: Strike = lambda trainer: None) -> dict[str, Any]:
        """Trains a model that is rewarded for the length of its answers; the reward of this rank may be away."""
        set_seed(1234)
        reward = AwayTwice(away, lambda completions, **_: [float(len(each)) for each in completions])
        reward.__name__ = "length"  # type: ignore[attr-defined]
        trainer = grpo_trainer(
            self.directory / name,
            self.tokenizer,
            reward_funcs=reward,
            max_steps=POLICY_STEPS,
            gradient_accumulation_steps=1,
            **arguments_of(self.strategy),
        )
        struck = strike(trainer) if self.rank == 1 else None
        return self.result(name, trainer, struck or reward)

    def result(
        self,
        name: str,
        trainer: Any,
        struck: Any,
        healed: bool = True,
        resume: bool = False,
        settings: Mapping[str, Any] = {},
    ) -> dict[str, Any]:
        waits: list[float] = []
        if healed:
            config = HealingConfig(**{"snapshot_interval": 3, "snapshot_verify_steps": 2, **settings})
            SelfHealingTrainer(trainer, config, sleep=waits.append).train(resume_from_checkpoint=resume or None)
        else:
            trainer.train()
        weights = whole_weights(trainer)
        saved = [path.name for path in (self.directory / name).glob(f"checkpoint-{SAVE_EVERY}/*")]
        in_parts = {"pytorch_model_fsdp_0", f"global_step{SAVE_EVERY}"} & {*saved}
        return {
            "directory": str(self.directory / name),
            "trained_as": trained_as(trainer),
            "saved_as": ("parts" if in_parts else "whole") if saved else None,
            "weights": digest_of(weights),
            "finite": all(bool(torch.isfinite(each).all()) for each in weights.values()),
            "steps": trainer.state.global_step,
            "losses": losses(trainer),
            "fired": getattr(struck, "fired", 0),
            "waits": len(waits),
            "events": self.events(name),
        }

    def events(self, name: str) -> list[dict[str, Any]]:
        """What the journal of this rank holds of what went wrong in the last run."""
        events = journal(self.directory / name, rank=self.rank)
        begun = max((at for at, event in enumerate(events) if event["kind"] == "run_started"), default=0)
        kinds = ("detected", "diagnosed", "action", "outcome", "run_started")
        before = [each for each in events[:begun] if each["kind"].startswith("checkpoint_")]
        return before + [each for each in events[begun:] if each["kind"] in kinds]


# ---- the faults ----


def nan_in_the_loss(trainer: Any) -> OutputFault:
    return OutputFault(trainer.model, lambda forward: forward == AFTER + 1)


def spike(trainer: Any) -> OutputFault:
    def steepen(hidden: torch.Tensor) -> torch.Tensor:
        hidden.register_hook(lambda gradient: gradient * 1e4)
        return hidden

    return OutputFault(trainer.model, lambda forward: forward == 31, steepen)


def changing(change: Callable[[torch.Tensor], Any]) -> Strike:
    return lambda trainer: Changing(trainer, change, trainer.model.model.layers[1])


def scrambled(trainer: Any) -> Changing:
    """On each rank its part of the last layer, so that there is nothing that ranks could be compared by."""
    return Changing(trainer, scramble, trainer.model.lm_head, CONVERGED_AFTER)


def lost_in_a_callback(trainer: Any) -> RaisingAt:
    callback = RaisingAt("on_step_end", AFTER)
    trainer.add_callback(callback)
    return callback


def turn_nan(weight: torch.Tensor) -> None:
    weight.view(-1)[:1] = torch.nan


def drift(weight: torch.Tensor) -> None:
    weight.mul_(1.01)


def scramble(weight: torch.Tensor) -> None:
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    weight.mul_(50).add_(noise.to(weight.dtype))


def red_flag(runs: Runs, name: str) -> dict[str, Any]:
    """A rule of the user's own, on what is logged alike on all ranks, asks for going back."""
    rules = runs.directory / "rules.toml"
    rules.write_text(
        '[mine]\nmetric = "learning_rate"\nobjectives = ["sft"]\nhealthy = "low"\n'
        'red_flag = [{ is = "above", value = 0.0006 }]\nsteps = 6\nobservations = 6\n'
        'severity = "error"\naction = "rollback"\ndiagnosis = "It is there."\nremedy = "None."\n'
    )
    return runs.train(name, settings={"rules_file": str(rules)}, learning_rate=1e-3)


def raising_rows(trainer: Any) -> RaisingRows:
    trainer.train_dataset = RaisingRows(trainer.train_dataset, struck=True)
    return trainer.train_dataset


def poison_rows(runs: Runs, name: str, poison: type[PoisonToken]) -> dict[str, Any]:
    return runs.train(name, lambda trainer: poison(trainer.model, runs.poison), poisoned=BAD_ROWS)


def full_disk(runs: Runs, name: str, on: int) -> dict[str, Any]:
    """The disk of a rank is full when the second checkpoint is written."""

    class FullDisk(DiskThatFills, SFTTrainer):
        full_at = 2 * SAVE_EVERY if runs.rank == on else None

    return runs.train(name, trainer_class=FullDisk)


def evaluation(runs: Runs, name: str) -> dict[str, Any]:
    """What computes the metrics of an evaluation cannot be reached for a while."""
    metrics = AwayTwice(runs.rank == 1, lambda predicted: {"rows": float(len(predicted.label_ids))})
    return runs.train(name, lambda trainer: metrics, compute_metrics=metrics)


def torn(runs: Runs, name: str, tear: Callable[[Path], None]) -> dict[str, Any]:
    """What a finished run has left is resumed from, without its last checkpoint, and with one that is torn."""
    own = runs.directory / name
    if runs.rank == 0:
        shutil.copytree(runs.directory / "none", own)
        for gone in ("last-known-good", f"checkpoint-{STEPS}"):
            shutil.rmtree(own / gone, ignore_errors=True)
        tear(own / f"checkpoint-{2 * SAVE_EVERY}")
    torch.distributed.barrier()
    return runs.train(name, resume=True)


def cut_weights(checkpoint: Path) -> None:
    """Of the second rank where each has a part."""
    names = ("global_step*/*zero_pp_rank_1_*_optim_states.pt", "pytorch_model_fsdp_0/__1_0.distcp")
    whole = ("pytorch_model_fsdp.bin", "model.safetensors")
    file = next(found for name in (*names, *whole) for found in checkpoint.glob(name))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def drop_part_of_rank(checkpoint: Path) -> None:
    (checkpoint / "rng_state_1.pth").unlink()


RUNS: dict[str, Callable[[Runs, str], dict[str, Any]]] = {
    # What the others are compared with.
    "plain": lambda runs, name: runs.train(name, healed=False),
    "longer": lambda runs, name: runs.train(name, max_steps=LONGER),
    "rewarded": lambda runs, name: runs.train_policy(name),
    "converged": lambda runs, name: runs.train(name, **CONVERGED),
    # The faults.
    "none": lambda runs, name: runs.train(name),
    "transient_nan": lambda runs, name: runs.train(name, nan_in_the_loss),
    "poison_rows_loss": lambda runs, name: poison_rows(runs, name, PoisonToken),
    "poison_rows_gradient": lambda runs, name: poison_rows(runs, name, PoisonGradient),
    "nan_weights": lambda runs, name: runs.train(name, changing(turn_nan)),
    "nan_policy": lambda runs, name: runs.train_policy(name, strike=changing(turn_nan)),
    "gradient_spike": lambda runs, name: runs.train(name, spike, max_steps=LONGER),
    "drifting_replica": lambda runs, name: runs.train(name, changing(drift)),
    "scrambled_weights": lambda runs, name: runs.train(name, scrambled, (0, 1), **CONVERGED),
    "learning_rate": lambda runs, name: runs.train(name, **CONVERGED | {"learning_rate": 3.0}),
    "red_flag": red_flag,
    "tracker": lambda runs, name: runs.train(name, UnreachableTracker, (0,)),
    "bad_sample": lambda runs, name: runs.train(name, raising_rows),
    "full_disk_rank_0": lambda runs, name: full_disk(runs, name, 0),
    "full_disk_rank_1": lambda runs, name: full_disk(runs, name, 1),
    "evaluation_retried": evaluation,
    "callback_retried": lambda runs, name: runs.train(name, lost_in_a_callback),
    "reward_retried": lambda runs, name: runs.train_policy(name, away=runs.rank == 1),
    "torn_weights": lambda runs, name: torn(runs, name, cut_weights),
    "torn_rank_part": lambda runs, name: torn(runs, name, drop_part_of_rank),
}


def main(directory: Path, strategy: str, *faults: str) -> None:
    prepare(strategy)
    # A deadlock is a failure after this time.
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=90))
    runs = Runs(directory, strategy)
    for fault in faults:
        runs.see(fault)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
    leave_together()
