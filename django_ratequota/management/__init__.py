"""The verbs of ``manage.py ratequota``: ``callers`` has explain, near and reset, ``maintenance`` publish, rollup,
checkpoint and status, ``policyfile`` export and import, ``undo`` undo, ``usage`` usage.
"""
