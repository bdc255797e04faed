"""Whom policies and list members are for: an immutable index of either, by subject, network, list and plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import copy
from itertools import chain
from typing import Any, Generic, Self, TypeVar

from ..utils.addresses import Address
from ..utils.chunked_mapping import ChunkedMapping
from .facts import EVERYONE, Key, MemberFacts, PolicyFacts, Trait
from .requests.caller import Caller

Facts = TypeVar("Facts", PolicyFacts, MemberFacts)


class Index(Generic[Facts]):
    """Policies or members. Immutable: ``changed`` returns a copy, in the time of the changed ones."""

    __slots__ = ("_at", "by_id", "kinds", "sizes", "traits")

    def __init__(self, entries: Iterable[Facts] = ()) -> None:
        #: All entries, including policies that are off.
        self.by_id: ChunkedMapping[int, Facts] = ChunkedMapping({})
        #: Key -> the entries that have it.
        self._at: ChunkedMapping[Key | None, tuple[Facts, ...]] = ChunkedMapping({})
        #: Trait -> number of entries that have it.
        self.traits: Counter[Trait] = Counter()
        self._change({}, {entry.id: entry for entry in entries})

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Facts]:
        return iter(self.by_id.values())

    def having(self, name: str) -> frozenset[Any]:
        """Return the values of a trait, such as the ids of the lists that a policy is for."""
        return frozenset(value for trait, value in self.traits if trait == name)

    def entries_of(self, caller: Caller, kinds: Iterable[str]) -> list[Facts]:
        """Return the entries for the caller's subjects of these kinds, whatever their dates."""
        found: list[Facts] = []
        for kind in kinds:
            if kind == "ip":
                found += self.containing(caller.address)
            else:
                value = caller.value(kind)
                if value:  # "" = the identifier failed, and no entry names such callers
                    found += self.at(f"{kind}:{value}")
        return found

    def containing(self, address: Address | None) -> list[Facts]:
        """Return the entries for networks that contain the address."""
        if address is None:
            return []
        length, number, at = address.max_prefixlen, int(address), self._at.get
        return [
            entry for bits, hosts in self.sizes if bits == length for entry in at((bits, hosts, number >> hosts), ())
        ]

    def at(self, key: Key) -> tuple[Facts, ...]:
        """Return the entries that have the key."""
        found: tuple[Facts, ...] = self._at.get(key, ())
        return found

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
        at: dict[Key | None, list[Facts]] = {entry.key: [] for entry in removed.values()}
        for entry in added.values():
            at.setdefault(entry.key, []).append(entry)
        if self.by_id:
            for key, own in at.items():
                own[:0] = [other for other in self._at.get(key, ()) if other.id not in removed]
        at.pop(None, None)  # policies that are off
        filled = {key: tuple(own) for key, own in at.items() if own}
        traits = Counter(self.traits)
        traits.subtract(chain.from_iterable(entry.traits for entry in removed.values()))
        traits.update(chain.from_iterable(entry.traits for entry in added.values()))
        self.by_id = self.by_id.changed(removed.keys() - added.keys(), added)
        self._at = self._at.changed(at.keys() - filled.keys(), filled)
        self.traits = +traits
        #: (address length in bits, host bits) of the networks: one lookup finds those of one size.
        self.sizes: frozenset[tuple[int, int]] = self.having("network")
        #: The kinds of the policies' subjects: ``ip``, and names of IDENTIFIERS.
        self.kinds: frozenset[str] = self.having("subject")


class Members(Index[MemberFacts]):
    """The members of all lists."""

    __slots__ = ()

    def kinds_of(self, lists: Collection[int]) -> frozenset[str]:
        """Return the kinds of the lists' members: ``ip``, ``user``, and names of IDENTIFIERS."""
        return frozenset(kind for list_id, kind in self.having("member") if list_id in lists)


class Group(Index[PolicyFacts]):
    """The policies of one endpoint and counted_per; policies of users are not included."""

    __slots__ = ()

    def without_subject(self, lists: Iterable[int], plans: Iterable[int]) -> Iterator[PolicyFacts]:
        """Yield the policies for these lists and plans, and for everyone."""
        keys: list[Key] = [*(("list", pk) for pk in lists), *(("plan", pk) for pk in plans), EVERYONE]
        for key in keys:
            yield from self.at(key)

    def enforces_plans(self) -> bool:
        """Whether one of the policies for plans is enforced: a log-only one takes no other's place."""
        return any(policy.mode == "enforce" for plan in self.having("plan") for policy in self.at(("plan", plan)))
