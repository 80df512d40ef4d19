"""Heals the trainers of a program whose code says nothing of this library: what `self-healing run` does."""
