"""Today's names of what is recorded by id: related objects, and callers such as ``user:42``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from django.contrib.auth import get_user_model
from django.db import models
from django.utils.translation import gettext

from ..operations.differences import object_names, primary_key
from .formatting import shown, shown_subject


def object_name(model: type[models.Model], pk: Any) -> str:
    """The object's name and id; the id alone where the model cannot have it."""
    if primary_key(model, pk) is None:
        return str(pk)
    name = object_names(model, [pk]).get(str(pk))
    return deleted(pk) if name is None else gettext("%(object)s (id %(pk)s)") % {"object": name, "pk": pk}


def deleted(pk: Any) -> str:
    """What stands for the name of a deleted object."""
    return gettext("deleted (id %(pk)s)") % {"pk": pk}


def usernames(callers: Iterable[str]) -> dict[str, str]:
    """Return caller -> user name of the callers that are users, in one query."""
    ids = {caller: caller.removeprefix("user:") for caller in callers if caller.startswith("user:")}
    names = object_names(get_user_model(), ids.values(), lambda user: user.get_username())
    return {caller: shown(names[pk]) for caller, pk in ids.items() if pk in names}


def described_callers(callers: Iterable[str]) -> dict[str, str]:
    """Return caller -> ``user:42 (alice)`` for users, the subject itself for others; one query."""
    callers = list(callers)
    names = usernames(callers)
    return {
        caller: f"{shown(caller)} ({names[caller]})" if caller in names else shown_subject(caller)
        for caller in callers
    }


def caller_text(caller: str, names: Mapping[str, str]) -> str:
    """``user alice`` for callers in ``names`` (see ``usernames``), the subject itself for others."""
    if caller in names:
        return gettext("user %s") % names[caller]
    return shown_subject(caller) if caller else gettext("unknown")
