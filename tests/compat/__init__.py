"""Runs the test suites of the libraries that ``django_ratequota.compat`` stands in for, unchanged, against it."""
