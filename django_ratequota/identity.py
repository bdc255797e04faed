"""Who is asking: the ``Caller`` of a request."""

from .policies.requests.identity import Caller

__all__ = ["Caller"]
