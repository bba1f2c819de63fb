"""Whether documents fit the schema of their collection, and what is wrong with them.

The runtime judges them again when it stores them. Here it is done before a request is let in, so
that its answer can say which documents are at fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import pyarrow

from penstock.model.columns import unstorable
from penstock.model.json_order import Json
from penstock.model.schema import compiled
from penstock.native.take import META, Taker

pa: Any = pyarrow

SHOWN_MAX: Final = 100
"""Invalid documents that an answer lists."""

QUICK_BYTES: Final = 32 << 10
"""Size of requests that are judged where they are read: a thread would cost more than that."""

_FEW: Final = 32

_decode: Final = msgspec.json.Decoder().decode


class Judge:
    """Judges the documents of one collection. May be used by several threads."""

    def __init__(self, schema_text: str) -> None:
        self._schema = compiled(schema_text)
        self._taker = Taker(self._schema)

    def invalid(self, texts: Sequence[bytes], meta: Json) -> tuple[dict[str, Json], ...]:
        """Return what is wrong with the first invalid documents: index, pointer and message.

        `meta`: what `/_meta` holds of each document; None if the schema does not name it.
        """
        if len(texts) <= _FEW and self._surely_valid(texts, meta):
            return ()
        batch = None if meta is None else meta_batch([meta] * len(texts))
        refused = self._taker.take_texts(texts, batch).refused
        return tuple(
            {"index": each.at, "pointer": found.pointer, "message": found.message}
            for each in refused[:SHOWN_MAX]
            for found in each.violations
        )

    def _surely_valid(self, texts: Sequence[bytes], meta: Json) -> bool:
        for text in texts:
            try:
                document = _decode(text)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                return False
            if not isinstance(document, dict):
                return False
            if meta is not None:
                document[META] = meta
            if not self._schema.is_valid(document) or unstorable(document, self._taker.root):
                return False
        return True


def meta_batch(metas: Sequence[Json]) -> pyarrow.RecordBatch:
    """What `/_meta` holds of each document, as the runtime takes it."""
    made: pyarrow.RecordBatch = pa.RecordBatch.from_pylist(
        metas,
        schema=pa.schema(
            [
                (
                    "source",
                    pa.struct(
                        [
                            ("receivedAt", pa.utf8()),
                            ("path", pa.utf8()),
                            ("idempotencyKey", pa.utf8()),
                        ]
                    ),
                )
            ]
        ),
    )
    return made
