"""What ``import django_ratequota`` takes beyond Django itself."""

from __future__ import annotations

import subprocess
import sys
from statistics import median

from benchmarks.measure import Result, Table

_CODE = """
import time
import django.conf, django.http, django.db.models
begun = time.perf_counter()
import django_ratequota
bare = time.perf_counter()
for name in django_ratequota.__all__:
    getattr(django_ratequota, name)
print(bare - begun, time.perf_counter() - begun)
"""


def run(quick: bool = False) -> Result:
    """Median over fresh interpreters."""
    times = [_once() for _ in range(3 if quick else 41)]
    bare, whole = (median(each) * 1000 for each in zip(*times, strict=True))
    note = "In fresh interpreters that had imported Django's settings, HTTP and models before."
    rows = [("import django_ratequota", bare), ("the same, and every public name", whole)]
    return Result([Table("Import", ("what", "ms"), rows, note)], {"import_ms": bare})


def _once() -> tuple[float, float]:
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=True)
    bare, whole = map(float, done.stdout.split())
    return bare, whole
