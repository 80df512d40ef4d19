"""
How long a process that is started again takes to get its state back: from shared memory, and from disk.

```bash
python benchmarks/restarts.py                       # 20 and 80 million parameters, with AdamW
python benchmarks/restarts.py --directory OUTPUTS   # on the disk that is to be measured
```

A job is killed after a step of which both are there. Each start after it is a process of its own, so that memory is as
fresh as it is for a job; the ways take turns, and of each part the shortest of all repeats counts. Measured are the
seconds on the clock, and those of CPU time, which other work on the machine disturbs less, of

- *state*: from looking for the state until weights and optimizer state are in the trainer's tensors. From disk that
  is what this library and `train()` do: the checkpoint is read through (checksums, NaN), then loaded. "loaded" is the
  second part alone, as without this library.
- *start*: from the call of `train()` until the first step begins, with all that both have in common (votes, data, the
  search of the weights for NaN, the first snapshot).

"cold" reads the checkpoint from the device, as a machine does whose memory was needed for other things, or a network
file system; "warm" has it in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback

import self_healing
from self_healing import HealingConfig, SelfHealingTrainer
from self_healing.checkpoints.vetting import vet
from self_healing.healers.restarts import ending
from self_healing.healers.restarts.shared_memory import open_in_memory, steps_in_memory
from self_healing.hf.state import live_state_of
from self_healing.rollback.shared_memory import directory_of, remove_states


RESULTS = Path(__file__).parent / "results"
# A checkpoint is written after so many steps; the process is killed in the step after so many more.
SAVED, KILLED = 6, 9
CPU = torch.device("cpu")
WHOLE, CPU_TIME = "whole", ", CPU"
# Larger files are not copied for each start: nobody writes to them.
_SMALL = 1 << 20


class Killed(TrainerCallback):
    """Kills the process in the step after those."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)


class FirstStep(TrainerCallback):
    """Is told when the first step begins: the last of all callbacks."""

    def __init__(self, begun: Callable[[], None]) -> None:
        self._begun = begun

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begun()


class Job:
    """
    The job that is killed and started again.

    Args:
        root (`Path`):
            Where its files are.
        hidden (`int`):
            Width of the model.
    """

    def __init__(self, root: Path, hidden: int) -> None:
        self.directory, self._left = root / "run", root / "left"
        self._hidden = hidden
        self.parameters = 0

    @property
    def checkpoint(self) -> Path:
        return self.directory / f"checkpoint-{SAVED}"

    def make_trainer(self) -> Trainer:
        set_seed(0)
        config = LlamaConfig(
            vocab_size=400,
            hidden_size=self._hidden,
            intermediate_size=self._hidden * 11 // 4,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=8,
        )
        rows = [{"input_ids": [row % 400] * 16, "labels": [row % 400] * 16} for row in range(32)]
        arguments = TrainingArguments(
            output_dir=str(self.directory),
            max_steps=KILLED + 2,
            per_device_train_batch_size=1,
            save_strategy="steps",
            save_steps=SAVED,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows)  # type: ignore[arg-type]
        trainer.remove_callback(PrinterCallback)
        return trainer

    def leave(self) -> None:
        """Trains, and is killed; what is left is kept for all starts after it."""

        def train() -> None:
            trainer = self.make_trainer()
            trainer.add_callback(Killed())
            SelfHealingTrainer(trainer, HealingConfig(snapshot_interval=2, snapshot_verify_steps=2)).train()

        in_process(train, restarts=0)
        self.parameters = in_process(lambda: sum(each.numel() for each in self.make_trainer().model.parameters()), 0)
        copy_tree(self.directory, self._left / "disk")
        copy_tree(directory_of(self.directory), directory_of(self._left))

    def as_left(self) -> None:
        """Puts everything back that was there when the job was killed."""
        for kept, place in (
            (self._left / "disk", self.directory),
            (directory_of(self._left), directory_of(self.directory)),
        ):
            shutil.rmtree(place, ignore_errors=True)
            copy_tree(kept, place)

    def remove(self) -> None:
        for directory in (self.directory, self._left):
            remove_states(directory)

    # ---- the ways ----

    def timed(self, way: Callable[[Trainer], dict[str, float]]) -> dict[str, float]:
        """Runs a way in a process of its own, in which the model has just been built."""
        self.as_left()
        return in_process(lambda: way(self.make_trainer()), restarts=1)

    def from_memory(self, trainer: Trainer) -> dict[str, float]:
        trainer.create_optimizer_and_scheduler(KILLED + 2)
        clock = Clock()
        newest = steps_in_memory(str(self.directory), 0, CPU)[0]
        opened = open_in_memory(str(self.directory), newest, 0, CPU)
        assert opened is not None
        assert opened.state is not None
        clock.passed("opened")
        live = live_state_of(trainer)
        opened.state.check(live)
        opened.state.put(live)
        clock.passed("copied")
        return clock.seconds

    def from_disk(self, trainer: Trainer) -> dict[str, float]:
        trainer.create_optimizer_and_scheduler(KILLED + 2)
        clock = Clock()
        assert vet(self.checkpoint).usable
        clock.passed("read through")
        trainer._load_from_checkpoint(str(self.checkpoint))
        trainer._load_optimizer_and_scheduler(str(self.checkpoint))
        clock.passed("loaded")
        return clock.seconds

    def start(self, trainer: Trainer, memory: bool) -> dict[str, float]:
        clock = Clock()

        class Begun(KeyboardInterrupt):
            pass

        def begun() -> None:
            clock.passed("begun")
            raise Begun

        if not memory:
            ending.ROOT = Path("/nowhere")
        config = HealingConfig(snapshot_interval=2, snapshot_verify_steps=2)
        healer = SelfHealingTrainer(trainer, config)
        trainer.add_callback(FirstStep(begun))
        clock.restart()
        try:
            healer.train()
        except Begun:
            assert trainer.state.global_step == (KILLED - 1 if memory else SAVED)
        return clock.seconds

    def drop_from_page_cache(self) -> None:
        for file in self.checkpoint.rglob("*"):
            if file.is_file():
                descriptor = os.open(file, os.O_RDONLY)
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


class Clock:
    """Seconds that parts of something took: on the clock, and of the process's CPU time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = self._now()

    @staticmethod
    def _now() -> dict[str, float]:
        return {"": time.perf_counter(), CPU_TIME: time.process_time()}

    def restart(self) -> None:
        self._last = self._now()

    def passed(self, part: str) -> None:
        now = self._now()
        for kind, seconds in now.items():
            self.seconds[part + kind] = seconds - self._last[kind]
            self.seconds[WHOLE + kind] = self.seconds.get(WHOLE + kind, 0.0) + seconds - self._last[kind]
        self._last = now


def in_process(work: Callable[[], Any], restarts: int) -> Any:
    """Does something in a process of its own, forked from one that has imported everything, and nothing more."""
    launcher = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.environ.update(launcher, TORCHELASTIC_MAX_RESTARTS="3")
        with os.fdopen(writing, "w") as file:
            json.dump(work(), file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        content = file.read()
    os.waitpid(child, 0)
    return json.loads(content) if content else None


def copy_tree(source: Path, target: Path) -> None:
    def copy(file: str, place: str) -> None:
        if os.path.getsize(file) < _SMALL:
            shutil.copy2(file, place)
        else:
            os.link(file, place)

    shutil.copytree(source, target, copy_function=copy)


def measure(root: Path, hidden: int, repeats: int) -> dict[str, Any]:
    job = Job(root, hidden)
    try:
        job.leave()
        ways: dict[str, tuple[Callable[[], None], Callable[[Trainer], dict[str, float]]]] = {
            "state, memory": (lambda: None, job.from_memory),
            "state, disk, warm": (lambda: None, job.from_disk),
            "state, disk, cold": (job.drop_from_page_cache, job.from_disk),
            "start, memory": (lambda: None, lambda trainer: job.start(trainer, memory=True)),
            "start, disk, warm": (lambda: None, lambda trainer: job.start(trainer, memory=False)),
            "start, disk, cold": (job.drop_from_page_cache, lambda trainer: job.start(trainer, memory=False)),
        }
        found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for _ in range(repeats):
            for name, (prepare, way) in ways.items():

                def timed(trainer: Trainer, prepare: Any = prepare, way: Any = way) -> Any:
                    prepare()
                    return way(trainer)

                found[name].append(job.timed(timed))
    finally:
        job.remove()
    # Each part of each way at its shortest: other work on the machine only adds to it.
    shortest = {name: {part: min(one[part] for one in each) for part in each[0]} for name, each in found.items()}
    files = [file for file in job.checkpoint.rglob("*") if file.is_file()]
    return {
        "parameters": job.parameters,
        "bytes": sum(file.stat().st_size for file in files),
        "seconds": {name: {part: round(took, 4) for part, took in each.items()} for name, each in shortest.items()},
        "times_as_long_as_from_memory": {
            f"{kind}{disk}{clock}": round(
                shortest[kind + disk][WHOLE + clock] / shortest[f"{kind}memory"][WHOLE + clock], 2
            )
            for kind in ("state, ", "start, ")
            for disk in ("disk, warm", "disk, cold")
            for clock in ("", CPU_TIME)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="on the disk that is to be measured", default=None)
    parser.add_argument("--output", type=Path, default=RESULTS / "restarts_cpu.json")
    options = parser.parse_args()
    sizes = []
    for hidden in options.hidden:
        root = Path(tempfile.mkdtemp(dir=options.directory))
        try:
            sizes.append(measure(root, hidden, options.repeats))
        finally:
            shutil.rmtree(root, ignore_errors=True)
        print(json.dumps(sizes[-1], indent=2), flush=True)
    result = {
        "what": "seconds until a process that is started again has its state back, and until its first step begins",
        "sizes": sizes,
        "repeats": options.repeats,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        # Where it is larger than the cores, the seconds on the clock say little.
        "load_average": round(os.getloadavg()[0], 1),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "self_healing": self_healing.__version__,
        },
    }
    options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"Written to {options.output}")


if __name__ == "__main__":
    main()
