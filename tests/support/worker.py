"""A process that checks requests on command: one line in, one line of JSON out.

Run by test_propagation with the databases of the test: ``check USER SCOPE``, ``get PATH``, ``run`` and Python as
JSON text, ``hammer``, ``progress`` and ``rest``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from tests.faults import poll


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.project.settings")
    import django

    django.setup()
    from django.contrib.auth.models import AnonymousUser, User
    from django.db import connection
    from django.test import Client, RequestFactory

    from django_ratequota import check_request, models
    from django_ratequota.runtime import default_limiter

    names: dict[str, Any] = {**vars(models), "User": User}

    def check(user: str, scope: str) -> dict[str, Any]:
        request = RequestFactory().get("/")
        request.user = User.objects.get(username=user)
        decision = check_request(request, scope=scope)
        return {
            "allowed": decision.allowed,
            "remaining": [status.remaining for status in decision.statuses],
            "limits": [status.limit for status in decision.statuses],
            "revision": decision.revision,
            "error": decision.error,
        }

    found: list[tuple[str, int, int, list[int], str]] = []
    rest_now = threading.Event()

    def hammer(name: str) -> None:
        user = User.objects.get(username=name) if name else AnonymousUser()
        # A decision must follow what was published before its request.
        while not rest_now.is_set():
            published = default_limiter().stored_revision()
            request = RequestFactory().get("/")
            request.user = user
            decision = check_request(request)
            limits = [status.limit for status in decision.statuses]
            found.append((name, published, decision.revision, limits, decision.error))
        connection.close()

    def progress() -> bool:
        target = len(found) + 20
        poll(lambda: len(found) >= target, 30, "twenty more decisions")
        return True

    threads = [threading.Thread(target=hammer, args=[name]) for name in ("", "alice") * 4]

    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        verb, _, rest = line.strip().partition(" ")
        if verb == "check":
            answer: Any = check(*rest.split(" "))
        elif verb == "get":
            answer = Client().get(rest).status_code
        elif verb == "hammer":
            answer = [thread.start() for thread in threads]
        elif verb == "progress":
            answer = progress()
        elif verb == "rest":
            rest_now.set()
            answer = [thread.join() for thread in threads] and found
        else:
            exec(json.loads(rest), names)
            answer = names.pop("answer", None)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
