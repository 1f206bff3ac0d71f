"""Makes the pages README.md, CONTRIBUTING.md and CHANGELOG.md part of the documentation site, and links to files work.
Called by mkdocs (mkdocs.yml); calls mkdocs alone.

Links between pages, and to files of the repository, are paths in the repository, so that they work in a checkout too.
In the site the pages of the root lie beside those of docs/, and the files that are linked to lie in files/.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
ROOT_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_LINK = re.compile(r"(?<=\]\()(?!https?://|#|mailto:)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the root, and every file of the repository that a page links to."""
    pages = {name: (ROOT / source).read_text() for source, name in ROOT_PAGES.items()}
    linked = {
        path
        for directory, texts in ((ROOT, pages.values()), (ROOT / "docs", _texts(files)))
        for text in texts
        for path in _targets(text, directory)
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=_LINK.sub(lambda match: _in_site(match[1], ROOT), text)))
    for path in sorted(linked):
        if _is_outside(path):
            files.append(File.generated(config, f"files/{path.relative_to(ROOT)}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Turns links out of docs/ into links to the site's copies. (`on_files` does so for the pages of the root.)"""
    return _LINK.sub(
        lambda match: _in_site(match[1], ROOT / "docs") if match[1].startswith("../") else match[1], markdown
    )


def _texts(files: Files) -> list[str]:
    return [file.content_string for file in files.documentation_pages()]


def _targets(text: str, directory: Path) -> list[Path]:
    return [(directory / link).resolve() for link in _LINK.findall(text)]


def _is_outside(path: Path) -> bool:
    """True if a file of the repository has to be copied to the site, because it is not a page."""
    return path.is_file() and ROOT / "docs" not in path.parents and str(path.relative_to(ROOT)) not in ROOT_PAGES


def _in_site(link: str, directory: Path) -> str:
    """Return what a link of a page in `directory` becomes in the site, whose pages all lie in its root."""
    path = (directory / link).resolve()
    if ROOT not in path.parents:
        return link
    name = str(path.relative_to(ROOT))
    if name in ROOT_PAGES:
        return ROOT_PAGES[name]
    return name.removeprefix("docs/") if name.startswith("docs/") else f"files/{name}"
