from __future__ import annotations

import contextlib

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.errors import UserError
from penstock.journal.names import JournalName, encode_value
from penstock.journal.selector import EVERYTHING, LabelSelector, MisnamedJournal, PartitionFilter
from penstock.model.spec import FieldValues, Scalar, Selector

EU = (("active", "%_true"), ("city", "S%C3%A3o%20Paulo"), ("env", "prod"), ("region", "eu"))


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        pytest.param("", True, id="nothing is asked"),
        pytest.param("  ", True, id="nothing but space"),
        pytest.param("region=eu", True, id="equal"),
        pytest.param("region==eu", True, id="equal, spelled twice"),
        pytest.param("region=us", False, id="not equal"),
        pytest.param("region!=us", True, id="differs"),
        pytest.param("region!=eu", False, id="does not differ"),
        pytest.param("zone!=a", True, id="differs where the label is absent"),
        pytest.param("zone=a", False, id="equal where the label is absent"),
        pytest.param("region in (eu,us)", True, id="one of two"),
        pytest.param("region in ( us )", False, id="one of one, with space"),
        pytest.param("region notin (us, asia)", True, id="none of two"),
        pytest.param("region notin (us, eu)", False, id="not none of two"),
        pytest.param("zone notin (a)", True, id="none of them where the label is absent"),
        pytest.param("region", True, id="there"),
        pytest.param("zone", False, id="not there"),
        pytest.param("!zone", True, id="absent"),
        pytest.param("! region", False, id="not absent"),
        pytest.param("region=eu,env!=test,region in (eu,us)", True, id="all hold"),
        pytest.param("region=eu,env!=prod", False, id="one does not"),
        pytest.param("active=%_true", True, id="a boolean, as in names"),
        pytest.param("active=true", False, id="text is no boolean"),
        pytest.param("active in (%_true, %_false)", True, id="booleans in a list"),
        pytest.param('city="São Paulo"', True, id="quoted text"),
        pytest.param("city=S%C3%A3o%20Paulo", True, id="encoded text"),
        pytest.param('city in ("São Paulo", x)', True, id="quoted text in a list"),
        pytest.param('"region"=eu', True, id="a quoted label"),
        pytest.param("in in (in)", False, id="a label that is called in"),
    ],
)
def test_a_selector_asks_for_labels(text: str, matches: bool) -> None:
    assert LabelSelector.parse(text).matches(EU) == matches


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("=eu", r'name of a label, found "="', id="no label"),
        pytest.param("region=", "a value, found the end", id="no value"),
        pytest.param("region=eu env=test", r'",", found "env"', id="no comma"),
        pytest.param("region=eu,", "name of a label, found the end", id="a comma too many"),
        pytest.param("region in eu", r'"\(", found "eu"', id="no list"),
        pytest.param("region in ()", r'a value, found "\)"', id="an empty list"),
        pytest.param("region in (eu us)", r'",", found "us"', id="a list without commas"),
        pytest.param("region in (eu", '",", found the end', id="a list without an end"),
        pytest.param('city="a', 'a closing "', id="a quote without an end"),
        pytest.param("active=%_yes", r'a value, found "%_yes"', id="no JSON value"),
    ],
)
def test_a_selector_that_cannot_be_read_says_where(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        LabelSelector.parse(text)
    assert caught.value.where is not None
    assert caught.value.where.startswith(text)


@given(st.text())
def test_any_text_is_a_selector_or_a_users_mistake(text: str) -> None:
    with contextlib.suppress(UserError):
        LabelSelector.parse(text)


VALUES = st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8"))


@given(VALUES, VALUES)
def test_an_encoded_value_selects_its_equals(mine: Scalar, other: Scalar) -> None:
    assume(mine != "")  # which has no text to be written in
    selector = LabelSelector.parse(f"field in ({encode_value(mine)})")
    assert selector.matches([("field", encode_value(mine))])
    same = (type(mine), mine) == (type(other), other)
    assert selector.matches([("field", encode_value(other))]) == same


def test_an_operators_label_is_compared_as_it_is() -> None:
    labels = [("team", "%_not json"), ("note", "a, b")]
    assert LabelSelector.parse('team="%_not json", note="a, b"').matches(labels)
    assert EVERYTHING.matches(labels)


# ----------------------------------------------------------------------------------- partitions


def _selector(*, include: str = "", exclude: str = "") -> Selector:
    def values(text: str) -> tuple[FieldValues, ...]:
        chosen: dict[str, list[Scalar]] = {}
        for item in text.split():
            field, value = item.split("=")
            chosen.setdefault(field, []).append(value == "true" if "t" in value[:1] else value)
        return tuple(FieldValues(field=f, values=tuple(v)) for f, v in chosen.items())

    return Selector(include=values(include), exclude=values(exclude))


NONE = _selector()


@pytest.mark.parametrize(
    ("fields", "selector", "suffix", "matches"),
    [
        pytest.param("", NONE, "pivot=00", True, id="no fields"),
        pytest.param(
            "region", _selector(include="region=us"), "region=us/pivot=00", True, id="included"
        ),
        pytest.param(
            "region", _selector(include="region=us"), "region=eu/pivot=00", False, id="not included"
        ),
        pytest.param(
            "region", _selector(exclude="region=eu"), "region=eu/pivot=00", False, id="excluded"
        ),
        pytest.param(
            "region",
            _selector(include="region=eu region=us", exclude="region=eu"),
            "region=eu/pivot=00",
            False,
            id="exclude wins",
        ),
        pytest.param(
            "region",
            _selector(include="region=eu region=us", exclude="region=eu"),
            "region=us/pivot=00",
            True,
            id="included, and another is excluded",
        ),
        pytest.param(
            "region",
            _selector(include="color=red"),
            "region=us/pivot=00",
            True,
            id="a field that is none is ignored",
        ),
        pytest.param(
            "category region",
            _selector(include="category=alpha", exclude="region=bad"),
            "category=alpha/region=good/pivot=00",
            True,
            id="one included, another not excluded",
        ),
        pytest.param(
            "active",
            _selector(include="active=true"),
            "active=%_false/pivot=00",
            False,
            id="another boolean",
        ),
        pytest.param(
            "active", _selector(include="active=true"), "active=%_true/pivot=80", True, id="boolean"
        ),
    ],
)
def test_a_partition_filter_takes_some(
    fields: str, selector: Selector, suffix: str, matches: bool
) -> None:
    assert PartitionFilter.of(fields.split(), selector).matches(suffix) == matches


@pytest.mark.parametrize(
    ("fields", "suffix", "message"),
    [
        pytest.param("category region", "category=a/pivot=00", "has 1 field", id="one too few"),
        pytest.param("region", "region=us/extra=x/pivot=00", "has 2 field", id="one too many"),
        pytest.param("region", "zone=us/pivot=00", "not of field region", id="another field"),
        pytest.param("region", "bad/pivot=00", "has no =", id="no value"),
        pytest.param(
            "a b", "a=excluded/zone=1/pivot=00", "not of field b", id="also behind a mismatch"
        ),
    ],
)
def test_a_name_without_the_fields_is_a_mistake(fields: str, suffix: str, message: str) -> None:
    chosen = PartitionFilter.of(fields.split(), _selector(exclude="a=excluded"))
    with pytest.raises(MisnamedJournal, match=message):
        chosen.matches(suffix)


SHORT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=4)


@given(st.dictionaries(SHORT, st.none() | st.booleans() | st.integers(0, 99) | SHORT, max_size=3))
def test_a_filter_takes_the_names_of_what_it_includes(values: dict[str, Scalar]) -> None:
    name = JournalName.of("c", values)
    chosen = tuple(FieldValues(field=field, values=(value,)) for field, value in name.partitions)
    suffix = str(name).removeprefix("c/")
    assert PartitionFilter.of(values, Selector(include=chosen)).matches(suffix)
    assert PartitionFilter.of(values, Selector(exclude=chosen)).matches(suffix) == (not values)
