"""The account name in the body of a login request, normalized."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.base_user import BaseUserManager
from django.core.exceptions import ObjectDoesNotExist
from django.db import connections, router
from django.http import RawPostDataException

#: Most bytes of a body that is parsed as JSON. A larger one raises, because padding could hide the name.
_MAX_BODY = 65_536
#: Most characters that normalization may compose into one.
_COMPOSED = 4


def find_login_name(request: Any, fields: Iterable[str]) -> str | None:
    """Return the name in these fields of the body; None without one. Raises ``ValueError`` for two names."""
    # In each way that a view may read it.
    bodies = [_parsed(request)] if hasattr(request, "parser_context") else [request.POST, _json(request)]
    found = {
        normalize(str(value))
        for body in bodies
        for field in fields
        if (value := body.get(field)) is not None and value != ""
    } - {""}
    if len(found) > 1:
        raise ValueError(f"the request names two accounts to log in to, in {' or '.join(fields)}")
    return next(iter(found), None)


def _parsed(request: Any) -> Mapping[str, Any]:
    """Return the body of REST framework's request as parsed by the view's parsers."""
    from rest_framework.exceptions import APIException
    from rest_framework.request import Empty

    try:
        data = request.data
    except APIException:
        # Reset, because REST framework raises this once, and the view must raise it again.
        request._data = request._files = request._full_data = Empty
        raise
    return data if isinstance(data, Mapping) else {}


def _json(request: Any) -> Mapping[str, Any]:
    try:
        body = getattr(request, "body", b"")
    except RawPostDataException:
        return {}  # a form with files, whose stream was read already
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
    """Return one spelling for all texts that Django's login treats as the same account name."""
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
    # Unicode's NFKC_Casefold, but invisible characters stay, because exact comparisons distinguish them.
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return text.strip()[:length].rstrip()


def is_looked_up(model: Any, field: Any) -> bool:
    """Whether a login may find an account by another spelling of its name."""
    find = getattr(type(model._default_manager), "get_by_natural_key", None)
    if find is not None and find is not BaseUserManager.get_by_natural_key:
        return True
    loose = connections[router.db_for_read(model)].vendor == "mysql" or getattr(field, "db_collation", None)
    return find is not None and bool(loose)
