"""Put customers on plans from your own code, such as the webhook of a payment provider."""

from .operations.assign import assign

__all__ = ["assign"]
