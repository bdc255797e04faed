"""Tools that know nothing of rate limits or of Django's settings."""
