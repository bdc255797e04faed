"""``RATEQUOTA``: what each key accepts, what is said about the rest, and that reading it never fails."""

from __future__ import annotations

from ipaddress import ip_network
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import dateutil.tz
import pytest
import pytz
from django.test import override_settings
from hypothesis import given
from hypothesis import strategies as st

from django_ratequota.conf import KEYS, Settings, read, settings
from django_ratequota.runtime import default_limiter
from tests.checks import ids
from tests.support.properties import examples

TENANT = {"tenant": "tests.project.views.tenant"}
PROXIES = ["10.0.0.0/8", " ::1 ", "unix"]


ACCEPTED: list[tuple[dict[str, Any], str, Any]] = [
    ({"REDIS_URL": "rediss://:secret@r.example:6380/1"}, "redis_url", "rediss://:secret@r.example:6380/1"),
    ({}, "enabled", True),
    ({"REDIS_URL": "memory://"}, "in_memory", True),
    ({"REDIS_URL": "memory://"}, "poll_seconds", 1.0),
    ({"REDIS_URL": "memory://", "POLL_SECONDS": 20}, "poll_seconds", 20),
    ({"REDIS_URL": "redis://localhost"}, "in_memory", False),
    ({"PREFIX": "shop.eu:v2-_"}, "prefix", "shop.eu:v2-_"),
    ({"ON_ERROR": "deny"}, "on_error", "deny"),
    ({"POLL_SECONDS": 0}, "poll_seconds", 0),
    ({"TRUSTED_PROXIES": PROXIES}, "trusted_proxies", tuple(PROXIES)),
    ({"TRUSTED_PROXIES": ["::ffff:10.0.0.0/104"]}, "networks", (ip_network("10.0.0.0/8"),)),
    ({"TRUSTED_PROXIES": PROXIES}, "networks", (ip_network("10.0.0.0/8"), ip_network("::1"))),
    ({"IPV6_PREFIX": 128}, "ipv6_prefix", 128),
    ({"CONCURRENCY_MAX": None}, "concurrency_max", None),
    ({"CONCURRENCY_MAX": 600}, "concurrency_max", 600),
    ({"IDENTIFIERS": TENANT}, "identifiers", TENANT),
    ({"IDENTIFIERS": {"recipient": None}}, "identifiers", {"recipient": None}),
    ({"IDENTIFIERS": TENANT, "CALLER": ("tenant", "ip")}, "caller", ("tenant", "ip")),
    ({"PLAN_RESOLVER": "tests.project.views.tenant"}, "plan_resolver", "tests.project.views.tenant"),
    ({"PLAN_RESOLVER": None}, "plan_resolver", ""),
    ({"HEADERS": []}, "headers", ()),
    ({"HEADERS": ["x-ratelimit", "ietf"]}, "headers", ("x-ratelimit", "ietf")),
    ({"TIME_ZONE": "Europe/Berlin"}, "time_zone", ZoneInfo("Europe/Berlin")),
    ({"TIME_ZONE": ZoneInfo("Asia/Tokyo")}, "time_zone", ZoneInfo("Asia/Tokyo")),
    ({"TIME_ZONE": pytz.timezone("Asia/Tokyo")}, "time_zone", ZoneInfo("Asia/Tokyo")),
    ({}, "time_zone", ZoneInfo("UTC")),
]


def test_accepted_values() -> None:
    for raw, field, expected in ACCEPTED:
        found, problems = read(raw)
        assert (problems, getattr(found, field)) == ([], expected), raw


#: What no key that wants a number accepts.
NUMBERS = ["0.1", None, True, float("nan"), float("inf"), -1, 10**9, [1]]


REFUSED: list[tuple[str, Any, str]] = [
    ("CACHE", None, "Write a string."),
    ("REDIS_URL", 6379, "Write a string."),
    ("PREFIX", "", "PREFIX must be 1 to 16 ASCII letters, digits or _ . : -"),
    ("PREFIX", "größe", "PREFIX must be 1 to 16 ASCII letters"),
    ("PREFIX", "x" * 17, "PREFIX must be 1 to 16 ASCII letters"),
    *(("TIMEOUT", value, "Write a number from 0.001 to 60.") for value in [*NUMBERS, 0]),
    *(("POLL_SECONDS", value, "Write a number from 0 to 86400.") for value in NUMBERS),
    *(("DENY_CACHE_SECONDS", value, "Write a number from 0 to 60.") for value in [*NUMBERS, 61]),
    *(("IPV6_PREFIX", value, "Write a whole number from 1 to 128.") for value in [*NUMBERS, 0, 129, 64.0]),
    *(("CONCURRENCY_MAX", value, "Write a number from 1 to 86400, or None.") for value in [0, True, "60"]),
    ("MAX_CONNECTIONS", 0, "Write a whole number from 1 to 10000."),
    ("LOCAL_SHARE", 2.5, "Write a whole number from 1 to 100000."),
    ("CLUSTER", "yes", "Write True or False."),
    ("ENABLED", "no", "Write True or False."),
    ("STATISTICS_SECONDS", 60, "Write a number from 0 to 20."),
    ("ON_ERROR", "closed", "Write one of allow, deny, local."),
    ("ON_ERROR", "", "Write one of allow, deny, local."),
    ("TRUSTED_PROXIES", "10.0.0.0/8", "Write a list of strings."),
    ("TRUSTED_PROXIES", [10], "Write a list of strings."),
    ("TRUSTED_PROXIES", ["10.0.0.1/8"], "10.0.0.1/8 has host bits set. Enter networks"),
    ("TRUSTED_PROXIES", ["proxy.example"], "Enter networks such as 10.0.0.0/8, or 'unix'."),
    ("IDENTIFIERS", ["tenant"], "Write {name: dotted path of (request) -> str | None, or None}."),
    ("IDENTIFIERS", {"user": "tests.project.views.tenant"}, "'user' is not a valid name of an identifier"),
    ("IDENTIFIERS", {"caller": "tests.project.views.tenant"}, "but none of caller, ip, plan, everyone, user."),
    ("IDENTIFIERS", {"api key": "tests.project.views.tenant"}, "Use letters, digits and _"),
    ("IDENTIFIERS", {7: "tests.project.views.tenant"}, "7 is not a valid name of an identifier"),
    ("IDENTIFIERS", {"büro": "tests.project.views.tenant"}, "'büro' is not a valid name of an identifier"),
    ("IDENTIFIERS", {"tenant": len}, "Write the dotted path of (request) -> str | None."),
    ("IDENTIFIERS", {"tenant": "tenant"}, "write the dotted path of (request) -> str | None."),
    ("IDENTIFIERS", {"tenant": "tests.nowhere.tenant"}, "No module named 'tests.nowhere'"),
    ("IDENTIFIERS", {"tenant": "tests.conftest.NOON_US"}, "tests.conftest.NOON_US is not callable"),
    # what it returns would be another value for each request
    ("IDENTIFIERS", {"tenant": "tests.project.views.aplain"}, "tests.project.views.aplain is async"),
    (
        "IDENTIFIERS",
        {"tenant": "django_ratequota.identifiers.jwt_claim"},
        "django_ratequota.identifiers.jwt_claim returns (request) -> str | None: write the dotted path",
    ),
    (
        "PLAN_RESOLVER",
        "tests.project.views.aplain",
        "write the dotted path of (request) -> slug | None that is not.",
    ),
    ("CALLER", "user", "Write a list of strings."),
    ("CALLER", [None], "Write a list of strings."),
    ("CALLER", ["tenant"], "List some of ip, user."),
    # else everybody would be the same caller
    ("CALLER", [], "List some of ip, user."),
    ("PLAN_RESOLVER", "tests.project.views.nobody", "write the dotted path of (request) -> slug | None."),
    ("PLAN_RESOLVER", len, "Write the dotted path of (request) -> slug | None."),
    *(
        ("SUBJECT_NAMES", path, "rite the dotted path of (subjects) -> {subject: name}")
        for path in ("tests.operations.test_subjects.nothing", "tests.operations.test_subjects.anames_of", 7)
    ),
    ("NOTIFY", "nowhere.receiver", "No module named 'nowhere'"),
    ("NOTIFY", ["django_ratequota.notify.post_to"], "post_to returns (level, status, at, **kwargs) -> None: write"),
    ("NOTIFY", [7], "Write a list of strings"),
    ("ENFORCE_ALL", 1, "Write True or False."),
    ("HEADERS", "ietf", "Write a list of strings."),
    ("HEADERS", ["x-rate-limit"], "Choose from ietf, ietf-11, x-ratelimit."),
    ("TIME_ZONE", "Berlin", "Write a zone of the IANA database, such as Europe/Berlin."),
    ("TIME_ZONE", "Europe", "Write a zone of the IANA database"),  # a folder of zones
    ("TIME_ZONE", "../etc/passwd", "Write a zone of the IANA database"),
    ("TIME_ZONE", None, "Write a zone of the IANA database"),
    ("TIME_ZONE", dateutil.tz.gettz("Asia/Tokyo"), "Write a zone of the IANA database"),
]


def test_a_refused_value_keeps_the_default_and_has_a_hint() -> None:
    for key, value, hint in REFUSED:
        # The other key is none the worse for it.
        other = {"TIMEOUT": 5} if key == "POLL_SECONDS" else {"POLL_SECONDS": 5}
        found, problems = read({key: value, **other})
        assert ids(problems) == ["E001"], (key, value)
        assert key in problems[0].msg
        assert hint in str(problems[0].hint)
        assert found == Settings(**{name.lower(): seconds for name, seconds in other.items()})


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("TIMOUT", "Did you mean 'TIMEOUT'?"),
        ("timeout", "Did you mean 'TIMEOUT'?"),
        ("TIME_ZONE_NAME", "Did you mean 'TIME_ZONE'?"),
        ("REPORT_SECONDS", "Did you mean 'POLL_SECONDS'?"),
        ("xyzzy", "Known keys: CACHE, CALLER, "),
        (7, "Known keys: CACHE, CALLER, "),
    ],
)
def test_an_unknown_key_gets_a_did_you_mean(key: Any, hint: str) -> None:
    found, [problem] = read({key: 1})
    assert (ids([problem]), problem.msg) == (["W001"], f"RATEQUOTA has no key {key!r}, so it is ignored.")
    assert str(problem.hint).startswith(hint)
    assert found == Settings()


@pytest.mark.parametrize("raw", [None, [], "x", 7])
def test_a_setting_that_is_no_mapping_is_one_problem(raw: Any) -> None:
    found, [problem] = read(raw)
    assert (ids([problem]), problem.hint) == (["E001"], "Write RATEQUOTA = {...}.")
    assert found == Settings()


def test_a_module_that_breaks_on_import_is_a_problem_too(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "broken_identifiers.py").write_text("raise RuntimeError('half configured')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for raw in (
        {"IDENTIFIERS": {"tenant": "broken_identifiers.tenant"}},
        {"PLAN_RESOLVER": "broken_identifiers.plan"},
    ):
        found, [problem] = read(raw)
        assert "half configured" in str(problem.hint)
        assert found == Settings()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(list(KEYS)), VALUES, max_size=4))
@examples(300)
def test_reading_never_fails_and_each_problem_has_a_hint(raw: dict[str, Any]) -> None:
    found, problems = read(raw)
    assert set(ids(problems)) <= {"E001"}
    for key in raw:
        if any(f"RATEQUOTA[{key!r}]" in problem.msg for problem in problems):
            assert getattr(found, KEYS[key].name) == getattr(Settings(), KEYS[key].name)


def test_the_settings_in_force_follow_overrides() -> None:
    before = settings.generation
    with override_settings(RATEQUOTA={"PREFIX": "other", "REDIS_URL": "redis://127.0.0.1:1/0", "TIMEOUT": 9}):
        assert (settings.prefix, settings.timeout) == ("other", 9)
        limiter = default_limiter()
        assert (limiter.prefix, limiter.store.timeout) == ("other", 9)
        with override_settings(DEBUG=True):
            assert default_limiter() is limiter
    assert settings.generation == before + 2
    assert (settings.prefix, default_limiter().prefix) == ("rqtest", "rqtest")


def test_djangos_time_zone_is_the_default_and_may_be_overridden() -> None:
    with override_settings(TIME_ZONE="Asia/Tokyo"):
        assert default_limiter().time_zone == settings.time_zone == ZoneInfo("Asia/Tokyo")
    with override_settings(TIME_ZONE="Asia/Tokyo", RATEQUOTA={"TIME_ZONE": "Europe/Berlin"}):
        assert settings.time_zone == ZoneInfo("Europe/Berlin")
