"""The log of this package, in which text that others wrote forges no lines and no colours."""

from __future__ import annotations

import logging
from traceback import format_exception_only

from .escaping import one_line


def _escape(record: logging.LogRecord) -> bool:
    """Escape the arguments of a record and the texts of its error; returns True, so that it is logged."""
    if isinstance(record.args, tuple):  # a project's own record may have a mapping
        record.args = tuple([one_line(str(arg)) if isinstance(arg, str | Exception) else arg for arg in record.args])
    if record.exc_info and record.exc_info[1]:
        error = _printable(record.exc_info[1])
        record.exc_info = type(error), error, error.__traceback__
    return True


def _printable(error: BaseException) -> BaseException:
    """Return the error, or a copy of it and of its causes if their texts could forge lines or colours."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) and cause not in chain:
        chain.append(cause)
    texts = ["".join(format_exception_only(one)).strip() for one in chain]
    if all(map(str.isprintable, texts)):
        return error
    copies = [Exception(one_line(text)) for text in texts]
    for at, copy in enumerate(copies):
        copy.__traceback__, copy.__cause__ = chain[at].__traceback__, copies[at + 1] if copies[at + 1 :] else None
    return copies[0]


logger = logging.getLogger("django_ratequota")
logger.addFilter(_escape)
