"""What happened, written down."""
