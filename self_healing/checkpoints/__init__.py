"""
Marks checkpoints on disk, judges them, chooses one to resume from, keeps the good ones, writes emergency ones.

Nothing here knows why a run is left or resumed: that is for `restarts/` and `rollback/`.
"""
