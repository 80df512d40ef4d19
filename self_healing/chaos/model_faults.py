"""`ModelFaults`: faults in the network, and what ends or interrupts a forward."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Iterable
from typing import Any

import torch

from ..instrument.live_state import local
from .calls import lose_connection, wait
from .injectors import SeenInputs, changed, last_weight, middle_weight, on_gradient, output_module, pieces_of, spoiled
from .strikes import Strikes


class ModelFaults:
    """
    Injects faults into the forward, the gradients and the weights of a network.

    Args:
        strikes ([`Strikes`]):
            Which strike now.
    """

    def __init__(self, strikes: Strikes) -> None:
        self._strikes = strikes
        self._trainer: Any = None
        self._seen: SeenInputs | None = None
        # What identifies the sequences that are poison samples from now on.
        self._poison: set[str] = set()

    def take_over(self, poisoned: Iterable[str]) -> None:
        """Takes over the poison samples of an earlier process."""
        self._poison.update(poisoned)

    def put_in_place(self, trainer: Any, undo: contextlib.ExitStack) -> None:
        """Hooks the model of a trainer, until `undo` is closed."""
        self._trainer = trainer
        model = trainer.model
        module = output_module(model)
        handles = [
            module.register_forward_pre_hook(self._before_forward),
            module.register_forward_hook(self._after_forward),
        ]
        if self._strikes.wanted("poison_samples"):
            self._seen = SeenInputs(model)
            undo.callback(self._release)
        weight = middle_weight(model)
        if weight is not None and (self._strikes.wanted("nan_gradient") or self._strikes.wanted("inf_gradient")):
            undo.callback(on_gradient(model, *weight, self._on_gradient).remove)
        for handle in handles:
            undo.callback(handle.remove)

    def _release(self) -> None:
        if self._seen is not None:
            self._seen.release()
            self._seen = None

    def change_weights(self) -> None:
        """Strikes weights between two steps."""
        for number in self._strikes.due("corrupted_weights"):
            self._corrupt_weights(number)
        for number in self._strikes.due("scrambled_layer"):
            self._scramble_layer(number)

    def _before_forward(self, module: Any, inputs: Any) -> None:
        if not torch.is_grad_enabled() or not module.training:
            return
        wait(self._strikes, "forward")
        for kind, name in (("sigterm", signal.SIGTERM), ("sigkill", signal.SIGKILL)):
            for number in self._strikes.due(kind):
                with self._strikes.strike(number):
                    os.kill(os.getpid(), name)
        for number in self._strikes.due("oom"):
            with self._strikes.strike(number):
                _run_out_of_memory(self._trainer.accelerator.device)
        lose_connection(self._strikes, "forward")

    def _after_forward(self, module: Any, inputs: Any, output: Any) -> Any:
        if not torch.is_grad_enabled() or not module.training:
            return None
        with self._strikes.contained():
            return self._spoil_output(module, output)
        return None

    def _spoil_output(self, module: Any, output: Any) -> Any:
        done = None
        for number in self._strikes.due("nan_loss"):
            with self._strikes.strike(number, module=type(module).__name__) as result:
                output, result["effect"] = changed(output, lambda tensor: tensor * float("nan"))
                done = output
        if self._seen is None:
            return done
        due = list(self._strikes.due("poison_samples"))
        if not due and not self._poison:
            return done
        pieces = list(pieces_of(self._seen.inputs, _pad_token(self._trainer)))
        for number in due:
            token = self._strikes.faults[number].token
            candidates = [piece for piece in pieces if token is None or token in piece.tokens]
            if token is not None and not candidates:
                continue
            rng = random.Random(f"{self._strikes.seed} {self._strikes.keys[number]} {self._strikes.count(number)}")
            chosen = rng.sample(candidates, min(int(self._strikes.faults[number].get("rows")), len(candidates)))
            with self._strikes.strike(number, rows=[piece.content for piece in chosen]) as result:
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
            for number in self._strikes.due(kind):
                with self._strikes.strike(number, parameter=name):
                    changed_gradient = gradient.clone()
                    changed_gradient.reshape(-1)[0] = value
        return changed_gradient

    def _corrupt_weights(self, number: int) -> None:
        found = middle_weight(self._trainer.model)
        with self._strikes.strike(number, parameter=None if found is None else found[0]) as result:
            result["effect"] = found is not None
            if found is not None:
                with torch.no_grad():
                    weight = local(found[1])
                    result["effect"] = weight.numel() > 0
                    weight.view(-1)[:1] = float("nan")

    def _scramble_layer(self, number: int) -> None:
        found = last_weight(self._trainer.model)
        with self._strikes.strike(number, parameter=None if found is None else found[0]) as result:
            result["effect"] = found is not None
            if found is not None:
                weight = local(found[1])
                result["effect"] = weight.numel() > 0
                generator = torch.Generator().manual_seed(self._strikes.seed + number)
                noise = torch.randn(weight.shape, generator=generator).to(weight.device, weight.dtype)
                with torch.no_grad():
                    weight.mul_(50).add_(noise)


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
