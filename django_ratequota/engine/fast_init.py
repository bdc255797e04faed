"""How value objects are made that every decision makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

Value = TypeVar("Value")


def fast_init(cls: type[Value]) -> Callable[..., Value]:
    """What makes one of a frozen, slotted dataclass of all its fields, in their order: in less than half the time.

    The ``__init__`` that ``dataclass`` writes for frozen classes looks every field up by its name, and a call by
    names takes longer than one by places.
    """
    names = [one.name for one in fields(cls)]  # type: ignore[arg-type]
    known: dict[str, Any] = {"new": object.__new__, "cls": cls}
    known |= {f"set_{name}": getattr(cls, name).__set__ for name in names}
    body = "".join(f"    set_{name}(made, {name})\n" for name in names)
    text = f"def make({', '.join(names)}):\n    made = new(cls)\n{body}    return made\n"
    exec(text, known)  # noqa: S102 - as dataclass does, of our own names
    make: Callable[..., Value] = known["make"]
    return make
