"""Ready identifiers: functions of the request for ``RATEQUOTA["IDENTIFIERS"]``.

``drf_api_key``, ``oauth_client`` and those of ``jwt_claim`` answer only what an authentication has proved. All others
read what a client writes: count attempts by them, or keep a policy per ``ip`` or ``network`` beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from typing import Any

from django.contrib.auth import get_user_model
from django.core.exceptions import ObjectDoesNotExist, ValidationError

from .policies.requests.identity import Caller
from .policies.requests.login_names import find_login_name
from .utils.addresses import network_of

Identifier = Callable[[Any], str | None]


def login_field(*fields: str) -> Identifier:
    """Return a function like ``login_name`` that reads these fields of the body and no others."""

    def identify(request: Any) -> str | None:
        return find_login_name(request, fields)

    return identify


def login_name(request: Any) -> str | None:
    """Return the account that the request tries to log in to, in one spelling; None where it names none.

    Reads the fields ``username`` and the user model's ``USERNAME_FIELD``, of a form or of a JSON body, whatever type
    the body says it has: the view may not ask either. The name is stripped and normalized (``normalize_username``,
    NFKC) as Django's login does it. It is folded to lower case too, even where the login tells cases apart: two
    accounts that share a counter harm nobody, but one account with many counters has no limit.

    Where the login finds accounts by more than their exact name (the user manager has a ``get_by_natural_key`` of its
    own; MySQL and MariaDB, whose collations take é for e; a field with a ``db_collation``), the account is looked up,
    one query, and its own name counts. An authentication backend that finds accounts in another way needs an
    identifier of its own, which returns the account's key.

    Raises ``ValueError`` where the body names two accounts, is too large or cannot be read: such requests share one
    counter.
    """
    return find_login_name(request, dict.fromkeys(("username", get_user_model().USERNAME_FIELD)))


def with_address(identifier: Identifier) -> Identifier:
    """Return an identifier of the client's address with the value of ``identifier``; None where that is None."""

    def identify(request: Any) -> str | None:
        value = identifier(request)
        return value and f"{Caller(request).value('ip') or 'unknown'} {value}"

    return identify


#: One account as tried from one address: failures there do not lock out the same account elsewhere.
login_pair = with_address(login_name)


def network(request: Any) -> str:
    """Return the client's network, /24 of IPv4 and /48 of IPv6, such as ``203.0.113.0/24``.

    A client with one address often has its neighbours: providers give one customer a /48, which is 65,536 clients at
    an ``IPV6_PREFIX`` of 64.
    """
    address = Caller(request).address
    # "unknown" as in ip:unknown: nobody is beyond limits for want of an address.
    return "unknown" if address is None else network_of(address)


def header_key(header: str, scheme: str = "", known: Callable[[str], bool] | None = None) -> Identifier:
    """Return an identifier of the key in a header: the first 32 digits of its SHA-256, so that no page shows the key.

    ``scheme`` is the word before the key, such as ``Api-Key`` in ``Authorization``. ``known(key)`` says whether the
    key exists: without it a client that makes up keys gets a new counter with each.
    """

    def identify(request: Any) -> str | None:
        key = request.headers.get(header, "").strip()
        if scheme:
            word, _blank, key = key.partition(" ")
            key = key.strip() if word.lower() == scheme.lower() else ""
        if not key or (known is not None and not known(key)):
            return None
        return sha256(key.encode(errors="surrogatepass")).hexdigest()[:32]

    return identify


#: The key in ``X-API-Key``, whether it exists or not.
header_api_key = header_key("X-API-Key")


def drf_api_key(request: Any) -> str | None:
    """Return the prefix of djangorestframework-api-key's key, once it is proved: by ``request.auth``, or by the view.

    The view's permission (``HasAPIKey`` or one of its kind) says where the key is and which model knows it. The key
    is verified again, one query: a permission may have let the request pass for another reason. None outside REST
    framework's throttle, which runs after permissions.
    """
    auth: Any = getattr(request, "auth", None)
    if hasattr(auth, "hashed_key"):
        return str(auth.prefix)
    view = (getattr(request, "parser_context", None) or {}).get("view")
    for permission in _parts(view.get_permissions() if view is not None else ()):
        keys: Any = getattr(getattr(permission, "model", None), "objects", None)
        text = permission.get_key(request) if hasattr(keys, "get_from_key") else None
        try:
            key = keys.get_from_key(text) if text else None
        except (ObjectDoesNotExist, ValidationError):
            continue
        if key is not None and not key.has_expired:
            return str(key.prefix)
    return None


def oauth_client(request: Any) -> str | None:
    """Return the ``client_id`` of django-oauth-toolkit's application, once a token is proved."""
    application = getattr(getattr(request, "auth", None), "application", None)
    return None if application is None else str(application.client_id)


def jwt_claim(name: str) -> Identifier:
    """Return an identifier of a claim of the JWT that was proved: ``request.auth`` of djangorestframework-simplejwt.

    A claim that is no text and no whole number counts as none.
    """

    def identify(request: Any) -> str | None:
        auth = getattr(request, "auth", None)
        payload = getattr(auth, "payload", auth)
        value = payload.get(name) if isinstance(payload, Mapping) else None
        return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None

    return identify


def _parts(permissions: Any) -> Iterator[Any]:
    """The permissions, and the operands of REST framework's & and |."""
    for permission in permissions:
        yield permission
        yield from _parts(getattr(permission, name) for name in ("op1", "op2") if hasattr(permission, name))
