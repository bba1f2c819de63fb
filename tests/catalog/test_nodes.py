"""The YAML dialect: JSON's scalars, positions of everything, and limits."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from penstock.catalog.diagnostics import Diagnostics, FilePosition
from penstock.catalog.nodes import DEPTH_MAX, Node, parse, parse_json


def read(text: str) -> Node:
    diagnostics = Diagnostics()
    node = parse(text, "f.yaml", diagnostics)
    assert [d.render() for d in diagnostics] == []
    assert node is not None
    return node


def complaints(text: str) -> list[str]:
    diagnostics = Diagnostics()
    parse(text, "f.yaml", diagnostics)
    return [d.message for d in diagnostics]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        pytest.param("null", None, id="null"),
        pytest.param("", None, id="nothing is null"),
        pytest.param("~", None, id="a tilde is null"),
        pytest.param("true", True, id="true"),
        pytest.param("True", "True", id="True is a string"),
        pytest.param("no", "no", id="no is a string, and a country"),
        pytest.param("on", "on", id="on is a string"),
        pytest.param("12", 12, id="an integer"),
        pytest.param("-0", 0, id="minus zero"),
        pytest.param("1.0", 1.0, id="a float stays a float"),
        pytest.param("1e3", 1000.0, id="an exponent"),
        pytest.param("123456789012345678901234567890", 123456789012345678901234567890, id="big"),
        pytest.param("012", "012", id="a leading zero is no number"),
        pytest.param("0x1F", "0x1F", id="hexadecimal is a string"),
        pytest.param("0o7", "0o7", id="octal is a string"),
        pytest.param("1_000", "1_000", id="underscores make a string"),
        pytest.param("+1", "+1", id="plus makes a string"),
        pytest.param(".5", ".5", id="a bare point makes a string"),
        pytest.param(".inf", ".inf", id="infinity is a string"),
        pytest.param("12:30", "12:30", id="a time of day is a string"),
        pytest.param("2019-01-16", "2019-01-16", id="a date is a string"),
        pytest.param("2023-01-23T01:00:00Z", "2023-01-23T01:00:00Z", id="a timestamp is a string"),
        pytest.param("'12'", "12", id="quotes make a string"),
        pytest.param("!!str 12", "12", id="a tag makes a string"),
        pytest.param("!!float 12", 12, id="a tag that fits is fine"),
    ],
)
def test_scalars_are_those_of_json(text: str, value: object) -> None:
    found = read(f"key: {text}\n").members["key"].value
    assert (type(found), found) == (type(value), value)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("ab<~/ "), inner),
    max_leaves=20,
)


@given(JSON, st.sampled_from([None, "\t"]))
def test_json_text_reads_as_json(value: Any, indent: str | None) -> None:  # noqa: ANN401
    diagnostics = Diagnostics()
    node = parse_json(json.dumps(value, indent=indent), "f.json", diagnostics)
    assert list(diagnostics) == []
    assert node is not None
    assert node.plain() == value
    assert all(node.find(inner.pointer) is inner for inner in node.walk())


def test_keys_and_values_know_where_they_stand() -> None:
    root = read("a:\n  b/c:\n    - x\n    - key: 7\n")
    node = root.find("/a/b~1c/1/key")
    assert node is not None
    assert (node.value, node.at, node.key_at) == (
        7,
        FilePosition("f.yaml", 4, 12),
        FilePosition("f.yaml", 4, 7),
    )


def test_a_merge_key_fills_in_what_is_not_there() -> None:
    root = read(
        "base: &base {a: 1, b: 1}\n"
        "more: &more {b: 2, c: 2}\n"
        "one: {<<: *base, b: 9}\n"
        "two: {<<: [*base, *more], d: 4}\n"
        "'<<': a plain key\n"
    )
    assert root.members["one"].plain() == {"a": 1, "b": 9}
    assert root.members["two"].plain() == {"a": 1, "b": 1, "c": 2, "d": 4}
    assert root.members["<<"].value == "a plain key"


def test_an_alias_has_a_pointer_of_its_own() -> None:
    root = read("a: &x {k: 1}\nb: *x\n")
    assert root.members["b"].members["k"].pointer == "/b/k"
    assert root.members["b"].key_at == FilePosition("f.yaml", 2, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("[" * 200 + "]" * 200, "values nest deeper", id="deep brackets"),
        pytest.param(
            "a: &a " + "[" * 90 + "]" * 90 + "\nb: " + "[" * 50 + "*a" + "]" * 50,
            "values nest deeper",
            id="deep through an alias",
        ),
        pytest.param("a: *nowhere", "alias *nowhere has no anchor", id="alias without anchor"),
        pytest.param("{[a]: 1}", "a mapping key must be a string", id="a list as a key"),
        pytest.param("a: 1e999", "is out of range", id="a number without bounds"),
        pytest.param("a: " + "9" * 5000, "a number of 5000 digits", id="a number without end"),
        pytest.param("a: \x07", "U+0007 is not allowed", id="a control character"),
        pytest.param("a: !!int x", "unknown tag !!int", id="a tag that does not fit"),
        pytest.param("a: !!binary aGk=", "unknown tag !!binary", id="a type that JSON has not"),
    ],
)
def test_what_cannot_be_read_is_said_once(text: str, message: str) -> None:
    (complaint,) = complaints(text)
    assert message in complaint


def test_depth_up_to_the_limit_is_fine() -> None:
    text = "[" * DEPTH_MAX + "]" * DEPTH_MAX
    assert read(text).plain() == json.loads(text)


def test_stock_yaml_reads_the_template_alike() -> None:
    template = Path(__file__).parents[2] / "src/penstock/catalog/templates/demo/catalog.yaml"
    text = template.read_text(encoding="utf-8")
    stock = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506 - strings only
    assert list(read(text).members) == list(stock)
