"""Pages about the code are true: the files they name exist, and every package has a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "penstock"
READMES = sorted(SOURCE.rglob("README.md"))
PAGES = [
    ROOT / "CONTRIBUTING.md",
    ROOT / "tests" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *READMES,
]
PACKAGES = sorted(
    path.parent
    for path in SOURCE.rglob("__init__.py")
    if path.parent != SOURCE and path.parent.name not in {"proto", "templates"}
)

_FILE = re.compile(r"`([\w./-]+\.(?:py|proto|yaml))`")
_LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def missing_files(page: Path) -> list[str]:
    """The files that a page names and nobody has, relative to the page, the source or the root."""
    bases = (page.parent, SOURCE, ROOT, ROOT / "src", ROOT / "bench")
    named = _FILE.findall(page.read_text())
    return [name for name in named if not any((base / name).exists() for base in bases)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    assert missing_files(page) == []
    links = _LINK.findall(page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_package_has_a_page_that_names_all_of_its_files(package: Path) -> None:
    pages = [above / "README.md" for above in (package, package.parent)]
    text = "".join(page.read_text() for page in pages if page.exists())
    files = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    assert sorted(name for name in files if name not in text) == []


def test_a_file_that_nobody_has_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`model/clock.py` and `model/no_such.py`")
    assert missing_files(page) == ["model/no_such.py"]
