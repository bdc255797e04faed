"""The dict in parts behaves as a dict does, and a changed copy shares what the change does not touch."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from django_ratequota.utils.chunked_mapping import ChunkedMapping
from tests.support.properties import examples

KEYS = st.one_of(st.integers(-3, 40), st.text("abc", max_size=2), st.none())
EDITS = st.lists(st.tuples(st.sets(KEYS), st.dictionaries(KEYS, st.integers())), max_size=5)


@given(st.dictionaries(KEYS, st.integers()), EDITS)
@examples(200)
def test_it_is_the_dict_that_the_same_changes_make(entries: dict[Any, int], edits: Any) -> None:
    plain, mapping = dict(entries), ChunkedMapping(entries)
    for gone, come in edits:
        before = dict(mapping)
        changed = mapping.changed(gone, come)
        assert dict(mapping) == before, "the one before is as it was"
        plain = {key: value for key, value in plain.items() if key not in gone} | come
        mapping = changed
        assert (dict(mapping), len(mapping)) == (plain, len(plain))
        assert mapping.common(come.keys()) == come.keys()
        assert all((key in mapping) == (key in plain) and mapping.get(key, 7) == plain.get(key, 7) for key in gone)


def test_it_grows_in_chunks_of_few_entries() -> None:
    mapping: ChunkedMapping[int, int] = ChunkedMapping({})
    for start in range(0, 20_000, 50):
        mapping = mapping.changed((), {number: -number for number in range(start, start + 50)})
    assert dict(mapping) == {number: -number for number in range(20_000)}
    assert max(map(len, mapping._chunks)) < 1024
    assert mapping.common({5, 7, 10**6}) == {5, 7}
    assert mapping.common(dict.fromkeys(range(19_000, 30_000)).keys()) == set(range(19_000, 20_000))


def test_a_change_copies_only_the_changed_chunks() -> None:
    before = ChunkedMapping({number: str(number) for number in range(10_000)})
    after = before.changed({77}, {123: "other"})
    copied = [one for one, other in zip(before._chunks, after._chunks, strict=True) if one is not other]
    assert 1 <= len(copied) <= 2
    assert (before[123], after[123], 77 in before, 77 in after) == ("123", "other", True, False)
