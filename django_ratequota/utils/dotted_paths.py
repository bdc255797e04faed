"""Functions that settings name by their dotted path."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import iscoroutinefunction

from ..exceptions import ConfigurationError

_IDENTIFIERS = "header_key jwt_claim login_field with_address"
#: Functions that return what a setting names, and are none themselves.
_FACTORIES = {
    **{f"django_ratequota.identifiers.{name}": "an identifier" for name in _IDENTIFIERS.split()},
    "django_ratequota.notify.post_to": "a receiver",
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
            hint = "call it in a module of yours, and write the dotted path of the function that it returns"
            raise ConfigurationError(f"{value} returns {_FACTORIES[value]}: {hint}.")
        return value

    return validate
