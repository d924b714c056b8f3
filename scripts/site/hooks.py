"""What mkdocs does not do by itself: pages from outside docs/, and links to source files (mkdocs.yml, `make docs`).

A link in a page is relative to the page's place in the repository. Here it gets the place of its target in the site.
A source file that a page links to becomes a page of its own. A link to a file that is not there fails the build.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent.parent
GENERATED = ROOT / "build" / "site" / "pages"
TOP_PAGES = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r"(?<=\]\()(?P<file>[^)\s#:]+)(?P<anchor>#[^)\s]*)?(?=\))")
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".json": "json", ".yaml": "yaml"}

log = get_plugin_logger("site")
places: dict[str, Path] = {}
"""Page of the site -> its file in the repository."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    places.clear()
    for file in files.documentation_pages():
        places[file.src_uri] = ROOT / "docs" / file.src_uri
    for name in TOP_PAGES:
        _add(files, config, name, ROOT / name, (ROOT / name).read_text(encoding="utf-8"))
    for file in sorted(GENERATED.rglob("*.md")):
        _add(files, config, file.relative_to(GENERATED).as_posix(), file, file.read_text(encoding="utf-8"))
    waiting = list(places.items())
    while waiting:
        uri, file = waiting.pop()
        for target in _linked(uri, file):
            target_uri = _uri(target)
            if target.is_file() and target_uri not in places and files.get_file_from_path(target_uri) is None:
                text = target.read_text(encoding="utf-8")
                if target.suffix != ".md":
                    text = f"# {target.relative_to(ROOT)}\n\n````{LANGUAGES.get(target.suffix, 'text')}\n{text}\n````\n"
                _add(files, config, target_uri, target, text)
                if target.suffix == ".md":
                    waiting.append((target_uri, target))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    home = places[uri]

    def moved(link: re.Match[str]) -> str:
        target = _target(home, link["file"])
        anchor = link["anchor"] or ""
        if target.is_dir():
            target = target / "README.md"
        if not target.exists():
            log.warning("%s links to %s, which is not there", home.relative_to(ROOT), link["file"])
            return link[0]
        return os.path.relpath(_uri(target), Path(uri).parent) + anchor

    return LINK.sub(moved, markdown) if home.suffix == ".md" else markdown


def _linked(uri: str, file: Path) -> list[Path]:
    return [_target(file, link["file"]) for link in LINK.finditer(file.read_text(encoding="utf-8"))]


def _target(home: Path, link: str) -> Path:
    return Path(os.path.normpath(home.parent / link))


def _uri(target: Path) -> str:
    """The page of the site that shows a file of the repository."""
    for folder in (ROOT / "docs", GENERATED):
        if target.is_relative_to(folder):
            return target.relative_to(folder).as_posix()
    name = target.relative_to(ROOT).as_posix()
    if name in TOP_PAGES:
        return name
    return f"sources/{name}" if target.suffix == ".md" else f"sources/{name}.md"


def _add(files: Files, config: MkDocsConfig, uri: str, file: Path, text: str) -> None:
    places[uri] = file
    files.append(File.generated(config, uri, content=text))
