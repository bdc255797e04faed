"""The Django setting ``RATEQUOTA = {...}``: every key optional, read once, read anew when a test overrides it."""

from __future__ import annotations

import zoneinfo
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import tzinfo
from difflib import get_close_matches
from inspect import iscoroutinefunction
from ipaddress import ip_network
from typing import Any, Generic, TypeVar

from django.conf import settings as django_settings
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from .engine.keys import check_prefix
from .exceptions import ConfigurationError, InvalidBucket
from .utils.addresses import Network, unmap_network
from .utils.locks import ForkSafeLock

#: Functions that return identifiers, and are none themselves.
_FACTORIES = tuple(
    f"django_ratequota.identifiers.{name}" for name in ("header_key", "jwt_claim", "login_field", "with_address")
)
#: What a policy may count per besides the names in IDENTIFIERS.
COUNTED_PER = ("caller", "ip", "plan", "everyone")
ON_ERROR = ("allow", "deny", "local")
#: Wire forms of the response headers; ``headers.FORMS`` has a function for each.
HEADER_FORMS = ("ietf", "ietf-11", "x-ratelimit")
#: A trusted proxy that talks through a Unix socket has no address.
UNIX = "unix"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``RATEQUOTA`` with its defaults. Field names are the keys in lower case."""

    #: CACHES alias of django-redis whose server and credentials are used, on connections of our own.
    cache: str = "default"
    #: redis://, rediss://, unix:// or redis+sentinel:// URL, instead of CACHE.
    redis_url: str = ""
    #: REDIS_URL is any node of a Redis Cluster.
    cluster: bool = False
    #: First part of every Redis key: 1 to 16 ASCII letters, digits or _ . : -
    prefix: str = "rq"
    #: Seconds that a decision may wait for Redis, connecting included.
    timeout: float = 0.1
    #: Most connections to each Redis server: of a process for its threads, and of each event loop. Callers stand in
    #: line for one. Fewer where the alias, or the URL, sets a smaller max_connections.
    max_connections: int = 64
    #: What a policy without its own on_error does while Redis gives no decision: allow, deny (503) or local.
    on_error: str = "allow"
    #: Consecutive failures after which Redis is left alone and probed by one request a second.
    breaker_failures: int = 3
    #: Processes among which on_error = local divides each limit.
    local_share: int = 4
    #: Seconds between looks for policy changes whose publication was lost.
    poll_seconds: float = 30.0
    #: Seconds that a request without any limit may rely on the last look at the revision; 0 = it always asks.
    #: On a Cluster all requests rely on it, for 1 second where this is 0.
    revision_max_age: float = 0.0
    #: Seconds that a refusal may be repeated in this process without asking Redis again; 0 = it always asks.
    deny_cache_seconds: float = 1.0
    #: Seconds between this process's reports to Redis, which ``ratequota status`` shows; 0 = none.
    report_seconds: float = 5.0
    #: Seconds between the times that this process hands over what it counted, for the admin to show; 0 = it counts
    #: nothing, and refusals have no id.
    statistics_seconds: float = 1.0
    #: Networks (CIDR) whose X-Forwarded-For is believed; "unix" = a proxy on a Unix socket.
    trusted_proxies: tuple[str, ...] = ()
    #: IPv6 addresses that share this many leading bits count as one client.
    ipv6_prefix: int = 64
    #: {name: dotted path of (request) -> str | None}: more kinds of subjects, such as tenant or api_key. None = the
    #: caller has none; callers for whom the function raises share one counter.
    identifiers: Mapping[str, str] = field(default_factory=dict)
    #: Who the caller is: the first of these that answers.
    caller: tuple[str, ...] = ("user", "ip")
    #: Dotted path of (request) -> plan slug, instead of plan assignments; None, or an exception = the default plan.
    plan_resolver: str = ""
    #: The middleware enforces every view.
    enforce_all: bool = False
    #: The middleware counts requests that a view with a throttle refuses before its throttle is asked (a wrong key,
    #: say) under the policies counted per ip, and refuses them before the view authenticates.
    count_unchecked: bool = False
    #: Response headers to send: ietf-11 (RateLimit and RateLimit-Policy as in the IETF's draft 11), ietf (the newest
    #: known form of them, now ietf-11), x-ratelimit.
    headers: tuple[str, ...] = ("ietf", "x-ratelimit")
    #: Time zone of calendar days, weeks and months; "" = Django's TIME_ZONE.
    time_zone_name: str = ""
    #: Users whose own policies and plan are held in memory.
    user_cache_size: int = 10_000
    networks: tuple[Network, ...] = ()

    @property
    def time_zone(self) -> tzinfo:
        """The zone of calendar windows; raises ``ConfigurationError`` where Django's TIME_ZONE names none."""
        name = self.time_zone_name or django_settings.TIME_ZONE
        try:
            return zoneinfo.ZoneInfo(name)
        except (zoneinfo.ZoneInfoNotFoundError, TypeError, ValueError, OSError) as error:
            problem = f"Django's TIME_ZONE {name!r} is no zone of the IANA database"
            raise ConfigurationError(f"{problem}; write RATEQUOTA['TIME_ZONE'] = 'Europe/Berlin'") from error


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with one key of RATEQUOTA, and what to write instead."""

    key: str
    message: str
    hint: str
    #: A warning leaves the key out; an error makes the setting unusable until it is mended.
    warning: bool = False


_KEYS = {
    ("TIME_ZONE" if f.name == "time_zone_name" else f.name.upper()): f.name
    for f in fields(Settings)
    if f.name != "networks"
}


def read(raw: object) -> tuple[Settings, list[Problem]]:
    """The settings that ``raw`` asks for, and its problems; a key with a problem keeps its default."""
    problems: list[Problem] = []
    if not isinstance(raw, Mapping):
        return Settings(), [Problem("RATEQUOTA", f"RATEQUOTA is a {type(raw).__name__}.", "Write RATEQUOTA = {...}.")]
    values: dict[str, Any] = {}
    for key, value in raw.items():
        name = _KEYS.get(key)
        if name is None:
            near = get_close_matches(str(key).upper(), _KEYS, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known keys: {', '.join(sorted(_KEYS))}."
            problems.append(Problem(str(key), f"RATEQUOTA has no key {key!r}; it is ignored.", hint, warning=True))
            continue
        try:
            values |= _VALIDATORS[name](value)
        except (ConfigurationError, InvalidBucket) as error:
            # A URL holds a password, and may stand where an alias belongs.
            shown = "" if name in ("cache", "redis_url") else f" = {value!r:.80}"
            problems.append(Problem(key, f"RATEQUOTA[{key!r}]{shown} cannot be used.", str(error)))
    settings = Settings(**values)
    known = {"user", "ip", *settings.identifiers}
    unknown = [name for name in settings.caller if name not in known]
    if unknown or not settings.caller:
        what = f"names {unknown[0]!r}, which is no identifier" if unknown else "is empty, so all callers would be one"
        hint = f"Name some of {', '.join(sorted(known))}."
        problems.append(Problem("CALLER", f"RATEQUOTA['CALLER'] {what}.", hint))
        settings = replace(settings, caller=Settings().caller)
    return settings, problems


def _text(name: str, allowed: tuple[str, ...] = ()) -> Any:
    def validate(value: object) -> dict[str, Any]:
        if not isinstance(value, str) or (allowed and value not in allowed):
            raise ConfigurationError(f"Write one of {', '.join(allowed)}." if allowed else "Write a string.")
        return {name: value}

    return validate


def _number(name: str, least: float, most: float, kind: type = float) -> Any:
    def validate(value: object) -> dict[str, Any]:
        accepted = int if kind is int else (int, float)
        if not isinstance(value, accepted) or isinstance(value, bool) or not least <= value <= most:
            raise ConfigurationError(f"Write {'a whole' if kind is int else 'a'} number from {least} to {most}.")
        return {name: value}

    return validate


def _names(name: str, allowed: tuple[str, ...] = ()) -> Any:
    def validate(value: object) -> dict[str, Any]:
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise ConfigurationError("Write a list of strings.")
        if allowed and not set(value) <= set(allowed):
            raise ConfigurationError(f"Choose from {', '.join(allowed)}.")
        return {name: tuple(value)}

    return validate


def _prefix(value: object) -> dict[str, Any]:
    return {"prefix": check_prefix(value)}  # type: ignore[arg-type]  # it checks the type


def _proxies(value: object) -> dict[str, Any]:
    names = _names("trusted_proxies")(value)["trusted_proxies"]
    try:
        return {
            "trusted_proxies": names,
            "networks": tuple(unmap_network(ip_network(name.strip())) for name in names if name != UNIX),
        }
    except ValueError as error:
        raise ConfigurationError(f"{error}; write networks such as 10.0.0.0/8, or 'unix'.") from error


def _dotted(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise ConfigurationError(f"Write the dotted path of {what}.")
    try:
        found = import_string(value)
    except Exception as error:  # a module may raise anything while it is imported
        raise ConfigurationError(f"{error}; write the dotted path of {what}.") from error
    if not callable(found):
        raise ConfigurationError(f"{value} is not callable; write the dotted path of {what}.")
    if iscoroutinefunction(found):  # what it returns is another object for each request
        raise ConfigurationError(f"{value} is async; write the dotted path of {what} that is not.")
    return value


def _identifiers(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError("Write {name: dotted path of (request) -> str | None}.")
    for name, path in value.items():
        if (
            not isinstance(name, str)
            or not name.isidentifier()
            or not name.isascii()
            or name in (*COUNTED_PER, "user")
        ):
            taken = ", ".join((*COUNTED_PER, "user"))
            raise ConfigurationError(
                f"{name!r} is no name for an identifier: use letters, digits and _, not {taken}."
            )
        _dotted(path, "(request) -> str | None")
        if path in _FACTORIES:
            text = (
                "returns an identifier: call it in a module of yours, and write the dotted path of what it returns."
            )
            raise ConfigurationError(f"{path} {text}")
    return {"identifiers": dict(value)}


def _plan_resolver(value: object) -> dict[str, Any]:
    return {"plan_resolver": _dotted(value, "(request) -> slug | None") if value else ""}


def _flag(name: str) -> Any:
    def validate(value: object) -> dict[str, Any]:
        if not isinstance(value, bool):
            raise ConfigurationError("Write True or False.")
        return {name: value}

    return validate


def _time_zone(value: object) -> dict[str, Any]:
    try:
        zoneinfo.ZoneInfo(str(value))
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ConfigurationError("Write a zone of the IANA database, such as Europe/Berlin.") from error
    return {"time_zone_name": str(value)}


_VALIDATORS: dict[str, Any] = {
    "cache": _text("cache"),
    "redis_url": _text("redis_url"),
    "cluster": _flag("cluster"),
    "prefix": _prefix,
    "breaker_failures": _number("breaker_failures", 1, 1000, int),
    "local_share": _number("local_share", 1, 100_000, int),
    "report_seconds": _number("report_seconds", 0, 20),
    "statistics_seconds": _number("statistics_seconds", 0, 20),
    "timeout": _number("timeout", 0.001, 60),
    "max_connections": _number("max_connections", 1, 10_000, int),
    "on_error": _text("on_error", ON_ERROR),
    "poll_seconds": _number("poll_seconds", 0, 86_400),
    "deny_cache_seconds": _number("deny_cache_seconds", 0, 60),
    "revision_max_age": _number("revision_max_age", 0, 3600),
    "trusted_proxies": _proxies,
    "ipv6_prefix": _number("ipv6_prefix", 1, 128, int),
    "identifiers": _identifiers,
    "caller": _names("caller"),
    "plan_resolver": _plan_resolver,
    "enforce_all": _flag("enforce_all"),
    "count_unchecked": _flag("count_unchecked"),
    "headers": _names("headers", HEADER_FORMS),
    "time_zone_name": _time_zone,
    "user_cache_size": _number("user_cache_size", 1, 10_000_000, int),
}


class _LazySettings:
    """``settings.timeout`` and so on, read from Django on first use; ``reload`` forgets them."""

    #: Grows with every reload, so that whatever was made from the settings can tell that it is out of date.
    generation = 0
    _found: Settings | None = None

    def __getattr__(self, name: str) -> Any:
        if self._found is None:
            self._found = read(getattr(django_settings, "RATEQUOTA", {}))[0]
            # As attributes of its own: every request reads a dozen, and comes here for none of them.
            vars(self).update({one.name: getattr(self._found, one.name) for one in fields(Settings)})
        return getattr(self._found, name)

    def reload(self) -> None:
        self._found = None
        for one in fields(Settings):
            vars(self).pop(one.name, None)
        self.generation += 1


#: The settings in force.
settings: Any = _LazySettings()


def _forget(*, setting: str, **_: object) -> None:
    if setting in ("RATEQUOTA", "TIME_ZONE", "CACHES"):
        settings.reload()


setting_changed.connect(_forget, dispatch_uid="django_ratequota.conf")

Made = TypeVar("Made")


class OncePerSettings(Generic[Made]):
    """Makes one object from the settings, however many threads ask at once, and another when they change."""

    def __init__(self, make: Callable[[], Made]) -> None:
        self._make = make
        self._lock = ForkSafeLock()
        self._made: tuple[int, Made] | None = None

    def __call__(self) -> Made:
        """The object; raises what making it raises."""
        made = self._made
        if made is not None and made[0] == settings.generation:
            return made[1]
        with self._lock:
            made = self._made
            if made is None or made[0] != settings.generation:
                made = self._made = (settings.generation, self._make())
            return made[1]

    def forget(self) -> None:
        """Make another the next time."""
        self._made = None
