"""The verbs of ``manage.py ratequota``: ``callers`` has explain and reset, ``maintenance`` publish, rollup and
status, ``policyfile`` export and import, ``history`` undo, ``quotas`` usage.
"""
