"""What requests note for the ledger: the units of a check, held until it has ended, and what follows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import ReferenceType

from ..engine.types import Bucket


class Entry(NamedTuple):
    """Units that were charged to a bucket, or refunded."""

    bucket: Bucket
    units: int
    #: When they were charged, by the store's clock (µs): that names the window, of a refund too.
    charged_us: int
    #: When they were refunded (µs); 0 = they were charged.
    refunded_us: int = 0


class Refusal(NamedTuple):
    """A request for which a bucket had no room."""

    bucket: Bucket
    #: Units that it asked for.
    cost: int
    #: When, by the store's clock (µs).
    at_us: int


class Hold(list[Entry]):
    """The charges of one check.

    They are final once the check has ended: by its first charge or refund by hand, with its request, or at the end of
    ``with check_caller(...)``. Until then a killed worker takes them along, as nobody has got anything for them.
    """

    __slots__ = ("is_open", "owner")
    is_open: bool
    #: The checks of the request, which has ended where they are gone or say so; None = it is not a request's.
    owner: ReferenceType[Any] | None

    def is_held(self) -> bool:
        """Return whether the check has not ended."""
        if self.owner is None:
            return self.is_open
        checks = self.owner()
        return checks is not None and not checks.ended and self.is_open


class Settled(NamedTuple):
    """What was charged or refunded by hand, and the holds that end with it."""

    entries: Sequence[Entry]
    holds: Sequence[Hold]


#: What a request may note.
Noted = Entry | Refusal | Hold | Settled
