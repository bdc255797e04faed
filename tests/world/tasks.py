"""Tasks for Celery and jobs for RQ: a check for each row, until their time limit is over."""

from __future__ import annotations

import os
import time
from pathlib import Path

import django
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from rq.timeouts import JobTimeoutException

django.setup()

from django_ratequota.ledger import book  # noqa: E402

from .scene import Log  # noqa: E402
from .site import ask, ask_and_note  # noqa: E402

#: Seconds that a task may take before it is told, and after which it goes on to its end if it never is.
LIMIT, DEAF = 1, 5.0

app = Celery("tasks", broker=os.environ.get("WORLD_BROKER", ""))
app.conf.worker_prefetch_multiplier = 1


@app.task(soft_time_limit=LIMIT)  # type: ignore[untyped-decorator]
def celery_task(caller: int) -> None:
    check_rows(caller, SoftTimeLimitExceeded)


def rq_job(caller: int) -> None:
    """RQ ends the process of a job by ``os._exit``, so the job writes the ledger."""
    check_rows(caller, JobTimeoutException)
    book.flush()


def check_rows(caller: int, limit: type[Exception]) -> None:
    """Check one row after the other; notes whether the time limit was heard of."""
    log, until, heard = Log(os.environ["WORLD_LOG"]), time.monotonic() + DEAF, False
    try:
        while time.monotonic() < until:
            log.note(ask(caller))
    except limit:
        heard = True
    ask_and_note(1000 + caller, Log(os.environ["WORLD_LOG"] + ".afterwards"))
    with Path(os.environ["WORLD_LOG"] + ".heard").open("a") as file:
        file.write(f"{caller} {heard}\n")
