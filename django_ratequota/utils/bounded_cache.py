"""A bounded cache for values that are cheap to compute again."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

Value = TypeVar("Value")


class BoundedCache(dict[Hashable, Value]):
    """A dict that keeps at most ``size`` values if they are added by ``put``, and at least the half put last.

    Not an LRU, so that a hit is one lookup in a dict, without a call or a lock: a value that is used all the time is
    computed again once in ``size / 2`` others. Concurrent threads may lose values, too.
    """

    __slots__ = ("_size",)

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def put(self, key: Hashable, value: Value) -> None:
        """Keep the value; drop the older half when the cache is full."""
        if len(self) >= self._size and key not in self:
            for old in list(self)[: len(self) // 2 + 1]:
                self.pop(old, None)
        self[key] = value
