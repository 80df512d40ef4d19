"""
Checkpoints that cannot be written.

What a checkpoint holds, and which one can be trusted, is in `checkpoints/`.
"""
