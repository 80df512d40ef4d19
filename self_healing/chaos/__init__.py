"""
Faults to inject into a training run: to rehearse what one's own job survives, and for the tests of this package.

    trainer = SFTTrainer(..., callbacks=[SelfHealingCallback(), Chaos("nan_loss@12, oom@20, sigkill@30")])

On the command line, without touching the script: `self-healing chaos train.py --faults "nan_loss@12,sigkill@30"`.

`Chaos` is imported when it is first used: who starts a rehearsal, or reads what came of one, does not wait for torch.
"""

from typing import TYPE_CHECKING, Any

from .faults import KINDS, Fault, FaultError, parse_fault, parse_faults
from .ledger import Ledger, Strike
from .survival import Survival, survived


if TYPE_CHECKING:
    from .callback import Chaos as Chaos
    from .data_faults import SampleError as SampleError


__all__ = [
    "KINDS",
    "Chaos",
    "Fault",
    "FaultError",
    "Ledger",
    "SampleError",
    "Strike",
    "Survival",
    "parse_fault",
    "parse_faults",
    "survived",
]


def __getattr__(name: str) -> Any:
    """Imports what is asked for (PEP 562)."""
    if name == "Chaos":
        from .callback import Chaos as found
    elif name == "SampleError":
        from .data_faults import SampleError as found  # type: ignore[assignment]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
