"""Who is in which subject list: an immutable index of all lists' members, by user, subject and network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

from ..utils.addresses import Address
from ..utils.chunked_mapping import ChunkedMapping
from .facts import MemberFacts
from .requests.caller import Caller

#: Address length in bits -> host bits of a cell: a /16, or an IPv6 /32. A lookup tries only the sizes of the networks
#: in the address's cell. With 10^5 networks of all sizes, these are a few instead of 33.
_CELL = {32: 16, 128: 96}
#: A network wider than 2**4 cells (a /12, or an IPv6 /28) is in the one cell of all addresses instead.
_SPREAD = 4

#: The networks of a cell: their host bits, each size once, and prefix -> entries. A prefix is the network's number
#: with a 1 before its first bit, so that 10.0.0.0/8 and 10.0.0.0/16 have different ones.
_Cell = tuple[tuple[int, ...], dict[int, tuple[MemberFacts, ...]]]
_EMPTY: _Cell = ((), {})


class Members:
    """The members of all lists. Immutable: ``changed`` returns a copy, in the time of the changed rows."""

    __slots__ = ("_at", "_by_id", "_cells", "_kinds")

    def __init__(self) -> None:
        self._by_id: ChunkedMapping[int, MemberFacts] = ChunkedMapping({})
        #: ``MemberFacts.key`` of users and subjects -> the entries with that key, one per list.
        self._at: ChunkedMapping[str, tuple[MemberFacts, ...]] = ChunkedMapping({})
        #: Prefix of a cell -> its networks. The cell of all IPv4 addresses is 32, that of all IPv6 addresses 128.
        self._cells: ChunkedMapping[int, _Cell] = ChunkedMapping({})
        #: (list id, kind) -> number of members.
        self._kinds: Counter[tuple[int, str]] = Counter()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[MemberFacts]:
        return iter(self._by_id.values())

    def kinds_of(self, lists: Collection[int]) -> frozenset[str]:
        """Return the kinds of the lists' members: ``ip``, ``user``, and names of IDENTIFIERS."""
        return frozenset(kind for list_id, kind in self._kinds if list_id in lists)

    def entries_of(self, caller: Caller, kinds: Iterable[str]) -> list[MemberFacts]:
        """Return the caller's entries of these kinds in any list, whatever their dates."""
        found: list[MemberFacts] = []
        for kind in kinds:
            if kind == "ip":
                found += self.containing(caller.address)
            else:
                value = caller.value(kind)
                if value:  # "" = the identifier failed, and no list names such callers
                    found += self._at.get(f"{kind}:{value}", ())
        return found

    def containing(self, address: Address | None) -> list[MemberFacts]:
        """Return the entries of networks that contain the address."""
        found: list[MemberFacts] = []
        if address is not None:
            bits, cells = address.max_prefixlen, self._cells.get
            prefix = int(address) | 1 << bits
            for sizes, at in (cells(prefix >> _CELL[bits], _EMPTY), cells(bits, _EMPTY)):
                for hosts in sizes:
                    if own := at.get(prefix >> hosts):
                        found += own
        return found

    def changed(self, rows: Mapping[int, MemberFacts | None]) -> Members:
        """Return a copy with these rows (id -> member; None = deleted); the same object if it holds them already."""
        removed = {pk: self._by_id[pk] for pk in self._by_id.common(rows.keys())}
        added = {pk: member for pk, member in rows.items() if member is not None}
        if removed == added:
            return self
        entries: dict[Any, list[MemberFacts]] = {
            key: [one for one in self._entries(key) if one.id not in rows]
            for key in {member.key for member in (*removed.values(), *added.values())}
        }
        for member in added.values():
            entries[member.key].append(member)
        networks = {key: tuple(entries.pop(key)) for key in list(entries) if isinstance(key, tuple)}
        other = copy(self)
        other._by_id = self._by_id.changed(removed.keys() - added.keys(), added)
        other._at = _changed(self._at, {key: tuple(own) for key, own in entries.items()})
        other._cells = _changed(self._cells, self._changed_cells(networks))
        kinds = Counter(self._kinds)
        kinds.subtract((member.list_id, member.kind) for member in removed.values())
        kinds.update((member.list_id, member.kind) for member in added.values())
        other._kinds = +kinds
        return other

    def _entries(self, key: Any) -> tuple[MemberFacts, ...]:
        at: Mapping[Any, tuple[MemberFacts, ...]] = self._at
        if not isinstance(key, str):
            cell, key = _cells(*key)[0], _prefix(*key)
            at = self._cells.get(cell, _EMPTY)[1]
        return at.get(key, ())

    def _changed_cells(
        self, networks: Mapping[tuple[int, int, int], tuple[MemberFacts, ...]]
    ) -> dict[int, _Cell | None]:
        """Return the cells of these networks with their new entries; None for a cell without any."""
        found: dict[tuple[int, int], dict[int, tuple[MemberFacts, ...]]] = {}
        for key, own in networks.items():
            for cell in _cells(*key):
                at = found.get((key[0], cell))
                if at is None:
                    at = found[key[0], cell] = dict(self._cells.get(cell, _EMPTY)[1])
                if own:
                    at[_prefix(*key)] = own
                else:
                    at.pop(_prefix(*key), None)
        # One tuple for all cells that hold the same sizes, because there may be 65,536 cells.
        shared: dict[tuple[int, ...], tuple[int, ...]] = {}
        cells: dict[int, _Cell | None] = {}
        for (bits, cell), at in found.items():
            sizes = tuple(sorted({bits + 1 - prefix.bit_length() for prefix in at}))
            cells[cell] = (shared.setdefault(sizes, sizes), at) if at else None
        return cells


def _changed(mapping: ChunkedMapping[Any, Any], entries: Mapping[Any, Any]) -> ChunkedMapping[Any, Any]:
    """Return a copy of the mapping with these entries; an empty one is removed."""
    filled = {key: own for key, own in entries.items() if own}
    return mapping.changed(entries.keys() - filled.keys(), filled)


def _prefix(bits: int, hosts: int, number: int) -> int:
    return number | 1 << bits - hosts


def _cells(bits: int, hosts: int, number: int) -> Sequence[int]:
    """Return the cells that the network is in, or that it covers."""
    wider, prefix = hosts - _CELL[bits], _prefix(bits, hosts, number)
    if wider <= 0:
        return [prefix >> -wider]
    if wider > _SPREAD:
        return [bits]
    return range(prefix << wider, (prefix + 1) << wider)
