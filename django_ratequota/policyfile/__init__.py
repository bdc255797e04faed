"""Policies as code: export the database as a file, and import a file.

``document`` reads and writes YAML and JSON, ``schema`` makes the sections of a file from the models, ``export`` reads
the database, ``entries`` reads a file, ``apply`` compares the two and imports.
"""

from __future__ import annotations

from .apply import Diff, apply_file
from .document import FORMATS, MAX_BYTES, decode
from .export import export_chunks

__all__ = ["FORMATS", "MAX_BYTES", "Diff", "apply_file", "decode", "export_chunks"]
