"""The account that a request tries to log in to: wherever the body names it, in one spelling."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.base_user import BaseUserManager
from django.core.exceptions import ObjectDoesNotExist
from django.db import connections, router
from django.http import RawPostDataException

#: Bytes of a body that are read as JSON. A larger one raises: else padding would hide the name.
_MAX_BODY = 65_536
#: As many characters may become one when they are normalized.
_COMPOSED = 4


def find_login_name(request: Any, fields: Iterable[str]) -> str | None:
    """Return the name in these fields of the body, None where there is none; raises ``ValueError`` for two names."""
    found = {
        normalize(str(value))
        for body in _bodies(request)
        for field in fields
        if (value := body.get(field)) is not None and value != ""
    } - {""}
    if len(found) > 1:
        raise ValueError(f"the request names two accounts to log in to, in {' or '.join(fields)}")
    return next(iter(found), None)


def _bodies(request: Any) -> Iterator[Mapping[str, Any]]:
    """The body in each way that a view may read it."""
    if hasattr(request, "parser_context"):  # REST framework's request
        yield _parsed(request)
    else:
        yield request.POST
        yield _json(request)


def _parsed(request: Any) -> Mapping[str, Any]:
    """The body by the view's own parsers."""
    from rest_framework.exceptions import APIException
    from rest_framework.request import Empty

    try:
        data = request.data
    except APIException:
        # REST framework says what is wrong once: the view must still hear it.
        request._data = request._files = request._full_data = Empty
        raise
    return data if isinstance(data, Mapping) else {}


def _json(request: Any) -> Mapping[str, Any]:
    try:
        body = getattr(request, "body", b"")
    except RawPostDataException:
        return {}  # a form with files: reading it has used it up, for the view as well
    if not body:
        return {}
    if len(body) > _MAX_BODY:
        raise ValueError(f"the body has more than {_MAX_BODY} bytes")
    try:
        data = json.loads(body)
    except ValueError:
        if "json" in (request.content_type or ""):
            raise
        return {}
    return data if isinstance(data, Mapping) else {}


def normalize(text: str) -> str:
    """One spelling of an account's name; texts that Django's login takes for each other have the same."""
    model = get_user_model()
    field = model._meta.get_field(model.USERNAME_FIELD)
    length = getattr(field, "max_length", None) or 254  # as AuthenticationForm has it
    text = text.strip()
    if len(text) > length * _COMPOSED:
        raise ValueError(f"a login name of {len(text)} characters")
    text = model.normalize_username(text)
    if is_looked_up(model, field):
        try:
            text = model._default_manager.get_by_natural_key(text).get_username()
        except ObjectDoesNotExist:
            pass
    # As Unicode's NFKC_Casefold, without its removal of invisible characters: exact comparisons tell these apart.
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return text.strip()[:length].rstrip()


def is_looked_up(model: Any, field: Any) -> bool:
    """Whether a login may find an account by a name that is not its own."""
    find = getattr(type(model._default_manager), "get_by_natural_key", None)
    if find is not None and find is not BaseUserManager.get_by_natural_key:
        return True
    loose = connections[router.db_for_read(model)].vendor == "mysql" or getattr(field, "db_collation", None)
    return find is not None and bool(loose)
