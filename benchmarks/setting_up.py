"""What ``django.setup()`` takes more with the app, in fresh interpreters by turns."""

from __future__ import annotations

import os
import subprocess
import sys
from statistics import median

from benchmarks.measure import Result, Table

_CODE = """
import sys, time
import django, benchmarks.settings as settings
if sys.argv[1] == "without":
    settings.INSTALLED_APPS.remove("django_ratequota")
begun = time.process_time()
django.setup()
print(time.process_time() - begun)
"""


def run(quick: bool = False) -> Result:
    """Medians, and the median difference of neighbours."""
    rounds = [(_once("with"), _once("without")) for _ in range(3 if quick else 25)]
    with_it, without = (1e3 * median(each) for each in zip(*rounds, strict=True))
    more = 1e3 * median(each - other for each, other in rounds)
    note = "CPU of the process. Both have Django's auth and contenttypes, and REST framework."
    rows = [("without the app", without), ("with the app", with_it), ("more", more)]
    return Result([Table("`django.setup()`", ("", "CPU ms"), rows, note)], {"setup_ms": more})


def _once(how: str) -> float:
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "benchmarks.settings"}
    words = [sys.executable, "-c", _CODE, how]
    return float(subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout)
