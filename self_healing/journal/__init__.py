"""
The journal: incidents, events and the postmortem of a run.

Nothing here decides anything, and no trainer is needed.
"""
