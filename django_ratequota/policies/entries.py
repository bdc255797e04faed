"""The entries of users and subjects that a process holds: all of them, where they are not too many.

They are read in parts, the first with the snapshot, the others by the requests that still have to read an entry
themselves. Once all are held, a key that is missing means that nobody has rows, which takes no query.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from . import loading
from .facts import NOBODY, SubjectKey, UserEntry

#: Most entries that are held at once. Of more than these the oldest are dropped, and read again when they are needed.
MOST_ENTRIES = 200_000
#: Rows whose entries are read together, which takes some 30 ms.
_PART = 2_000

Key = str | SubjectKey


class Part(NamedTuple):
    """Entries that were read, and where the next part begins; None = they are all read."""

    entries: Mapping[Key, UserEntry]
    then: loading.Place | None


class Entries:
    """Replaced as a whole when anything may have changed: a thread that reads it then gets an old answer, or none."""

    __slots__ = ("_at", "known", "missing")

    def __init__(self) -> None:
        #: User's primary key, or (kind, value) of a subject -> entry; None = it has to be read again.
        self.known: dict[Key, UserEntry | None] = {}
        #: The entry of keys that are not known; None = it has to be read.
        self.missing: UserEntry | None = None
        #: Where the next part begins; None = all are held, or they are too many.
        self._at: loading.Place | None = loading.FIRST

    @property
    def whole(self) -> bool:
        """Whether there is no part left to read."""
        return self._at is None

    def read(self, keys: list[Key]) -> Part:
        """Read the entries of these keys, and the next part. Raises ``django.db.Error``."""
        at = self._at
        more, then = loading.next_keys(at, _PART) if at is not None else (set[Key](), None)
        return Part(loading.load_entries([*keys, *more.difference(keys)]), then)

    def keep(self, part: Part) -> None:
        """Hold what was read; the lock of the cache must be held."""
        self.known.update(part.entries)
        fits = len(self.known) <= MOST_ENTRIES
        if self._at is not None:
            self._at = part.then if fits else None
            if self._at is None and fits:
                self.missing = NOBODY  # last: until then, who is missing is read
        if self.missing is None:
            while len(self.known) > MOST_ENTRIES:
                del self.known[next(iter(self.known))]

    def drop(self, keys: set[Key]) -> None:
        """Have these read again when they are needed."""
        # Marked, not deleted: a key that is missing may mean that nobody has rows.
        self.known.update(dict.fromkeys(keys if self.missing is not None else keys & self.known.keys()))
