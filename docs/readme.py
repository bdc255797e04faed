"""The README as an index shows it: links to files are absolute, because an index has no files beside it.

A metadata hook of hatchling. The address that links begin with is "Source" in ``[project.urls]`` of pyproject.toml.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: What stands before the target of a link or a picture: ``](``, ``src="``, ``srcset="``.
_RELATIVE = re.compile(r"""(\]\(|src(?:set)?=")(?![a-z]+:|#)([^)"\s]+)""")
_PICTURES = (".png", ".svg")


class Readme(MetadataHookInterface):
    """Sets the field ``readme``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling with the table ``[project]``."""
        source = metadata["urls"]["Source"]

        def absolute(link: re.Match[str]) -> str:
            kind = "raw" if link[2].endswith(_PICTURES) else "blob"
            return f"{link[1]}{source}/{kind}/main/{link[2]}"

        text = _RELATIVE.sub(absolute, Path(self.root, "README.md").read_text())
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
