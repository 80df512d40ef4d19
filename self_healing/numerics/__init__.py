"""Numbers that go wrong: loss, gradients, weights and the learning rate."""
