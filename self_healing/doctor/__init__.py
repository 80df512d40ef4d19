"""Looks at a machine before a run: what there is, what will be healed on it, and what will not work."""
