"""Who is asking: user, client address, custom identifiers, and the subject a counter belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from traceback import format_exception_only
from typing import Any, NamedTuple

from django.utils.functional import cached_property
from django.utils.module_loading import import_string

from ...conf import UNIX, settings
from ...engine.keys import short
from ...runtime import OncePerSettings
from ...utils.addresses import Address, Network, unmap
from ...utils.problems import note_problem

#: Headers that were read lately are known again; longer ones are read each time.
_HEADERS, _LONGEST = 4096, 200
#: Addresses of X-Forwarded-For that are looked at, from the right, and characters that one of them has at most.
_MAX_HOPS, _MAX_ADDRESS = 32, 100

#: Nobody is beyond limits for want of an address (a proxy on a Unix socket that is not trusted, say).
UNKNOWN = "ip:unknown"
#: The value of an identifier whose function raised: all such callers count as ``tenant:``. No function can return it,
#: since an empty text is no answer, and no policy can name it.
FAILED = ""


class Located(NamedTuple):
    """Where a request comes from."""

    address: Address | None
    #: The address as part of a subject; None without one.
    text: str | None


class Caller:
    """The caller of one request; what is asked of it is worked out once, and only when asked."""

    #: Whether ``user_id`` says who is logged in; False = nobody had to know, and it is None.
    user_read = True

    def __init__(self, request: Any, user: Any = None) -> None:
        """``user`` when it is known already (async code awaits it), else ``request.user`` is read."""
        self._request = request
        self._user = user
        self._values: dict[str, str | None] = {}

    @cached_property
    def user_id(self) -> str | None:
        """The logged-in user's primary key as text; None for anonymous callers."""
        user = self._user if self._user is not None else getattr(self._request, "user", None)
        if user is None or not user.is_authenticated:
            return None
        key = user.pk
        return None if key is None else str(key)

    @property
    def address(self) -> Address | None:
        """The client's address, as far as trusted proxies vouch for it; None when there is none."""
        return self.located.address

    @cached_property
    def located(self) -> Located:
        """The address, and the text that it counts by."""
        meta = self._request.META
        return _reader()(meta.get("REMOTE_ADDR") or "", meta.get("HTTP_X_FORWARDED_FOR") or "")

    @cached_property
    def plan_slug(self) -> str | None:
        """The slug that PLAN_RESOLVER returns; None, the default plan, without one and where it raises."""
        path = settings.plan_resolver
        return self._ask(path) or None if path else None

    @cached_property
    def name(self) -> str:
        """The subject of whatever is counted per caller: the first of CALLER that answers."""
        for kind in settings.caller:
            value = self.value(kind)
            if value is not None:
                return f"{kind}:{value}"
        return UNKNOWN

    def value(self, kind: str) -> str | None:
        """The caller's value of a kind of subject: ``user``, ``ip`` or a name from IDENTIFIERS.

        None = the caller has none; ``FAILED`` = the function raised.
        """
        if kind == "user":
            return self.user_id
        if kind == "ip":
            return self.located.text
        if kind not in self._values:
            value = self._find(kind)
            self._values[kind] = value if value is None else short(value)
        return self._values[kind]

    def subject(self, counted_per: str, plan_id: int | None) -> str | None:
        """Whose counter a policy counted per this uses; None when the caller has no such thing."""
        if counted_per == "caller":
            return self.name
        if counted_per == "everyone":
            return "everyone"
        if counted_per == "plan":
            return None if plan_id is None else f"plan:{plan_id}"
        value = self.value(counted_per)
        if value is None and counted_per == "ip":
            return UNKNOWN
        return None if value is None else f"{counted_per}:{value}"

    def _find(self, kind: str) -> str | None:
        path = settings.identifiers.get(kind)
        return self._ask(path) if path else None

    def _ask(self, path: str) -> str | None:
        """Call a configured function; ``FAILED`` where it raises, which is logged and never fails the request."""
        try:
            value = import_string(path)(self._request)
            text = "" if value is None else _text(value)
        except Exception as error:
            # A client may have caused it: without an answer it would leave the policies that count by one.
            note_problem(path, f"{path} failed: {format_exception_only(error)[-1].strip()}", error)
            return FAILED
        return text or None


def _text(value: Any) -> str:
    if callable(value):  # its text holds its address in memory, which may be another in each request
        raise TypeError("it returned a function, not a text")
    return str(value)


def failed_kind(subject: str) -> str:
    """The kind of a subject shared by all callers whose identifier raised; "" for other subjects."""
    kind, colon, value = subject.partition(":")
    return kind if colon and value == FAILED else ""


class DescribedCaller(Caller):
    """A caller described by hand, for ``explain``: no request stands behind it.

    ``plan_slug`` and ``identifiers`` are what PLAN_RESOLVER and the IDENTIFIERS would answer; ``FAILED`` = it raises.
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
        self.located = _located(None if address is None else unmap(ip_address(address)))
        self.plan_slug = plan_slug
        self._values = {kind: short(value) for kind, value in (identifiers or {}).items()}

    def _find(self, kind: str) -> str | None:
        return None


class Unidentified(Caller):
    """A caller before its view authenticates: an address, and nothing that depends on who is logged in.

    None of the project's functions is called: they may rely on the user.
    """

    def __init__(self, request: Any) -> None:
        super().__init__(request)
        self.user_id, self.user_read, self.plan_slug = None, False, None
        self.name = self.subject("ip", None) or UNKNOWN

    def _find(self, kind: str) -> str | None:
        return None


def _make_reader() -> Callable[[str, str], Located]:
    networks, trust_unix = settings.networks, UNIX in settings.trusted_proxies

    def read(remote: str, forwarded: str) -> Located:
        return _located(client_address(remote, forwarded, networks, trust_unix))

    # Reading an address costs more than all else that is asked of a caller who came before.
    known = lru_cache(_HEADERS)(read)

    def read_headers(remote: str, forwarded: str) -> Located:
        if not networks and not trust_unix:
            forwarded = ""  # nobody's is believed
        return (known if len(remote) + len(forwarded) <= _LONGEST else read)(remote, forwarded)

    return read_headers


#: (REMOTE_ADDR, X-Forwarded-For) -> where the request comes from, by the settings in force.
_reader = OncePerSettings(_make_reader)


def _located(address: Address | None) -> Located:
    return Located(address, None if address is None else client_text(address, settings.ipv6_prefix))


def client_address(
    remote: str, forwarded: str, trusted: Iterable[Network], trust_unix: bool = False
) -> Address | None:
    """The client's address: from the peer leftwards through X-Forwarded-For, as long as each hop is trusted.

    Anything that is no address ends the walk at the last hop that was one, so that what a client writes there
    itself is never believed. So does the ``_MAX_HOPS``-th address.
    """
    hop = _read(remote)
    if hop is None and not (trust_unix and not remote):
        return None
    if hop is not None and not _within(hop, trusted):
        return hop
    # One piece more than is looked at: the rest of a long header stays unread in it.
    for text in forwarded.rsplit(",", _MAX_HOPS)[: -_MAX_HOPS - 1 : -1] if forwarded else ():
        step = _read(text)
        if step is None:
            break
        hop = step
        if not _within(hop, trusted):
            break
    return hop


def client_text(address: Address, ipv6_prefix: int) -> str:
    """The address as part of a subject: IPv4 as it is, IPv6 as the network that counts as one client."""
    if isinstance(address, IPv4Address):
        return str(address)
    if ipv6_prefix == 128:
        return str(IPv6Address(int(address)))
    return str(IPv6Network((int(address), ipv6_prefix), strict=False))


def _read(text: str) -> Address | None:
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


def _within(address: Address, networks: Iterable[Network]) -> bool:
    return any(address in network for network in networks)
