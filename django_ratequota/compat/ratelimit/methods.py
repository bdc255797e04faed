"""Values of ``method``: the HTTP methods that are counted."""

from __future__ import annotations

#: Every method.
ALL = (None,)
#: Methods that change something.
UNSAFE = ["DELETE", "PATCH", "POST", "PUT"]
