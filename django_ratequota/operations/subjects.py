"""Subjects such as ``tenant:acme`` for operators: their display names, and the known ones that a text begins."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import ExitStack
from datetime import timedelta
from traceback import format_exception_only
from typing import Any

from django.db import connections, transaction
from django.db.models import QuerySet
from django.utils import timezone
from django.utils.module_loading import import_string

from ..changes.databases import subject_begins
from ..changes.validators import visible
from ..conf import settings
from ..exceptions import StoreError
from ..models import QuotaWindow
from ..monitoring.timeline import seen_callers
from ..utils.problems import note_problem

#: Most characters of a display name.
MAX_NAME = 100
#: Most subjects that are offered, and most rows that are read to find them: a subject may have several.
MAX_OFFERED, _MAX_ROWS = 20, 200
_SEEN = timedelta(hours=48)
#: Characters that a terminal may obey.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]+")


def subject_names(subjects: Iterable[str]) -> dict[str, str]:
    """Return subject -> display name of those that SUBJECT_NAMES names, in one call of it.

    It is asked about subjects of IDENTIFIERS only. Its exceptions are logged, and then no subject has a name.
    """
    path = settings.subject_names
    asked = sorted({subject for subject in subjects if _is_identified(subject)}) if path else []
    if not asked:
        return {}
    try:
        with ExitStack() as savepoints:
            for connection in connections.all(initialized_only=True):
                if connection.in_atomic_block:  # else its failing query would end the page's transaction, too
                    savepoints.enter_context(transaction.atomic(using=connection.alias))
            found = import_string(path)(asked) or {}
            names = {subject: _name(found[subject]) for subject in asked if found.get(subject)}
    except Exception as error:
        note_problem(path, f"{path} failed: {format_exception_only(error)[-1].strip()}", error)
        return {}
    return {subject: name for subject, name in names.items() if name}


def named(subject: str, name: str) -> str:
    """Return a subject with its display name, ``Acme GmbH (tenant:acme)``; the subject alone without one."""
    return f"{name} ({subject})" if name else subject


def printable(text: str) -> str:
    """Return the text for a terminal, in quotes and escaped if clients could forge lines or colours by it."""
    return text if text.isprintable() else repr(text)


def _is_identified(subject: str) -> bool:
    kind, _colon, value = subject.partition(":")
    return bool(value) and kind in settings.identifiers


def _name(value: Any) -> str:
    """Return the display name on one line, cut, without characters that reverse text or control a terminal."""
    text = visible(_CONTROL.sub(" ", str(value))).strip()
    return text if len(text) <= MAX_NAME else f"{text[: MAX_NAME - 1]}…"


def known_subjects(text: str, tables: Iterable[QuerySet[Any]], *, seen: bool) -> list[str]:
    """Return subjects that begin with ``text``, in alphabetical order, at most ``MAX_OFFERED``.

    Without a colon, ``text`` begins the value of any identifier: ``ac`` finds ``tenant:acme``. ``tables`` are rows
    with a subject; with ``seen``, subjects counted in the last 48 hours are searched, too.
    """
    if "\x00" in text:
        return []
    found: set[str] = set()
    sources = [rows.order_by() for rows in tables]
    if seen:
        sources.append(QuotaWindow.objects.filter(written_at__gt=timezone.now() - _SEEN).order_by())
    for prefix in _prefixes(text):
        if len(found) >= MAX_OFFERED:
            break
        for rows in sources:
            found.update(_beginning(rows, prefix))
        # Statistics count callers only.
        if seen and prefix.partition(":")[0] in settings.caller and len(found) < MAX_OFFERED:
            try:
                found.update(seen_callers(prefix, MAX_OFFERED))
            except StoreError:
                pass  # the database knows some
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
