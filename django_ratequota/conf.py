"""The Django setting ``RATEQUOTA``: read once, and read again when a test overrides it. All its keys are optional.

``Settings`` is the table of the keys: meaning, default and validation of each.
"""

from __future__ import annotations

import zoneinfo
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import tzinfo
from difflib import get_close_matches
from ipaddress import ip_network
from typing import Any

from django.conf import settings as django_settings
from django.core import checks
from django.core.signals import setting_changed

from .engine.keys import check_prefix
from .exceptions import ConfigurationError, InvalidBucket
from .utils.addresses import Network, unmap_network
from .utils.dotted_paths import function

#: What a policy may count per, besides the names in IDENTIFIERS.
COUNTED_PER = ("caller", "ip", "plan", "everyone")
ON_ERROR = ("allow", "deny", "local")
#: Wire forms of the response headers; ``headers.FORMS`` has a function for each.
HEADER_FORMS = ("ietf", "ietf-11", "x-ratelimit")
#: Names a trusted proxy on a Unix socket, which has no address.
UNIX = "unix"

#: Returns a value as ``Settings`` holds it; raises ``ConfigurationError``, whose text is the hint for the developer.
_Validator = Callable[[Any], Any]


def _that(is_valid: Callable[[Any], bool], hint: str) -> _Validator:
    def validate(value: Any) -> Any:
        if not is_valid(value):
            raise ConfigurationError(hint)
        return value

    return validate


_string = _that(lambda value: isinstance(value, str), "Write a string.")
_boolean = _that(lambda value: isinstance(value, bool), "Write True or False.")


def _choice(*allowed: str) -> _Validator:
    return _that(lambda value: value in allowed, f"Write one of {', '.join(allowed)}.")


def _number(least: float, most: float, *, whole: bool = False, or_none: bool = False) -> _Validator:
    kind, name = (int, "whole number") if whole else (int | float, "number")

    def is_valid(value: Any) -> bool:
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        return least <= value <= most if is_number else or_none and value is None

    return _that(is_valid, f"Write a {name} from {least} to {most}{', or None' if or_none else ''}.")


def _strings(*allowed: str) -> _Validator:
    def validate(value: object) -> tuple[str, ...]:
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise ConfigurationError("Write a list of strings.")
        if allowed and not set(value) <= set(allowed):
            raise ConfigurationError(f"Choose from {', '.join(allowed)}.")
        return tuple(value)

    return validate


def _networks(value: object) -> tuple[str, ...]:
    names: tuple[str, ...] = _strings()(value)
    try:
        _parse_networks(names)
    except ValueError as error:
        raise ConfigurationError(f"{error}. Enter networks such as 10.0.0.0/8, or 'unix'.") from error
    return names


def _parse_networks(names: tuple[str, ...]) -> tuple[Network, ...]:
    return tuple(unmap_network(ip_network(name.strip())) for name in names if name != UNIX)


def _identifiers(value: object) -> dict[str, str | None]:
    if not isinstance(value, Mapping):
        raise ConfigurationError("Write {name: dotted path of (request) -> str | None, or None}.")
    reserved = (*COUNTED_PER, "user")
    for name, path in value.items():
        if not isinstance(name, str) or not name.isidentifier() or not name.isascii() or name in reserved:
            hint = f"Use letters, digits and _, but none of {', '.join(reserved)}"
            raise ConfigurationError(f"{name!r} is not a valid name of an identifier. {hint}.")
        if path is not None:
            function("(request) -> str | None")(path)
    return dict(value)


def _optional(signature: str) -> _Validator:
    return lambda value: (value and function(signature)(value)) or ""


def _receivers(value: object) -> tuple[str, ...]:
    paths: tuple[str, ...] = _strings()([value] if isinstance(value, str) else value)
    return tuple(map(function("(level, status, at, **kwargs) -> None"), paths))


def _time_zone(value: object) -> str:
    return str(_zone(str(value), "Write a zone of the IANA database, such as Europe/Berlin."))


def _zone(name: str, otherwise: str) -> zoneinfo.ZoneInfo:
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, TypeError, ValueError, OSError) as error:
        raise ConfigurationError(otherwise) from error


def _key(default: Any, validate: _Validator) -> Any:
    kind = "default_factory" if callable(default) else "default"
    return field(**{kind: default}, metadata={"validate": validate})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``RATEQUOTA`` with its defaults; the comments become docs/reference/settings.md."""

    #: False switches all limits off, and Redis is not used. For development, CI and emergencies.
    enabled: bool = _key(True, _boolean)
    #: Alias in `CACHES` (django-redis or Django's `RedisCache`) whose server and login are used, with
    #: connections of this app.
    cache: str = _key("default", _string)
    #: URL of the Redis to use instead of `CACHE`: `redis://`, `rediss://`, `unix://` or `redis+sentinel://`.
    #: You can write `valkey` instead of `redis`. With `memory://` each process has counters of its own, for
    #: development, CI and projects that a single process serves.
    redis_url: str = _key("", _string)
    #: Set to True if `REDIS_URL` is the URL of a node of a Redis Cluster.
    cluster: bool = _key(False, _boolean)
    #: First part of every Redis key. Give each project on one Redis a prefix of its own.
    prefix: str = _key("rq", check_prefix)
    #: Seconds that a decision may wait for Redis, connecting included.
    timeout: float = _key(0.1, _number(0.001, 60))
    #: Connections of a worker to each Redis server, at most. Requests queue for a free one. A smaller
    #: `max_connections` of the alias or the URL takes precedence.
    max_connections: int = _key(64, _number(1, 10_000, whole=True))
    #: What a policy without its own `on_error` does while Redis is unavailable: allow the request, deny it
    #: (503) or decide by local counters of the worker.
    on_error: str = _key("allow", _choice(*ON_ERROR))
    #: Number of workers that share each limit under `on_error = local`. Each of them admits 1 / `LOCAL_SHARE`
    #: of it.
    local_share: int = _key(4, _number(1, 100_000, whole=True))
    #: Seconds between two queries for policy changes whose publication was lost. With `memory://` the default
    #: is 1, and this is how workers find each other's changes.
    poll_seconds: float = _key(30.0, _number(0, 86_400))
    #: Seconds for which a worker may repeat a refusal without another call to Redis; 0 = it always calls Redis.
    deny_cache_seconds: float = _key(1.0, _number(0, 60))
    #: Seconds between two transfers of statistics and of the worker's report to Redis, for the admin and
    #: `ratequota status`; 0 = there are none, and refusals have no id.
    statistics_seconds: float = _key(1.0, _number(0, 20))
    #: Seconds between two writes of durable counters to the database; 0 = the database has none.
    checkpoint_seconds: float = _key(1.0, _number(0, 300))
    #: Months for which the usage of ended calendar periods is kept in the database; 0 = forever.
    keep_quota_months: int = _key(24, _number(0, 1200, whole=True))
    #: Days for which the database keeps the usage of each day of a month; 0 = forever.
    keep_quota_days: int = _key(62, _number(0, 36_500, whole=True))
    #: Seconds after which a slot of a rate such as `20 concurrent` is free again if the worker that holds it was
    #: killed. While a request runs, its worker renews the slot.
    concurrency_ttl: float = _key(60.0, _number(1, 3600))
    #: Seconds for which a request may hold its slots at most. Then they are released although the request still
    #: runs, for example because its client does not read the response. None = until the request has ended.
    concurrency_max: float | None = _key(None, _number(1, 86_400, or_none=True))
    #: Receivers of `quota_threshold`, called when a counter reaches 80 % or 100 % of its limit: a dotted path
    #: or a list of them.
    notify: tuple[str, ...] = _key((), _receivers)
    #: Limits that send `quota_threshold`: calendar (those by the calendar day, week or month) or all.
    notify_limits: str = _key("calendar", _choice("calendar", "all"))
    #: Function that returns email addresses for subjects of `IDENTIFIERS`, such as `{"tenant:4711":
    #: "billing@acme.example"}`, for `django_ratequota.notify.mail_customers`. It is called with a list of
    #: subjects. Subjects that it leaves out get no email. Users have their model's email field.
    customer_emails: str = _key("", _optional("(subjects) -> {subject: address}"))
    #: Networks (CIDR) of your proxies, whose `X-Forwarded-For` is trusted; `unix` = a proxy on a Unix socket,
    #: which has no address.
    trusted_proxies: tuple[str, ...] = _key((), _networks)
    #: IPv6 addresses that share this many leading bits are one client.
    ipv6_prefix: int = _key(64, _number(1, 128, whole=True))
    #: More kinds of subjects, such as tenant or api_key, each with the function that reads it from a request.
    #: The function returns None for clients without a value. All clients for whom it raises share one counter.
    #: Write None instead of a function for a kind that only `check_caller` uses, such as the recipient of a
    #: message. If clients can make up the values, set the attribute `ratequota_verified = False` on the function,
    #: so that the database keeps their usage only for policies that ask for it. So it does for kinds without a
    #: function.
    identifiers: Mapping[str, str | None] = _key(dict, _identifiers)
    #: Who the client is: the first of these (user, ip, or a key of `IDENTIFIERS`) that the request has.
    caller: tuple[str, ...] = _key(("user", "ip"), _strings())
    #: Function that returns the slug of the client's plan. If it returns None, raises or returns the slug of no
    #: plan, the assigned plan applies, or else the default plan. Months begin on the day in the assignments,
    #: wherever the plan comes from.
    plan_resolver: str = _key("", _optional("(request) -> slug | None"))
    #: Function that returns display names for subjects of `IDENTIFIERS`, such as `{"tenant:4711": "Acme
    #: GmbH"}`, for the admin and the commands. It is called with a list of many subjects at once and may leave
    #: some out. Give it an attribute `ratequota_search`, a function that returns subjects whose names contain a
    #: text, to make names searchable.
    subject_names: str = _key("", _optional("(subjects) -> {subject: name}"))
    #: The middleware enforces policies on every view.
    enforce_all: bool = _key(False, _boolean)
    #: The middleware counts requests that a view refuses before its throttle runs, for example because of a
    #: wrong key. It applies the policies counted per ip and refuses such requests before the view
    #: authenticates.
    count_unchecked: bool = _key(False, _boolean)
    #: Response headers to send: ietf-11 (`RateLimit` and `RateLimit-Policy` as in draft 11 of the IETF), ietf
    #: (the latest supported draft, now ietf-11), x-ratelimit.
    headers: tuple[str, ...] = _key(("ietf", "x-ratelimit"), _strings(*HEADER_FORMS))
    #: Time zone of calendar days, weeks and months. The default is Django's `TIME_ZONE`.
    time_zone_name: str = _key("", _time_zone)

    @property
    def in_memory(self) -> bool:
        """Whether this process counts on its own, without Redis."""
        return self.redis_url == "memory://"

    @property
    def networks(self) -> tuple[Network, ...]:
        """The addresses in TRUSTED_PROXIES."""
        return _parse_networks(self.trusted_proxies)

    @property
    def time_zone(self) -> tzinfo:
        """The zone of calendar windows; raises ``ConfigurationError`` where Django's TIME_ZONE is unknown."""
        name = self.time_zone_name or django_settings.TIME_ZONE
        problem = f"Django's TIME_ZONE {name!r} is not a zone of the IANA database"
        return _zone(name, f"{problem}. Set RATEQUOTA['TIME_ZONE'] = 'Europe/Berlin'")


#: Key of RATEQUOTA -> field of ``Settings``: its name in lower case, ``time_zone_name`` for TIME_ZONE.
KEYS = {f.name.upper().removesuffix("_NAME"): f for f in fields(Settings)}


def read(raw: object) -> tuple[Settings, list[checks.CheckMessage]]:
    """Return the settings in ``raw``, and what ``manage.py check`` says about it.

    E001: a value that cannot be used, so that the key's default applies. W001: a key that does not exist.
    """
    problems: list[checks.CheckMessage] = []
    if not isinstance(raw, Mapping):
        return Settings(), [_unusable(f"RATEQUOTA is a {type(raw).__name__}.", "Write RATEQUOTA = {...}.")]
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in KEYS:
            near = get_close_matches(str(key).upper(), KEYS, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known keys: {', '.join(sorted(KEYS))}."
            text = f"RATEQUOTA has no key {key!r}, so it is ignored."
            problems.append(checks.Warning(text, hint=hint, id="django_ratequota.W001"))
            continue
        try:
            values[KEYS[key].name] = KEYS[key].metadata["validate"](value)
        except (ConfigurationError, InvalidBucket) as error:
            # A URL holds a password, and may stand where an alias belongs.
            shown = "" if key in ("CACHE", "REDIS_URL") else f" = {value!r:.80}"
            problems.append(_unusable(f"RATEQUOTA[{key!r}]{shown} cannot be used.", str(error)))
    settings = Settings(**values)
    if settings.in_memory and "poll_seconds" not in values:
        settings = replace(settings, poll_seconds=1.0)
    known = {"user", "ip", *settings.identifiers}
    unknown = [name for name in settings.caller if name not in known]
    if unknown or not settings.caller:
        what = (
            f"contains {unknown[0]!r}, which is not an identifier"
            if unknown
            else "is empty, so all clients would be one"
        )
        if settings.identifiers or not raw.get("IDENTIFIERS"):  # else they are the problem, and have one
            problems.append(_unusable(f"RATEQUOTA['CALLER'] {what}.", f"List some of {', '.join(sorted(known))}."))
        settings = replace(settings, caller=Settings().caller)
    return settings, problems


def _unusable(text: str, hint: str) -> checks.CheckMessage:
    return checks.Error(text, hint=hint, id="django_ratequota.E001")


class _LazySettings:
    """``settings.timeout`` and so on, read from Django on first use; ``reload`` forgets them."""

    #: Grows with every reload, so that objects made from the settings can tell that they are out of date.
    generation = 0
    _loaded: Settings | None = None

    def __getattr__(self, name: str) -> Any:
        if self._loaded is None:
            self._loaded = read(getattr(django_settings, "RATEQUOTA", {}))[0]
            # As attributes of its own, because every request reads a dozen: they then need no call to this method.
            vars(self).update({f.name: getattr(self._loaded, f.name) for f in KEYS.values()})
        return getattr(self._loaded, name)

    def reload(self) -> None:
        self._loaded = None
        for f in KEYS.values():
            vars(self).pop(f.name, None)
        self.generation += 1


#: The settings in force.
settings: Any = _LazySettings()


def _reload(*, setting: str, **_: object) -> None:
    if setting in ("RATEQUOTA", "TIME_ZONE", "CACHES"):
        settings.reload()


setting_changed.connect(_reload, dispatch_uid="django_ratequota.conf")
