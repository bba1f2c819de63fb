"""Run a small deployment so that the JVM can archive the Spark classes that Penstock uses.

`python -m penstock.training FILE` runs it in a JVM that, when it ends, writes the classes it loaded
to FILE (`penstock.engine.class_archive`). It runs a large transaction and a small one, because they
take different paths: Parquet files, an exchange and Python workers; rows that travel with the plan.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Final

from penstock import api
from penstock.engine import ARCHIVE_CLASSES, close_spark

_CATALOG: Final = """\
collections:
  training/visits:
    key: [/page]
    schema:
      type: object
      required: [page, visits, longest, last]
      reduce: { strategy: merge }
      properties:
        page: { type: integer }
        visits: { type: integer, reduce: { strategy: sum } }
        longest: { type: integer, reduce: { strategy: maximize } }
        last: { type: string, reduce: { strategy: lastWriteWins } }
materializations:
  training/pages:
    endpoint:
      connector: { image: penstock/materialize-sqlite, config: { path: %s } }
    bindings:
      - source: training/visits
        resource: { table: pages }
        fields: { recommended: true, exclude: [flow_document] }
"""

_MANY, _FEW = 120_000, 100
_DUMP_S = 300
"""A busy machine takes a while to write an archive."""


def train(archive: Path) -> None:
    """Run the deployment, and have the JVM write the archive."""
    with tempfile.TemporaryDirectory(prefix="penstock-training-") as temporary:
        directory = Path(temporary)
        catalog = directory / "catalog.yaml"
        catalog.write_text(_CATALOG % (directory / "pages.db"))
        conf = {"spark.driver.extraJavaOptions": f"{ARCHIVE_CLASSES}={archive}"}
        with api.open(directory / "data", conf=conf) as penstock:
            penstock.apply(catalog)
            for count in (_MANY, _FEW):
                penstock.append("training/visits", map(_visit, range(count)))
                penstock.run()
        close_spark(timeout_s=_DUMP_S)


def _visit(number: int) -> dict[str, object]:
    """Return a document with text that does not compress: a small batch would not become files."""
    mixed = number * 0x9E3779B97F4A7C15 % (1 << 64)
    text = f"{mixed:016x}{mixed * 31 % (1 << 64):016x}{mixed * 97 % (1 << 64):016x}"
    return {"page": mixed % 5000, "visits": 1, "longest": mixed % 997, "last": text}


if __name__ == "__main__":
    train(Path(sys.argv[1]))
