"""Run by wheel.sh: the README as an index renders it has its text, its picture, and no relative link.

``readme_check.py SDIST`` needs readme-renderer, which twine installs; with Markdown it needs the extra ``md``.
"""

from __future__ import annotations

import email
import re
import sys
import tarfile
from pathlib import Path

from readme_renderer import markdown


def main(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        [name] = [name for name in archive.getnames() if name.count("/") == 1 and name.endswith("/PKG-INFO")]
        metadata = archive.extractfile(name)
        assert metadata is not None
        text = email.message_from_bytes(metadata.read()).get_payload()
    page = markdown.render(text)
    assert page, "the README cannot be rendered"
    assert "<img" in page
    links = re.findall(r'(?:href|src|srcset)="([^"]+)"', page)
    assert len(links) > 20
    relative = [link for link in links if not re.match(r"https://|#", link)]
    assert relative == [], f"docs/readme.py leaves these links relative: {relative}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
