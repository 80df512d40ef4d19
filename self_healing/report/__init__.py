"""
The report of a run, read from what it has left in its directory. Nothing here imports torch or transformers.

`records` is what is known of a run, `reading` reads it, and the other modules put it into words, a page, or files.
"""

from .healing_report import HealingReport


__all__ = ["HealingReport"]
