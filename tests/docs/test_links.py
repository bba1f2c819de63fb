"""Links between pages lead somewhere, and the index leads to every page in reading order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock_docs.pages import DOCS, ROOT, anchor, headings, pages

INDEX = DOCS / "README.md"
PAGES = [*pages(), ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"]
_LINK = re.compile(
    r"(?<!!)\[[^\]]*\]\((?!https?:|mailto:)(?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)"
)
_CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    found: list[str] = []
    for _, heading in headings(page.read_text(encoding="utf-8")):
        name = anchor(heading)
        again = found.count(name)
        found += [name, f"{name}-{again}"] if again else [name]
    return {*found}


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    wrong = []
    # Code is left out, but not the brackets around it: [`penstock run`](#penstock-run).
    text = _CODE.sub(
        lambda found: "" if found[0].lstrip().startswith("```") else "x", page.read_text()
    )
    for link in _LINK.finditer(text):
        target = (page.parent / link["path"]).resolve() if link["path"] else page
        in_page = target.exists() and target.suffix == ".md" and link["anchor"]
        if not target.exists() or (in_page and link["anchor"] not in anchors(target)):
            wrong.append(link[0])
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` c\n[x](none.md) [y](#none) [z](#a-b-c) [`w`](page.md#a-b-c) `[q](no)`")
    assert broken(page) == ["[x](none.md)", "[y](#none)"]


def test_the_index_leads_to_every_page() -> None:
    text = INDEX.read_text()
    named = [(DOCS / link["path"]).resolve() for link in _LINK.finditer(text) if link["path"]]
    indirect = {page for page in pages() if page.parent.name in ("connectors", "adr")}
    wanted = {page for page in pages() if page != INDEX} - indirect
    wanted |= {DOCS / "connectors" / "README.md", DOCS / "adr" / "README.md"}
    assert sorted(str(page.relative_to(ROOT)) for page in wanted - {*named}) == []


@pytest.mark.parametrize("folder", ["connectors", "adr"])
def test_an_index_of_a_folder_leads_to_all_of_it(folder: str) -> None:
    text = (DOCS / folder / "README.md").read_text()
    names = {path.name for path in (DOCS / folder).glob("*.md")} - {"README.md"}
    assert sorted(name for name in names if f"({name})" not in text) == []
