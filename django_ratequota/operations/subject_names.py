"""Display names, mail addresses and the search of subjects such as ``tenant:acme``, by functions of the project."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import islice
from traceback import format_exception_only
from typing import Any, TypeVar

from django.contrib.auth import get_user_model
from django.db import connections, transaction
from django.utils.module_loading import import_string

from ..changes.validators import visible
from ..conf import settings
from ..utils.problems import note_problem
from .differences import object_names

#: Maximum length of a display name, and maximum number of subjects found by a part of it.
MAX_NAME, _MOST_FOUND = 100, 1_000
#: Characters that a terminal may obey.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]+")
_Result = TypeVar("_Result")


def subject_names(subjects: Iterable[str]) -> dict[str, str]:
    """Return subject -> display name of those that SUBJECT_NAMES names, in one call of it."""
    return _ask(settings.subject_names, subjects, _name)


def customer_emails(subjects: Iterable[str]) -> dict[str, str]:
    """Return subject -> mail address of those that CUSTOMER_EMAILS has one for, in one call of it."""
    return _ask(settings.customer_emails, subjects, str)


def subjects_named(text: str) -> list[str]:
    """Return subjects whose names contain the text: users, and what SUBJECT_NAMES' ``ratequota_search`` finds."""
    model: Any = get_user_model()
    users = model._default_manager.filter(**{f"{model.USERNAME_FIELD}__icontains": text})
    keys = users.order_by().values_list("pk", flat=True)[:_MOST_FOUND]
    return [*(f"user:{pk}" for pk in keys), *identified_subjects(text)]


def identified_subjects(text: str) -> list[str]:
    """Return subjects of IDENTIFIERS whose names contain the text, as far as the project can search them."""

    def search(names: Any) -> list[str]:
        found: Any = getattr(names, "ratequota_search", lambda _text: ())(text)
        return [subject for subject in islice(found, _MOST_FOUND) if _is_identified(subject)]

    return _call(settings.subject_names, search) or [] if text else []


def _ask(path: str, subjects: Iterable[str], text: Callable[[Any], str]) -> dict[str, str]:
    """Return subject -> text of what the function at ``path`` returns of those of IDENTIFIERS."""
    asked = sorted({subject for subject in subjects if _is_identified(subject)})

    def answer(function: Any) -> dict[str, str]:
        found = function(asked) or {}
        return {subject: text(found[subject]) for subject in asked if found.get(subject)}

    texts = _call(path, answer) if asked else None
    return {subject: one for subject, one in (texts or {}).items() if one}


def _call(path: str, use: Callable[[Any], _Result]) -> _Result | None:
    """Return what ``use`` makes of the function at ``path``; None where none is, or it raises, which is logged."""
    try:
        with ExitStack() as savepoints:
            for connection in connections.all(initialized_only=True):
                if connection.in_atomic_block:  # else its failing query would end the page's transaction, too
                    savepoints.enter_context(transaction.atomic(using=connection.alias))
            return use(import_string(path)) if path else None
    except Exception as error:
        note_problem(path, f"{path} failed: {format_exception_only(error)[-1].strip()}", error)
        return None


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


def _is_identified(subject: str) -> bool:
    kind, _colon, value = subject.partition(":")
    return bool(value) and kind in settings.identifiers


def _name(value: Any) -> str:
    """Return the display name on one line, cut, without characters that reverse text or control a terminal."""
    text = visible(_CONTROL.sub(" ", str(value))).strip()
    return text if len(text) <= MAX_NAME else f"{text[: MAX_NAME - 1]}…"
