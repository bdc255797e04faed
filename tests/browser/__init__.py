"""The operators' pages in a real browser. Not a part of ``make test``: ``make browser`` runs it."""
