"""The exception of a refused request."""

from django.core.exceptions import PermissionDenied


class Ratelimited(PermissionDenied):
    """The request is beyond its rate; 403 unless a handler or ``RatelimitMiddleware`` returns another response."""
