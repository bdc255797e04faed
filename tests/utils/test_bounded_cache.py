"""What was worked out lately is remembered, within bounds."""

from __future__ import annotations

from django_ratequota.utils.bounded_cache import BoundedCache


def test_it_holds_no_more_than_its_size_and_the_latest_half_of_that() -> None:
    for size in (1, 2, 3, 10, 1000):
        recent: BoundedCache[str] = BoundedCache(size)
        for number in range(3 * size):
            recent.put(number, str(number))
            assert recent.get(number) == str(number), "the newest is there"
            assert len(recent) <= size
            latest = range(max(0, number + 1 - size // 2), number + 1) if number % 50 == 49 else ()
            assert all(recent.get(one) == str(one) for one in latest)


def test_a_value_that_is_put_again_drops_no_other() -> None:
    recent: BoundedCache[int] = BoundedCache(3)
    for number in range(3):
        recent.put(number, number)
    recent.put(1, 7)
    assert dict(recent) == {0: 0, 1: 7, 2: 2}
