"""A receiver of ``quota_threshold`` for worker processes: posts to the address in RATEQUOTA_TEST_HOOK."""

from __future__ import annotations

import os

from django_ratequota.notify import post_to

post = post_to(os.environ["RATEQUOTA_TEST_HOOK"], "a secret of the tests")
