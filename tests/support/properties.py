"""How much is tested, by profile: ``pytest --hypothesis-profile=thorough``.

``quick``, the default, tries a share of each property's examples; ``thorough`` tries all of them. Both try the same
ones in every run. ``explore`` tries twenty times as many, at random. ``quick`` shortens long tests too, and leaves
out those marked ``thorough``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

#: Examples tried, as a multiple of a property's own number.
_MULTIPLES = {"quick": 0.1, "thorough": 1.0, "explore": 20.0}
#: Fewest examples of a property.
_FEWEST = 15

for _name in _MULTIPLES:
    # Fixtures that examples share hold no state of their own.
    settings.register_profile(
        _name,
        derandomize=_name != "explore",
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
settings.load_profile("quick")


def is_thorough() -> bool:
    """Return whether tests marked ``thorough`` run: in all profiles but ``quick``."""
    return settings.get_current_profile_name() != "quick"


def examples(number: int) -> settings:
    """Return settings that try ``number`` examples of a property, times the multiple of the profile in use."""
    multiple = _MULTIPLES[settings.get_current_profile_name()]
    return settings(max_examples=max(min(number, _FEWEST), math.ceil(number * multiple)))


def thorough_after(number: int, values: Iterable[Any]) -> list[Any]:
    """Return a test's parameters, of which ``quick`` runs the first ``number``; a tuple has a value for each name."""
    known = list(values)
    return known[:number] + [_thorough(value) for value in known[number:]]


def _thorough(value: Any) -> Any:
    if isinstance(value, type(pytest.param())):
        return pytest.param(*value.values, id=value.id, marks=[*value.marks, pytest.mark.thorough])
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.thorough)


def scaled(number: int) -> int:
    """Return ``number``, or a quarter of it in ``quick``: seconds of load, or callers that find a bound."""
    return number if is_thorough() else max(1, number // 4)
