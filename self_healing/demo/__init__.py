"""
The demo: a small language model learns real text, three faults strike, and the terminal shows what becomes of them.

The plain trainer and the healed one meet the same faults side by side, each in a process of its own, and a fault-free
twin is the measure. Nothing in it is acted: the models train, the faults are injected where real ones arise, and what
is told at the end is read from the runs; what they did not show is printed as a failure of the demo.

What is imported from here needs neither torch nor TRL: the processes of the runs load them.
"""

from .faults import DemoFault, demo_faults
from .rehearsal import RehearsalResult, run_rehearsal
from .show import DemoResult, fresh_run_dir, run_demo
from .size import DemoSize
from .text import BROKEN_CHARACTER, stdlib_docstrings


__all__ = [
    "BROKEN_CHARACTER",
    "DemoFault",
    "DemoResult",
    "DemoSize",
    "RehearsalResult",
    "demo_faults",
    "fresh_run_dir",
    "run_demo",
    "run_rehearsal",
    "stdlib_docstrings",
]
