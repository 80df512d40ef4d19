"""
Faults to inject into a training run: to rehearse what one's own job survives, and for the tests of this package.

    trainer = SFTTrainer(..., callbacks=[SelfHealingCallback(), Chaos("nan_loss@12, oom@20, sigkill@30")])

On the command line, without touching the script: `self-healing chaos train.py --faults "nan_loss@12,sigkill@30"`.
"""

from .callback import Chaos
from .data_faults import SampleError
from .faults import KINDS, Fault, FaultError, parse_fault, parse_faults
from .ledger import Ledger, Strike
from .survival import Survival, survived


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
