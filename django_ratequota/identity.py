"""Who is asking: the ``Caller`` of a request."""

from .policies.requests.caller import Caller

__all__ = ["Caller"]
