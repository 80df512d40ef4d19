"""
What the families of failures share about a run: its context, its incidents and what becomes of them.

Nothing that one family alone needs belongs here.
"""
