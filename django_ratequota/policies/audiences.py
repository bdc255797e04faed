"""Whom policies and list members are for: an immutable index of either, by subject, network, list and plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import chain
from typing import Any, Generic, Self, TypeVar

from ..utils.addresses import Address
from ..utils.chunked_mapping import ChunkedMapping
from .facts import EVERYONE, Key, MemberFacts, PolicyFacts, Trait, list_key, plan_key
from .requests.caller import Caller

Facts = TypeVar("Facts", PolicyFacts, MemberFacts)

#: Address length in bits -> host bits of a cell: a /16, or an IPv6 /32. A lookup tries only the sizes of the networks
#: in the address's cell. With 10^5 networks of all sizes, these are a few instead of 33.
_CELL = {32: 16, 128: 96}
#: A network wider than 2**4 cells (a /12, or an IPv6 /28) is in the one cell of all addresses instead.
_SPREAD = 4

#: The networks of a cell: their host bits, each size once, and prefix -> entries. A prefix is the network's number
#: with a 1 before its first bit, so that 10.0.0.0/8 and 10.0.0.0/16 have different ones.
_Cell = tuple[tuple[int, ...], dict[int, tuple[Any, ...]]]
_EMPTY: _Cell = ((), {})


class Index(Generic[Facts]):
    """Policies or members. Immutable: ``changed`` returns a copy, in the time of the changed ones."""

    __slots__ = ("_at", "_cells", "by_id", "traits")

    def __init__(self, entries: Iterable[Facts] = ()) -> None:
        #: All entries, including policies that are off.
        self.by_id: ChunkedMapping[int, Facts] = ChunkedMapping({})
        #: Key -> the entries that have it, except for networks.
        self._at: ChunkedMapping[str, tuple[Facts, ...]] = ChunkedMapping({})
        #: Prefix of a cell -> its networks. The cell of all IPv4 addresses is 32, that of all IPv6 addresses 128.
        self._cells: ChunkedMapping[int, _Cell] = ChunkedMapping({})
        #: Trait -> number of entries that have it.
        self.traits: Counter[Trait] = Counter()
        self._change({}, {entry.id: entry for entry in entries})

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Facts]:
        return iter(self.by_id.values())

    def entries_of(self, caller: Caller, kinds: Iterable[str]) -> list[Facts]:
        """Return the entries for the caller's subjects of these kinds, whatever their dates."""
        found: list[Facts] = []
        for kind in kinds:
            if kind == "ip":
                found += self.containing(caller.address)
            else:
                value = caller.value(kind)
                if value:  # "" = the identifier failed, and no entry names such callers
                    found += self._at.get(f"{kind}:{value}", ())
        return found

    def containing(self, address: Address | None) -> list[Facts]:
        """Return the entries for networks that contain the address."""
        found: list[Facts] = []
        if address is not None:
            bits, cells = address.max_prefixlen, self._cells.get
            prefix = int(address) | 1 << bits
            for sizes, at in (cells(prefix >> _CELL[bits], _EMPTY), cells(bits, _EMPTY)):
                for hosts in sizes:
                    if own := at.get(prefix >> hosts):
                        found += own
        return found

    def at(self, key: Key) -> tuple[Facts, ...]:
        """Return the entries that have the key."""
        at: Mapping[Any, tuple[Facts, ...]] = self._at
        if not isinstance(key, str):
            at, key = self._cells.get(_cells(*key)[0], _EMPTY)[1], _prefix(*key)  # type: ignore[assignment]
        return at.get(key, ())

    def changed(self, rows: Mapping[int, Facts | None]) -> Self:
        """Return a copy with these rows (id -> entry; None = deleted); the same object if it holds them already."""
        removed = {pk: self.by_id[pk] for pk in self.by_id.common(rows.keys())}
        added = {pk: entry for pk, entry in rows.items() if entry is not None}
        if removed == added:
            return self
        other = copy(self)
        other._change(removed, added)
        return other

    def _change(self, removed: Mapping[int, Facts], added: Mapping[int, Facts]) -> None:
        """Change the index in place. Mappings that a copy shares are replaced, never changed."""
        keys = {entry.key for entry in chain(removed.values(), added.values())} - {None}
        entries = {key: [one for one in self.at(key) if one.id not in removed] for key in keys if key is not None}
        for entry in added.values():
            if entry.key is not None:
                entries[entry.key].append(entry)
        networks = {key: tuple(entries.pop(key)) for key in list(entries) if isinstance(key, tuple)}
        self.by_id = self.by_id.changed(removed.keys() - added.keys(), added)
        self._at = _changed(self._at, {key: tuple(own) for key, own in entries.items()})
        self._cells = _changed(self._cells, self._changed_cells(networks))
        traits = Counter(self.traits)
        traits.subtract(chain.from_iterable(entry.traits for entry in removed.values()))
        traits.update(chain.from_iterable(entry.traits for entry in added.values()))
        self.traits = +traits

    def _changed_cells(self, networks: Mapping[tuple[int, int, int], tuple[Facts, ...]]) -> dict[int, _Cell | None]:
        """Return the cells of these networks with their new entries; None for a cell without any."""
        found: dict[tuple[int, int], dict[int, tuple[Facts, ...]]] = {}
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


class Members(Index[MemberFacts]):
    """The members of all lists."""

    __slots__ = ()

    def kinds_of(self, lists: Collection[int]) -> frozenset[str]:
        """Return the kinds of the lists' members: ``ip``, ``user``, and names of IDENTIFIERS."""
        return frozenset(kind for kind, list_id in self.traits if list_id in lists)


class Group(Index[PolicyFacts]):
    """The policies of one endpoint and counted_per; policies of users are not included."""

    __slots__ = ("kinds",)
    #: The kinds of the policies' subjects: ``ip``, and names of IDENTIFIERS.
    kinds: frozenset[str]

    def _change(self, removed: Mapping[int, PolicyFacts], added: Mapping[int, PolicyFacts]) -> None:
        super()._change(removed, added)
        self.kinds = self.having("subject")

    def having(self, name: str) -> frozenset[Any]:
        """Return the values of a trait, such as the ids of the lists that a policy is for."""
        return frozenset(value for trait, value in self.traits if trait == name)

    def without_subject(self, lists: Iterable[int], plans: Iterable[int]) -> Iterator[PolicyFacts]:
        """Yield the policies for these lists and plans, and for everyone."""
        for key in (*map(list_key, lists), *map(plan_key, plans), EVERYONE):
            yield from self._at.get(key, ())


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
