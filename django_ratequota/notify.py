"""Ready receivers of ``policies_changed`` and ``quota_threshold``, which send a mail, a chat message or a webhook.

Connect them in the ``ready`` method of an app's config, or name those of ``quota_threshold`` in NOTIFY. The text is
written at once, and sent by a thread: no save waits for a mail server. A process that ends, such as a command, waits
until everything is sent.
"""

from __future__ import annotations

import hmac
import json
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener
from weakref import WeakSet

from django.contrib.auth import get_user_model
from django.core.mail import mail_managers, send_mail
from django.db import models
from django.template.loader import render_to_string
from django.utils import timezone
from django.utils.translation import gettext

from .conf import settings
from .engine.rates import Rate, format_period
from .engine.types import BucketStatus
from .models import PolicyChange
from .monitoring.alerts import Crossing, digest
from .operations.recorded import Words, name_users
from .operations.subjects import customer_emails, subject_names
from .operations.texts import number_text
from .policies.limit_names import limit_name
from .utils import forks
from .utils.escaping import one_line
from .utils.log import logger

__all__ = ["change_text", "mail_customers", "mail_operators", "post_to", "threshold_text"]


#: Maximum number of changes that a text lists, and of characters of each value; in a chat so few that the
#: first line, which is cut, keeps its second backtick.
_LISTED, _CHARACTERS, _CHAT_CHARACTERS = 20, 200, 100
#: What a chat may obey between backticks, too: Slack's <commands>, and mentions, which a space of no width ends.
_CHAT_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "@\u200b"})
#: Maximum number of waiting messages; more are dropped, which is logged.
_MOST_WAITING = 100
_TIMEOUT = 10.0
#: Bytes of the shortest key of a signature.
_LEAST_KEY = 16

#: Sends one after another.
_sender: ThreadPoolExecutor
#: The message that is being sent, and those that wait: the sender keeps each until it is sent.
_unsent: WeakSet[Future[None]]


def mail_operators(**event: Any) -> None:
    """Mail what a save changed, or how full a limit is, to Django's ``MANAGERS``."""
    _send_later(mail_managers, *_text(event))


def mail_customers(*, level: int, status: BucketStatus, at: datetime, cost: int, **_: Any) -> None:
    """Email the customer with a nearly used up limit, for ``NOTIFY``.

    Users have their email field, other subjects the addresses of CUSTOMER_EMAILS. Nobody is mailed about a limit that
    is log only, or shared: by a plan, everyone or an address.
    """
    bucket = status.bucket
    name, address = _customer(bucket.subject) if bucket.mode == "enforce" else ("", "")
    if not address:
        return
    unit = gettext("requests") if bucket.rate.counts == "requests" else gettext("units")
    refused = _refused_cost(level, status, cost)
    context = {
        "name": name,
        "used": number_text(status.used + status.debt),
        "limit": number_text(status.limit),
        "unit": unit,
        "rate": _in_words(bucket.rate, unit),
        "endpoint": bucket.scope,
        "resets_at": _resets_at(status, at),
        "level": level,
        "refused_cost": number_text(refused) if refused else "",
    }
    template = "django_ratequota/mail/quota_threshold"
    with timezone.override(settings.time_zone):
        subject, text = (render_to_string(f"{template}{part}.txt", context) for part in ("_subject", ""))
    _send_later(send_mail, " ".join(subject.split()), f"{text.strip()}\n", None, [address])


def _customer(subject: str) -> tuple[str, str]:
    """Return the name and the email address of a counter's subject; "" = it is not a customer or has no address."""
    kind, _colon, value = subject.partition(":")
    if kind != "user":
        return subject_names([subject]).get(subject, ""), customer_emails([subject]).get(subject, "")
    model: Any = get_user_model()
    user = model._default_manager.filter(pk=value).first()
    return one_line(str(user)), getattr(user, getattr(model, "EMAIL_FIELD", ""), "")


def _in_words(rate: Rate, unit: str) -> str:
    texts = {
        "day": gettext("%(limit)s %(unit)s per day"),
        "week": gettext("%(limit)s %(unit)s per week"),
        "month": gettext("%(limit)s %(unit)s per month"),
    }
    text = texts.get(rate.calendar) or gettext("%(limit)s %(unit)s per %(period)s")
    return text % {"limit": number_text(rate.limit), "unit": unit, "period": format_period(rate.period)}


def post_to(url: str, secret: str = "") -> Callable[..., None]:
    """Return a receiver that posts to a webhook: ``{"text": ...}`` for a chat, or with a ``secret`` a signed event.

    Names in a chat's text stand in backticks, and mention nobody. A redirect is not followed.

    The signature is the one of Standard Webhooks; a secret that begins with ``whsec_`` goes on in base64. Connect the
    receiver with ``weak=False``. Raises ``ValueError`` for a URL that is not http or https, and for a short secret.
    """
    if not url.startswith(("https://", "http://")):
        raise ValueError("post_to: write the webhook's whole address, https://...")
    key = _key(secret) if secret else b""

    def post(**event: Any) -> None:
        if key:
            name, data = _event(event)
            _send_later(_post, url, json.dumps(data).encode(), key, name)
        else:
            text = "\n".join(_text(event, _for_chat)).translate(_CHAT_ESCAPES)
            _send_later(_post, url, json.dumps({"text": text}).encode())

    return post


def _key(secret: str) -> bytes:
    try:
        key = b64decode(secret[6:], validate=True) if secret.startswith("whsec_") else secret.encode()
    except ValueError:
        key = b""
    if len(key) < _LEAST_KEY:
        raise ValueError(f"post_to: write a secret of {_LEAST_KEY} characters or more, or whsec_ and base64")
    return key


def _plain(text: Any) -> str:
    """Return a name or a value for an email."""
    return one_line(str(text))[:_CHARACTERS]


def _for_chat(text: Any) -> str:
    """Return a name or a value between backticks, where chats read no links."""
    line = one_line(str(text)).replace("`", "'")
    return f"`{line[:_CHAT_CHARACTERS]}`"


def _text(event: dict[str, Any], quote: Callable[[Any], str] = _plain) -> tuple[str, str]:
    if "changes" in event:
        return change_text(event["changes"], event["actor"], event["reason"], quote=quote)
    return threshold_text(event["level"], event["status"], event["at"], cost=event["cost"], quote=quote)


def _event(event: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return an id, the same from every process that sends this event, and what is posted of it."""
    text = "\n".join(_text(event))
    if "changes" in event:
        data = {"text": text, "reason": str(event["reason"]), "revision": event["revision"]}
        at = datetime.now(UTC)
        return str(event["change_id"]), {"type": "policies_changed", "timestamp": at.isoformat(), "data": data}
    level, status, at, cost = (event[name] for name in ("level", "status", "at", "cost"))
    bucket, at_us = status.bucket, round(at.timestamp() * 10**6)
    # A fixed window is in the name; other rates reach a level once a period at most.
    period = 0 if bucket.rate.algorithm == "fixed_window" else at_us // status.window_us
    data = {
        "text": text,
        "level": level,
        "subject": bucket.subject,
        "endpoint": bucket.scope,
        "rate": str(bucket.rate),
        "unit": bucket.rate.counts,
        "used": status.used + status.debt,
        "limit": status.limit,
        "cost": cost,
        "allowed": status.allowed,
        "resets_at": (at + timedelta(microseconds=status.reset_after_us)).isoformat(),
        "mode": bucket.mode,
        "policy": bucket.policy_id,
    }
    name = digest(settings.prefix, *Crossing(level, status, cost, at_us).name, period)
    return name, {"type": "quota_threshold", "timestamp": at.isoformat(), "data": data}


def threshold_text(
    level: int, status: BucketStatus, at: datetime, *, cost: int, quote: Callable[[Any], str] = _plain
) -> tuple[str, str]:
    """Return a subject and a text about a limit that is ``level`` percent used, or refused a request of ``cost``."""
    bucket, used = status.bucket, status.used + status.debt
    who, limit = quote(bucket.subject), one_line(limit_name(bucket))
    subject = f"{who} has used {level} % of {limit}"
    if refused := _refused_cost(level, status, cost):
        verb = "was refused" if bucket.mode == "enforce" else "would have been refused"
        subject = f"a request of {refused} by {who} {verb} at {used} of {limit}"
    ends = "The window ends" if bucket.rate.algorithm == "fixed_window" else "Full again"
    lines = [f"Used: {used} of {status.limit}", f"{ends}: {_resets_at(status, at):%Y-%m-%d %H:%M %Z}"]
    if bucket.policy_id is not None:
        lines.append(f"Policy: {bucket.policy_id}, counted per {bucket.counted_per or 'caller'}")
    return f"Rate limits: {subject}"[:200], "\n".join(lines)


def _refused_cost(level: int, status: BucketStatus, cost: int) -> int:
    """Return the cost of the refused request that the level is about; 0 where the limit is that far used."""
    return cost if level == 100 and status.remaining else 0


def _resets_at(status: BucketStatus, at: datetime) -> datetime:
    return (at + timedelta(microseconds=status.reset_after_us)).astimezone(settings.time_zone)


def change_text(
    changes: models.QuerySet[PolicyChange], actor: Any, reason: str, *, quote: Callable[[Any], str] = _plain
) -> tuple[str, str]:
    """Return a subject, and a text with the values before and after of the first changes of a save."""
    rows = list(changes[: _LISTED + 1])
    name_users(rows)
    number = changes.count() if len(rows) > _LISTED else len(rows)
    who = quote(actor) if actor else "code or a command"
    words = Words(rows)
    lines = [f"By: {who}", f"Reason: {quote(reason) if reason else 'none'}", ""]
    for row in rows[:_LISTED]:
        lines.append(_title(row, quote))
        if row.action == PolicyChange.Action.UPDATE:
            for label, *values in words.table(row):
                before, after = (quote(value) if value else "empty" for value in values)
                lines.append(f"  {label}: {before} → {after}")
    if number > _LISTED:
        lines.append(f"and {number - _LISTED} more")
    subject = _title(rows[0], quote) if rows else "policies changed"
    if number > 1:
        subject += f" and {number - 1} more"
    return f"Rate limits: {subject}"[:200], "\n".join(lines)


def _title(row: PolicyChange, quote: Callable[[Any], str]) -> str:
    return str(row) if row.model == "*" else f"{row.model} {row.get_action_display()}: {quote(row.object_text)}"


class _NoRedirect(HTTPRedirectHandler):
    """Makes a redirect an error: it could lead a message to a server inside the network."""

    def redirect_request(self, *_: Any) -> None:
        return None


_opener = build_opener(_NoRedirect)


def _post(url: str, data: bytes, key: bytes = b"", name: str = "") -> None:
    headers = {"Content-Type": "application/json"}
    if key:
        # https://www.standardwebhooks.com; the time is the one of sending, for receivers that refuse old ones.
        at = str(int(time.time()))
        signature = b64encode(hmac.digest(key, f"{name}.{at}.".encode() + data, "sha256")).decode()
        headers |= {"webhook-id": name, "webhook-timestamp": at, "webhook-signature": f"v1,{signature}"}
    request = Request(url, data, headers)  # noqa: S310 - checked in ``post_to``
    try:
        _opener.open(request, timeout=_TIMEOUT).close()
    except HTTPError as error:
        error.close()  # it holds the reply, and so a connection
        raise


def _send_later(send: Callable[..., object], *args: Any) -> None:
    """Call ``send`` on a thread, or here where none can be started; a process that ends does so after it."""
    if len(_unsent) > _MOST_WAITING:
        logger.error("a notification was dropped: %d are waiting already", _MOST_WAITING)
        return
    try:
        _unsent.add(_sender.submit(_send, send, *args))
    except RuntimeError:  # the system has no thread left, or the process ends
        _send(send, *args)


def _send(send: Callable[..., object], *args: Any) -> None:
    try:
        send(*args)
    except Exception as error:
        # The class only: a message may hold the webhook's address, which is a secret.
        logger.error("a notification was not sent: %s", type(error).__name__)


def wait_until_sent() -> None:
    """Wait until everything that waits now is sent, for tests."""
    _sender.submit(bool).result()


def _renew() -> None:
    # A forked child has no thread that sends.
    global _sender, _unsent
    _sender, _unsent = ThreadPoolExecutor(1, "ratequota-notify"), WeakSet()


_renew()
forks.after_fork(_renew)
