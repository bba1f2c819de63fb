"""Whatever people write, checking ends with a report, never with a stack trace."""

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.catalog.build import build_catalog
from penstock.catalog.diagnostics import Diagnostics
from penstock.catalog.nodes import parse
from penstock.model.spec import Catalog, from_json, to_json

CATALOG: dict[str, Any] = json.loads("""
{
  "import": [{"url": "catalog.yaml"}],
  "collections": {
    "a/orders": {
      "key": ["/id"],
      "schema": {
        "type": "object",
        "required": ["id", "region"],
        "reduce": {"strategy": "merge"},
        "properties": {
          "id": {"$ref": "#/$defs/id"},
          "region": {"type": "string"},
          "total": {"type": "number", "reduce": {"strategy": "sum"}}
        },
        "$defs": {"id": {"type": "integer", "default": 0}}
      },
      "projections": {"region": {"location": "/region", "partition": true}, "t": "/total"},
      "journals": {"fragments": {"length": 1000, "retention": "1h"}}
    },
    "a/totals": {
      "key": ["/id"],
      "writeSchema": {
        "type": "object", "required": ["id"], "properties": {"id": {"type": "integer"}}
      },
      "readSchema": {"allOf": [{"$ref": "flow://relaxed-write-schema"}]},
      "derive": {
        "using": {"sqlite": {"migrations": ["create table t (id integer)"]}},
        "shuffleKeyTypes": ["integer"],
        "transforms": [
          {
            "name": "x",
            "source": {"name": "a/orders", "partitions": {"include": {"region": ["eu"]}}},
            "shuffle": {"key": ["/id"]},
            "lambda": "select $id, $t;"
          }
        ]
      }
    }
  },
  "captures": {
    "a/in": {
      "endpoint": {"connector": {"image": "i", "config": {"password": "${env:P}"}}},
      "bindings": [{"resource": {"path": "p"}, "target": "a/orders"}]
    }
  },
  "materializations": {
    "a/out": {
      "endpoint": {"local": {"command": ["x"], "env": {"A": "b"}}},
      "source": {"capture": "a/in"},
      "bindings": [
        {
          "resource": {"table": "t"},
          "source": {"name": "a/orders", "notBefore": "2024-01-01T00:00:00Z"},
          "fields": {"recommended": true, "require": {"t": {}}, "groupBy": ["id"]}
        }
      ],
      "triggers": {"config": [{"url": "u", "payloadTemplate": "p", "headers": {"h": "${env:P}"}}]},
      "shards": {"minTxnDuration": "1s", "flags": {"enable-runtime-v2": "true"}}
    }
  },
  "tests": {
    "t": [{"ingest": {"collection": "a/orders", "documents": [{"id": 1, "region": "eu"}]}}],
    "u": {"steps": [{"verify": {"collection": {"name": "a/orders"}, "documents": []}}]}
  }
}
""")

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(
        ["", "/", "a/orders", "#", "catalog.yaml", "#/x", "~", "${env:X}", "../x", "\\0"]
    ),
    st.text(max_size=5),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                ["type", "$ref", "name", "key", "include", "lambda", "reduce", "x", ""]
            ),
            inner,
            max_size=2,
        )
    ),
    max_leaves=4,
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:  # noqa: ANN401
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [at, *(p for token, v in inner for p in places(v, (*at, token)))]


@given(st.data())
def test_any_value_in_any_place_gives_a_report(data: st.DataObject) -> None:
    catalog: Any = copy.deepcopy(CATALOG)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places(catalog)[1:] or [()]))
        if not path:
            break
        parent = catalog
        for token in path[:-1]:
            parent = parent[token]
        match data.draw(st.sampled_from(["replace", "remove", "rename"])):
            case "replace":
                parent[path[-1]] = data.draw(VALUES)
            case "remove":
                del parent[path[-1]]
            case _ if isinstance(parent, dict):
                parent[f"{path[-1]}x"] = parent.pop(path[-1])
    with tempfile.TemporaryDirectory() as directory:
        main = Path(directory) / "catalog.yaml"
        main.write_text(json.dumps(catalog), encoding="utf-8")
        outcome = build_catalog([main], environ={"P": "secret"})
    for diagnostic in outcome.diagnostics:
        assert diagnostic.at.line >= 1
        assert "secret" not in diagnostic.render()
    assert from_json(Catalog, to_json(outcome.catalog)) == outcome.catalog


@pytest.mark.parametrize(
    "catalog",
    [
        pytest.param({"import": ["x\0.yaml"]}, id="a zero byte in a path"),
        pytest.param({"import": ["x" * 300]}, id="a path that is too long"),
        pytest.param({"import": ["http://["]}, id="a broken URL"),
        pytest.param({"import": ["loop"]}, id="a loop of links"),
        pytest.param(
            {"captures": {"a": {"endpoint": {"ingest": {"x": "${file:\0}"}}, "bindings": []}}},
            id="a zero byte in the path of a secret",
        ),
        pytest.param(
            {"captures": {"a": {"endpoint": {"ingest": {"x": "${file:%s}" % ("z" * 300)}}}}},
            id="a secret's path that is too long",
        ),
        pytest.param(
            {"collections": {"a": {"schema": {"$id": "http://[", "items": {"$ref": "x"}}}}},
            id="an $id that is no URL",
        ),
        pytest.param(
            {
                "collections": {
                    "a": {
                        "derive": {
                            "using": {"sqlite": {"migrations": ["x\0.sql", "create\0"]}},
                            "transforms": [{"name": "x", "source": "a", "lambda": "select '"}],
                        }
                    }
                }
            },
            id="a zero byte in SQL",
        ),
        pytest.param(
            {
                "collections": {
                    "a": {"derive": {"using": {"python": {"module": "(" * 5000}}}},
                    "b": {"derive": {"using": {"python": {"module": "x = '\\d'\0"}}}},
                }
            },
            id="Python that its parser gives up on",
        ),
    ],
)
def test_what_the_system_refuses_is_reported(catalog: Any, tmp_path: Path) -> None:  # noqa: ANN401
    (tmp_path / "catalog.yaml").write_text(json.dumps(catalog), encoding="utf-8")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert not build_catalog([tmp_path], environ={}).ok


@given(st.text(st.sampled_from("a:-[]{},&*!|>'\"#%@?~<\n \t\\\0\ud7ff0.e"), max_size=40))
def test_any_text_is_read_or_reported(text: str) -> None:
    diagnostics = Diagnostics()
    node = parse(text, "f.yaml", diagnostics)
    assert (node is None) <= (not diagnostics.ok)
