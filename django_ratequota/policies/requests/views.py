"""What a view declares: its scope, its cost, its throttles, and who checks its requests."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from ...engine.types import check_cost
from ...exceptions import InvalidCost

logger = logging.getLogger("django_ratequota")

#: Set by ``@ratequota`` on the views it decorates: the scope, "" = none.
SCOPE_ATTRIBUTE = "ratequota_scope"
#: Set on the class of the usage endpoint.
USAGE_ATTRIBUTE = "ratequota_shows_usage"
#: Set by ``@ratequota`` on the functions that it makes: the function itself, and its cost. Others' wrappers copy it.
WRAPPER_ATTRIBUTE = "ratequota_wrapper"
#: Set on Django Ninja's views of which some operation has a ``QuotaThrottle``: method -> its ``LateCheck``, None
#: where it has no such throttle.
LIMITED_ATTRIBUTE = "ratequota_limited"


class LateCheck(NamedTuple):
    """What a view asks of its quota after it may have refused the request already."""

    #: None = it names none.
    scope: str | None
    #: Units, None = the endpoint's own. The least where the cost is computed from the request.
    cost: int | None


def shows_usage(view: Any) -> bool:
    """Whether the view is the usage endpoint: known by an attribute, as a project without DRF must not import it."""
    return getattr(view_class(view), USAGE_ATTRIBUTE, False) is True


def scope_of(view: Any) -> str | None:
    """The scope that a view names for itself, by decorator or as ``throttle_scope``; None when it names none."""
    holder = view_class(view)
    decorated = getattr(view, SCOPE_ATTRIBUTE, "") or getattr(getattr(holder, "dispatch", None), SCOPE_ATTRIBUTE, "")
    scope = decorated or class_attribute(view, "throttle_scope")
    return scope if isinstance(scope, str) and scope else None


def enforces_itself(view: Any) -> bool:
    """Whether the view is decorated or has our throttle: it knows its scope and cost, and who authenticated."""
    return is_decorated(view) or any(
        _is_ours(throttle) for throttle in class_attribute(view, "throttle_classes") or ()
    )


def is_decorated(view: Any) -> bool:
    """Whether ``@ratequota`` decorates the view, or its class' dispatch."""
    holder = view_class(view)
    return hasattr(view, SCOPE_ATTRIBUTE) or hasattr(getattr(holder, "dispatch", None), SCOPE_ATTRIBUTE)


def late_check(view: Any, method: str) -> LateCheck | None:
    """What a view asks that may refuse a request before it has it checked; None of all others.

    REST framework and Ninja authenticate before they ask throttles; other decorators may be around ``@ratequota``.
    """
    limited: dict[str, LateCheck | None] | None = getattr(view, LIMITED_ATTRIBUTE, None)
    if limited is not None:
        return limited.get(method, LateCheck(None, 1))  # which Ninja answers 405
    if is_decorated(view):
        wrapper, cost = getattr(view, WRAPPER_ATTRIBUTE, (view, None))
        return None if wrapper is view or view_class(view) is not None else LateCheck(scope_of(view), cost)
    if not (chooses_throttles(view) or enforces_itself(view)):
        return None
    return LateCheck(scope_of(view), least_cost(class_attribute(view, "throttle_cost")))


def least_cost(cost: Any) -> int | None:
    """The units that a request consumes at least, by what names its cost; None = the endpoint's own."""
    if isinstance(cost, property) or callable(cost):
        return 1
    try:
        return None if cost is None else check_cost(cost)
    except InvalidCost:
        return None  # as where the throttle is asked


def chooses_throttles(view: Any) -> bool:
    """Whether the view's class picks its throttles for each request, by a ``get_throttles`` of its own."""
    method = getattr(view_class(view), "get_throttles", None)
    return method is not None and getattr(method, "__module__", "") != "rest_framework.views"


def throttles_itself(view: Any, request: Any, args: Any, kwargs: Any) -> bool:
    """Whether our throttle is among those that the view's class picks for the request."""
    try:
        return any(_is_ours(type(throttle)) for throttle in _twin(view, request, args, kwargs).get_throttles())
    except Exception as error:
        # What is the client's fault (a version that is none, a wrong token), the view itself will say.
        if getattr(error, "status_code", 500) >= 500:
            logger.exception("get_throttles of %s failed; ENFORCE_ALL enforces the view", view)
        return False


def _twin(view: Any, request: Any, args: Any, kwargs: Any) -> Any:
    """Another instance like the one that answers, as REST framework has it when it asks for the throttles."""
    twin = view.cls(**(getattr(view, "initkwargs", None) or {}))
    actions = getattr(view, "actions", None) or {}
    twin.action_map = {"head": actions.get("get"), **actions}
    twin.setup(request, *args, **kwargs)
    asked = twin.request = twin.initialize_request(request, *args, **kwargs)
    load = asked._load_stream

    def load_and_keep() -> None:
        # Else ``request.data`` would leave nothing for the view to parse; of forms Django keeps the fields.
        if request.content_type != "multipart/form-data":
            _ = request.body
        load()

    asked._load_stream = load_and_keep
    twin.headers = twin.default_response_headers
    twin.format_kwarg = twin.get_format_suffix(**kwargs)
    asked.accepted_renderer, asked.accepted_media_type = twin.perform_content_negotiation(asked)
    asked.version, asked.versioning_scheme = twin.determine_version(asked, *args, **kwargs)
    return twin


def _is_ours(throttle: Any) -> bool:
    """Whether it is a ``QuotaThrottle``, told by name: a project without DRF must not import it here."""
    return any(
        base.__module__ == "django_ratequota.throttling" and base.__name__ == "QuotaThrottle"
        for base in getattr(throttle, "__mro__", ())
    )


def limits_itself(view: Any) -> bool:
    """Whether anything of this package limits the view, the drop-ins for other packages included."""
    if str(getattr(view, "__module__", "")).startswith("django_ratequota."):
        return False  # the usage endpoint: it limits itself, and none of the project's views
    throttles = class_attribute(view, "throttle_classes") or ()
    bases = [base for throttle in throttles for base in getattr(throttle, "__mro__", ())]
    ours = any(base.__module__.startswith("django_ratequota.") for base in bases)
    return ours or hasattr(view, LIMITED_ATTRIBUTE) or enforces_itself(view)


def view_class(view: Any) -> Any:
    """The class that ``as_view`` made the view from; None of other views."""
    return getattr(view, "cls", None) or getattr(view, "view_class", None)


def class_attribute(view: Any, name: str) -> Any:
    """What the view's instances have under that name: what ``as_view`` was given, else the class's own."""
    given = getattr(view, "initkwargs", None) or getattr(view, "view_initkwargs", None) or {}
    return given[name] if name in given else getattr(view_class(view), name, None)
