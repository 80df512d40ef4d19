"""Settings of a trainer's model and optimizer that take less memory for the same result."""

from __future__ import annotations

from typing import Any

from ..hf.state import innermost


class ActivationCheckpointing:
    """Switches activation checkpointing of a model on and off in the middle of a run."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._mine = self._inputs_needed_gradients = False

    @property
    def on(self) -> bool:
        """Whether activation checkpointing is on."""
        # Renamed in transformers 5.2x; the old name warns there.
        for name in ("is_activation_checkpointing", "is_gradient_checkpointing"):
            found = getattr(self._model, name, None)
            if found is not None:
                return bool(found)
        return False

    def switch_on(self) -> bool:
        """Switches it on, if the model supports it; whether that changed anything."""
        if self.on or not getattr(self._model, "supports_gradient_checkpointing", False):
            return False
        self._inputs_needed_gradients = hasattr(self._model, "_require_grads_hook")
        self._call("enable", {"use_reentrant": False})
        self._mine = self.on
        return self._mine

    def switch_off(self) -> None:
        """Undoes [`switch_on`]."""
        if self._mine:
            self._call("disable")
            if not self._inputs_needed_gradients and hasattr(self._model, "_require_grads_hook"):
                self._model.disable_input_require_grads()
        self._mine = False

    def _call(self, what: str, options: dict[str, Any] | None = None) -> None:
        for name in ("activation", "gradient"):
            method = getattr(self._model, f"{name}_checkpointing_{what}", None)
            if method is not None:
                method(**({} if options is None else {f"{name}_checkpointing_kwargs": options}))
                return


class UpdateOneByOne:
    """Has an optimizer of torch update parameter by parameter: all at once takes as much memory again as they do."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._before: list[tuple[dict[str, Any], Any]] = []

    def switch_on(self) -> bool:
        """Switches it on; whether that changed anything."""
        for group in getattr(innermost(self._optimizer), "param_groups", []):
            if "foreach" in group and group["foreach"] is not False and not group.get("fused"):
                self._before.append((group, group["foreach"]))
                group["foreach"] = False
        return bool(self._before)

    def switch_off(self) -> None:
        """Undoes [`switch_on`]."""
        for group, foreach in self._before:
            group["foreach"] = foreach
        self._before.clear()
