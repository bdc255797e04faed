"""Settings of the test suite with the databases, and the router, that a test names in the environment."""

from __future__ import annotations

import json
import os

import dj_database_url

from tests.project.settings import *  # noqa: F403

#: Alias -> URL and further settings of the database.
DATABASES = {
    alias: {**(dj_database_url.parse(config.pop("url")) if config else {}), **config}
    for alias, config in json.loads(os.environ["RATEQUOTA_TEST_ALIASES"]).items()
}
DATABASE_ROUTERS = [path for path in (os.environ.get("RATEQUOTA_TEST_ROUTER"),) if path]
