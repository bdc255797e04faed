"""Which views Django awaits."""

from __future__ import annotations

from typing import Any

from asgiref.sync import iscoroutinefunction


def is_awaited(view: Any) -> bool:
    """Return whether Django awaits the view: a coroutine function, or the dispatch of an async class-based view."""
    if iscoroutinefunction(view):
        return True
    while view is not None:
        # method_decorator passes a partial of the bound method, which other decorators may have wrapped.
        instance = getattr(getattr(view, "func", view), "__self__", None)
        if instance is not None:
            return bool(getattr(instance, "view_is_async", False))
        view = getattr(view, "__wrapped__", None)
    return False
