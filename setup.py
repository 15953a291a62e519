"""The page that the package index shows: README.md, with links that lead somewhere there, too.

Everything else is in pyproject.toml. ``REPO_URL`` is the repository's address, which the release
workflow knows; without it nothing can be linked to, and the words of a link stand alone.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^\[\]]*)\]\(([^()\s]+)\)")
PICTURE = re.compile(r'<img src="([^"]+)"([^>]*)>')


def described(text: str, repository: str, version: str) -> str:
    """The README as it stands elsewhere: relative links are those of this version's files."""

    def there(kind: str, target: str) -> str:
        return f"{repository}/{kind}/v{version}/{target}"

    def link(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        if "://" in target:
            return match.group()
        if not repository:
            return "" if picture else words
        return f"{picture}[{words}]({there('raw' if picture else 'blob', target)})"

    def picture(match: re.Match[str]) -> str:
        return f'<img src="{there("raw", match[1])}"{match[2]}>' if repository else ""

    return PICTURE.sub(picture, LINK.sub(link, text)).lstrip()


def main() -> None:
    """Called by the build backend, which reads the rest from pyproject.toml."""
    repository = os.environ.get("REPO_URL", "").rstrip("/")
    project = (HERE / "pyproject.toml").read_text(encoding="utf-8")
    (version,) = re.findall(r'^version = "(.+)"$', project, re.MULTILINE)
    changes = f"{repository}/blob/v{version}/CHANGELOG.md"
    setup(
        long_description=described((HERE / "README.md").read_text("utf-8"), repository, version),
        long_description_content_type="text/markdown",
        project_urls={"Source": repository, "Changelog": changes} if repository else {},
    )


if __name__ == "__main__":
    main()
