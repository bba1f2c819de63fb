"""Built specs are values."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.spec import Frozen, Shards, Source, fingerprint, from_json, to_json

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=10,
)


@given(JSON)
def test_a_frozen_value_is_what_it_was_made_of(value: object) -> None:
    frozen = Frozen(value)  # type: ignore[arg-type]
    assert frozen.value == value
    assert pickle.loads(pickle.dumps(frozen)) == frozen  # noqa: S301


@given(st.dictionaries(st.text(max_size=3), st.integers(), min_size=2))
def test_the_order_of_members_does_not_matter(value: dict[str, int]) -> None:
    turned = dict(reversed(value.items()))
    assert Frozen(value) == Frozen(turned)  # type: ignore[arg-type]
    assert hash(Frozen(value)) == hash(Frozen(turned))  # type: ignore[arg-type]


def test_a_frozen_value_does_not_change() -> None:
    frozen = Frozen({"a": [1]})
    frozen.value["a"].append(2)
    assert frozen.value == {"a": [1]}
    with pytest.raises(AttributeError):
        frozen.text = "{}"


def test_equal_specs_have_equal_fingerprints() -> None:
    source = Source(collection="acme/orders", not_before="2024-01-01T00:00:00Z")
    assert fingerprint(source) == fingerprint(from_json(Source, to_json(source)))
    assert fingerprint(source) != fingerprint(Source(collection="acme/orders"))


def test_a_fingerprint_stays_what_it_is() -> None:
    """It is recorded; a change here means that every recorded task looks changed."""
    assert fingerprint(Shards(max_txn_s=300)) == "ae8ea9b9fe0bb3851385cadac76a6b0d"
