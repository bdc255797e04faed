"""Ready receivers of ``policies_changed``, which send operators a mail or a chat message about each save.

Connect them in the ``ready`` method of an app's config. The text is written at once, and sent by a thread: no save
waits for a mail server. A process that ends, such as a command, waits until everything is sent.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.request import Request, urlopen

from django.core.mail import mail_managers
from django.db import models

from .models import PolicyChange
from .operations.differences import differences, label, related_names
from .recording.validators import visible
from .utils.locks import ForkSafeLock

__all__ = ["change_text", "mail_operators", "post_to"]

logger = logging.getLogger("django_ratequota")

#: Most changes that a text lists, and characters of each value.
_LISTED, _CHARACTERS = 20, 200
#: Most messages that wait; more are dropped, and that is logged.
_MOST_WAITING = 100
_TIMEOUT = 10.0

_waiting: deque[Callable[[], object]] = deque()
_sending = False
_lock = ForkSafeLock()


def mail_operators(*, changes: models.QuerySet[PolicyChange], actor: Any, reason: str, **_: Any) -> None:
    """Mail what a save changed to Django's ``MANAGERS``; a receiver of ``policies_changed``."""
    subject, text = change_text(changes, actor, reason)
    _send_later(partial(mail_managers, subject, text))


def post_to(url: str) -> Callable[..., None]:
    """Return a receiver of ``policies_changed`` that posts ``{"text": ...}`` to a webhook (Slack, Mattermost).

    Connect it with ``weak=False``. Raises ``ValueError`` for a URL that is not http or https.
    """
    if not url.startswith(("https://", "http://")):
        raise ValueError("post_to: write the webhook's whole address, https://...")

    def post(*, changes: models.QuerySet[PolicyChange], actor: Any, reason: str, **_: Any) -> None:
        data = json.dumps({"text": "\n".join(change_text(changes, actor, reason))}).encode()
        _send_later(partial(_post, Request(url, data, {"Content-Type": "application/json"})))  # noqa: S310 - checked

    return post


def change_text(changes: models.QuerySet[PolicyChange], actor: Any, reason: str) -> tuple[str, str]:
    """Return a subject, and a text with the values before and after of the first changes of a save."""
    rows = list(changes[: _LISTED + 1])
    more = changes.count() - _LISTED if len(rows) > _LISTED else 0
    who = visible(actor) if actor else "code or a command"
    names = related_names(difference for row in rows[:_LISTED] for difference in differences(row))
    lines = [f"By: {who}", f"Reason: {visible(reason) or 'none'}", ""]
    for row in rows[:_LISTED]:
        lines.append(_title(row))
        if row.action == PolicyChange.Action.UPDATE:
            lines += [
                f"  {label(name, field)}: {_value(names, field, before)} → {_value(names, field, after)}"
                for name, field, before, after in differences(row)
            ]
    if more:
        lines.append(f"and {more} more")
    subject = _title(rows[0]) if rows else "policies changed"
    if len(rows) > 1:
        subject += f" and {more + min(len(rows), _LISTED) - 1} more"
    return " ".join(f"Rate limits: {subject}".split())[:200], "\n".join(lines)


def _title(row: PolicyChange) -> str:
    return str(row) if row.model == "*" else f"{row.model} {row.get_action_display()}: {visible(row.object_text)}"


def _value(names: dict[Any, dict[str, str]], field: Any, value: Any) -> str:
    if value in (None, ""):
        return "empty"
    if field is not None and field.is_relation:
        value = names[field.related_model].get(str(value), f"deleted (id {value})")
    return visible(value)[:_CHARACTERS]


def _post(request: Request) -> None:
    with urlopen(request, timeout=_TIMEOUT):  # noqa: S310 - checked in ``post_to``
        pass


def _send_later(send: Callable[[], object]) -> None:
    """Call ``send`` on a thread, which ends when nothing waits; no daemon, so that a command ends after it."""
    global _sending
    with _lock:
        if len(_waiting) >= _MOST_WAITING:
            logger.error("a notification of a policy change was dropped: %d are waiting already", _MOST_WAITING)
            return
        _waiting.append(send)
        if _sending:
            return
        _sending = True
    try:
        threading.Thread(target=_send_all, name="ratequota-notify").start()
    except RuntimeError as error:  # no thread can be started
        with _lock:
            _waiting.clear()
            _sending = False
        logger.error("a notification of a policy change could not be sent: %s", error)


def _send_all() -> None:
    global _sending
    while True:
        with _lock:
            if not _waiting:
                _sending = False
                return
            send = _waiting.popleft()
        try:
            send()
        except Exception as error:
            # The class only: a message may hold the webhook's address, which is a secret.
            logger.error("a notification of a policy change was not sent: %s", type(error).__name__)


def _clear() -> None:
    # A forked child has no thread that sends.
    global _sending
    _waiting.clear()
    _sending = False


os.register_at_fork(after_in_child=_clear)
