"""Who is in which subject list: an immutable index of all lists' members, by user, subject and network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import copy

from ..utils.addresses import Address
from ..utils.chunked_mapping import ChunkedMapping
from .facts import MemberFacts
from .requests.caller import Caller

#: Address length in bits -> host bits of a cell: a /16, or an IPv6 /32. A lookup tries only the sizes of the networks
#: in the address's cell. With 10^5 networks of all sizes, these are a few instead of 33.
_CELL = {32: 16, 128: 96}
#: A network wider than 2**4 cells (a /12, or an IPv6 /28) is in the one cell of all addresses instead.
_SPREAD = 4


class Members:
    """The members of all lists. Immutable: ``changed`` returns a copy, in the time of the changed rows."""

    __slots__ = ("_at", "_by_id", "_kinds", "_sizes")

    def __init__(self) -> None:
        self._by_id: ChunkedMapping[int, MemberFacts] = ChunkedMapping({})
        #: ``MemberFacts.key`` -> the entries with that key, one per list.
        self._at: ChunkedMapping[object, tuple[MemberFacts, ...]] = ChunkedMapping({})
        #: (list id, kind) -> number of members.
        self._kinds: Counter[tuple[int, str]] = Counter()
        #: Cell -> host bits of networks there. May hold sizes that are gone, which only costs a lookup.
        self._sizes: ChunkedMapping[tuple[int, int], tuple[int, ...]] = ChunkedMapping({})

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
            bits, number, at, sizes = address.max_prefixlen, int(address), self._at.get, self._sizes.get
            for hosts in (*sizes((bits, number >> _CELL[bits]), ()), *sizes((bits, -1), ())):
                found += at((bits, hosts, number >> hosts), ())
        return found

    def changed(self, rows: Mapping[int, MemberFacts | None]) -> Members:
        """Return a copy with these rows (id -> member; None = deleted); the same object if it holds them already."""
        removed = {pk: self._by_id[pk] for pk in self._by_id.common(rows.keys())}
        added = {pk: member for pk, member in rows.items() if member is not None}
        if removed == added:
            return self
        entries: dict[object, list[MemberFacts]] = {
            key: [one for one in self._at.get(key, ()) if one.id not in rows]
            for key in {member.key for member in (*removed.values(), *added.values())}
        }
        for member in added.values():
            entries[member.key].append(member)
        filled = {key: tuple(own) for key, own in entries.items() if own}
        other = copy(self)
        other._by_id = self._by_id.changed(removed.keys() - added.keys(), added)
        other._at = self._at.changed(entries.keys() - filled.keys(), filled)
        kinds = Counter(self._kinds)
        kinds.subtract((member.list_id, member.kind) for member in removed.values())
        kinds.update((member.list_id, member.kind) for member in added.values())
        other._kinds = +kinds
        other._sizes = self._sizes.changed((), _new_sizes(self._sizes, added.values()))
        return other


def _new_sizes(
    known: Mapping[tuple[int, int], tuple[int, ...]], members: Iterable[MemberFacts]
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return the cells that the members add sizes to, with all of their sizes."""
    found: dict[tuple[int, int], Collection[int]] = {}
    for member in members:
        if isinstance(member.key, tuple):
            bits, hosts, number = member.key
            for cell in _cells(bits, hosts, number):
                sizes = found.get(cell) or known.get(cell, ())
                if hosts not in sizes:
                    found[cell] = {*sizes, hosts}
    # One tuple for all cells that hold the same sizes, because there may be 65,536 cells.
    shared: dict[tuple[int, ...], tuple[int, ...]] = {}
    return {cell: shared.setdefault(own, own) for cell, sizes in found.items() if (own := tuple(sorted(sizes)))}


def _cells(bits: int, hosts: int, number: int) -> Iterable[tuple[int, int]]:
    """Return the cells that the network is in, or that it covers."""
    wider = hosts - _CELL[bits]
    if wider <= 0:
        return [(bits, number >> -wider)]
    if wider > _SPREAD:
        return [(bits, -1)]
    return [(bits, cell) for cell in range(number << wider, (number + 1) << wider)]
