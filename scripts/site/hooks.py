"""What MkDocs is told beside ``mkdocs.yml``.

- Pages that live elsewhere: the changelog, CONTRIBUTING, the notebooks with their outputs, and the
  commands with what their ``--help`` prints.
- A link from a page to a file of the repository outside ``docs/`` leads to a copy of that file in
  the site: Markdown as a page, everything else as text. So the site is whole without a network, and the
  same link works where the page is read in the repository.
"""

from __future__ import annotations

import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

sys.path.insert(0, os.path.dirname(__file__))
from commands import commands_page
from notebook_pages import as_markdown

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ELSEWHERE = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Files outside ``docs/`` that are pages of the site, under these names."""
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_INDEX = ("__init__.py", "README.md", "table.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that live elsewhere, and every file that a page links to."""
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text, images = as_markdown(notebook)
        _add(files, config, f"notebooks/{notebook.stem}.md", text)
        _add(files, config, f"notebooks/{notebook.name}", notebook.read_bytes())
        for name, data in images.items():
            _add(files, config, f"notebooks/{name}", data)
    _add(files, config, "reference/commands.md", commands_page())
    for source, uri in ELSEWHERE.items():
        _add(files, config, uri, (ROOT / source).read_text(encoding="utf-8"))
    waiting = [file.src_uri for file in files if file.src_uri.endswith(".md")]
    while waiting:
        for found in _outside(waiting.pop(), files):
            uri = _uri(found)
            if files.get_file_from_path(uri) is None:
                content = _listing(found) if found.is_dir() else found.read_bytes()
                _add(files, config, uri, content, InclusionLevel.NOT_IN_NAV)
                if uri.endswith(".md"):
                    waiting.append(uri)
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Links to files of the repository become links to their copies."""
    here = page.file.src_uri

    def replaced(match: re.Match[str]) -> str:
        start, target, anchor, end = match.groups()
        found = _resolve(here, target)
        if found is None or (found.is_relative_to(DOCS) and _home(here).is_relative_to(DOCS)):
            return match.group()
        way = posixpath.relpath(_uri(found), posixpath.dirname(here) or ".")
        return f"{start}{way}{anchor or ''}{end}"

    return _LINK.sub(replaced, markdown)


def _add(
    files: Files, config: MkDocsConfig, uri: str, content: str | bytes,
    inclusion: InclusionLevel = InclusionLevel.UNDEFINED,
) -> None:  # fmt: skip
    files.append(File.generated(config, uri, content=content, inclusion=inclusion))


def _outside(uri: str, files: Files) -> list[Path]:
    """The files outside ``docs/`` that a page links to."""
    page = files.get_file_from_path(uri)
    assert page is not None
    targets = [match.group(2) for match in _LINK.finditer(page.content_string)]
    found = (_resolve(uri, target) for target in targets)
    return [path for path in found if path is not None and not path.is_relative_to(DOCS)]


def _home(uri: str) -> Path:
    """Where a page's links start from, in the repository."""
    for source, page in ELSEWHERE.items():
        if uri == page:
            return ROOT / source
    prefix = "repository/"
    return ROOT / uri.removeprefix(prefix) if uri.startswith(prefix) else DOCS / uri


def _resolve(uri: str, target: str) -> Path | None:
    """The file of the repository that a link means; ``None`` for an address or nothing."""
    if "://" in target or target.startswith(("/", "mailto:")):
        return None
    path = Path(os.path.normpath(_home(uri).parent / target))
    if path.is_dir():
        path = next((path / name for name in _INDEX if (path / name).is_file()), path)
    return path if path.exists() and path.is_relative_to(ROOT) else None


def _listing(folder: Path) -> str:
    """A page for a folder that has none of its own."""
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    inside = folder.relative_to(ROOT).as_posix()
    return "\n".join([f"# `{inside}`", "", *(f"- `{name}`" for name in names)]) + "\n"


def _uri(path: Path) -> str:
    """Where the site has a file of the repository."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    inside = path.relative_to(ROOT).as_posix()
    if inside in ELSEWHERE:
        return ELSEWHERE[inside]
    if inside.startswith("notebooks/"):
        return f"{inside.removesuffix('.ipynb')}.md"
    if path.is_dir():
        return f"repository/{inside}/index.md"
    shown = path.suffix in (".md", ".svg", ".png")
    return f"repository/{inside}" + ("" if shown else ".txt")
