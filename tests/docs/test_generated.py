"""What is generated is up to date, complete, and about things that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.catalog.diagnostics import Diagnostics
from penstock.catalog.forms import Either, Form, Key, KeyedMapping, ListOf, MapOf
from penstock.catalog.grammar import CATALOG
from penstock.catalog.nodes import parse
from penstock.cli.connector import connectors as listed_connectors
from penstock.model.reduce import Strategy
from penstock_docs import catalog, checked, commands, connectors
from penstock_docs.__main__ import generate
from penstock_docs.pages import DOCS, ROOT, Region, blocks, headings, pages, regions, rendered

SOURCES = sorted((ROOT / "src" / "penstock").rglob("*.py"))
TROUBLES = DOCS / "troubleshooting.md"
CODE = re.compile(r"[\"\[]([EW]-[A-Z]+(?:-[A-Z]+)*)[\"\]]")

HIDDEN = {"W-DROP", "W-REDUCE-CHANGED"}
"""Findings about changes of a collection that no command prints."""

IDLE = {
    ("a catalog", "storageMappings"),
    ("a storage mapping", "stores"),
    ("a store", "provider"),
    ("a store", "bucket"),
    ("a store", "prefix"),
    ("a store", "path"),
    ("a collection", "reset"),
    ("fragments", "flushInterval"),
    ("a capture", "autoDiscover"),
    ("autoDiscover", "addNewBindings"),
    ("autoDiscover", "evolveIncompatibleCollections"),
    ("a materialization binding", "atLeastOnce"),
    ("triggers", "interval"),
}
"""Keys that are accepted and do nothing: the page does not recommend them by an example."""


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_generated_parts_are_up_to_date(page: Path) -> None:
    found = rendered(page, generate)
    assert found == page.read_text(encoding="utf-8"), "run: make docs"


def test_a_page_that_is_not_up_to_date_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n\n<!-- generated: common options -->\nold\n<!-- end -->\nkept\n")
    text = rendered(page, generate)
    assert "| `--data` |" in text
    assert "old" not in text
    assert text.endswith("<!-- end -->\nkept\n")


def test_what_does_not_exist_cannot_be_generated(tmp_path: Path) -> None:
    for what in ("keys of collections.NAME.none", "config of penstock/none", "none"):
        with pytest.raises(LookupError):
            generate(Region(what=what, page=tmp_path / "p.md", text="", offset=0))


# ----------------------------------------------------------------------------------- docs/catalog


def supported() -> set[tuple[str, str]]:
    """Every key that has an effect, with the mapping that it is in."""
    return {
        (mapping.what, name)
        for _, mapping in catalog.mappings()
        for name, key in mapping.keys.items()
        if isinstance(key, Key) and not key.accepted
    }


def used(value: Any, form: Form) -> Iterator[tuple[str, str]]:  # noqa: ANN401
    """The keys that a catalog uses."""
    match form:
        case Either():
            for each in form.forms:
                yield from used(value, each)
        case ListOf() if isinstance(value, list):
            for item in value:
                yield from used(item, form.item)
        case MapOf() if isinstance(value, dict):
            for member in value.values():
                yield from used(member, form.value)
        case KeyedMapping() if isinstance(value, dict):
            for name, member in value.items():
                if isinstance(key := form.keys.get(name), Key):
                    yield form.what, name
                    yield from used(member, key.form)
        case _:
            return


def test_every_mapping_of_the_grammar_is_on_the_page_once() -> None:
    by_path = dict(catalog.mappings())
    shown = [
        id(by_path[region.what.removeprefix(catalog.KEYS)])
        for region in regions(catalog.PAGE)
        if region.what.startswith(catalog.KEYS)
    ]
    missing = {each.what for each in by_path.values() if id(each) not in shown}
    assert missing <= {"a storage mapping", "a store", "autoDiscover"}
    assert len(shown) == len({*shown})


def test_every_key_has_an_example() -> None:
    shown: set[tuple[str, str]] = set()
    for block in blocks(catalog.PAGE):
        if block.language == "yaml":
            node = parse(block.text, "example.yaml", Diagnostics())
            assert node is not None, block.place
            shown |= {*used(node.plain(), CATALOG)}
    assert supported() - shown - IDLE == set()


def test_every_strategy_and_every_language_is_on_the_page() -> None:
    text = catalog.PAGE.read_text()
    assert [each.value for each in Strategy if f"| `{each.value}`" not in text] in (
        [],
        ["maximize"],  # in one row with minimize
    )
    engines = {"spark": "Spark SQL", "sqlite": "SQLite", "python": "Python"}
    assert {*engines.values()} <= {heading for _, heading in headings(text)}


# -------------------------------------------------------------------------------------- docs/cli


def test_every_command_is_on_the_page_with_an_example() -> None:
    text = (DOCS / "cli.md").read_text()
    found = [*commands.commands()]
    assert len(found) > 30
    for name, command in found:
        part = text.split(f"\n### {name}\n")[1].split("\n### ")[0]
        assert "Example:\n\n```sh\n" in part, name
        for option in (*commands.options(command), *commands.arguments(command)):
            assert option.text, f"{name}: {option.names} has no help"


def test_common_options_are_listed_once() -> None:
    names = {option.names for option in commands.common()}
    assert {"`--data`", "`--consensus`", "`--json`", "`--debug`"} <= names
    text = (DOCS / "cli.md").read_text()
    assert text.count("\n| `--debug` |") == 1


def test_every_environment_variable_is_on_the_page() -> None:
    written = {
        v for s in SOURCES for v in re.findall(r"\bPENSTOCK_[A-Z][A-Z_]*[A-Z]", s.read_text())
    }
    text = (DOCS / "cli.md").read_text()
    assert sorted(name for name in written if name not in text) == []
    assert len(written) > 8


def test_every_exit_code_is_on_the_page() -> None:
    written = {
        n for s in SOURCES for n in re.findall(r"^    exit_code = (\d+)", s.read_text(), re.M)
    }
    listed = (DOCS / "cli.md").read_text().split("## Exit codes")[1].split("\n## ")[0]
    assert {"1", "2"} < written
    assert sorted(code for code in written if f"\n| {code} |" not in listed) == []


# -------------------------------------------------------------------------------- docs/connectors


def test_every_connector_has_a_page_with_all_of_its_keys_and_an_example() -> None:
    found = {region.what: region.page for page in pages() for region in regions(page)}
    for name, schemas in connectors.connectors().items():
        page = found[f"resource of {name}"]
        assert page.parent == DOCS / "connectors"
        assert page.name in (DOCS / "connectors" / "README.md").read_text()
        if schemas.config.value["properties"]:
            assert found[f"config of {name}"] == page
        examples = [b.text for b in blocks(page) if b.language == "yaml"]
        assert any(name in text or "ingest:" in text for text in examples), name
        for member in schemas.resource.value["properties"]:
            assert f"| `{member}` |" in page.read_text(), member


def test_every_connector_that_is_listed_has_a_page() -> None:
    images = {image.removesuffix(":NAME") for _, image, _ in listed_connectors()}
    assert images == {name if name != "python" else "-" for name in connectors.connectors()}


def test_defaults_and_examples_of_connectors_fit_their_schemas() -> None:
    for name, schemas in connectors.connectors().items():
        for schema in (schemas.config, schemas.resource):
            known = schema.value["properties"]
            required = {each: known[each]["examples"][0] for each in schema.value["required"]}
            for member, about in known.items():
                shown = [*about.get("examples", ())]
                shown += [about["default"]] if "default" in about else []
                for value in shown:
                    value = value.strip('"') if isinstance(value, str) else value
                    assert schema.problems({**required, member: value}) == (), (name, member, value)


# --------------------------------------------------------------------------- docs/troubleshooting


def codes() -> set[str]:
    """Every code that a command can print."""
    return {code for source in SOURCES for code in CODE.findall(source.read_text())} - HIDDEN


def sections() -> dict[str, str]:
    text = TROUBLES.read_text()
    parts = re.split(r"^### ([EW]-[A-Z-]+)$", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_code_is_explained_and_no_other() -> None:
    assert len(codes()) > 45
    assert codes() - sections().keys() == set(), "write a section in docs/troubleshooting.md"
    assert sections().keys() - codes() == set(), "remove its section"


@pytest.mark.parametrize("code", sorted(sections()))
def test_a_section_says_what_to_do(code: str) -> None:
    section = sections()[code].split("\n## ")[0]
    about = section.strip().split("\n\n")[0]
    assert about.endswith("."), about
    assert "\n**Fix:** " in section


def test_every_example_causes_its_code() -> None:
    shown = {region.heading: region for region in regions(TROUBLES)}
    cannot = {"E-FILE-CHANGED", "W-WIDE"}
    assert shown.keys() == codes() - cannot, "each code has an example, except for a few"
    for code, region in shown.items():
        body = region.text[region.offset :].split("<!-- end -->")[0]
        assert f"[{code}]" in body, code
        if code.startswith("W-"):
            assert not re.search(r"\[E-[A-Z-]+\]", body), f"{code}: errors beside the warning"


def test_an_example_is_checked_for_real(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# E-KEY\n```yaml\ncollectoins: {}\n```\n<!-- generated: check -->\n<!-- end -->\n"
    )
    [region] = regions(page)
    assert "[E-KEY]" in checked.generate(region)
    assert yaml.safe_load(region.blocks_above()[0].text) == {"collectoins": {}}
