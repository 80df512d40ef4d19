"""Memory that runs out."""
