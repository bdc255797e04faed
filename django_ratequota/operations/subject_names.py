"""Display names and mail addresses of subjects such as ``tenant:acme``, by functions of the project."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from traceback import format_exception_only
from typing import Any

from django.contrib.auth import get_user_model
from django.db import connections, transaction
from django.utils.module_loading import import_string

from ..changes.validators import visible
from ..conf import settings
from ..utils.problems import note_problem
from .differences import object_names

#: Most characters of a display name.
MAX_NAME = 100
#: Characters that a terminal may obey.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]+")


def subject_names(subjects: Iterable[str]) -> dict[str, str]:
    """Return subject -> display name of those that SUBJECT_NAMES names, in one call of it."""
    return _ask(settings.subject_names, subjects, _name)


def customer_emails(subjects: Iterable[str]) -> dict[str, str]:
    """Return subject -> mail address of those that CUSTOMER_EMAILS has one for, in one call of it."""
    return _ask(settings.customer_emails, subjects, str)


def _ask(path: str, subjects: Iterable[str], text: Callable[[Any], str]) -> dict[str, str]:
    """Return subject -> text of what the function at ``path`` returns for them; "" = there is no function.

    It is asked about subjects of IDENTIFIERS only. Its exceptions are logged, and then nothing is known of any.
    """
    asked = sorted({subject for subject in subjects if _is_identified(subject)}) if path else []
    if not asked:
        return {}
    try:
        with ExitStack() as savepoints:
            for connection in connections.all(initialized_only=True):
                if connection.in_atomic_block:  # else its failing query would end the page's transaction, too
                    savepoints.enter_context(transaction.atomic(using=connection.alias))
            found = import_string(path)(asked) or {}
            texts = {subject: text(found[subject]) for subject in asked if found.get(subject)}
    except Exception as error:
        note_problem(path, f"{path} failed: {format_exception_only(error)[-1].strip()}", error)
        return {}
    return {subject: one for subject, one in texts.items() if one}


def names_of(subjects: Iterable[str]) -> dict[str, str]:
    """Return subject -> user name, or display name: users in one query, others in one call of SUBJECT_NAMES."""
    subjects = set(subjects)
    ids = {subject: subject.removeprefix("user:") for subject in subjects if subject.startswith("user:")}
    users = object_names(get_user_model(), ids.values(), lambda user: user.get_username())
    found = {subject: users[pk] for subject, pk in ids.items() if pk in users}
    return found | subject_names(subjects - ids.keys())


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
