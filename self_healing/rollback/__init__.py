"""States that a run can go back to."""
