"""`Chaos`: injects faults into the training of one trainer, each as often as it was asked for, across restarts."""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import logging
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from ..data.proxy import Proxy
from ..instrument import find_trainer
from .faults import KINDS, Fault, FaultError, keys_of, parse_faults
from .ledger import Ledger
from .places import (
    SeenInputs,
    changed,
    last_weight,
    middle_weight,
    output_module,
    pieces_of,
    spoiled,
)
from .schedule import strike_steps
from .waiting import wait_in_c, wait_in_python


logger = logging.getLogger("self_healing.chaos")


class SampleError(ValueError):
    """What a bad sample raises."""


class _LastWord(TrainerCallback):
    """Undoes what [`Chaos`] did after all others have undone what they put on top of it."""

    def __init__(self, chaos: Chaos) -> None:
        self.chaos = chaos

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.chaos.end()


class Chaos(TrainerCallback):
    """
    Injects faults into a training run, to rehearse what it survives.

    A fault that has struck is written to the ledger before it strikes and does not strike again, neither when the
    step is computed again nor in a restarted process, unless it was asked for more often. The run's random states
    are not touched, and all hooks are gone when training ends. With several processes, faults strike in the first.

    Args:
        faults (`str` or `Sequence[Fault | str]`):
            What to inject: [`Fault`] objects, or how they are written down, `"nan_loss@12, sigkill@30"`.
        seed (`int`, *optional*, defaults to 0):
            Of everything that is drawn at random.
        ledger (`str`, `PathLike` or [`Ledger`], *optional*, defaults to `"chaos.jsonl"`):
            The file that remembers what has struck. Outside of the run's directory; another one, or none yet, for
            another rehearsal.
        min_gap (`int`, *optional*):
            Fewest steps between two faults at random. Defaults to half of the steps that each has.

    Example:

    ```python
    trainer = SFTTrainer(..., callbacks=[SelfHealingCallback(), Chaos("nan_loss@12, oom@20")])
    trainer.train()
    ```
    """

    def __init__(
        self,
        faults: str | Sequence[Fault | str],
        seed: int = 0,
        ledger: str | os.PathLike[str] | Ledger = "chaos.jsonl",
        min_gap: int | None = None,
    ) -> None:
        given = [faults] if isinstance(faults, str) else list(faults)
        self.faults: tuple[Fault, ...] = tuple(
            fault for each in given for fault in ([each] if isinstance(each, Fault) else parse_faults(each))
        )
        if not self.faults:
            raise FaultError(f"Chaos needs at least one fault; there are: {', '.join(KINDS)}.")
        self.keys = keys_of(self.faults)
        self.seed = seed
        self.ledger = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
        self.min_gap = min_gap
        self.steps: tuple[int, ...] = ()
        self._last_word = _LastWord(self)
        self._trainer: Any = None
        self._undo: list[Callable[[], None]] = []
        # Shared with data loader workers, which are forked with a copy of everything else: the steps that are
        # finished; per fault the number of strikes, the step of the last one, and the index of a bad sample.
        self._clock = _shared(torch.zeros(1, dtype=torch.long))
        self._struck = _shared(torch.tensor([[0, -1, -1]] * len(self.faults)))
        self._lock = multiprocessing.RLock()
        self._poison: set[str] = set()
        self._seen: SeenInputs | None = None
        self._replayed = False
        self._stream: Any = None
        self._original_stream: Any = None

    # ---- attaching ----

    def attach(self, trainer: Trainer) -> Chaos:
        """Adds this callback to a trainer, before all others: what it breaks, they get to see."""
        trainer.add_callback(self)
        self._go_first(trainer)
        return self

    def _go_first(self, trainer: Any) -> None:
        callbacks = trainer.callback_handler.callbacks
        if callbacks[0] is not self:
            callbacks.remove(self)
            callbacks.insert(0, self)
        self._trainer = trainer
        if self._at("data"):
            self._join_stream(trainer)

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = find_trainer(self)
        if trainer is not None:
            self._go_first(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer: Any = find_trainer(self)
        # A call of `train()` that was left by an exception has had no end.
        self.detach()
        if trainer is None:
            logger.warning("Chaos found no trainer in the call stack and injects nothing. Please use Chaos.attach().")
            return
        if args.process_index != 0:
            return
        if state.max_steps < 1:
            raise FaultError("Chaos needs to know how long the run is. Please set max_steps.")
        self.steps = strike_steps(self.faults, int(state.max_steps), self.seed, self.min_gap)
        self._read_ledger()
        self._clock[0] = int(state.global_step)
        self._trainer = trainer
        callbacks = trainer.callback_handler.callbacks
        if self._last_word in callbacks:
            callbacks.remove(self._last_word)
        callbacks.append(self._last_word)
        run_dir = Path(_healing_dir(trainer) or args.output_dir).absolute()
        if run_dir in self.ledger.path.parents and run_dir != Path.cwd():
            logger.warning("The ledger %s lies in the run's directory; please keep it elsewhere.", self.ledger.path)
        self.ledger.write(
            "run",
            run_dir=str(run_dir),
            step=int(state.global_step),
            max_steps=int(state.max_steps),
            faults=list(self.keys),
            at=list(self.steps),
        )
        self._put_in_place(trainer, kwargs.get("train_dataloader"))

    def _read_ledger(self) -> None:
        """What earlier processes of this rehearsal have done."""
        if self._replayed:
            return
        self._replayed = True
        known = {key: number for number, key in enumerate(self.keys)}
        strikes = self.ledger.strikes()
        for strike in strikes:
            self._poison.update(strike.detail.get("rows", ()))
            number = known.get(strike.fault)
            if number is not None:
                row = self._struck[number]
                row[0], row[1] = max(int(row[0]), strike.count), max(int(row[1]), strike.step)
                row[2] = strike.detail.get("index", int(row[2]))
        if strikes:
            logger.warning(
                "Chaos: %d strikes are on record in %s and do not come again. For another rehearsal, name another "
                "ledger.",
                len(strikes),
                self.ledger.path,
            )

    def _put_in_place(self, trainer: Any, dataloader: Any) -> None:
        model = trainer.model
        module = output_module(model)
        handles = [
            module.register_forward_pre_hook(self._before_forward),
            module.register_forward_hook(self._after_forward),
        ]
        if self._wanted("poison_samples"):
            self._seen = SeenInputs(model)
            self._undo.append(self._seen.release)
        weight = middle_weight(model)
        if weight is not None and (self._wanted("nan_gradient") or self._wanted("inf_gradient")):
            parameter: Any = weight[1]
            handles.append(parameter.register_hook(functools.partial(self._on_gradient, weight[0])))
        self._undo.extend(handle.remove for handle in handles)
        if self._at("data") and self._stream is None:
            dataset = getattr(dataloader, "dataset", None)
            while isinstance(dataset, Proxy):
                dataset = dataset.wrapped
            self._guard_data(dataset)
        if self._at("reward"):
            self._guard_rewards(trainer)
        if self._wanted("disk_full"):
            self._guard_saving(trainer)

    def _wanted(self, kind: str) -> bool:
        return any(fault.kind == kind for fault in self.faults)

    def _at(self, place: str) -> bool:
        return any(self._place(fault) == place for fault in self.faults)

    def _place(self, fault: Fault) -> str:
        if fault.kind == "bad_sample":
            return "data"
        if fault.kind in ("network_error", "slow_step", "hang"):
            where = str(fault.get("where"))
            if where != "auto":
                return where
            return "reward" if getattr(self._trainer, "reward_funcs", None) else "forward"
        return "forward"

    def detach(self) -> None:
        """Takes all hooks and wrappers back."""
        while self._undo:
            self._undo.pop()()
        self._seen = None

    def end(self) -> None:
        """Gives the trainer back as it was; this callback stays with it, and does nothing before the next run."""
        self.detach()
        if self._trainer is not None:
            self._leave_stream()
            callbacks = self._trainer.callback_handler.callbacks
            if self._last_word in callbacks:
                callbacks.remove(self._last_word)
        self._trainer = None

    @contextlib.contextmanager
    def _contained(self) -> Iterator[None]:
        """A fault that fails by a mistake of ours, or of the disk the ledger is on, is left out."""
        try:
            yield
        except Exception:
            logger.exception("Chaos: a fault failed to strike at step %d and is left out.", int(self._clock[0]))

    # ---- whether one strikes now ----

    def _due(self, kind: str, place: str | None = None) -> Iterator[int]:
        """The faults of a kind that strike now, by number."""
        step = int(self._clock[0])
        for number, fault in enumerate(self.faults):
            if fault.kind != kind or (place is not None and self._place(fault) != place):
                continue
            count, last = int(self._struck[number, 0]), int(self._struck[number, 1])
            if step < self.steps[number] or (fault.limit is not None and count >= fault.limit):
                continue
            if fault.limit is None or KINDS[kind].counts_calls or step > last:
                yield number

    @contextlib.contextmanager
    def _strike(self, number: int, **detail: Any) -> Iterator[dict[str, Any]]:
        """Writes down a strike and then, unless the process is gone, what came of it (`effect` in what it gives)."""
        step, fault = int(self._clock[0]), self.faults[number]
        count = int(self._struck[number, 0]) + 1
        self._struck[number, 0], self._struck[number, 1] = count, step
        # One that always strikes is written down the first time: nothing new comes of the rest.
        told = fault.limit is not None or count == 1
        if told:
            self.ledger.strike(self.keys[number], fault.kind, step, count, detail)
            logger.warning("Chaos: %s strikes at step %d.", self.keys[number], step)
        result: dict[str, Any] = {"effect": True}
        try:
            yield result
        finally:
            if told:
                effect = bool(result.pop("effect"))
                self.ledger.effect(self.keys[number], count, effect, result)

    # ---- in the forward ----

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._clock[0] = int(state.global_step)
        if self._trainer is None:
            return
        with self._contained():
            for number in self._due("torn_checkpoint"):
                self._tear_checkpoint(number, args.output_dir)
            for number in self._due("corrupted_weights"):
                self._corrupt_weights(number)
            for number in self._due("scrambled_layer"):
                self._scramble_layer(number)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._clock[0] = int(state.global_step)

    def _before_forward(self, module: Any, inputs: Any) -> None:
        if not torch.is_grad_enabled() or not module.training:
            return
        self._wait("forward")
        for kind, name in (("sigterm", signal.SIGTERM), ("sigkill", signal.SIGKILL)):
            for number in self._due(kind):
                with self._strike(number):
                    os.kill(os.getpid(), name)
        for number in self._due("oom"):
            with self._strike(number):
                _run_out_of_memory(self._trainer.accelerator.device)
        self._lose_connection("forward")

    def _after_forward(self, module: Any, inputs: Any, output: Any) -> Any:
        if not torch.is_grad_enabled() or not module.training:
            return None
        spoilt = None
        with self._contained():
            spoilt = self._spoil_output(module, output)
        return spoilt

    def _spoil_output(self, module: Any, output: Any) -> Any:
        done = None
        for number in self._due("nan_loss"):
            with self._strike(number, module=type(module).__name__) as result:
                output, result["effect"] = changed(output, lambda tensor: tensor * float("nan"))
                done = output
        if self._seen is None:
            return done
        due = list(self._due("poison_samples"))
        if not due and not self._poison:
            return done
        pieces = list(pieces_of(self._seen.inputs, _pad_token(self._trainer)))
        for number in due:
            token = self.faults[number].token
            candidates = [piece for piece in pieces if token is None or token in piece.tokens]
            if token is not None and not candidates:
                continue
            rng = random.Random(f"{self.seed} {self.keys[number]} {int(self._struck[number, 0])}")
            chosen = rng.sample(candidates, min(int(self.faults[number].get("rows")), len(candidates)))
            with self._strike(number, rows=[piece.content for piece in chosen]) as result:
                self._poison.update(piece.content for piece in chosen)
                result["effect"] = bool(chosen)
        bad = [piece for piece in pieces if piece.content in self._poison]
        if bad:
            output, _ = changed(output, lambda tensor: spoiled(tensor, bad))
            done = output
        return done

    def _on_gradient(self, name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        changed_gradient = None
        for kind, value in (("nan_gradient", float("nan")), ("inf_gradient", float("inf"))):
            for number in self._due(kind):
                with self._strike(number, parameter=name):
                    changed_gradient = gradient.clone()
                    changed_gradient.reshape(-1)[0] = value
        return changed_gradient

    def _lose_connection(self, place: str) -> None:
        for number in self._due("network_error", place):
            with self._strike(number, where=place):
                raise ConnectionError(errno.ECONNRESET, "Connection reset by peer (rehearsed by self_healing.chaos)")

    def _wait(self, place: str) -> None:
        for kind in ("slow_step", "hang"):
            for number in self._due(kind, place):
                fault = self.faults[number]
                wait = wait_in_python if fault.get("wait") == "python" else wait_in_c
                with self._strike(number, where=place, seconds=fault.get("seconds")):
                    wait(float(fault.get("seconds")))

    # ---- in the weights ----

    def _corrupt_weights(self, number: int) -> None:
        found = middle_weight(self._trainer.model)
        with self._strike(number, parameter=None if found is None else found[0]) as result:
            result["effect"] = found is not None
            if found is not None:
                with torch.no_grad():
                    found[1][(0,) * found[1].ndim] = float("nan")

    def _scramble_layer(self, number: int) -> None:
        found = last_weight(self._trainer.model)
        with self._strike(number, parameter=None if found is None else found[0]) as result:
            result["effect"] = found is not None
            if found is not None:
                weight = found[1]
                generator = torch.Generator().manual_seed(self.seed + number)
                noise = torch.randn(weight.shape, generator=generator).to(weight.device, weight.dtype)
                with torch.no_grad():
                    weight.mul_(50).add_(noise)

    # ---- in what is around the model ----

    def _guard_data(self, dataset: Any) -> None:
        """Gives the dataset object a class of its own for the time of the run, below whatever guards it."""
        cls = type(dataset)
        chaos = self

        def __getitem__(self: Any, index: Any) -> Any:
            chaos._on_loading(index)
            return cls.__getitem__(self, index)

        def __getitems__(self: Any, indices: Any) -> Any:
            chaos._on_loading(indices)
            return cls.__getitems__(self, indices)

        def __iter__(self: Any) -> Iterator[Any]:
            for place, sample in enumerate(cls.__iter__(self)):
                chaos._on_loading(place)
                yield sample

        streams = isinstance(dataset, torch.utils.data.IterableDataset)
        methods: dict[str, Any] = {"__iter__": __iter__} if streams else {"__getitem__": __getitem__}
        if not streams and hasattr(cls, "__getitems__"):
            methods["__getitems__"] = __getitems__
        try:
            dataset.__class__ = type(cls.__name__, (cls,), {**methods, "__module__": cls.__module__})
        except TypeError:
            logger.warning("Chaos cannot break the data: a %s takes no faults. Please use a Dataset.", cls.__name__)
            return

        def give_back() -> None:
            dataset.__class__ = cls

        self._undo.append(give_back)

    def _join_stream(self, trainer: Any) -> None:
        """
        Puts a Hugging Face stream behind a function that raises, before the loader is made from it: what guards such a
        stream takes it to pieces, and would leave out what only the outermost object does.
        """
        stream = trainer.train_dataset
        if not isinstance(stream, torch.utils.data.IterableDataset) or not hasattr(stream, "map"):
            return

        def load(sample: Any, index: int) -> Any:
            self._on_loading(index)
            return sample

        trainer.train_dataset = self._stream = stream.map(load, with_indices=True)
        self._original_stream = stream

    def _leave_stream(self) -> None:
        if self._stream is not None and self._trainer.train_dataset is self._stream:
            self._trainer.train_dataset = self._original_stream
        self._stream = None

    def _on_loading(self, indices: Any) -> None:
        if isinstance(indices, (str, slice)):
            return
        self._wait("data")
        self._lose_connection("data")
        wanted = [int(index) for index in indices] if hasattr(indices, "__iter__") else [int(indices)]
        for number, fault in enumerate(self.faults):
            if fault.kind == "bad_sample" and wanted:
                self._spoil_sample(number, fault, wanted)

    def _spoil_sample(self, number: int, fault: Fault, wanted: list[int]) -> None:
        with self._lock:
            bad = int(self._struck[number, 2]) if fault.index is None else fault.index
            if bad < 0 and int(self._clock[0]) >= self.steps[number]:
                bad = self._struck[number, 2] = wanted[0]
            bad = int(bad)
            if bad not in wanted or int(self._clock[0]) < self.steps[number]:
                return
            if fault.limit is not None and int(self._struck[number, 0]) >= fault.limit:
                return
            with self._strike(number, index=bad):
                raise SampleError(f"sample {bad} cannot be decoded (rehearsed by self_healing.chaos)")

    def _guard_rewards(self, trainer: Any) -> None:
        functions = getattr(trainer, "reward_funcs", None)
        if not functions:
            logger.warning("Chaos: %s has no reward functions to break.", type(trainer).__name__)
            return
        original = functions[0]
        if isinstance(original, torch.nn.Module):
            handle = original.register_forward_pre_hook(lambda module, inputs: self._lose_connection("reward"))
            self._undo.append(handle.remove)
            return
        if inspect.iscoroutinefunction(original):

            @functools.wraps(original)
            async def broken_async(*args: Any, **kwargs: Any) -> Any:
                self._lose_connection("reward")
                return await original(*args, **kwargs)

            functions[0] = broken_async
        else:

            @functools.wraps(original)
            def broken(*args: Any, **kwargs: Any) -> Any:
                self._lose_connection("reward")
                return original(*args, **kwargs)

            functions[0] = broken

        def give_back() -> None:
            functions[0] = original

        self._undo.append(give_back)

    def _guard_saving(self, trainer: Any) -> None:
        original, was_set = trainer.save_model, "save_model" in vars(trainer)

        @functools.wraps(original)
        def save_model(output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
            done = original(output_dir, *args, **kwargs)
            for number in self._due("disk_full"):
                directory = str(output_dir or trainer.args.output_dir)
                with self._strike(number, directory=directory):
                    # As a full disk leaves it: the weights half written, and nothing after them.
                    _cut_off(Path(directory))
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), directory)
            return done

        trainer.save_model = save_model

        def give_back() -> None:
            if was_set:
                trainer.save_model = original
            else:
                vars(trainer).pop("save_model", None)

        self._undo.append(give_back)

    def _tear_checkpoint(self, number: int, output_dir: str) -> None:
        found = sorted(
            (path for path in Path(output_dir).glob("checkpoint-*") if path.name.split("-")[-1].isdigit()),
            key=lambda path: int(path.name.split("-")[-1]),
        )
        if not found:
            # Nothing to tear yet: the first one there is.
            return
        with self._strike(number, checkpoint=str(found[-1])) as result:
            result["effect"] = _cut_off(found[-1])
        if self.faults[number].get("then") == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)


def _shared(values: Any) -> torch.Tensor:
    """The same numbers for this process and for those that are forked from it."""
    shared: torch.Tensor = values.share_memory_()
    return shared


def _healing_dir(trainer: Any) -> str | None:
    for callback in trainer.callback_handler.callbacks:
        directory = getattr(getattr(callback, "config", None), "healing_dir", None)
        if directory:
            return str(directory)
    return None


def _pad_token(trainer: Any) -> int | None:
    found = getattr(getattr(trainer.model, "config", None), "pad_token_id", None)
    return found if isinstance(found, int) else None


def _run_out_of_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.empty(4 * torch.cuda.get_device_properties(device).total_memory, dtype=torch.uint8, device=device)
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.14 GiB of which 1.21 GiB is "
        "free. Including non-PyTorch memory, this process has 77.92 GiB memory in use. (rehearsed by "
        "self_healing.chaos)"
    )


def _cut_off(directory: Path) -> bool:
    """Leaves half of the largest file of weights; in a file of its own, so that hard links elsewhere stay whole."""
    files = [*directory.glob("*.safetensors"), *directory.glob("*.bin")]
    if not files:
        return False
    largest = max(files, key=lambda path: path.stat().st_size)
    whole = largest.read_bytes()
    part = largest.with_name(largest.name + ".part")
    part.write_bytes(whole[: len(whole) // 2])
    part.replace(largest)
    return True
