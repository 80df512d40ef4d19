"""The three faults of the demo."""

from __future__ import annotations

from dataclasses import dataclass

from ..failures import FailureType


@dataclass(frozen=True, slots=True)
class DemoFault:
    """
    One fault of the demo.

    Args:
        name (`str`):
            As the table has it.
        what (`str`):
            What it does, in a few words.
        kind (`str`):
            What [`~self_healing.chaos.callback.Chaos`] injects for it.
        step (`int`):
            Optimizer steps finished when it strikes.
        failure ([`FailureType`]):
            What it should be diagnosed as.
    """

    name: str
    what: str
    kind: str
    step: int
    failure: FailureType


def demo_faults(steps: int) -> tuple[DemoFault, ...]:
    """
    Gives the three faults of a run, a quarter of it apart.

    Args:
        steps (`int`):
            Of the run.
    """
    return (
        DemoFault(
            "transient NaN",
            "one forward answers NaN",
            "nan_loss",
            steps // 4,
            FailureType.NONFINITE_TRANSIENT,
        ),
        DemoFault(
            "poison sample",
            "one row gives NaN, always",
            "poison_samples",
            steps // 2,
            FailureType.NONFINITE_POISON_ROWS,
        ),
        DemoFault(
            "dropped connection",
            "a connection drops",
            "network_error",
            3 * steps // 4,
            FailureType.NETWORK,
        ),
    )
