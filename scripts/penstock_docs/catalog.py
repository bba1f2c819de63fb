"""docs/catalog.md: the keys of every mapping of the grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.catalog.forms import (
    Either,
    Form,
    Key,
    KeyedMapping,
    ListOf,
    MapOf,
    Unsupported,
)
from penstock.catalog.grammar import CATALOG
from penstock_docs.pages import DOCS, Region, anchor, regions, table

PAGE = DOCS / "catalog.md"
KEYS = "keys of "


def mappings(form: Form = CATALOG, at: str = "") -> Iterator[tuple[str, KeyedMapping]]:
    """Yield every mapping with known keys by its path; one that is shared comes several times."""
    match form:
        case KeyedMapping():
            yield at or "a catalog", form
            for name, key in form.keys.items():
                if isinstance(key, Key):
                    yield from mappings(key.form, f"{at}.{name}" if at else name)
        case ListOf():
            yield from mappings(form.item, f"{at}[]")
        case MapOf():
            yield from mappings(form.value, f"{at}.NAME")
        case Either():
            for each in form.forms:
                yield from mappings(each, at)
        case _:
            return


def keys_table(path: str, page: Path = PAGE, heading: str = "") -> str:
    """Return the table of the keys of the mapping at a path, for the section of a heading."""
    found = [mapping for at, mapping in mappings() if at == path]
    if not found:
        raise LookupError(f"the grammar has no mapping at {path!r}: remove its section")
    links = {form: text for form, text in _sections(page).items() if text != heading}
    rows = [
        (f"`{name}`", _type(key.form, links), _default(key), key.about)
        for name, key in found[0].keys.items()
        if isinstance(key, Key)
    ]
    return table(("key", "value", "default", "meaning"), rows) + _rules(found[0])


def _type(form: Form, links: Mapping[int, str]) -> str:
    """Return what a value is, with links to where its keys are listed."""
    below = dict.fromkeys(
        links[id(mapping)] for _, mapping in _next_mappings(form) if id(mapping) in links
    )
    shown = form.expected.replace(f"a mapping: {_what(form)}", "a mapping")
    return shown + "".join(f" ([{text}](#{anchor(text)}))" for text in below)


def _what(form: Form) -> str:
    return form.what if isinstance(form, KeyedMapping) else "\0"


def _next_mappings(form: Form) -> Iterator[tuple[str, KeyedMapping]]:
    """Yield the mappings that a value is made of, but not those inside of them."""
    match form:
        case KeyedMapping():
            yield form.what, form
        case ListOf():
            yield from _next_mappings(form.item)
        case MapOf():
            yield from _next_mappings(form.value)
        case Either():
            for each in form.forms:
                yield from _next_mappings(each)
        case _:
            return


def _sections(page: Path) -> dict[int, str]:
    """Return the heading of the section that lists the keys of each mapping."""
    by_path: dict[str, int] = {}
    for path, mapping in mappings():
        by_path.setdefault(path, id(mapping))
    return {
        by_path[region.what.removeprefix(KEYS)]: region.heading
        for region in regions(page)
        if region.what.startswith(KEYS) and region.what.removeprefix(KEYS) in by_path
    }


def _default(key: Key) -> str:
    if key.required:
        return "**required**"
    return "" if key.default is None else f"`{_shown(key.default)}`"


def _shown(value: Any) -> str:  # noqa: ANN401 - any JSON value
    return value if isinstance(value, str) else json.dumps(value)


def _rules(mapping: KeyedMapping) -> str:
    """Return what keys demand of each other."""
    rules = []
    if mapping.one_of:
        rules.append(f"Exactly one of {_names(mapping.one_of)}.")
    rules += [f"`{a}` and `{b}`: both, or neither." for a, b in mapping.together]
    rules += [f"`{a}` and `{b}` exclude each other." for a, b in mapping.exclusive]
    return f"\n\n{' '.join(rules)}" if rules else ""


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def refused_keys() -> str:
    """Return the table of keys that are known only to be refused."""
    rows = {
        (name, mapping.what, key.code, key.message): (
            f"`{name}`",
            path,
            f"[{key.code}](troubleshooting.md#{anchor(key.code)})",
            key.hint if isinstance(key.hint, str) else "the error shows what to write",
        )
        for path, mapping in mappings()
        for name, key in mapping.keys.items()
        if isinstance(key, Unsupported)
    }
    return table(("key", "of", "error", "instead"), [*rows.values()])


def generate(region: Region) -> str:
    if region.what == "refused keys":
        return refused_keys()
    path = region.what.removeprefix(KEYS)
    shown = keys_table(path, region.page, region.heading)
    earlier = [each for each in regions(region.page) if each.heading == region.heading]
    if earlier[0].offset == region.offset:
        return shown
    return f"`{path.rsplit('.', 1)[-1].removesuffix('[]')}` has these keys:\n\n{shown}"
