"""What the parts of a limited request take, in a process of its own by ``site``'s settings; prints a line of JSON."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable

import django
import redis

from benchmarks.measure import interleave


def main() -> None:
    """Time each part on the wall and on the processor."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.breakdown", description=__doc__)
    parser.add_argument("blocks", type=int)
    options = parser.parse_args()
    django.setup()
    parts = _parts()
    wall = interleave(parts, options.blocks, 100)
    processor = interleave(parts, options.blocks, 100, time.thread_time)
    print(json.dumps([(name, wall[name] * 1e6, processor[name] * 1e6) for name in parts]))


def _parts() -> dict[str, Callable[[], object]]:
    from django.http import HttpResponse
    from django.test import RequestFactory

    from benchmarks.site.throttles_floor import OneCall
    from benchmarks.site.views import Items
    from django_ratequota import check_request
    from django_ratequota.headers import add_headers, decision_headers
    from django_ratequota.runtime import default_limiter
    from django_ratequota.throttling import QuotaThrottle

    client = redis.Redis.from_url(os.environ["BENCH_REDIS_URL"])
    sha = client.script_load("return 1")
    bare = Items.as_view(throttle_classes=[])
    floor = Items.as_view(throttle_classes=[OneCall])
    limited = Items.as_view(throttle_classes=[QuotaThrottle])
    request = RequestFactory().get("/items/")
    limited(request)
    decision = request.ratequota
    buckets = tuple(status.bucket for status in decision.statuses)

    def anew(ask: Callable[[], object]) -> Callable[[], object]:
        """As for a request that was not decided about yet."""

        def asking() -> object:
            del request.ratequota, request.ratequota_checks
            return ask()

        return asking

    return {
        "the view without throttle": lambda: bare(request),
        "the view with one bare EVALSHA": lambda: floor(request),
        "the view with QuotaThrottle": anew(lambda: limited(request)),
        "— check_request, 3 policies": anew(lambda: check_request(request, "items")),
        "— — Limiter.check, 3 buckets": lambda: default_limiter().check(buckets),
        "— — — redis-py, evalsha `return 1`": lambda: client.evalsha(sha, 1, "breakdown"),
        "— headers, rendered": lambda: decision_headers(decision),
        "— headers, rendered and set on a new response": lambda: add_headers(HttpResponse(), decision, request),
    }


if __name__ == "__main__":
    main()
