"""Documents to Arrow and back: nothing is lost, nothing is added."""

from __future__ import annotations

from typing import Any

from hypothesis import given

from penstock.model.columns import as_stored, columns, unstorable
from penstock.model.json_order import canonical_json
from penstock.model.schema import CompiledSchema
from penstock.native.arrow import to_arrow, to_json
from penstock.testing import strategies_schema as strategies


@given(strategies.cases())
def test_documents_survive_the_way_through_columns(
    case: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    schema, documents = case
    compiled = CompiledSchema(schema)
    root = columns(compiled.shape)
    stored = [d for d in documents if compiled.is_valid(d) and unstorable(d, root) is None]
    texts = [canonical_json(as_stored(d, root)) for d in stored]
    batch = to_arrow(stored, root)
    batch.validate(full=True)
    assert to_json(batch, root) == texts
    assert to_json(batch.slice(1, 3), root) == texts[1:4]
