"""What each process records about its decisions, and what reads it back."""
