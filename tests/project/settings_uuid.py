"""Settings of the test suite with a user model of the project's own, whose key is a UUID."""

from __future__ import annotations

from tests.project.settings import *  # noqa: F403
from tests.project.settings import INSTALLED_APPS

INSTALLED_APPS = ["tests.project.uuid_user", *INSTALLED_APPS]
AUTH_USER_MODEL = "uuid_user.Customer"
