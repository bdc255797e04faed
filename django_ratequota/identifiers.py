"""Ready-made identifiers: functions of the request for ``RATEQUOTA["IDENTIFIERS"]``.

``drf_api_key``, ``oauth_client`` and ``jwt_claim`` return only authenticated values. All others read unverified
input, which clients can vary: use them to count attempts, or keep a policy per ``ip`` or ``network`` in addition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from typing import Any

from django.contrib.auth import get_user_model
from django.core.exceptions import ObjectDoesNotExist, ValidationError

from .policies.requests.caller import Caller
from .policies.requests.login_names import find_login_name
from .utils.addresses import network_of

Identifier = Callable[[Any], str | None]


def _unverified(identifier: Identifier) -> Identifier:
    """Mark an identifier whose values clients can make up, claim or share (see ``caller.is_verified``)."""
    identifier.ratequota_verified = False  # type: ignore[attr-defined]
    return identifier


def login_field(*fields: str) -> Identifier:
    """Return a function like ``login_name`` that reads only these fields of the body."""

    def identify(request: Any) -> str | None:
        return find_login_name(request, fields)

    return _unverified(identify)


@_unverified
def login_name(request: Any) -> str | None:
    """Return the account that the request tries to log in to, in one spelling; None where it names none.

    Reads the fields ``username`` and the user model's ``USERNAME_FIELD`` of a form or JSON body, whatever its content
    type, because views may ignore that too. The name is stripped and normalized (``normalize_username``, NFKC) as by
    Django's login. It is also lowercased, even where the login is case-sensitive: two accounts that share a counter
    do no harm, but one account with many counters has no limit.

    Some logins find accounts by more than their exact name: a user manager with its own ``get_by_natural_key``; MySQL
    and MariaDB, whose collations treat é as e; a field with a ``db_collation``. There the account is looked up, one
    query, and its own name counts. An authentication backend that finds accounts in another way needs its own
    identifier, which returns the account's key.

    Raises ``ValueError`` where the body names two accounts, is too large or cannot be read: such requests share one
    counter.
    """
    return find_login_name(request, dict.fromkeys(("username", get_user_model().USERNAME_FIELD)))


def with_address(identifier: Identifier) -> Identifier:
    """Return an identifier that combines the client's address and ``identifier``; None where that is None."""

    def identify(request: Any) -> str | None:
        value = identifier(request)
        return value and f"{Caller(request).value('ip') or 'unknown'} {value}"

    return _unverified(identify)


#: One account from one address: failed logins there do not lock out the account elsewhere.
login_pair = with_address(login_name)


@_unverified
def network(request: Any) -> str:
    """Return the client's network, /24 of IPv4 and /48 of IPv6, such as ``203.0.113.0/24``.

    A client often controls its neighbouring addresses as well: providers assign a /48 to one customer, which is
    65,536 clients at an ``IPV6_PREFIX`` of 64.
    """
    address = Caller(request).address
    # "unknown" as in ip:unknown, so that callers without an address are limited as well.
    return "unknown" if address is None else network_of(address)


def header_key(header: str, scheme: str = "", known: Callable[[str], bool] | None = None) -> Identifier:
    """Return an identifier of the key in a header: the first 32 digits of its SHA-256, so that no page shows the key.

    ``scheme`` is the word before the key, such as ``Api-Key`` in ``Authorization``. ``known(key)`` tells whether
    the key exists: without it, a client that makes up keys gets a new counter with each.
    """

    def identify(request: Any) -> str | None:
        key = request.headers.get(header, "").strip()
        if scheme:
            word, _blank, key = key.partition(" ")
            key = key.strip() if word.lower() == scheme.lower() else ""
        if not key or (known is not None and not known(key)):
            return None
        return sha256(key.encode(errors="surrogatepass")).hexdigest()[:32]

    return identify if known else _unverified(identify)


#: The key in ``X-API-Key``, whether it exists or not.
header_api_key = header_key("X-API-Key")


def drf_api_key(request: Any) -> str | None:
    """Return the prefix of djangorestframework-api-key's verified key.

    It is read from ``request.auth``, or by the view's permission (``HasAPIKey`` or a subclass). Then it is verified
    again, one query, because another permission may have admitted the request. None outside REST framework's
    throttles, which run after permissions.
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
    """Return the ``client_id`` of django-oauth-toolkit's application, if the request has a valid token."""
    application = getattr(getattr(request, "auth", None), "application", None)
    return None if application is None else str(application.client_id)


def jwt_claim(name: str) -> Identifier:
    """Return an identifier of a claim of the verified JWT: ``request.auth`` of djangorestframework-simplejwt.

    Claims other than text and whole numbers are ignored.
    """

    def identify(request: Any) -> str | None:
        auth = getattr(request, "auth", None)
        payload = getattr(auth, "payload", auth)
        value = payload.get(name) if isinstance(payload, Mapping) else None
        return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None

    return identify


def _parts(permissions: Any) -> Iterator[Any]:
    """Yield the permissions, and the operands of REST framework's & and |."""
    for permission in permissions:
        yield permission
        yield from _parts(getattr(permission, name) for name in ("op1", "op2") if hasattr(permission, name))
