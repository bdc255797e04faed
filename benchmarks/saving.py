"""Another process that edits policies, at a given rate per second: ``python -m benchmarks.saving 400``.

Each edit is a transaction of its own, recorded and published as a save is. It is written in two statements: a save's
own work would take the processor from the requests that are measured. Prints a line once it has edited, and how many
edits a second it came to when its input ends.
"""

from __future__ import annotations

import sys
import threading
import time
from itertools import count

from benchmarks.processes import set_django_up


def main() -> None:
    """Edit until standard input ends."""
    set_django_up()
    from django.db import connection, transaction

    from django_ratequota.models import PolicyChange, RatePolicy
    from django_ratequota.runtime import default_limiter

    if connection.vendor == "sqlite":
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA synchronous = NORMAL")
    every, limiter = 1 / float(sys.argv[1]), default_limiter()
    subjects = RatePolicy.objects.filter(endpoint__isnull=True).exclude(subject="").order_by("pk")
    pks = list(subjects.values_list("pk", flat=True)[:1000])
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set())).start()
    begun = time.perf_counter()
    for number in count(1):
        pk, rates = pks[number % len(pks)], f"{1000 + number}/min"
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("UPDATE django_ratequota_ratepolicy SET rates = %s WHERE id = %s", [rates, pk])
            states = {"before": {"rates": "50/min", "user": None}, "after": {"rates": rates, "user": None}}
            PolicyChange(model="ratepolicy", object_id=str(pk), action="update", **states).save(force_insert=True)
        limiter.publish()
        if number == 1:
            print("editing", flush=True)
        if ended.wait(max(0.0, begun + number * every - time.perf_counter())):
            print(number / (time.perf_counter() - begun), flush=True)
            return


if __name__ == "__main__":
    main()
