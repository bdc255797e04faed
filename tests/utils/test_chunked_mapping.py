"""The dict in parts behaves as a dict does, and a changed copy shares what the change does not touch."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from django_ratequota.utils.chunked_mapping import Parted
from tests.support.properties import examples

KEYS = st.one_of(st.integers(-3, 40), st.text("abc", max_size=2), st.none())
EDITS = st.lists(st.tuples(st.sets(KEYS), st.dictionaries(KEYS, st.integers())), max_size=5)


@given(st.dictionaries(KEYS, st.integers()), EDITS)
@examples(200)
def test_it_is_the_dict_that_the_same_changes_make(entries: dict[Any, int], edits: Any) -> None:
    plain, parted = dict(entries), Parted(entries)
    for gone, come in edits:
        before = dict(parted)
        changed = parted.changed(gone, come)
        assert dict(parted) == before, "the one before is as it was"
        plain = {key: value for key, value in plain.items() if key not in gone} | come
        parted = changed
        assert (dict(parted), len(parted)) == (plain, len(plain))
        assert parted.common(come.keys()) == come.keys()
        assert all((key in parted) == (key in plain) and parted.get(key, 7) == plain.get(key, 7) for key in gone)


def test_it_grows_in_parts_of_few_entries() -> None:
    parted: Parted[int, int] = Parted({})
    for start in range(0, 20_000, 50):
        parted = parted.changed((), {number: -number for number in range(start, start + 50)})
    assert dict(parted) == {number: -number for number in range(20_000)}
    assert max(map(len, parted._parts)) < 1024
    assert parted.common({5, 7, 10**6}) == {5, 7}
    assert parted.common(dict.fromkeys(range(19_000, 30_000)).keys()) == set(range(19_000, 20_000))


def test_a_change_copies_the_part_that_it_touches() -> None:
    before = Parted({number: str(number) for number in range(10_000)})
    after = before.changed({77}, {123: "other"})
    fresh = [one for one, other in zip(before._parts, after._parts, strict=True) if one is not other]
    assert 1 <= len(fresh) <= 2
    assert (before[123], after[123], 77 in before, 77 in after) == ("123", "other", True, False)
