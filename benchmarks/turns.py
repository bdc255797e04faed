"""How late callers of ``turn`` wake, four processes that share 100 slots a second."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor

import redis

from benchmarks.measure import Cell, Result, Table
from django_ratequota import Bucket, Decision, Limiter, Rate, turn

PROCESSES = 4
SLOTS = Bucket("bench:turns", Rate.parse("100/s burst 1 leaky_bucket"))


def run(quick: bool = False) -> Result:
    """Let each process enter a number of times, from threads and from tasks."""
    times, rows, figures = 5 if quick else 200, list[tuple[Cell, ...]](), dict[str, float]()
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        for name, enter in (("with turn", in_thread), ("async with turn", in_task)):
            late = sorted(one for own in pool.map(enter, [times] * PROCESSES) for one in own)
            p50, p95 = (late[int(len(late) * share)] for share in (0.5, 0.95))
            rows.append((name, p50, p95, late[-1]))
            figures.setdefault("turn_late_ms", p95)
    columns = ("", "p50, ms", "p95, ms", "latest, ms")
    note = f"{PROCESSES} processes share 100 slots a second with Redis on this machine; late by the server's clock."
    return Result([Table("How late callers of turn wake", columns, rows, note)], figures)


def in_thread(times: int) -> list[float]:
    """Enter a number of times; return how late each time was (ms)."""
    limiter, late = _limiter(), []
    for _ in range(times):
        with turn(SLOTS, limiter=limiter) as booked:
            late.append(_late(booked))
    return late


def in_task(times: int) -> list[float]:
    """``in_thread``, awaited."""

    async def enter() -> list[float]:
        limiter, late = _limiter(), []
        for _ in range(times):
            async with turn(SLOTS, limiter=limiter) as booked:
                late.append(_late(booked))
        return late

    return asyncio.run(enter())


def _limiter() -> Limiter:
    return Limiter(client=redis.Redis.from_url(os.environ["REDIS_URL"]), timeout=10)


def _late(booked: Decision) -> float:
    return (time.time_ns() // 1000 - booked.at_us - (booked.retry_after_us or 0)) / 1000
