"""Put customers on plans and refund them from your own code, such as the webhook of a payment provider."""

from .operations.assign import assign
from .operations.counters import Correction, refund, reset

__all__ = ["Correction", "assign", "refund", "reset"]
