"""
Training that hangs.

Signs of life are given in `instrument/`; what a process that was ended leaves to the next one is in `restarts/`.
"""
