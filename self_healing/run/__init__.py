"""What the families of failures share about a run: its context, its incidents and what becomes of them."""
