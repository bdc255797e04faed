"""Settings of the scenes: those of the suite, with callers that a header names."""

from __future__ import annotations

import json
import os

from tests.project.settings import *  # noqa: F403
from tests.project.settings import RATEQUOTA as _SUITES

ROOT_URLCONF = "tests.world.site"
RATEQUOTA = {
    **_SUITES,
    "IDENTIFIERS": {"tenant": "tests.world.site.caller"},
    **json.loads(os.environ.get("RATEQUOTA_TEST_CHANGES", "{}")),
}
