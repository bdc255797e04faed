"""What was worked out lately is remembered, within bounds."""

from __future__ import annotations

import threading

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
