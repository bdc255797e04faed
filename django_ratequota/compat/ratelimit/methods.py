"""Which HTTP methods are counted."""

from __future__ import annotations

#: Every method.
ALL = (None,)
#: Those that change something.
UNSAFE = ["DELETE", "PATCH", "POST", "PUT"]
