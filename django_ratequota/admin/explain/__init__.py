"""The Explain page: what applies to a caller, and why."""
