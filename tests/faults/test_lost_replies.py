"""A reply is lost: one logical hit counts exactly once if the server saw it, and not at all if it did not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from django_ratequota import Limiter
from django_ratequota.engine.rates import ALGORITHMS

from .asking import Ask, failure, slow
from .servers import Node
from .wire import Wire

LIMIT = 100
HITS = 7

Make = Callable[..., Limiter]


def counted(limiter: Limiter, algorithm: str) -> int:
    return LIMIT - limiter.peek([slow(algorithm, LIMIT)]).statuses[0].remaining


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("knob", "each_counts"), [("cut_after_execution", 1), ("cut_before_request_is_passed_on", 0)]
)
def test_a_hit_whose_reply_is_lost(
    node: Node, proxy: Wire, limiters: Make, ask: Ask, algorithm: str, knob: str, each_counts: int
) -> None:
    """A client that retried counted such a hit eleven times."""
    limiter, direct = limiters(proxy), limiters(node)
    asked = [slow(algorithm, LIMIT)]
    assert counted(direct, algorithm) == 0  # and the server knows the script: every request is a hit
    for hit in range(1, HITS + 1):
        setattr(proxy, knob, 1)
        assert failure(ask, limiter, asked) == "connection"
        # Between two lost ones, one that is answered: so the breaker stays closed.
        assert ask(limiter, asked).statuses[0].remaining == LIMIT - hit * (1 + each_counts)
    assert counted(direct, algorithm) == HITS * (1 + each_counts)
    assert proxy.requests == 2 * HITS


def test_a_hit_whose_reply_is_late_counts_once_and_reaches_no_other_caller(
    node: Node, proxy: Wire, limiters: Make, ask: Ask
) -> None:
    limiter, direct = limiters(proxy, timeout=0.5), limiters(node)
    ask(limiter, [slow("gcra", LIMIT, user=2)])  # connected
    for hit in range(1, 4):
        proxy.delay = 1.0
        assert failure(ask, limiter, [slow("gcra", LIMIT)]) == "timeout"
        proxy.delay = 0.0
        assert ask(limiter, [slow("gcra", LIMIT, user=2)]).statuses[0].remaining == LIMIT - 1 - hit
    assert counted(direct, "gcra") == 3


@pytest.mark.parametrize(("spared", "counts"), [(0, 0), (1, 1)], ids=["NOSCRIPT", "the decision"])
def test_a_reply_that_is_lost_where_the_script_is_not_known(
    node: Node, proxy: Wire, limiters: Make, ask: Ask, spared: int, counts: int
) -> None:
    """This takes two requests, of which only the second counts."""
    proxy.spare, proxy.cut_after_execution = spared, 1
    assert failure(ask, limiters(proxy), [slow("token_bucket", LIMIT)]) == "connection"
    assert counted(limiters(node), "token_bucket") == counts
