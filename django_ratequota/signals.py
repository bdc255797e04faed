"""Public signals."""

from .changes.publication import policies_changed
from .enforcement.check_request import request_refused
from .monitoring.alerts import quota_threshold
from .runtime import store_state_changed

__all__ = ["policies_changed", "quota_threshold", "request_refused", "store_state_changed"]
