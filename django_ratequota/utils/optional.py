"""Imports optional packages on use; where one is missing, the error names the extra that installs it."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from ..exceptions import ConfigurationError


def require(module: str, extra: str) -> ModuleType:
    """Import and return the module; raises ``ConfigurationError`` naming the extra that installs it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
        raise ConfigurationError(f"{module} is not installed: pip install 'django-ratequota[{extra}]'") from error
