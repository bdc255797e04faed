"""Policies as code: what the database says as a file (``export``), and a file's word made so (``bring``).

``text`` reads and writes YAML and JSON, ``sections`` says what a file holds, ``reading`` and ``values`` judge
one, ``changes`` brings the database to it.
"""

from __future__ import annotations

from .apply import Comparison, bring
from .document import MAX_BYTES, decode
from .schema import FORMATS, export, pieces

__all__ = ["FORMATS", "MAX_BYTES", "Comparison", "bring", "decode", "export", "pieces"]
