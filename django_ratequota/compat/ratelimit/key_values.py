"""The values of ``key``: ``ip``, ``user``, ``header:NAME`` and so on."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_address, ip_network
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from ...policies.requests.caller import Caller
from ...utils.addresses import unmap


def get_ip(request: Any) -> str:
    """Return the client's address, or its network by RATELIMIT_IPV4_MASK and RATELIMIT_IPV6_MASK."""
    where = getattr(settings, "RATELIMIT_IP_META_KEY", None)
    if not where:
        address: Any = Caller(request).address
        text = request.META.get("REMOTE_ADDR", "")
    else:
        text = _named_address(request, where)
        try:
            address = unmap(ip_address(text))
        except ValueError:
            address = None
    if address is None:
        raise ImproperlyConfigured(
            f"{text!r:.60} is not an IP address; set RATEQUOTA['TRUSTED_PROXIES'] to your proxies, or "
            "RATELIMIT_IP_META_KEY to the header that your proxy writes, or to a function"
        )
    name, default = ("RATELIMIT_IPV4_MASK", 32) if address.version == 4 else ("RATELIMIT_IPV6_MASK", 64)
    mask = getattr(settings, name, default)
    # A zone (fe80::1%eth0) names an interface of this host, not the client.
    return str(ip_network(f"{str(address).partition('%')[0]}/{mask}", strict=False).network_address)


def _named_address(request: Any, where: Any) -> str:
    if isinstance(where, str) and "." in where:
        where = import_string(where)
    if callable(where):
        return str(where(request))
    if where not in request.META:
        raise ImproperlyConfigured(f"RATELIMIT_IP_META_KEY names {where!r}, which this request does not have")
    return str(request.META[where])


_SIMPLE: dict[str, Callable[[Any], str]] = {
    "ip": get_ip,
    "user": lambda request: str(request.user.pk),
    "user_or_ip": lambda request: str(request.user.pk) if request.user.is_authenticated else get_ip(request),
}
_NAMED: dict[str, Callable[[Any, str], str]] = {
    "get": lambda request, name: request.GET.get(name, ""),
    "post": lambda request, name: request.POST.get(name, ""),
    "header": lambda request, name: request.META.get(f"HTTP_{name.replace('-', '_').upper()}", ""),
}


def value_of(key: Any, group: str, request: Any) -> str:
    """Return the value of ``key`` for the request; raises ``ImproperlyConfigured``."""
    if not key:
        raise ImproperlyConfigured("pass key='ip', 'user', 'header:x-api-key' ...: each value has its own counter")
    if not callable(key):
        if key in _SIMPLE:
            return _SIMPLE[key](request)
        kind, colon, name = key.partition(":")
        if colon and kind in _NAMED:
            return _NAMED[kind](request, name)
        if colon or "." not in key:
            known = ", ".join([*_SIMPLE, *(f"{kind}:NAME" for kind in _NAMED)])
            raise ImproperlyConfigured(f"there is no key {key!r}; there are {known}, functions and dotted paths")
        key = import_string(key)
    value = key(group, request)
    if not isinstance(value, str):
        raise ImproperlyConfigured(f"a key's function must return text, not {type(value).__name__}")
    return value
