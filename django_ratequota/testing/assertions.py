"""Assertions about responses. Their failures show the state of every limit."""

from __future__ import annotations

from typing import Any

from ..conf import settings
from ..engine.decision import Decision
from ..headers import retry_after_seconds
from .isolation import current_scene

_NOT_CHECKED = (
    "no limit was checked for this request: is the view decorated, does it have QuotaThrottle, or is ENFORCE_ALL set?"
)
_NOT_CONFIGURED = "no Redis is configured: set RATEQUOTA['REDIS_URL'] = 'memory://', or to embedded_server()"


def assert_limited(response: Any, retry_after: int | None = None, by: str | None = None) -> None:
    """Fail unless the response is a 429.

    ``retry_after`` is the expected Retry-After in whole seconds; ``by`` is the name, as clients see it
    (``search/min``), of a policy that must have refused the request. None = any.
    """
    __tracebackhide__ = True
    decision = _decision(response)
    if response.status_code != 429:
        refused = decision is not None and not decision.allowed
        but = " (refused, but block=False lets the view run)" if refused else ""
        raise AssertionError(f"expected 429, got {response.status_code}{but}: {_describe(decision)}")
    header = response.headers.get("Retry-After")
    if retry_after is not None and header != str(retry_after):
        raise AssertionError(f"expected Retry-After {retry_after}, got {header}: {_describe(decision)}")
    if by is not None and (decision is None or by not in decision.violated):
        raise AssertionError(f"expected a refusal by {by!r}: {_describe(decision)}")


def assert_allowed(response: Any, remaining: int | None = None) -> None:
    """Fail if the response is a refusal, 429 or 503, or if the units left are not ``remaining``."""
    __tracebackhide__ = True
    decision = _decision(response)
    refused = decision is not None and not decision.allowed
    if refused or response.status_code == 429:
        code = response.status_code
        raise AssertionError(f"expected the request to be admitted, got {code}: {_describe(decision)}")
    if remaining is not None and (left := _left(decision)) != remaining:
        raise AssertionError(f"expected {remaining} to remain, not {left}: {_describe(decision)}")


def remaining(response: Any, policy: str | None = None) -> int:
    """Return the units left after the request, under the policy of this name (``search/min``) or the tightest one.

    Raises ``AssertionError`` where there is no such number.
    """
    __tracebackhide__ = True
    decision = _decision(response)
    left = _left(decision, policy)
    if left is None:
        which = "no policy" if policy is None else f"no policy {policy!r}"
        raise AssertionError(f"{which} has a number of remaining units: {_describe(decision)}")
    return left


def _left(decision: Decision | None, policy: str | None = None) -> int | None:
    if decision is None:
        return None
    named = [status for status in decision.statuses if status.bucket.title == policy]
    status = decision.binding if policy is None else next(iter(named), None)
    return None if status is None else status.remaining


def _decision(response: Any) -> Decision | None:
    """Return the decision about the request of a test client's response; None where there is none."""
    request = getattr(response, "wsgi_request", None) or getattr(response, "asgi_request", None)
    return getattr(request, "ratequota", None)


def _describe(decision: Decision | None) -> str:
    """Describe the state of each limit after the decision."""
    if decision is None:
        return _NOT_CHECKED
    if decision.degraded:
        cause = _NOT_CONFIGURED if decision.error == "configuration" else "is Redis running?"
        return f"Redis gave no decision ({decision.error}), so the policies' on_error decided; {cause}"
    parts = [f"{name} refuses" for name in decision.blocked_by]
    for status in decision.statuses:
        log = ", in log mode" if status.bucket.mode == "log" else ""
        refused = ", and refused" if status in decision.refusing else ""
        parts.append(f"{status.bucket.title}: {status.remaining} of {status.limit} remain{log}{refused}")
    wait = retry_after_seconds(decision)
    if wait is not None:
        parts.append(f"Retry-After {wait}")
    return "; ".join(parts) or f"no policy applies to the request{_policies_in_force()}"


def _policies_in_force() -> str:
    """Name the endpoints with policies in the scene in force; outside of scenes, why nothing is enforced, else ""."""
    scene = current_scene()
    snapshot = scene and scene.policies.current()
    if not snapshot:
        return "" if settings.enabled else "; RATEQUOTA['ENABLED'] is False"
    names = [snapshot.endpoints[endpoint].name if endpoint else "all endpoints" for endpoint in snapshot.groups]
    return f"; policies in force: {', '.join(names) or 'none for everyone, plans or subjects'}"
