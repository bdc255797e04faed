"""The errors that django-ratequota raises; all share the root ``RateQuotaError``.

A refused request is not an error: it is a ``Decision`` with ``allowed=False``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

#: Reasons of error replies by a healthy server, which may well decide other commands: it redirects this one, asks to
#: send it again, or the command's key, script or argument is wrong.
ANSWERS = frozenset("noscript moved ask tryagain crossslot wrongtype response".split())


class RateQuotaError(Exception):
    """Root of every error raised by this package. Errors can be pickled, as pools of processes do."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, vars(self))


class InvalidRate(RateQuotaError, ValueError):
    """A rate that cannot be read or that no algorithm counts; the message shows what to write instead.

    ``template`` and ``params`` are the parts of the message, for translation.
    """

    def __init__(self, template: str, **params: object) -> None:
        super().__init__(template % params if params else template)
        self.template, self.params = template, params


class InvalidCost(RateQuotaError, ValueError):
    """A cost that is not a whole number of units in the accepted range."""


class InvalidCaller(RateQuotaError, ValueError):
    """Arguments of ``check_caller`` that describe no caller."""


class InvalidBucket(RateQuotaError, ValueError):
    """Buckets that cannot be checked together, or an invalid clock, prefix or time zone."""


class ConfigurationError(RateQuotaError):
    """``RATEQUOTA``, or the CACHES alias that it names, cannot be used; ``manage.py check`` reports the same."""


#: Most problems of a file that are listed; there may be one in each of 100,000 lines.
SHOWN = 20


class FileProblem(NamedTuple):
    """A problem of a file, and its place."""

    #: Counted from 1.
    line: int
    #: Such as ``policies[3].rates``; "" = the line itself.
    path: str
    text: str


class InvalidFile(RateQuotaError):
    """A file of policies that cannot be imported; ``problems`` lists all that is wrong."""

    def __init__(self, problems: list[FileProblem]) -> None:
        super().__init__("; ".join(problem.text for problem in problems[:SHOWN]))
        self.problems = problems


class StoreError(RateQuotaError):
    """Redis gave no decision.

    ``reason`` is a short, stable label for counters and logs: ``timeout``, ``connection``, or the lower-cased
    error prefix that the server sent (``readonly``, ``oom``, ``busy``, ``loading``, ``noperm`` ...).
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    @property
    def answered(self) -> bool:
        """Whether a healthy server replied with an error; no breaker opens by it."""
        return self.reason in ANSWERS


class StoreLeftAlone(StoreError):
    """Nothing was sent: the circuit breaker is open, and ``reason`` is that of its failure, or there is no server."""


class OutOfTime(StoreError):
    """Too little of the decision's time was left for this command; its server is not to blame."""

    def __init__(self, seconds: float) -> None:
        super().__init__("timeout", f"no decision within {seconds} s")


class NoSlot(RateQuotaError, TimeoutError):
    """The next slot of a queue is later than ``turn`` may wait; nothing was booked.

    ``retry_after`` is the time until that slot (seconds).
    """

    def __init__(self, timeout: float, retry_after: float) -> None:
        super().__init__(f"no slot within {timeout:g} s; the next one is in {retry_after:.1f} s")
        self.retry_after = retry_after


class NewerRevision(RateQuotaError):
    """The policies were published again since the caller's snapshot; nothing was consumed.

    ``revision`` is the stored one: reload the snapshot, then check again. ``instead_of`` is the caller's own, where
    it is greater and cannot be a revision: more than a day ahead of the store's clock.
    """

    def __init__(self, revision: int, instead_of: int | None = None) -> None:
        super().__init__(f"policies were published at revision {revision}")
        self.revision, self.instead_of = revision, instead_of


def _restored(kind: type[RateQuotaError], args: tuple[Any, ...], attributes: dict[str, Any]) -> RateQuotaError:
    """Return an error as it was, without ``__init__``, whose arguments are not those of the message."""
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(attributes)
    return error
