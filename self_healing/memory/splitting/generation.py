"""Generation for as many prompts at a time as fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ...call_shape import CallShape
from .calls import SplitCalls
from .lockstep import Lockstep
from .sizes import KnownSizes
from .slicing import CannotSplit, goes_on, main_input, parts, rows_of


# Arguments that are the same for all rows, whatever size they have.
_OF_NO_ROW = frozenset(
    {
        "generation_config",
        "bad_words_ids",
        "force_words_ids",
        "eos_token_id",
        "pad_token_id",
        "suppress_tokens",
        "begin_suppress_tokens",
        "sequence_bias",
        "stop_strings",
        "tokenizer",
        "processor",
    }
)
# Arguments that may know the rows by their place in the batch, or see one batch only.
_OF_THE_BATCH = (
    "logits_processor",
    "prefix_allowed_tokens_fn",
    "stopping_criteria",
    "streamer",
    "assistant_model",
    "custom_generate",
)


class SplitGeneration:
    """
    Runs `generate` of one module over as many prompts at a time as fit: the same prompts and the same distribution,
    other draws.

    Args:
        module (`torch.nn.Module`):
            The module.
        sizes ([`KnownSizes`]):
            What fits.
        calls ([`SplitCalls`]):
            Of the same module, told when a generation is going on.
        lockstep ([`Lockstep`], *optional*):
            Of the ranks that generate with the module together, where it is sharded.
    """

    def __init__(
        self, module: torch.nn.Module, sizes: KnownSizes, calls: SplitCalls, lockstep: Lockstep | None = None
    ) -> None:
        self._module = module
        self._sizes = sizes
        self._calls = calls
        self._lockstep = lockstep

    def call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of `generate`."""
        main = main_input(args, kwargs)
        if main is None or main.dim() == 0:
            return original(*args, **kwargs)
        length = main.size(1) if main.dim() > 1 else 1
        shape = CallShape("generate", main.size(0), self._longest(length, args, kwargs))
        refusal, chunks = "", -(-shape.rows // self._sizes.rows_for(shape))
        try:
            if chunks > 1 or self._lockstep is not None:
                self._check(args, kwargs)
        except CannotSplit as refused:
            refusal = str(refused)
        if self._lockstep is not None:
            chunks = self._lockstep.chunks(chunks, 1 if refusal else shape.rows)
        if chunks > 1 and not refusal:
            try:
                return self._split(original, shape, chunks, args, kwargs)
            except CannotSplit as refused:
                refusal = str(refused)
        self._calls.refused = refusal or self._calls.refused
        with self._calls.running(shape):
            result = original(*args, **kwargs)
        self._sizes.ran(shape)
        return result

    def _split(
        self,
        original: Callable[..., Any],
        shape: CallShape,
        chunks: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        pieces = []
        for start, stop in parts(shape.rows, chunks):
            part = {
                name: value if name in _OF_NO_ROW else rows_of(value, shape.rows, slice(start, stop), name)
                for name, value in kwargs.items()
            }
            positional = tuple(
                value if _is_config(value) or callable(value) else rows_of(value, shape.rows, slice(start, stop))
                for value in args
            )
            chunk = dataclasses.replace(shape, rows=stop - start)
            with self._calls.running(chunk):
                piece = original(*positional, **part)
            if not isinstance(piece, torch.Tensor) or piece.dim() != 2 or piece.size(0) % chunk.rows:
                raise CannotSplit("generation returns something else than the tokens")
            pieces.append(piece)
            self._sizes.ran(chunk)
        self._calls.pieces = max(self._calls.pieces, len(pieces))
        longest, padding = max(piece.size(1) for piece in pieces), self._padding(args, kwargs)
        return torch.cat(
            [torch.nn.functional.pad(piece, (0, longest - piece.size(1)), value=padding) for piece in pieces]
        )

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls.check_made_alone()
        for name in _OF_THE_BATCH:
            if kwargs.get(name):
                raise CannotSplit(f"`{name}` may look at the whole batch")
        if goes_on(args, kwargs):
            raise CannotSplit("it goes on from cached keys and values")
        if any(callable(value) and not isinstance(value, torch.Tensor) for value in args):
            raise CannotSplit("a function among the positional arguments may look at the whole batch")
        if self._setting("return_dict_in_generate", args, kwargs):
            raise CannotSplit("generation returns more than the tokens (return_dict_in_generate=True)")

    def _setting(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As `generate` takes it: from its arguments, their configuration, the model's."""
        configs = [kwargs.get("generation_config"), *args, getattr(self._module, "generation_config", None)]
        values = [kwargs.get(name), *(getattr(config, name, None) for config in configs if _is_config(config))]
        return next((value for value in values if value is not None), None)

    def _longest(self, length: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        new = self._setting("max_new_tokens", args, kwargs)
        if new is not None:
            return length + int(new)
        return max(length, int(self._setting("max_length", args, kwargs) or 0))

    def _padding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        found = self._setting("pad_token_id", args, kwargs)
        if found is None:
            found = self._setting("eos_token_id", args, kwargs)
        if isinstance(found, torch.Tensor):
            found = found.flatten().tolist()
        if isinstance(found, (list, tuple)):
            found = found[0] if found else None
        return int(found or 0)


def _is_config(value: Any) -> bool:
    return hasattr(value, "pad_token_id") and hasattr(value, "eos_token_id") and not callable(value)
