"""Find users by name, and the known subjects, such as ``tenant:acme``, that a text begins."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_network
from itertools import takewhile
from typing import Any

from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.db.models import Q, QuerySet
from django.utils import timezone

from ..changes.databases import subject_begins
from ..conf import settings
from ..exceptions import StoreError
from ..models import QuotaWindow
from ..monitoring.timeline import seen_callers
from ..utils.addresses import is_within, named_network, networks_around
from .subject_names import identified_subjects

#: Maximum number of subjects that are offered, and of rows that are read to find them: a subject may have several.
MAX_OFFERED, _MAX_ROWS = 20, 200
_SEEN = timedelta(hours=48)


def find_user(name: str, *, by_key: bool = False) -> Any:
    """Return the user with that login name, or the only one with that email address; None = no user.

    ``by_key`` looks for a primary key, where there is none of that name.
    """
    model: Any = get_user_model()
    users = model._default_manager
    if "\x00" in name:  # a database error in PostgreSQL's driver
        return None
    user = users.filter(**{model.USERNAME_FIELD: name}).first()
    mail = getattr(model, "EMAIL_FIELD", "")
    if user is None and "@" in name and mail:
        found = users.filter(**{mail: name})[:2]
        user = found[0] if len(found) == 1 else None
    if user is None and by_key:
        with suppress(ValueError, OverflowError, ValidationError):  # not a possible key
            user = users.filter(pk=name).first()
    return user


def policies_in(network: str, policies: QuerySet[Any]) -> list[Any]:
    """Return those of the policies for a network such as ``ip:203.0.113.0/24``, a wider one, or one in it."""
    outer = ip_network(network.removeprefix("ip:"))
    wider = networks_around(outer)
    ends = zip(str(outer[0]), str(outer[-1]), strict=False)
    begins = "".join(one for one, _other in takewhile(lambda pair: pair[0] == pair[1], ends))
    found = policies.filter(Q(subject__in=wider) | subject_begins(f"ip:{begins}", policies.db))
    found = found.select_related("user", "subject_list", "plan", "endpoint").order_by("subject", "pk")[:_MAX_ROWS]
    return [one for one in found if one.subject in wider or is_within(named_network(one.subject), outer)]


def known_subjects(text: str, tables: Iterable[QuerySet[Any]], *, seen: bool) -> list[str]:
    """Return subjects that begin with ``text``, in alphabetical order, at most ``MAX_OFFERED``.

    Without a colon, ``text`` begins the value of any identifier: ``ac`` finds ``tenant:acme``. ``tables`` are rows
    with a subject; with ``seen``, subjects counted in the last 48 hours are searched, too, and names.
    """
    if "\x00" in text:
        return []
    found: set[str] = set()
    sources = [rows.order_by() for rows in tables]
    if seen:
        sources.append(QuotaWindow.objects.filter(written_at__gt=timezone.now() - _SEEN).order_by())
        found.update(identified_subjects(text)[:MAX_OFFERED])
    for prefix in _prefixes(text):
        if len(found) >= MAX_OFFERED:
            break
        for rows in sources:
            found.update(_beginning(rows, prefix))
        # Statistics count callers only.
        if seen and prefix.partition(":")[0] in settings.caller and len(found) < MAX_OFFERED:
            with suppress(StoreError):  # the database knows some
                found.update(seen_callers(prefix, MAX_OFFERED))
    kinds = ("ip", *settings.identifiers)
    return sorted(one for one in found if one.partition(":")[0] in kinds)[:MAX_OFFERED]


def _prefixes(text: str) -> list[str]:
    if ":" in text:
        return [text]
    kinds = [f"{kind}:" for kind in settings.identifiers]
    return [kind for kind in kinds if kind.startswith(text)] + [f"{kind}{text}" for kind in kinds if text]


def _beginning(rows: QuerySet[Any], prefix: str) -> list[str]:
    """Return the first subjects with the prefix that the database finds."""
    subjects = rows.filter(subject_begins(prefix, rows.db)).values_list("subject", flat=True)[:_MAX_ROWS]
    return [subject for subject in subjects if subject.startswith(prefix)]
