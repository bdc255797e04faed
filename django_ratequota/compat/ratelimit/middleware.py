"""Answers refused requests with the view that RATELIMIT_VIEW names."""

from __future__ import annotations

from typing import Any

from asgiref.sync import async_to_sync, iscoroutinefunction
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.deprecation import MiddlewareMixin
from django.utils.module_loading import import_string

from .exceptions import Ratelimited


class RatelimitMiddleware(MiddlewareMixin):
    """Sync and async middleware; the view gets the request and the exception, and may be async as well."""

    def process_exception(self, request: Any, exception: Exception) -> Any:
        """Return the response to a refused request; None for any other exception."""
        if not isinstance(exception, Ratelimited):
            return None
        path = getattr(settings, "RATELIMIT_VIEW", None)
        if not path:
            raise ImproperlyConfigured("RatelimitMiddleware needs RATELIMIT_VIEW, the dotted path of a view")
        view = import_string(path)
        # Django calls this in a thread where the request is served by an event loop.
        return async_to_sync(view)(request, exception) if iscoroutinefunction(view) else view(request, exception)
