"""What was worked out lately is remembered, within bounds."""

from __future__ import annotations

import threading

import pytest

from django_ratequota.utils.bounded_cache import BoundedCache


@pytest.mark.parametrize("size", [1, 2, 3, 10, 1000])
def test_it_holds_no_more_than_its_size(size: int) -> None:
    recent: BoundedCache[str] = BoundedCache(size)
    for number in range(3 * size):
        recent.put(number, str(number))
        assert recent.get(number) == str(number), "the newest is there"
        assert len(recent) <= size


def test_the_latest_half_is_there() -> None:
    recent: BoundedCache[int] = BoundedCache(100)
    for number in range(1, 1001):
        recent.put(number, number)
    assert [recent.get(number) for number in range(951, 1001)] == list(range(951, 1001))


def test_a_value_that_is_put_again_drops_no_other() -> None:
    recent: BoundedCache[int] = BoundedCache(3)
    for number in range(3):
        recent.put(number, number)
    recent.put(1, 7)
    assert dict(recent) == {0: 0, 1: 7, 2: 2}


def test_threads_that_meet_see_their_own_values() -> None:
    recent: BoundedCache[int] = BoundedCache(16)
    wrong: list[object] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait(10)
        for number in range(5000):
            key = number % 40
            if (value := recent.get(key)) not in (None, key):
                wrong.append((key, value))
            recent.put(key, key)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    # Two threads may find room at once, and both then put one more.
    assert len(recent) <= 16 + 4
