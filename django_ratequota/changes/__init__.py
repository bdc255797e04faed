"""What happens to each change of policies: validated, written to the history, published on commit. Imports no model.

Decisions are recorded in ``monitoring``.
"""
