"""Assertions about responses, which say how the limits stood where they fail."""

from __future__ import annotations

from typing import Any

from ..engine.types import Decision
from ..headers import retry_after_seconds
from .isolation import current_scene

_NOT_CHECKED = (
    "no limit was checked on its way: is the view decorated, does it have QuotaThrottle, or is ENFORCE_ALL set?"
)


def assert_limited(response: Any, retry_after: int | None = None, by: str | None = None) -> None:
    """Fail unless the response is a 429.

    ``retry_after`` is what its Retry-After has to say, in whole seconds; ``by`` names a policy that refused it, as
    clients see it (``search/min``). None = whatever.
    """
    __tracebackhide__ = True
    decision = _decision(response)
    if response.status_code != 429:
        refused = (
            "" if decision is None or decision.allowed else " (the view went on all the same, as block=False says)"
        )
        raise AssertionError(f"expected 429, got {response.status_code}{refused}: {_standing(decision)}")
    said = response.headers.get("Retry-After")
    if retry_after is not None and said != str(retry_after):
        raise AssertionError(f"expected Retry-After {retry_after}, got {said}: {_standing(decision)}")
    if by is not None and (decision is None or by not in decision.violated):
        raise AssertionError(f"expected a refusal by {by!r}: {_standing(decision)}")


def assert_allowed(response: Any, remaining: int | None = None) -> None:
    """Fail if the response is a refusal, 429 or 503; ``remaining`` is what has to be left, see ``remaining``."""
    __tracebackhide__ = True
    decision = _decision(response)
    refused = decision is not None and not decision.allowed
    if refused or response.status_code == 429:
        raise AssertionError(
            f"expected the request to be admitted, got {response.status_code}: {_standing(decision)}"
        )
    if remaining is not None and _remaining(response) != remaining:
        left = _remaining(response)
        raise AssertionError(f"expected {remaining} to remain, not {left}: {_standing(decision)}")


def remaining(response: Any, policy: str | None = None) -> int:
    """Units left after the request: of the policy that clients see by this name (``search/min``), else of the one
    with the smallest share left. Raises ``AssertionError`` where there is no such number.
    """
    __tracebackhide__ = True
    left = _remaining(response, policy)
    if left is None:
        which = "no policy" if policy is None else f"no policy {policy!r}"
        raise AssertionError(f"{which} says what remains: {_standing(_decision(response))}")
    return left


def _remaining(response: Any, policy: str | None = None) -> int | None:
    decision = _decision(response)
    if decision is None:
        said = response.headers.get("X-RateLimit-Remaining")
        return None if policy is not None or said is None else int(said)
    if policy is None:
        return None if decision.binding is None else decision.binding.remaining
    return next((s.remaining for s in decision.statuses if s.bucket.title == policy), None)


def _decision(response: Any) -> Decision | None:
    """What was decided on the way to a test client's response; None where that is not known."""
    request = getattr(response, "wsgi_request", None) or getattr(response, "asgi_request", None)
    return getattr(request, "ratequota", None)


def _standing(decision: Decision | None) -> str:
    """How the limits stood, in a sentence."""
    if decision is None:
        return _NOT_CHECKED
    if decision.degraded:
        return f"Redis gave no decision ({decision.error}), so the policies' on_error decided; is it running?"
    parts = [f"{name} refuses" for name in decision.blocked_by]
    for status in decision.statuses:
        log = ", in log mode" if status.bucket.mode == "log" else ""
        refused = ", and refused" if status in decision.refusing else ""
        parts.append(f"{status.bucket.title}: {status.remaining} of {status.limit} remain{log}{refused}")
    wait = retry_after_seconds(decision)
    if wait is not None:
        parts.append(f"Retry-After {wait}")
    return "; ".join(parts) or f"no policy applies to it{_in_force()}"


def _in_force() -> str:
    """What the test put in force, where it did."""
    scene = current_scene()
    snapshot = scene and scene.policies.current()
    if not snapshot:
        return ""
    names = [
        f"{snapshot.endpoints[endpoint].name if endpoint else 'all endpoints'} ({policy.text})"
        for endpoint, groups in snapshot.groups.items()
        for group in groups.values()
        for policy in group.policies
    ]
    return f"; in force are {', '.join(names) or 'none for everyone, plans or subjects'}"
