"""What each process records about its decisions, and what reads it back."""

#: Whether the database gets rows. Tests switch it off, because a thread would write past their transactions.
writes_rows = True
