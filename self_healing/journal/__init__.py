"""
What happened, written down.

Nothing here decides anything, and no trainer is needed.
"""
