"""Buckets in, a Decision out, by one script. Works with ``client=`` and without Django's settings."""
