"""Checkpoints that cannot be written: nothing torn is left, and the run goes on to the next one."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    assert_same_weights,
    journal,
    logged,
    plain_trainer,
    sft_trainer,
    weights,
)
from transformers import Trainer, TrainerCallback, TrainingArguments
from trl import SFTTrainer

from self_healing import (
    ConfigurationError,
    HealingConfig,
    SelfHealingCallback,
    SelfHealingTrainer,
)
from self_healing.checkpoints.choice import refuse_unwritable
from self_healing.checkpoints.marker import write_marker
from self_healing.checkpoints.retention import expendable_checkpoint, remove_torn
from self_healing.checkpoints.vetting import vet
from self_healing.failures.classify import classify_exception, could_not_be_written
from self_healing.failures.recipes import FailureType
from self_healing.healers.assembly import assemble
from self_healing.healers.saves import SaveHealer
from self_healing.hf.saving import CheckpointSaving


SAVING = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 1}


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def failing_saves(*steps: int, error: Callable[[], Exception] = full, base: type = Trainer) -> Any:
    """A trainer whose checkpoints of these steps fail when the model is written and the optimizer is not."""

    class FullDisk(base):  # type: ignore[misc]
        failures = 0

        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            if self.state.global_step in steps:
                self.failures += 1
                assert (Path(output_dir) / "model.safetensors").exists()
                raise error()
            super()._save_optimizer_and_scheduler(output_dir)

    return FullDisk


def disk_trainer(output_dir: Path, tokenizer: Any, *steps: int, **arguments: Any) -> Any:
    error = arguments.pop("error", full)
    return plain_trainer(
        output_dir, tokenizer, trainer_class=failing_saves(*steps, error=error), **SAVING, **arguments
    )


def names(output_dir: Path) -> list[str]:
    return sorted(entry.name for entry in output_dir.iterdir() if "checkpoint" in entry.name)


def outcomes(output_dir: Path) -> list[str]:
    return [event["outcome"] for event in journal(output_dir, "outcome")]


# ---- what counts as the disk ----


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG])
def test_errors_of_the_disk_are_known_by_their_number(number: int) -> None:
    assert classify_exception(OSError(number, os.strerror(number))) is FailureType.DISK


def test_a_tokenizer_that_finds_no_room_is_known(tokenizer: Any) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("only Linux has a device that is always full")
    with pytest.raises(Exception, match=r"os error 28") as raised:
        tokenizer.backend_tokenizer.save("/dev/full")
    assert type(raised.value) is Exception
    assert classify_exception(raised.value) is FailureType.DISK


def test_a_tokenizer_that_may_not_write_is_known_while_a_checkpoint_is_written() -> None:
    error = Exception(f"Permission denied (os error {errno.EACCES})")
    assert classify_exception(error) is FailureType.USER_CODE
    assert could_not_be_written(error)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_a_refused_permission_is_the_disk_only_while_a_checkpoint_is_written(number: int) -> None:
    error = OSError(number, os.strerror(number))
    assert classify_exception(error) is FailureType.USER_CODE
    assert could_not_be_written(error)
    assert not could_not_be_written(FileNotFoundError(errno.ENOENT, "gone"))


@pytest.mark.slow
def test_what_safetensors_and_torch_raise_on_a_disk_that_takes_no_more_is_known(tmp_path: Path) -> None:
    script = """
        import resource, signal, sys, torch
        from safetensors.torch import save_file
        from self_healing.failures.classify import classify_exception

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        tensors = {"a": torch.zeros(200_000)}
        for save in (
            lambda: save_file(tensors, sys.argv[1] + "/a.safetensors"),
            lambda: torch.save(tensors, sys.argv[1] + "/a.pt"),
            lambda: torch.save(tensors, sys.argv[1] + "/b.pt", _use_new_zipfile_serialization=False),
            lambda: open(sys.argv[1] + "/c", "w").write("x" * 200_000),
        ):
            try:
                save()
            except Exception as error:
                print(type(error).__name__, classify_exception(error).value)
    """
    done = run(script, str(tmp_path))
    assert done.stdout.split("\n")[:4] == [
        "SafetensorError disk",
        "RuntimeError disk",
        "RuntimeError disk",
        "OSError disk",
    ]


def run(script: str, *arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    path = [str(Path(__file__).parents[1]), *sys.path]
    done = subprocess.run(
        [*prefix, sys.executable, "-c", textwrap.dedent(script), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


# ---- the run goes on ----


@pytest.mark.heals("disk", "callback")
@pytest.mark.heals("disk", "wrapper")
@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapper", "callback"])
def test_two_saves_that_fail_cost_their_checkpoints_and_the_third_is_good(
    wrapped: bool, tmp_path: Path, tokenizer: Any
) -> None:
    clean = disk_trainer(tmp_path / "clean", tokenizer, max_steps=8)
    clean.train()
    callbacks = None if wrapped else [SelfHealingCallback()]
    trainer = disk_trainer(tmp_path / "run", tokenizer, 2, 4, max_steps=8, callbacks=callbacks)
    SelfHealingTrainer(trainer).train() if wrapped else trainer.train()
    assert trainer.failures == 2
    assert trainer.state.global_step == 8
    assert_same_weights(weights(trainer), weights(clean))
    assert logged(trainer) == logged(clean)
    assert names(tmp_path / "run") == ["checkpoint-6", "checkpoint-8"]
    verdict = vet(tmp_path / "run" / "checkpoint-6")
    assert verdict.usable, verdict.reason

    resumed = disk_trainer(tmp_path / "run", tokenizer, max_steps=8)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-6"))
    assert_same_weights(weights(resumed), weights(clean))


def raised_from(error: Exception) -> Exception:
    caused = RuntimeError("cannot write the optimizer state")
    caused.__cause__ = error
    return caused


def torch_into_a_directory_that_is_gone() -> Exception:
    torch.save({"weight": torch.zeros(1)}, "/nonexistent/optimizer.pt")
    raise AssertionError


ERRORS: dict[str, Callable[[], Exception]] = {
    **{
        name: (lambda number: lambda: OSError(number, os.strerror(number)))(getattr(errno, name))
        for name in (
            *("ESTALE", "ENOTCONN", "EREMOTEIO", "ENOTEMPTY", "EBUSY", "EIO", "EROFS", "EDQUOT"),
            *("ETIMEDOUT", "ECONNRESET", "EACCES", "ENOENT", "EMFILE", "ENOMEM"),
        )
    },
    "no number": lambda: OSError("the file system is away"),
    "raised from one": lambda: raised_from(OSError(errno.ESTALE, os.strerror(errno.ESTALE))),
    "of Rust": lambda: Exception(f"Stale file handle (os error {errno.ESTALE})"),
    "of torch": torch_into_a_directory_that_is_gone,
}


@pytest.mark.parametrize("name", ERRORS)
def test_any_error_of_the_system_in_a_save_costs_that_save(tmp_path: Path, tokenizer: Any, name: str) -> None:
    trainer = disk_trainer(tmp_path, tokenizer, 2, max_steps=4, error=ERRORS[name])
    SelfHealingTrainer(trainer).train()
    assert (trainer.failures, trainer.state.global_step) == (1, 4)
    assert names(tmp_path) == ["checkpoint-4"]
    [outcome] = journal(tmp_path, "outcome")
    assert (outcome["failure"], outcome["outcome"], outcome["missing"]) == ("disk", "resolved", [2])


def test_an_error_of_the_system_in_a_callback_s_on_save_is_not_one_of_the_save(tmp_path: Path, tokenizer: Any) -> None:
    class Copies(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    trainer = disk_trainer(tmp_path, tokenizer, callbacks=[Copies(), SelfHealingCallback()])
    with pytest.raises(OSError, match="Stale file handle"):
        trainer.train()
    assert vet(tmp_path / "checkpoint-2").usable


@pytest.fixture
def out_of_reach(tmp_path: Path) -> Iterator[None]:
    """Whatever is asked about a file in this directory is refused, whether there is one included."""
    root = os.geteuid() == 0
    tmp_path.chmod(0o700 if root else 0)
    if root:
        os.seteuid(65534)
    yield
    if root:
        os.seteuid(0)
    tmp_path.chmod(0o700)


@pytest.mark.usefixtures("out_of_reach")
def test_where_nothing_is_known_of_what_was_written_that_is_said(tmp_path: Path) -> None:
    assert "PermissionError" in (remove_torn(tmp_path / "checkpoint-2") or "")
    healer = SaveHealer(assemble(HealingConfig(), tmp_path))
    assert not healer.failed(RuntimeError("PytorchStreamWriter failed writing"), tmp_path / "checkpoint-2", 2, None)


def test_the_journal_tells_of_it_once_and_closes_it_when_one_could_be_written(tmp_path: Path, tokenizer: Any) -> None:
    SelfHealingTrainer(disk_trainer(tmp_path, tokenizer, 2, 4)).train()
    [incident] = journal(tmp_path, "detected")
    assert (incident["step"], incident["symptom"]) == (2, "OSError")
    assert journal(tmp_path, "diagnosed")[0]["failure"] == "disk"
    actions = [event["action"] for event in journal(tmp_path, "action")]
    assert actions == ["remove_partial_checkpoint", "go_on_without"] * 2
    [outcome] = journal(tmp_path, "outcome")
    assert (outcome["outcome"], outcome["missing"]) == ("resolved", [2, 4])


def test_a_run_whose_last_checkpoint_is_missing_says_so_loudly(tmp_path: Path, tokenizer: Any, caplog: Any) -> None:
    trainer = disk_trainer(tmp_path, tokenizer, 2, 4, 6)
    SelfHealingTrainer(trainer).train()
    assert trainer.state.global_step == 6
    assert names(tmp_path) == []
    assert outcomes(tmp_path) == ["unresolved"]
    assert "The last checkpoint could not be written" in caplog.text
    assert "trainer.save_model" in caplog.text


def test_nobody_is_told_of_a_checkpoint_that_is_not_there(tmp_path: Path, tokenizer: Any) -> None:
    told: list[int] = []

    class Told(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            told.append(state.global_step)

    SelfHealingTrainer(disk_trainer(tmp_path, tokenizer, 2, callbacks=[Told()])).train()
    assert told == [4, 6]


def test_a_best_checkpoint_that_could_not_be_written_is_not_taken_for_the_best_on_disk(
    tmp_path: Path, tokenizer: Any
) -> None:
    trainer = disk_trainer(
        tmp_path,
        tokenizer,
        4,
        trainer_kwargs={"eval_dataset": plain_trainer(tmp_path / "other", tokenizer).train_dataset.select(range(4))},
        eval_strategy="steps",
        eval_steps=2,
        max_steps=4,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
    )
    SelfHealingTrainer(trainer).train()
    assert trainer.state.best_global_step == 2
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")


def test_a_best_model_that_was_not_saved_does_not_keep_a_later_one_from_being_the_best(
    tmp_path: Path, tokenizer: Any
) -> None:
    measured = iter([5.0, 3.0, 3.5, 4.0])

    class Measured(failing_saves(4)):  # type: ignore[misc]
        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            output = super().evaluation_loop(*args, **kwargs)
            output.metrics["eval_loss"] = next(measured)
            return output

    trainer = plain_trainer(
        tmp_path,
        tokenizer,
        trainer_class=Measured,
        trainer_kwargs={"eval_dataset": plain_trainer(tmp_path / "other", tokenizer).train_dataset.select(range(4))},
        callbacks=[SelfHealingCallback()],
        eval_strategy="steps",
        eval_steps=2,
        max_steps=8,
        load_best_model_at_end=True,
        **SAVING,
    )
    trainer.train()
    assert trainer.failures == 1
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-6")
    assert trainer.state.best_metric == 3.5


def test_a_checkpoint_of_an_earlier_run_stays_when_nothing_was_written_to_it(tmp_path: Path, tokenizer: Any) -> None:
    plain_trainer(tmp_path, tokenizer, max_steps=2, **SAVING).train()

    trainer = plain_trainer(tmp_path, tokenizer, max_steps=2, **SAVING)
    trainer.state.global_step = 2

    def not_allowed(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    healer = SaveHealer(assemble(HealingConfig(), tmp_path))
    assert not CheckpointSaving(trainer, healer, contextlib.nullcontext).write(not_allowed, None, None)
    assert vet(tmp_path / "checkpoint-2").usable


def test_a_checkpoint_of_an_earlier_run_that_was_partly_overwritten_is_removed(tmp_path: Path, tokenizer: Any) -> None:
    plain_trainer(tmp_path, tokenizer, max_steps=2, **SAVING).train()
    disk_trainer(tmp_path, tokenizer, 2, max_steps=2, callbacks=[SelfHealingCallback()]).train()
    assert names(tmp_path) == []


def test_the_state_a_failed_save_has_changed_is_put_back(tmp_path: Path, tokenizer: Any) -> None:
    seen: list[Any] = []

    class Drawing(failing_saves(2)):  # type: ignore[misc]
        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            torch.rand(3)
            super()._save_optimizer_and_scheduler(output_dir)

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(torch.get_rng_state())

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                seen.append(torch.get_rng_state())

    trainer = plain_trainer(tmp_path, tokenizer, trainer_class=Drawing, callbacks=[Look()], max_steps=3, **SAVING)
    SelfHealingTrainer(trainer).train()
    assert torch.equal(seen[1], seen[2])


def test_an_error_that_is_not_the_disk_s_is_not_held_back(tmp_path: Path, tokenizer: Any) -> None:
    trainer = disk_trainer(tmp_path, tokenizer, 2, error=lambda: ValueError("a mistake in save_model"))
    with pytest.raises(ValueError, match="a mistake"):
        SelfHealingTrainer(trainer).train()


def test_on_save_failure_raise_lets_the_error_pass(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(OSError, match="No space left"):
        SelfHealingTrainer(disk_trainer(tmp_path, tokenizer, 2), HealingConfig(on_save_failure="raise")).train()


def test_a_failure_of_our_own_lets_the_disk_s_error_pass(tmp_path: Path, tokenizer: Any, monkeypatch: Any) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr("self_healing.healers.saves.SaveHealer.failed", broken)
    trainer = disk_trainer(tmp_path, tokenizer, 2, callbacks=[SelfHealingCallback()])
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    assert "_save_checkpoint" not in vars(trainer)


@pytest.mark.parametrize("name", ["EIO", "ENOTEMPTY", "EBUSY", "ESTALE", "EACCES", "no number"])
def test_a_checkpoint_that_is_written_stays_when_an_older_one_cannot_be_removed(
    tmp_path: Path, tokenizer: Any, monkeypatch: Any, name: str
) -> None:
    def rotate_checkpoints(*_: Any, **__: Any) -> None:
        raise ERRORS[name]()

    monkeypatch.setattr("transformers.trainer.rotate_checkpoints", rotate_checkpoints)
    SelfHealingTrainer(disk_trainer(tmp_path, tokenizer)).train()
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert all(vet(tmp_path / name).usable for name in names(tmp_path))
    [diagnosed] = journal(tmp_path, "diagnosed")
    assert (diagnosed["step"], diagnosed["cause"]) == (2, "an older checkpoint could not be removed")
    assert outcomes(tmp_path) == ["resolved"]


@pytest.mark.slow
def test_a_full_file_system_costs_its_checkpoints_and_not_the_run(tmp_path: Path, tokenizer: Any) -> None:
    """A file system that is really full, in a mount namespace of its own, until something is deleted from it."""
    enter = ("unshare", "--user", "--map-root-user", "--mount")
    if shutil.which("unshare") is None or subprocess.run([*enter, "true"], capture_output=True).returncode != 0:
        pytest.skip("mounting needs user namespaces")
    script = """
        import shutil, subprocess, sys
        from pathlib import Path
        import torch
        from conftest import build_tokenizer, plain_trainer, weights
        from transformers import TrainerCallback
        from self_healing import SelfHealingTrainer

        disk, out = Path(sys.argv[1]), Path(sys.argv[2])
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], check=True)
        filler = disk / "filler"
        # Half a checkpoint, of about 340 kB, fits.
        filler.write_bytes(bytes(4 * 2**20 - 200 * 2**10))

        class Clean(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                print("step", state.global_step, sorted(entry.name for entry in disk.iterdir()))
                if state.global_step == 5:
                    filler.unlink()

        trainer = plain_trainer(
            disk,
            build_tokenizer(),
            save_strategy="steps",
            save_steps=2,
            gradient_accumulation_steps=1,
            max_steps=8,
            callbacks=[Clean()],
        )
        SelfHealingTrainer(trainer).train()
        torch.save(weights(trainer), out / "weights.pt")
        shutil.copytree(disk, out / "disk")
    """
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").mkdir()
    done = run(script, str(tmp_path / "disk"), str(tmp_path / "out"), prefix=enter)
    left = tmp_path / "out" / "disk"
    assert "checkpoint" not in done.stdout.split("step 5")[1].split("\n")[0], done.stdout
    assert names(left) == ["checkpoint-6", "checkpoint-8"]
    assert vet(left / "checkpoint-6").usable
    [outcome] = journal(left, "outcome")
    assert (outcome["outcome"], outcome["missing"]) == ("resolved", [2, 4])
    [detected] = journal(left, "detected")
    assert detected["evidence"]["message"].endswith(f" of 4.19 MB free at {tmp_path / 'disk'}")
    assert f"checkpoint-4 could not be written either (DiskFull: 0 of 4.19 MB free at {tmp_path}" in done.stderr

    clean = plain_trainer(tmp_path / "clean", tokenizer, max_steps=8, **SAVING)
    clean.train()
    resumed = plain_trainer(tmp_path / "resumed", tokenizer, max_steps=8, gradient_accumulation_steps=1)
    resumed.train(resume_from_checkpoint=str(left / "checkpoint-6"))
    assert_same_weights(weights(resumed), weights(clean))


# ---- room ----


def a_checkpoint(directory: Path, step: int, standing: str = "unverified", run: str = "mine") -> Path:
    checkpoint = directory / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    write_marker(checkpoint, run, step, {}, emergency=False, standing=standing)  # type: ignore[arg-type]
    return checkpoint


def test_the_oldest_checkpoint_that_may_go_is_chosen(tmp_path: Path) -> None:
    a_checkpoint(tmp_path, 1, run="another")
    a_checkpoint(tmp_path, 2, "verified")
    best = a_checkpoint(tmp_path, 3)
    linked = a_checkpoint(tmp_path, 4)
    (tmp_path / "last-known-good").mkdir()
    os.link(linked / "trainer_state.json", tmp_path / "last-known-good" / "state")
    (tmp_path / "checkpoint-5").mkdir()
    expendable = a_checkpoint(tmp_path, 6, "suspect")
    a_checkpoint(tmp_path, 7)
    newest = a_checkpoint(tmp_path, 8)
    assert expendable_checkpoint("mine", tmp_path, str(best)) == expendable
    shutil.rmtree(expendable)
    shutil.rmtree(tmp_path / "checkpoint-7")
    assert expendable_checkpoint("mine", tmp_path, str(best)) is None
    assert newest.exists()


def test_with_make_room_an_unverified_checkpoint_goes_and_the_save_is_made_again(
    tmp_path: Path, tokenizer: Any
) -> None:
    class Full(Trainer):
        """There is room for three checkpoints."""

        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            if len(list(tmp_path.glob("checkpoint-*"))) > 3:
                raise full()
            super()._save_optimizer_and_scheduler(output_dir)

    config = HealingConfig(on_save_failure="make_room", snapshot_verify_steps=100)
    trainer = plain_trainer(tmp_path, tokenizer, trainer_class=Full, max_steps=8, **SAVING)
    SelfHealingTrainer(trainer, config).train()
    # The first waits to be verified and is linked to last-known-good/: its removal would free nothing.
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-6", "checkpoint-8"]
    assert vet(tmp_path / "checkpoint-8").usable
    actions = [event["action"] for event in journal(tmp_path, "action")]
    assert actions == ["remove_partial_checkpoint", "make_room"]
    [outcome] = journal(tmp_path, "outcome")
    assert (outcome["outcome"], outcome["missing"]) == ("resolved", [])


def test_without_make_room_nothing_is_removed(tmp_path: Path, tokenizer: Any) -> None:
    trainer = disk_trainer(tmp_path, tokenizer, 6)
    SelfHealingTrainer(trainer, HealingConfig(snapshot_verify_steps=100)).train()
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4"]


def test_what_is_left_of_a_checkpoint_that_cannot_be_removed_does_not_look_complete(
    tmp_path: Path, monkeypatch: Any
) -> None:
    checkpoint = a_checkpoint(tmp_path, 3)
    (checkpoint / "model.safetensors").write_bytes(b"half")

    def refuse(*_: Any, ignore_errors: bool = False, **__: Any) -> None:
        if not ignore_errors:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    monkeypatch.setattr("pathlib.Path.rename", refuse)
    assert "Input/output error" in (remove_torn(checkpoint) or "")
    assert [file.name for file in checkpoint.iterdir()] == ["model.safetensors"]


# ---- emergencies ----


def test_an_emergency_checkpoint_that_does_not_fit_leaves_nothing_torn_and_the_run_resumes_from_a_regular_one(
    tmp_path: Path, tokenizer: Any
) -> None:
    class FullEmergency(SFTTrainer):
        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            if Path(output_dir).parent.name == "emergency":
                raise full()
            super()._save_optimizer_and_scheduler(output_dir)

    class Cut(TrainerCallback):
        fired = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5 and not self.fired:
                self.fired += 1
                raise ConnectionError("the storage went away")

    clean = sft_trainer(tmp_path / "clean", tokenizer, **SAVING)
    clean.train()
    trainer = sft_trainer(tmp_path / "run", tokenizer, trainer_class=FullEmergency, callbacks=[Cut()], **SAVING)
    SelfHealingTrainer(trainer, sleep=lambda _: None).train()
    assert trainer.state.global_step == 6
    assert not list((tmp_path / "run" / "emergency").glob("checkpoint-*"))
    assert_same_weights(weights(trainer), weights(clean))


# ---- an output_dir that cannot be written ----


def make_unwritable(directory: Path) -> None:
    """Puts a file in its place: not even root can write into that."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.touch()


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_output_dir_that_cannot_be_written_is_refused_before_the_first_step(
    tmp_path: Path, tokenizer: Any, wrapped: bool
) -> None:
    trainer = sft_trainer(tmp_path / "run", tokenizer, save_strategy="steps", save_steps=2)
    make_unwritable(tmp_path / "run")
    before = weights(trainer)
    if not wrapped:
        trainer.add_callback(SelfHealingCallback())
    with pytest.raises(ConfigurationError, match=r"cannot be written .*FileExistsError.*nothing was trained"):
        (SelfHealingTrainer(trainer) if wrapped else trainer).train()
    assert_same_weights(weights(trainer), before)


def test_a_place_where_no_directory_can_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigurationError, match=r"cannot be written \(FileNotFoundError"):
        refuse_unwritable(TrainingArguments("run", report_to=[], use_cpu=True))


def test_without_checkpoints_to_write_it_is_only_told(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = sft_trainer(tmp_path / "run", tokenizer, max_steps=2)
    make_unwritable(tmp_path / "run")
    SelfHealingTrainer(trainer).train()
    assert trainer.state.global_step == 2
    assert "cannot be written" in caplog.text


def test_a_disk_that_is_full_for_the_moment_is_no_reason_to_refuse(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer = sft_trainer(tmp_path, tokenizer, max_steps=1, save_strategy="steps", save_steps=1)
    monkeypatch.setattr("self_healing.checkpoints.choice.tempfile.TemporaryFile", full)
    SelfHealingTrainer(trainer).train()
    assert trainer.state.global_step == 1
