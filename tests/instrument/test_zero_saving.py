"""What a disk refuses of DeepSpeed's checkpoint is given up by all ranks, wherever in it that is."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked_pairs import run_pair

from self_healing.hf.saving import CouldNotBeWritten, SavingTogether


class TorchCheckpointEngine:
    """As DeepSpeed's own; some file names are refused on the first rank."""

    def __init__(self, refused: str, rank: int) -> None:
        self._refused = refused if rank == 0 else ""

    def makedirs(self, path: str) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)

    def save(self, content: bytes, path: Path) -> None:
        if path.name == self._refused:
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_bytes(content)


class Engine:
    """Writes in the order of DeepSpeed 0.19.8, with its barriers."""

    has_moe_layers = pipeline_parallelism = False

    def __init__(self, refused: str, rank: int) -> None:
        self._rank = rank
        self.checkpoint_engine = TorchCheckpointEngine(refused, rank)

    def zero_nvme_offload_optimizer(self) -> bool:
        return False

    def save_checkpoint(self, directory: str) -> bool:
        torch.distributed.barrier()
        folder = Path(directory, "global_step1")
        self.checkpoint_engine.makedirs(str(folder))
        self.checkpoint_engine.save(b"partition", folder / f"zero_pp_rank_{self._rank}")
        if self._rank == 0:
            self._copy_recovery_script(directory)
            # Not through the wrapped method: DeepSpeed opens this file by itself.
            TorchCheckpointEngine.save(self.checkpoint_engine, b"global_step1", Path(directory, "latest"))
        torch.distributed.barrier()
        return True

    def _copy_recovery_script(self, directory: str) -> None:
        TorchCheckpointEngine.save(self.checkpoint_engine, b"", Path(directory, "zero_to_fp32.py"))


class Trainer:
    """What of a Trainer is asked for, and called in a save."""

    is_deepspeed_enabled = True

    def __init__(self, directory: Path, refused: str, rank: int) -> None:
        self._directory, self._rank = str(directory), rank
        self.engine = Engine(refused, rank)
        self.args = SimpleNamespace(save_only_model=False, process_index=rank)
        wrapped = SimpleNamespace(engine=self.engine)
        self.accelerator = SimpleNamespace(
            device=torch.device("cpu"), state=SimpleNamespace(fsdp_plugin=None), deepspeed_engine_wrapped=wrapped
        )

    def save_checkpoint(self) -> None:
        self.save_model()
        self._save_optimizer_and_scheduler()
        self._save_scaler()
        self._save_rng_state()

    def save_model(self) -> None:
        self._save()
        # As where weights are not gathered for the file.
        self.engine.save_checkpoint(self._directory)

    def _save(self) -> None:
        if self._rank == 0:
            TorchCheckpointEngine.save(self.engine.checkpoint_engine, b"", Path(self._directory, "model"))

    def _save_optimizer_and_scheduler(self) -> None:
        self.engine.save_checkpoint(self._directory)

    def _save_scaler(self) -> None: ...

    def _save_rng_state(self) -> None: ...


@pytest.mark.parametrize("refused", ["", "zero_pp_rank_0", "latest"])
def test_what_one_rank_cannot_write_is_told_by_all_and_none_waits(tmp_path: Path, refused: str) -> None:
    def save(directory: Path, rank: int) -> dict[str, Any]:
        trainer = Trainer(directory, refused, rank)
        together = SavingTogether(trainer)
        assert together.possible
        try:
            together.save(trainer.save_checkpoint, directory)
        except CouldNotBeWritten as error:
            return {"told": str(error)}
        return {"told": ""}

    outcome = run_pair(tmp_path / "pair", save, seconds=30)
    assert outcome["hung"] == [], outcome["last"]
    told = [rank.get("told", rank) for rank in outcome["ranks"]]
    assert told == ["", ""] if not refused else all("No space left on device" in each for each in told)


def test_what_another_engine_writes_is_left_to_it() -> None:
    trainer = Trainer(Path(), "", 0)
    trainer.engine.checkpoint_engine = SimpleNamespace(makedirs=None, save=None)  # type: ignore[assignment]
    assert not SavingTogether(trainer).possible
