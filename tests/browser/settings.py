"""Settings of the browser tests: the suite's, under a strict Content-Security-Policy and on a database on disk."""

from __future__ import annotations

import os
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import django

from tests.project.settings import *  # noqa: F403
from tests.project.settings import MIDDLEWARE, RATEQUOTA, TEMPLATES

RATEQUOTA = {**RATEQUOTA, "IDENTIFIERS": {"tenant": "tests.project.views.api_key"}, "STATISTICS_SECONDS": 1}

#: Nothing inline but by nonce, nothing from elsewhere, no eval. data: is for the admin's own select arrows.
SECURE_CSP = {
    "default-src": ["'self'"],
    "script-src": ["'self'", "<CSP_NONCE_SENTINEL>"],
    "style-src": ["'self'", "<CSP_NONCE_SENTINEL>"],
    "img-src": ["'self'", "data:"],
    "object-src": ["'none'"],
    "base-uri": ["'none'"],
    "form-action": ["'self'"],
    "frame-ancestors": ["'none'"],
}
#: Django's own from 6.0 on; before, a stand-in.
CSP_MIDDLEWARE = (
    "django.middleware.csp.ContentSecurityPolicyMiddleware"
    if django.VERSION >= (6, 0)
    else "tests.browser.csp.ContentSecurityPolicyMiddleware"
)
MIDDLEWARE = [CSP_MIDDLEWARE, *MIDDLEWARE]
if django.VERSION >= (6, 0):
    TEMPLATES = deepcopy(TEMPLATES)
    TEMPLATES[0]["OPTIONS"]["context_processors"].append("django.template.context_processors.csp")

# The live server's threads and the test each have a connection of their own: they would share the one of a database
# in memory, and with it each other's transactions.
_DATABASE = Path(tempfile.gettempdir()) / f"ratequota-browser-{os.getpid()}.sqlite3"
DATABASES: dict[str, Any] = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": _DATABASE,
        "OPTIONS": {
            "timeout": 20,
            "transaction_mode": "IMMEDIATE",
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF",
        },
        "TEST": {"NAME": _DATABASE},
    }
}
