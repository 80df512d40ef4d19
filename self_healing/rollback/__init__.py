"""
States that a run can go back to, and the steps since then, applied again.

When to go back, and what to change, is decided by the families: this room knows none of them.
"""
