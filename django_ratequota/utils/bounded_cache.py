"""A bounded memory of what was worked out lately, for values that are cheap enough to work out again."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class BoundedCache(Generic[Value]):
    """Keeps the last ``size`` values or fewer, at least half as many; None is no value.

    Two generations instead of an exact LRU: a hit is one look into a dict and takes no lock, while moving a key to
    the end of an order would need one. Threads that meet in here may lose values, which are then worked out anew.
    """

    __slots__ = ("_half", "_old", "_young")

    def __init__(self, size: int) -> None:
        self._half = max(1, size // 2)
        self._young: dict[Hashable, Value] = {}
        self._old: dict[Hashable, Value] = {}

    def get(self, key: Hashable) -> Value | None:
        """The value put under the key; None when there is none, or no longer."""
        value = self._young.get(key)
        if value is None:
            value = self._old.get(key)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: Hashable, value: Value) -> None:
        """Keep the value, and let go of those that were not asked for in a long time."""
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        self._young[key] = value

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())
