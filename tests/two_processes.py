"""Run by test_distributed.py under torchrun: the same short runs on two processes, healthy and struck."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from conftest import (
    POISON_WORD,
    TEXTS,
    EvalLoss,
    OutputFault,
    PoisonToken,
    best_model_trainer,
    build_tokenizer,
    journal,
    leave_together,
    losses,
    sft_trainer,
)
from constants import settings_among
from torch.distributed import DistBackendError, DistNetworkError
from transformers import TrainerCallback, set_seed
from trl import SFTTrainer

from self_healing import (
    HealingConfig,
    HealingReport,
    SelfHealingCallback,
    SelfHealingTrainer,
    UnrecoverableTrainingError,
    classify_exception,
)
from self_healing.checkpoints.choice import CheckpointError
from self_healing.healers.numerics import replicas
from self_healing.hf.state import local, unwrap_optimizer


# Of a run whose weights are struck after so many steps.
STRUCK_AFTER, LAST = 19, 22


def digest_of(weights: Mapping[str, torch.Tensor]) -> str:
    content = hashlib.sha256()
    for value in weights.values():
        content.update(value.numpy().tobytes())
    return content.hexdigest()


def digest(trainer: Any) -> str:
    return digest_of(trainer.model.state_dict())


def main(directory: Path) -> None:
    rank = int(os.environ["RANK"])
    tokenizer = build_tokenizer()
    results: dict[str, Any] = {}

    def run(name: str, healed: bool = True, struck_rank: int | None = None, poison: bool = False) -> None:
        set_seed(1234)
        texts = [f"{text} {POISON_WORD}" if poison and index in (5, 17) else text for index, text in enumerate(TEXTS)]
        trainer = sft_trainer(
            directory / name,
            tokenizer,
            texts=texts,
            callbacks=[SelfHealingCallback()] if healed else None,
            ddp_backend="gloo",
            max_steps=4,
        )
        fired = 0
        if poison:
            fault: Any = PoisonToken(trainer.model, tokenizer.convert_tokens_to_ids(POISON_WORD))
        else:
            fault = OutputFault(trainer.model, strike=lambda forward: forward == 4 and rank == struck_rank)
        trainer.train()
        fired = fault.fired
        results[name] = {
            "weights": digest(trainer),
            "losses": losses(trainer),
            "steps": trainer.state.global_step,
            "fired": fired,
            "outcomes": journal(directory / name, "outcome") if rank == 0 else [],
            "runs": runs_named_in(name) if healed else [],
        }

    def corrupted(name: str, healed: bool, struck_rank: int | None) -> None:
        """Weights of one rank turn NaN."""

        class Corrupting(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
                if state.global_step == STRUCK_AFTER and rank == struck_rank:
                    next(model.parameters()).data.view(-1)[0] = float("nan")

        set_seed(1234)
        trainer = sft_trainer(
            directory / name,
            tokenizer,
            callbacks=[*([SelfHealingCallback()] if healed else []), Corrupting()],
            ddp_backend="gloo",
            max_steps=LAST,
            gradient_accumulation_steps=1,
        )
        trainer.train()
        results[name] = {
            "weights": digest(trainer),
            "losses": losses(trainer),
            "actions": [event["action"] for event in journal(directory / name, "action")] if rank == 0 else [],
            "outcomes": journal(directory / name, "outcome") if rank == 0 else [],
        }

    def flipped(
        name: str,
        struck_rank: int,
        step: int,
        bit: int,
        moment: bool = False,
        snapshots: int = 1000,
        every: int = 1000,
    ) -> None:
        """One bit of one rank is another one after a step, and weights are compared every so many, and in the last."""
        set_seed(1234)
        flip = BitFlip(rank == struck_rank, step, bit, place=0.7, moment=moment)
        trainer = sft_trainer(
            directory / name,
            tokenizer,
            callbacks=[SelfHealingCallback(HealingConfig(snapshot_interval=snapshots)), flip],
            ddp_backend="gloo",
            max_steps=LAST,
            gradient_accumulation_steps=1,
        )
        with patch.object(replicas, "_EVERY", every):
            trainer.train()
        results[name] = {
            "weights": digest(trainer),
            "flipped": flip.fired,
            "named": [event["evidence"].get("odd_ranks") for event in journal_of_rank(name, "diagnosed")][-1:],
            "outcomes": [[event["failure"], event["steps_lost"]] for event in journal_of_rank(name, "outcome")],
        }

    def drifting(name: str, drifting_rank: int) -> None:
        """The weights of one rank are changed after every step."""

        class Drift(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
                if state.global_step >= 2 and rank == drifting_rank:
                    next(model.parameters()).data.mul_(1.01)

        set_seed(1234)
        trainer = sft_trainer(
            directory / name,
            tokenizer,
            callbacks=[SelfHealingCallback(HealingConfig(max_recovery_attempts=2)), Drift()],
            ddp_backend="gloo",
            max_steps=22,
            gradient_accumulation_steps=1,
        )
        results[name] = {"ended": ""}
        # On a busy machine reading was seen to take long, so that the next comparison was that of the last step.
        with patch.object(replicas, "_EVERY", 10):
            try:
                trainer.train()
            except UnrecoverableTrainingError as error:
                results[name]["ended"] = str(error)

    def unseen(name: str) -> None:
        """NaN in a row of one rank that no batch reads, and a best checkpoint that is torn."""

        class Faults(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
                if state.global_step == 5 and rank == 1:
                    with torch.no_grad():
                        rows = getattr(model, "module", model).model.embed_tokens.weight
                        rows[tokenizer.convert_tokens_to_ids(POISON_WORD)] = float("nan")

            def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step == state.max_steps and rank == 0:
                    for checkpoint in (directory / name).glob("**/checkpoint-2"):
                        file = checkpoint / "model.safetensors"
                        file.write_bytes(file.read_bytes()[:1000])

        set_seed(1234)
        callbacks = [EvalLoss(rises=True), SelfHealingCallback(), Faults()]
        trainer = best_model_trainer(directory / name, tokenizer, *callbacks, ddp_backend="gloo")
        trainer.train()
        results[name] = {
            "weights": digest(trainer),
            "best": trainer.state.best_model_checkpoint,
            "finite": all(bool(torch.isfinite(value).all()) for value in trainer.model.state_dict().values()),
            "actions": [event["action"] for event in journal(directory / name, "action")] if rank == 0 else [],
        }

    def flagged(name: str, flagged_rank: int) -> None:
        """A metric that only one rank logs ends the run on both."""

        class Reporting(SFTTrainer):
            def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
                if rank == flagged_rank:
                    logs["mine"] = 1.0
                super().log(logs, *args, **kwargs)

        rules = directory / "rules.toml"
        rules.write_text(
            '[mine]\nmetric = "mine"\nobjectives = ["sft"]\nhealthy = "below 0"\n'
            'red_flag = [{is = "above", value = 0.0}]\nsteps = 2\nobservations = 2\nseverity = "error"\n'
            'action = "stop"\ndiagnosis = "It is mine."\nremedy = "Ask the test."\nsource = "the test"\n'
        )
        set_seed(1234)
        trainer = sft_trainer(
            directory / name,
            tokenizer,
            callbacks=[SelfHealingCallback(HealingConfig(rules_file=str(rules)))],
            trainer_class=Reporting,
            ddp_backend="gloo",
            max_steps=8,
        )
        stopped = ""
        try:
            trainer.train()
        except UnrecoverableTrainingError as error:
            stopped = str(error)
        results[name] = {"steps": trainer.state.global_step, "stopped": stopped}

    def preempted(name: str, asked_rank: int) -> None:
        """One of the two is asked to leave in the third step."""

        class Asked(TrainerCallback):
            def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step == 2 and rank == asked_rank:
                    os.kill(os.getpid(), signal.SIGTERM)

        set_seed(1234)
        trainer = sft_trainer(directory / name, tokenizer, callbacks=[Asked()], ddp_backend="gloo", max_steps=8)
        code = 0
        try:
            SelfHealingTrainer(trainer).train()
        except SystemExit as left:
            code = left.code
        checkpoints = sorted(path.name for path in (directory / name).glob("checkpoint-*"))
        results[name] = {"steps": trainer.state.global_step, "code": code, "checkpoints": checkpoints}

    def journal_of_rank(name: str, kind: str | None = None) -> list[dict[str, Any]]:
        return journal(directory / name, kind, rank)

    def runs_named_in(name: str) -> list[str]:
        """By the journal of this rank."""
        return sorted({event["run"] for event in journal_of_rank(name)})

    def slow_to_save(name: str, slow_rank: int) -> None:
        """One of the two is behind while a checkpoint is written."""
        set_seed(1234)
        trainer = sft_trainer(
            directory / name, tokenizer, ddp_backend="gloo", max_steps=1, save_strategy="steps", save_steps=1
        )
        original = trainer._save_rng_state

        def save(output_dir: str) -> None:
            time.sleep(rank == slow_rank)
            original(output_dir)

        trainer._save_rng_state = save
        SelfHealingTrainer(trainer).train()
        results[name] = {"runs": runs_named_in(name)}

    def damaged(name: str, damaged_rank: int) -> None:
        """Each process has an output directory of its own; one of the two has lost a file."""

        def healer(output_dir: Path, **arguments: Any) -> SelfHealingTrainer:
            set_seed(1234)
            return SelfHealingTrainer(sft_trainer(output_dir, tokenizer, ddp_backend="gloo", **arguments))

        healer(directory / name, max_steps=4, save_strategy="steps", save_steps=2).train()
        torch.distributed.barrier()
        own = shutil.copytree(directory / name, directory / f"{name}.of_rank_{rank}")
        shutil.rmtree(own / "last-known-good", ignore_errors=True)
        if rank == damaged_rank:
            (own / "checkpoint-4" / "optimizer.pt").unlink()
        resumed = healer(own, max_steps=5)
        resumed.train(resume_from_checkpoint=True)
        events = journal(own, rank=rank)
        refused = ""
        try:
            healer(directory / f"{name}.nothing_of_rank_{rank}", max_steps=5).train(resume_from_checkpoint=True)
        except CheckpointError as error:
            refused = str(error)
        results[name] = {
            "resumed_at": [event["step"] for event in events if event["kind"] == "run_started"][-1],
            "looked": any(event["kind"].startswith("checkpoint_") for event in events),
            "weights": digest(resumed.trainer),
            "refused": refused,
        }

    def fails_again_and_again(name: str, faulty_rank: int) -> None:
        """A bug on one rank, of which the other sees that it is gone; from step 2 on, until somebody removes it."""
        gone = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:6022. This is typically caused"
        faulty = True

        class Bug(TrainerCallback):
            def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step == 3 and faulty:
                    raise ValueError("only here") if rank == faulty_rank else RuntimeError(gone)

        def start(restarts: int) -> str:
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restarts)
            set_seed(1234)
            trainer = sft_trainer(
                directory / name,
                tokenizer,
                callbacks=[Bug()],
                ddp_backend="gloo",
                max_steps=4,
                save_strategy="steps",
                save_steps=2,
            )
            try:
                healer = SelfHealingTrainer(trainer, HealingConfig(max_recovery_attempts=0))
                healer.train(resume_from_checkpoint="auto")
            except (ValueError, RuntimeError) as error:
                return f"{type(error).__name__}: {error}"
            incidents = healer.get_report().incidents
            results[name]["lost"] = [incident["steps_lost"] for incident in incidents]
            results[name]["repeated"] = [incident["steps_repeated"] for incident in incidents]
            results[name]["outcomes"] = [incident["outcome"] for incident in incidents]
            return "finished"

        def told_by(each: int) -> Any:
            path = directory / name / ("postmortem.json" if each == 0 else f"postmortem.rank{each}.json")
            return json.loads(path.read_text()) if path.exists() else None

        results[name] = {"ends": [start(0)]}
        torch.distributed.barrier()
        results[name]["first"] = [told_by(each) for each in (0, 1)]
        results[name]["report"] = HealingReport.from_run_dir(directory / name).incidents
        results[name]["actions"] = journal(directory / name, "action")
        torch.distributed.barrier()
        results[name]["ends"] += [start(1), start(2)]
        torch.distributed.barrier()
        results[name]["refused"] = [told_by(each) for each in (0, 1)]
        torch.distributed.barrier()
        faulty = False
        results[name]["ends"].append(start(0))
        torch.distributed.barrier()
        results[name]["left"] = [told_by(each) for each in (0, 1)]

    def of_a_gone_peer() -> list[str]:
        """How errors are classified that can only be told apart where several processes train."""
        source = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537]"
        errors = [
            RuntimeError(f"{source} Read error [127.0.0.1]:6022: Connection reset by peer. This is typically caused"),
            RuntimeError(f"{source} Connection closed by peer [127.0.0.1]:6022. This is typically caused by a remote"),
            DistBackendError("NCCL error: remote process exited or there was a network error, NCCL version 2.27.3"),
            DistNetworkError(
                "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server crash?"
            ),
            DistNetworkError("failed to send: Broken pipe"),
            DistBackendError("NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)"),
            RuntimeError("the simulator says: Connection closed by peer"),
            ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        ]
        return [classify_exception(error).value for error in errors]

    run("plain", healed=False)
    results["of_a_gone_peer"] = of_a_gone_peer()
    run("healthy")
    slow_to_save("slow_to_save_1", slow_rank=1)
    damaged("damaged_0", damaged_rank=0)
    fails_again_and_again("faulty_1", faulty_rank=1)
    preempted("preempted_1", asked_rank=1)
    run("struck_on_0", struck_rank=0)
    run("struck_on_1", struck_rank=1)
    run("poison", poison=True)
    unseen("unseen")
    flagged("flagged_on_1", flagged_rank=1)
    corrupted("corrupted_plain", healed=False, struck_rank=None)
    corrupted("corrupted_on_1", healed=True, struck_rank=1)
    flipped("flipped_on_1", struck_rank=1, step=STRUCK_AFTER, bit=3)
    flipped("flipped_moment_on_1", struck_rank=1, step=STRUCK_AFTER, bit=26, moment=True)
    # Nothing is wrong with six steps after it, and with the snapshots that are taken of it.
    flipped("flipped_before_snapshots_on_1", struck_rank=1, step=12, bit=3, snapshots=1, every=10)
    drifting("drifting_on_1", drifting_rank=1)
    (directory / f"results.{rank}.json").write_text(json.dumps(results))


class BitFlip(TrainerCallback):
    """
    One bit of one weight of this rank, if it is the one, becomes another one after a step; or of its first moment.
    Of the weights with a word in their names, or of all.
    """

    def __init__(
        self, strikes: bool, step: int, bit: int, place: float, moment: bool = False, named: str = ""
    ) -> None:
        self.strikes, self.step, self.bit, self.place = strikes, step, bit, place
        self.moment, self.named = moment, named
        self.fired = 0

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.strikes or state.global_step != self.step or self.fired:
            return
        self.fired += 1
        weights = [weight for name, weight in model.named_parameters() if self.named in name and weight.requires_grad]
        if self.moment:
            moments = unwrap_optimizer(kwargs["optimizer"]).state
            weights = [moments[weight]["exp_avg"] for weight in weights]
        # The part of this rank, where they are sharded.
        weights = [local(weight.data) for weight in weights]
        at = int(self.place * sum(weight.numel() for weight in weights))
        for weight in weights:
            if at < weight.numel():
                weight.view(-1).view(torch.uint8)[4 * at + self.bit // 8] ^= 1 << self.bit % 8
                return
            at -= weight.numel()


def short_of_memory(directory: Path) -> None:
    """
    From step 2 on, one of the two has memory for two rows at a time in the backward pass, where it runs out after
    gradients have been added. Started again, the job goes on in pieces.
    """
    rank = int(os.environ["RANK"])
    set_seed(1234)
    healed = directory.name == "healed"
    trainer = sft_trainer(
        directory,
        build_tokenizer(),
        dropout=0.0,
        ddp_backend="gloo",
        max_steps=12,
        save_strategy="steps",
        save_steps=1,
    )
    fired = 0

    def look(module: Any, args: Any, output: torch.Tensor) -> None:
        rows = output.shape[0]

        def strike(gradient: Any) -> None:
            nonlocal fired
            if healed and rank == 1 and trainer.state.global_step >= 2 and rows > 2:
                fired += 1
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 2.00 GiB. ({rows} rows)")

        if output.requires_grad:
            output.register_hook(strike)

    # The last gradient of all.
    trainer.model.get_input_embeddings().register_forward_hook(look)
    # Larger sizes are tried soon, and none that ends the job once more.
    settings_among({"PROBE_STEPS": 2})
    SelfHealingTrainer(trainer).train(resume_from_checkpoint="auto")
    result: dict[str, Any] = {"fired": fired, "weights": digest(trainer), "losses": losses(trainer)}
    result["sum"] = sum(float(value.double().abs().sum()) for value in trainer.model.state_dict().values())
    (directory / f"results.{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    (short_of_memory if sys.argv[2:] == ["memory"] else main)(Path(sys.argv[1]))
    leave_together()
