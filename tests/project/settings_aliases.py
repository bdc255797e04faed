"""Settings of the test suite with the databases, and the router, that a test names in the environment."""

from __future__ import annotations

import json
import os

import dj_database_url

from tests.project.settings import *  # noqa: F403
from tests.project.settings import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "tests.project.shop"]
#: Alias -> URL of the database, and what else its settings say.
DATABASES = {
    alias: {**(dj_database_url.parse(given.pop("url")) if given else {}), **given}
    for alias, given in json.loads(os.environ["RATEQUOTA_TEST_ALIASES"]).items()
}
DATABASE_ROUTERS = [path for path in (os.environ.get("RATEQUOTA_TEST_ROUTER"),) if path]
