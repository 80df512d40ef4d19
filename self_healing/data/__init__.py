"""Samples and rows that cannot be used."""
