"""System checks: ``manage.py check`` reports a misconfiguration, so that the first request need not.

Importing this package registers them.
"""

from . import database, settings, store, views

__all__ = ["database", "settings", "store", "views"]
