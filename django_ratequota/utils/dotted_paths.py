"""Functions that settings name by their dotted path."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import iscoroutinefunction

from ..exceptions import ConfigurationError

#: Functions that return what a setting names, and are none themselves.
_FACTORIES = {
    "django_ratequota.notify.post_to",
    *(f"django_ratequota.identifiers.{name}" for name in ("header_key", "jwt_claim", "login_field", "with_address")),
}


def function(signature: str) -> Callable[[object], str]:
    """Return a validator of the dotted path of a function; it raises ``ConfigurationError`` with what to write."""

    def validate(value: object) -> str:
        if not isinstance(value, str):
            raise ConfigurationError(f"Write the dotted path of {signature}.")
        module, _dot, name = value.rpartition(".")
        try:
            function = getattr(import_module(module), name)
        except Exception as error:  # a module may raise anything while it is imported
            raise ConfigurationError(f"{error}; write the dotted path of {signature}.") from error
        if not callable(function):
            raise ConfigurationError(f"{value} is not callable; write the dotted path of {signature}.")
        if iscoroutinefunction(function):  # each call returns another coroutine object
            raise ConfigurationError(f"{value} is async; write the dotted path of {signature} that is not.")
        if value in _FACTORIES:
            raise ConfigurationError(f"{value} returns {signature}: write the dotted path of what it returns.")
        return value

    return validate
