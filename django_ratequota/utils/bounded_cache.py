"""A bounded cache for values that are cheap to compute again."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class BoundedCache(Generic[Value]):
    """Keeps the most recently used values: ``size`` at most, half as many at least. None cannot be a value.

    Two generations instead of an exact LRU: a hit is one lookup in a dict and needs no lock, as moving a key to the
    end of an order would. Concurrent threads may lose values, which are then computed again.
    """

    __slots__ = ("_half", "_old", "_young")

    def __init__(self, size: int) -> None:
        self._half = max(1, size // 2)
        self._young: dict[Hashable, Value] = {}
        self._old: dict[Hashable, Value] = {}

    def get(self, key: Hashable) -> Value | None:
        """Return the key's value; None when there is none (any more)."""
        value = self._young.get(key)
        if value is None:
            value = self._old.get(key)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: Hashable, value: Value) -> None:
        """Keep the value; drop the least recently used half when the cache is full."""
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        self._young[key] = value

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())
