"""docs/reference/limits.md: each number in its table is that of the constant beside it."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import pytest
from django.db.models import Model

from tests.support.snippets import ROOT

_TABLE = (ROOT / "docs/reference/limits.md").read_text().partition("|---|")[2].splitlines()[1:]
#: How many of the constant's unit a shown one is; constants ending in _US are compared in seconds.
_SIZES = {"ms": 0.001, "days": 86_400, "hours": 3_600, "MB": 10**6}


@pytest.mark.parametrize("line", _TABLE)
def test_the_number_is_that_of_the_constant(line: str) -> None:
    _, _, _, value, constant, _ = line.split("|")
    [(number, unit)] = re.findall(r"^ ([\d,.]+) ?(\w*)", value)
    [(file, name, part)] = re.findall(r"^ `([\w/]+)\.py` `([\w.]+)(?:\[(\d)\])?` $", constant)
    found: Any = import_module(f"django_ratequota.{file.replace('/', '.')}")
    for attribute in name.split("."):
        is_field = isinstance(found, type) and issubclass(found, Model)
        found = found._meta.get_field(attribute).max_length if is_field else getattr(found, attribute)
    found = found[int(part)] if part else found
    is_time = name.endswith(("_US", "_SECONDS"))
    size = _SIZES.get(unit, 1) if is_time or unit == "MB" else 1
    assert found / (10**6 if name.endswith("_US") else 1) == float(number.replace(",", "")) * size
