"""
Runs that take several processes: what one leaves to the next, and how a process ends.

Nothing here changes a step, and which checkpoint can be trusted is decided in `checkpoints/`.
"""
