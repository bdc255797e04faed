"""What users import and configure, by name: moving code inside the package must not break their projects."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import django

import django_ratequota
from django_ratequota import signals, testing
from django_ratequota.conf import KEYS
from tests.support.projects import run_python
from tests.support.snippets import ROOT

PACKAGE = Path(django_ratequota.__file__).parent
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)]

#: Public modules of the top level, and the names that projects use of each.
PUBLIC = {
    "api": "UsageHistoryView UsageView",
    "compat": "",
    "celery": "rate_limited",
    "decorators": "exempt ratequota",
    "errors": "exception_handler problem_details",
    "exceptions": "ConfigurationError InvalidBucket InvalidCaller InvalidCost InvalidRate NoSlot RateQuotaError "
    "StoreError",
    "headers": "add_headers decision_headers",
    "health": "Health health report",
    "identifiers": "drf_api_key header_api_key header_key jwt_claim login_field login_name login_pair network "
    "oauth_client with_address",
    "identity": "Caller",
    "metrics": "",
    "middleware": "RateQuotaMiddleware",
    "models": "Endpoint ListMember Plan PlanAssignment PolicyChange RatePolicy SubjectList UsageCount",
    "ninja": "QuotaThrottle problem_details",
    "notify": "change_text mail_customers mail_operators post_to threshold_text",
    "openapi": "AutoSchema QuotaSchema",
    "quotas": "Correction assign refund reset",
    "replay": "replay",
    "responses": "arefusal_response refusal_response refusal_text",
    "signals": "policies_changed quota_threshold request_refused store_state_changed",
    "tasks": "rollup",
    "testing": "Clock Policy assert_allowed assert_limited embedded_server isolated override_policies remaining "
    "unlimited",
    "throttling": "QuotaThrottle throttle_scope",
    "urls": "urlpatterns",
}
#: Public modules inside of these, and their names.
NESTED = {
    "admin": "QuotaLinkMixin",
    "compat.drf": "AnonRateThrottle ScopedRateThrottle SimpleRateThrottle UserRateThrottle",
    "compat.ratelimit": "ALL UNSAFE Ratelimited aget_usage ais_ratelimited get_usage is_ratelimited ratelimit",
    "compat.ratelimit.core": "get_usage is_ratelimited",
    "compat.ratelimit.decorators": "ratelimit",
    "compat.ratelimit.exceptions": "Ratelimited",
    "compat.ratelimit.middleware": "RatelimitMiddleware",
    "metrics.opentelemetry": "instrument",
    "metrics.prometheus": "RateQuotaCollector register view",
    "testing.plugin": "ratequota_clock ratequota_isolated ratequota_policies ratequota_server ratequota_unlimited",
}
NEEDS_DJANGO_6 = {"tasks"}
#: Modules that Django finds by their names, and what all others share.
SHARED = "__init__ admin apps checks conf management migrations runtime templatetags".split()
#: Packages that nobody else imports.
PRIVATE = "engine enforcement ledger monitoring operations policies policyfile changes store utils".split()
#: The keys of RATEQUOTA.
SETTINGS = """
CACHE CALLER CHECKPOINT_SECONDS CLUSTER CONCURRENCY_MAX CONCURRENCY_TTL COUNT_UNCHECKED CUSTOMER_EMAILS
DENY_CACHE_SECONDS ENABLED ENFORCE_ALL HEADERS
IDENTIFIERS IPV6_PREFIX KEEP_QUOTA_DAYS KEEP_QUOTA_MONTHS LOCAL_SHARE MAX_CONNECTIONS NOTIFY NOTIFY_LIMITS
ON_ERROR PLAN_RESOLVER POLL_SECONDS PREFIX REDIS_URL
STATISTICS_SECONDS SUBJECT_NAMES TIMEOUT TIME_ZONE TRUSTED_PROXIES
""".split()

_IMPORT = re.compile(r"from (django_ratequota[\w.]*) import (?:\(([^)]*)\)|([\w, ]+))")
_DOTTED = re.compile(r"\bdjango_ratequota(?:\.[A-Za-z_]\w*)+")
_CHECK_ID = re.compile(r"django_ratequota\.[EWI]\d{3}")


def test_the_top_level_has_these_modules() -> None:
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found == {*PUBLIC, *SHARED, *PRIVATE}


def test_public_modules_are_documented_and_have_their_names() -> None:
    pages = "\n".join(page.read_text() for page in PAGES)
    assert {module for module in PUBLIC if not re.search(rf"\bdjango_ratequota\.{module}\b", pages)} == set()
    for module, names in {**PUBLIC, **NESTED}.items():
        if module not in NEEDS_DJANGO_6 or django.VERSION >= (6, 0):
            for name in names.split():
                resolve_name(f"django_ratequota.{module}.{name}")


def test_the_package_and_its_faces_export_no_other_names() -> None:
    exported = "Bucket BucketStatus Decision Limiter Rate RateQuotaError"
    exported += " acheck_caller acheck_request apeek_caller awarm check_caller check_request peek_caller turn warm"
    assert django_ratequota.__all__ == exported.split()
    assert signals.__all__ == PUBLIC["signals"].split()
    assert testing.__all__ == PUBLIC["testing"].split()


def named_paths(page: Path) -> Iterator[str]:
    """The dotted paths on the page and those that its snippets import."""
    text = page.read_text()
    for module, several, names in _IMPORT.findall(text):
        for name in re.findall(r"(\w+)(?: as \w+)?", several or names):
            yield f"{module}.{name}"
    for path in _DOTTED.findall(text):
        if not _CHECK_ID.match(path):
            yield path


def test_paths_on_pages_can_be_imported() -> None:
    for path in {path for page in PAGES for path in named_paths(page)}:
        if path.split(".")[1] not in NEEDS_DJANGO_6 or django.VERSION >= (6, 0):
            resolve_name(path)


def test_the_pages_import_no_private_package() -> None:
    private = re.compile(rf"django_ratequota\.(?:{'|'.join(PRIVATE)})\b")
    found = {page.name: set(private.findall(page.read_text())) for page in PAGES}
    assert {name for name, paths in found.items() if paths} <= {"architecture.md"}


def test_the_settings_have_these_keys() -> None:
    assert sorted(KEYS) == SETTINGS


def test_the_views_functions_can_be_imported_before_django_is_set_up() -> None:
    """Settings and URLconfs import them while the apps are not ready."""
    code = """
from django.conf import settings
settings.configure(INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "django_ratequota"])
from django_ratequota import Limiter, acheck_request, check_request
from django_ratequota.decorators import ratequota
from django.apps import apps
print(apps.ready, check_request.__name__)
"""
    assert run_python(code) == ["False check_request"]
