"""
Keeps states that a run can go back to, goes back to them, and applies the steps since then again.

When to go back, and what to change, is decided by the families: this room knows none of them.
"""
