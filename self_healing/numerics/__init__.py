"""
Numbers that go wrong: loss, gradients, weights and the learning rate.

Detectors, which need no trainer, are in `detectors/`; states that can be gone back to, in `rollback/`.
"""
