"""
Memory that runs out.

How memory is measured and freed, and how a step is tried again, is in `instrument/`; here is decided what to do.
"""
