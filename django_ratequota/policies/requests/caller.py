"""The caller of a request: user, client address, custom identifiers, and the subjects of its counters."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from traceback import format_exception_only
from typing import Any, NamedTuple

from django.utils.functional import cached_property
from django.utils.module_loading import import_string

from ...conf import UNIX, settings
from ...engine.keys import short
from ...utils.addresses import Address, Network, unmap
from ...utils.problems import note_problem

#: Recent address headers whose result is kept, and their length in characters; longer ones are read each time.
_HEADERS, _LONGEST = 4096, 200
#: Most addresses that are read of X-Forwarded-For, from the right, and most characters of one address.
_MAX_HOPS, _MAX_ADDRESS = 32, 100

#: Subject of callers without an address, as behind an untrusted proxy on a Unix socket: they are limited together.
UNKNOWN = "ip:unknown"
#: Value of an identifier whose function raised: all such callers are counted together, as ``tenant:``. No policy can
#: name this value, and no function can return it, because an empty text means that the caller has none.
FAILED = ""


class ClientAddress(NamedTuple):
    """A client's address."""

    address: Address | None
    #: The address as part of a subject; None without one.
    text: str | None


class Caller:
    """The caller of one request. Each attribute is computed on first use, and once."""

    #: Whether ``user_id`` was read from the request; False = it is None even if a user is logged in.
    user_read = True
    #: Subject of policies counted per caller or ip if the caller has no name or address; "" = only blocks apply.
    unknown = UNKNOWN

    def __init__(self, request: Any, user: Any = None) -> None:
        """``user`` is the request's user if already known, as in async code; None = read ``request.user``."""
        self._request = request
        self._user = user
        self._values: dict[str, str | None] = {}

    @cached_property
    def user_id(self) -> str | None:
        """Return the logged-in user's primary key as text; None for anonymous callers."""
        user = self._user if self._user is not None else getattr(self._request, "user", None)
        if user is None or not user.is_authenticated:
            return None
        key = user.pk
        return None if key is None else str(key)

    @property
    def address(self) -> Address | None:
        """Return the client's address, according to the trusted proxies; None if there is none."""
        return self.client_address.address

    @cached_property
    def client_address(self) -> ClientAddress:
        """Return the client's address, and its text as part of a subject."""
        request = self._request
        # REST framework's request looks Django's attributes up by a function.
        meta = getattr(request, "_request", request).META
        remote = meta.get("REMOTE_ADDR") or ""
        forwarded = ""
        if settings.trusted_proxies:  # otherwise any client could have written the header
            forwarded = meta.get("HTTP_X_FORWARDED_FOR") or ""
            if not forwarded and "HTTP_FORWARDED" in meta:
                _note_forwarded(remote)
        read = _read_cached if len(remote) + len(forwarded) <= _LONGEST else _read
        return read(remote, forwarded, settings.generation)

    @cached_property
    def plan_slug(self) -> str | None:
        """Return PLAN_RESOLVER's slug; None = it has no opinion, it raised, or there is none."""
        path = settings.plan_resolver
        return self._call(path) or None if path else None

    @cached_property
    def name(self) -> str:
        """Return the subject of policies counted per caller: the first entry of CALLER that the caller has."""
        for kind in settings.caller:
            value = self.value(kind)
            if value is not None:
                return f"{kind}:{value}"
        return UNKNOWN

    def value(self, kind: str) -> str | None:
        """Return the caller's value of a kind of subject: ``user``, ``ip`` or a name from IDENTIFIERS.

        None = the caller has none; ``FAILED`` = the function raised.
        """
        if kind == "user":
            return self.user_id
        if kind == "ip":
            return self.client_address.text
        if kind not in self._values:
            path = settings.identifiers.get(kind)
            value = self._call(path) if path else None
            self._values[kind] = value if value is None else stored_value(value)
        return self._values[kind]

    def subject(self, counted_per: str, plan_id: int | None) -> str | None:
        """Return the subject that ``counted_per`` means for the caller; None or ``unknown`` if it has none."""
        if counted_per == "caller":
            return self.name if self.name != UNKNOWN else self.unknown
        if counted_per == "everyone":
            return "everyone"
        if counted_per == "plan":
            return None if plan_id is None else f"plan:{plan_id}"
        value = self.value(counted_per)
        if value is None and counted_per == "ip":
            return self.unknown
        return None if value is None else f"{counted_per}:{value}"

    def calls_functions(self, kinds: Iterable[str]) -> bool:
        """Return whether the project's functions find its name, its plan or its values of these kinds."""
        return bool(settings.plan_resolver) or not settings.identifiers.keys().isdisjoint((*settings.caller, *kinds))

    def _call(self, path: str) -> str | None:
        """Call a configured function; return ``FAILED`` if it raises, which is logged and never fails the request."""
        try:
            value = import_string(path)(self._request)
            text = "" if value is None else identifier_text(value)
        except Exception as error:
            # Not None, because a client that causes the error would then escape the policies counted per identifier.
            note_problem(path, f"{path} failed: {format_exception_only(error)[-1].strip()}", error)
            return FAILED
        return text or None


def identifier_text(value: Any) -> str:
    """Return an identifier's value as text; raises ``TypeError`` for a function or another object without a text."""
    # Because such a text holds a memory address, which may differ in each request.
    if callable(value):
        raise TypeError("it returned a function, not a text")
    cls: Any = type(value)
    if cls.__str__ is object.__str__ and cls.__repr__ is object.__repr__:
        raise TypeError(f"{cls.__name__} has no text of its own")
    return str(value)


def is_verified(kind: str) -> bool:
    """Whether the project has verified the subjects of this kind, so that no client can make up new ones.

    Addresses are not, nor are IDENTIFIERS whose function has ``ratequota_verified = False``, or that have none.
    """
    if kind not in settings.identifiers:
        return kind != "ip"
    path = settings.identifiers[kind]
    return path is not None and getattr(import_string(path), "ratequota_verified", True)


def stored_value(value: str) -> str:
    """Return an identifier's value as subjects have it. One that is written like a digest is hashed, too.

    Otherwise a client could write the digest of another one's value.
    """
    return short(f"\0{value}" if value.startswith("~") else value)


def failed_kind(subject: str) -> str:
    """Return the kind of a subject shared by callers after their identifier raised; "" for other subjects."""
    kind, colon, value = subject.partition(":")
    return kind if colon and value == FAILED else ""


class DescribedCaller(Caller):
    """A caller described by values instead of a request, for ``explain``.

    ``plan_slug`` and ``identifiers`` stand for the results of PLAN_RESOLVER and IDENTIFIERS; ``FAILED`` = it raised.
    """

    def __init__(
        self,
        *,
        user_id: str | None,
        address: str | None,
        identifiers: dict[str, str] | None = None,
        plan_slug: str | None = None,
    ) -> None:
        self.user_id = user_id
        self.client_address = _read(address or "", "", settings.generation)
        self.plan_slug = plan_slug
        self._values = {kind: short(value) for kind, value in (identifiers or {}).items()}

    @classmethod
    def named(cls, name: str, ip: str = "", plan_slug: str | None = None) -> DescribedCaller:
        """Return the caller that counters name so: ``user:42``, ``tenant:acme``, ``ip:2001:db8::/64``.

        ``ip`` names its address alike; "" = unknown. Of a network, the caller has the first address.
        """
        kind, _colon, value = name.partition(":")
        address = (ip or name if kind == "ip" else ip).removeprefix("ip:").partition("/")[0]
        identifiers = {} if kind in ("", "user", "ip") else {kind: value}
        user_id = value if kind == "user" else None
        return cls(user_id=user_id, address=address or None, identifiers=identifiers, plan_slug=plan_slug)

    def calls_functions(self, kinds: Iterable[str]) -> bool:
        """Return False: it is described by values."""
        return False

    def _call(self, path: str) -> None:
        """Return None: what is not described is unknown."""


class Unidentified(DescribedCaller):
    """A caller before the view authenticates it: only its address is known.

    The project's functions are not called, because they may rely on the user.
    """

    user_read = False

    def __init__(self, request: Any) -> None:
        super().__init__(user_id=None, address=None)
        self.client_address = Caller(request).client_address
        self.name = self.subject("ip", None) or UNKNOWN


def _read(remote: str, forwarded: str, _generation: int) -> ClientAddress:
    """Return the address that REMOTE_ADDR and X-Forwarded-For name, by the settings of this generation."""
    address = client_address(remote, forwarded, settings.networks, UNIX in settings.trusted_proxies)
    return ClientAddress(address, None if address is None else client_text(address, settings.ipv6_prefix))


# Because parsing is the slowest part of identifying a known caller.
_read_cached = lru_cache(_HEADERS)(_read)


def client_address(remote: str, forwarded: str, trusted: Iterable[Network], unix: bool = False) -> Address | None:
    """Return the client's address: the first untrusted hop from the peer leftwards through X-Forwarded-For.

    A ``remote`` that is no address, such as ``unix:`` or an empty text, is a peer on a Unix socket. In the header,
    text that is no address, and the ``_MAX_HOPS``-th address, end the walk at the last address before it. So what a
    client writes there itself is never believed.
    """
    hop = _parse(remote)
    if not _is_proxy(hop, trusted, unix):
        return hop
    # One piece more than is read: it holds the unread rest of a long header.
    for text in forwarded.rsplit(",", _MAX_HOPS)[: -_MAX_HOPS - 1 : -1] if forwarded else ():
        step = _parse(text)
        if step is None:
            break
        hop = step
        if not _within(hop, trusted):
            break
    return hop


def client_text(address: Address, ipv6_prefix: int) -> str:
    """Return the address as part of a subject: IPv4 as it is, IPv6 as its network of ``ipv6_prefix`` bits."""
    if isinstance(address, IPv4Address):
        return str(address)
    if ipv6_prefix == 128:
        return str(IPv6Address(int(address)))
    return str(IPv6Network((int(address), ipv6_prefix), strict=False))


def _parse(text: str) -> Address | None:
    text = text.strip()
    if len(text) > _MAX_ADDRESS:
        return None
    if text.startswith("["):  # [2001:db8::1]:4711
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:  # 203.0.113.7:4711
        text = text.partition(":")[0]
    try:
        return unmap(ip_address(text))
    except ValueError:
        return None


def _note_forwarded(remote: str) -> None:
    if _is_proxy(_parse(remote), settings.networks, UNIX in settings.trusted_proxies):
        text = "a proxy of TRUSTED_PROXIES sends Forwarded, which is not read, and no X-Forwarded-For"
        note_problem("forwarded", f"{text}, so that all clients behind it have its address")


def _is_proxy(hop: Address | None, trusted: Iterable[Network], unix: bool) -> bool:
    return unix if hop is None else _within(hop, trusted)


def _within(address: Address, networks: Iterable[Network]) -> bool:
    return any(address in network for network in networks)
