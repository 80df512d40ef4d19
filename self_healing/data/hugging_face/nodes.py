"""Nodes of a stream that stay guarded when they make others of their kind, for shards or workers."""

from __future__ import annotations

from typing import Any

from datasets.iterable_dataset import _BaseExamplesIterable


class KeptNode(_BaseExamplesIterable):  # type: ignore[misc]
    """Hands its class and what it was given for guarding to the nodes it makes of itself."""

    handed_on: tuple[str, ...] = ()

    def _hand_on(self, node: Any) -> Any:
        if node is not self:
            node.__class__ = type(self)
            for name in self.handed_on:
                setattr(node, name, getattr(self, name))
        return node

    def shuffle_data_sources(self, generator: Any) -> Any:
        return self._hand_on(super().shuffle_data_sources(generator))

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> Any:
        return self._hand_on(super().shard_data_sources(num_shards, index, contiguous=contiguous))

    def reshard_data_sources(self) -> Any:
        # Numbered already: the shards stay what they are.
        return self
