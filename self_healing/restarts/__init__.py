"""Runs that take several processes: what one leaves to the next."""
