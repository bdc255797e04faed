"""Names that a package exports, and imports only when they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def lazy_exports(package: str, exports: Mapping[str, tuple[str, ...]]) -> Callable[[str], object]:
    """Return a ``__getattr__`` for the package; ``exports`` maps each of its modules to the names there."""
    modules = {name: module for module, names in exports.items() for name in names}

    def getter(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f".{modules[name]}", package), name)

    return getter
