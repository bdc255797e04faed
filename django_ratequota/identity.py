"""Who is asking: the ``Caller`` of a request."""

from .policies.identity import Caller

__all__ = ["Caller"]
