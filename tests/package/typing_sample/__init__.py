"""A user's project as mypy --strict sees it: what wheel.sh checks against the installed package and its py.typed.

The ignored errors are half of the test: strict mypy tells of those that are none, as it would if a name were Any.
"""
