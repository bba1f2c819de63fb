"""Hints that print a derivation: pasted into the catalog, it is accepted and runs."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from penstock.catalog.build import build_catalog
from penstock.connectors.builtin import BUILTIN
from penstock.model.spec import Transform
from penstock.runtime.derive.engine import SourceRead
from penstock.runtime.derive.python_engine import PythonEngine
from runtime.derive.python_catalogs import opened

HEAD = """\
collections:
  acme/orders:
    key: [/id]
    schema: &s
      type: object
      required: [id, region]
      properties: {id: {type: integer}, region: {type: string}}
    projections: {region: {location: /region, partition: true}}
  acme/by-region:
    key: [/id]
    schema: *s
"""
TYPESCRIPT = """
derive:
  using: {typescript: {module: "export class Derivation {}"}}
  transforms:
    - name: fromOrders
      source: {name: acme/orders, partitions: {include: {region: [eu]}}}
      shuffle: {key: [/region]}
      readDelay: 1h 30m
      lambda: |
        select 1;
        select "é";
    - {name: late-orders, source: acme/orders, shuffle: any, readDelay: 24h, priority: 2}
  shards: {maxTxnDuration: 10s}
"""
OLD = """
derivation:
  register: {schema: {type: integer}, initial: 0}
  transform:
    fromOrders:
      source: {name: acme/orders, partitions: {include: {region: [eu]}}}
      shuffle: {key: [/region]}
      readDelay: 1h 30m
      update: {lambda: typescript}
      publish:
        lambda: |
          select 1;
          select "é";
    late-orders:
      {source: {name: acme/orders}, shuffle: any, readDelay: 24h, priority: 2}
"""


def written(stanza: str) -> str:
    return HEAD + textwrap.indent(stanza, "    ")


@pytest.mark.parametrize(("stanza", "code"), [(TYPESCRIPT, "E-TS"), (OLD, "E-OLD-DERIVE")])
def test_a_printed_stanza_passes_and_runs(stanza: str, code: str, tmp_path: Path) -> None:
    main = tmp_path / "catalog.yaml"
    main.write_text(written(stanza), encoding="utf-8")
    refused = build_catalog([main], environ={}, connectors=BUILTIN)
    (hint,) = [d.hint for d in refused.diagnostics if d.code == code]
    assert hint is not None
    main.write_text(written(hint.partition("\n")[2]), encoding="utf-8")

    outcome = build_catalog([main], environ={}, connectors=BUILTIN)

    assert [d.render() for d in outcome.diagnostics] == []
    spec = outcome.catalog.collection("acme/by-region")
    assert spec is not None
    assert spec.derivation is not None
    first, second = spec.derivation.transforms
    assert (first.read_delay_s, first.shuffle) == (5400, ("/region",))
    assert first.source.selector.include[0].values == ("eu",)
    assert late(second) == ("late-orders", 86400, 2, True)
    assert spec.derivation.endpoint is not None
    assert '# select "é";' in (spec.derivation.endpoint.module or "")
    processor = opened(PythonEngine.of(outcome.catalog, spec))
    reads = [SourceRead(transform=i, document={"id": 1, "region": "eu"}) for i in (0, 1)]
    assert list(processor.process(reads)) == []
    assert processor.finish().patches == ()
    processor.close()


def late(transform: Transform) -> tuple[str, int, int, bool]:
    return transform.name, transform.read_delay_s, transform.priority, transform.shuffle_any


def test_a_printed_list_keeps_lambdas(tmp_path: Path) -> None:
    stanza = """
derive:
  using: {sqlite: {}}
  transform:
    fromOrders: {source: {name: acme/orders}, readDelay: 1h, lambda: "select $id, $region"}
"""
    main = tmp_path / "catalog.yaml"
    main.write_text(written(stanza), encoding="utf-8")
    refused = build_catalog([main], environ={}, connectors=BUILTIN)
    (hint,) = [d.hint for d in refused.diagnostics if d.code == "E-OLD-DERIVE"]
    assert hint is not None
    printed = "\nderive:\n  using: {sqlite: {}}\n" + textwrap.indent(hint.partition("\n")[2], "  ")
    main.write_text(written(printed), encoding="utf-8")
    outcome = build_catalog([main], environ={}, connectors=BUILTIN)
    assert [d.render() for d in outcome.diagnostics] == []
    spec = outcome.catalog.collection("acme/by-region")
    assert spec is not None
    assert spec.derivation is not None
    assert spec.derivation.transforms[0].code == "select $id, $region"
    assert spec.derivation.transforms[0].read_delay_s == 3600


def test_a_project_is_part_of_the_spec(tmp_path: Path) -> None:
    stanza = """
derive:
  using:
    python:
      files: [./p/pyproject.toml, p/enrich/__init__.py]
      dependencies: {httpx: ">=0.27", rich: "*"}
  transforms: [{name: fromOrders, source: acme/orders}]
"""
    package = tmp_path / "p" / "enrich"
    package.mkdir(parents=True)
    (tmp_path / "p" / "pyproject.toml").write_text("[project]\nname = 'enrich'\n")
    code = "class Derivation:\n    def from_orders(self, read): return {'id': 2, 'region': 'eu'}\n"
    (package / "__init__.py").write_text(code)
    main = tmp_path / "catalog.yaml"
    main.write_text(written(stanza), encoding="utf-8")
    outcome = build_catalog([main], environ={}, connectors=BUILTIN)
    assert [d.render() for d in outcome.diagnostics] == []
    spec = outcome.catalog.collection("acme/by-region")
    assert spec is not None
    assert spec.derivation is not None
    assert [path for path, _ in spec.derivation.files] == [
        "p/pyproject.toml",
        "p/enrich/__init__.py",
    ]
    assert spec.derivation.dependencies == ("httpx>=0.27", "rich")
    processor = opened(PythonEngine.of(outcome.catalog, spec))
    read = SourceRead(transform=0, document={"id": 1, "region": "eu"})
    assert list(processor.process([read])) == [(0, {"id": 2, "region": "eu"})]
    processor.close()
