"""The browser tests' settings with django-unfold's templates in the place of the admin's.

Without the policy of contents: unfold needs inline styles and scripts of its own.
"""

from __future__ import annotations

from tests.browser.settings import *  # noqa: F403
from tests.browser.settings import CSP_MIDDLEWARE, INSTALLED_APPS, MIDDLEWARE

INSTALLED_APPS = ["unfold", *INSTALLED_APPS]
MIDDLEWARE = [one for one in MIDDLEWARE if one != CSP_MIDDLEWARE]
CSP_MIDDLEWARE = "nobody"
