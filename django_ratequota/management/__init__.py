"""The verbs of ``manage.py ratequota``: ``callers`` has explain, near, reset and give-back, ``overrides`` block
and boost, ``maintenance`` publish, rollup, checkpoint and status, ``personal_data`` export-subject and forget,
``policies`` export, import and undo, ``usage`` usage.
"""
