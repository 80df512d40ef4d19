"""
Exact splitting of a model call that did not fit, and the memory of what sizes did.

A loss is computed from what the model gives for a batch. So the batch is not split there, where every loss adds up in
a way of its own and some (a sort over the batch, a statistic of it) do not add up at all, but at the call of the
model: it runs over some rows after the other, and the loss sees the outputs of all of them. Of all chunks but the last
only the outputs are kept; in the backward pass each is computed again, with its activations, and its gradients are
added to those of the others. That is exact for every loss and every metric as long as the model treats its rows one by
one.
"""

from ...call_shape import CallShape, Kind
from .calls import SplitCalls
from .generation import SplitGeneration
from .lockstep import Lockstep
from .passes import Passes
from .recomputing import ComputedOtherwise
from .sizes import KnownSizes
from .slicing import CannotSplit


__all__ = [
    "CallShape",
    "CannotSplit",
    "ComputedOtherwise",
    "Kind",
    "KnownSizes",
    "Lockstep",
    "Passes",
    "SplitCalls",
    "SplitGeneration",
]
