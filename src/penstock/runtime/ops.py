"""PURE: the collections in which tasks report on themselves.

    ops/stats        one document per transaction, which is visible if, and only if, it is
    ops/logs         a task's log: warnings, errors, progress
    ops/quarantine   documents that a capture refused, where its catalog says so

All are partitioned by task, so that the journal of a task is known without looking; they are read
like any other collection.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from penstock.journal.names import JournalName
from penstock.model.json_order import Json
from penstock.model.spec import CollectionSpec, Field, Frozen

TaskKindName = Literal["capture", "derivation", "materialization"]
TASK_KINDS: Final[tuple[TaskKindName, ...]] = get_args(TaskKindName)

_COUNTS: Final[Json] = {
    "type": "object",
    "properties": {
        "docsTotal": {"type": "integer", "reduce": {"strategy": "sum"}},
        "bytesTotal": {"type": "integer", "reduce": {"strategy": "sum"}},
    },
    "reduce": {"strategy": "merge"},
}

_SECTIONS: Final[dict[str, Json]] = {
    "capture": {
        "type": "object",
        "additionalProperties": {
            "type": "object",
            "properties": {
                "out": _COUNTS,
                "refusedTotal": {"type": "integer", "reduce": {"strategy": "sum"}},
            },
            "reduce": {"strategy": "merge"},
        },
        "reduce": {"strategy": "merge"},
    },
    "materialize": {
        "type": "object",
        "additionalProperties": {
            "type": "object",
            "properties": {
                "left": _COUNTS,
                "right": _COUNTS,
                "out": _COUNTS,
                "bytesBehind": {"type": "integer"},
                "lastSourcePublishedAt": {"type": "string", "format": "date-time"},
            },
            "reduce": {"strategy": "merge"},
        },
        "reduce": {"strategy": "merge"},
    },
    "derive": {
        "type": "object",
        "properties": {
            "transforms": {
                "type": "object",
                "additionalProperties": {
                    "type": "object",
                    "properties": {
                        "source": {"type": "string"},
                        "input": _COUNTS,
                        "bytesBehind": {"type": "integer"},
                        "lastSourcePublishedAt": {"type": "string", "format": "date-time"},
                    },
                    "reduce": {"strategy": "merge"},
                },
                "reduce": {"strategy": "merge"},
            },
            "published": _COUNTS,
            "out": _COUNTS,
        },
        "reduce": {"strategy": "merge"},
    },
}
"""Schemas of the sections that the kinds of tasks fill (`runtime/stats.py`)."""

_PHASES: Final[Json] = {
    "type": "object",
    "properties": {
        name: {"type": "number", "reduce": {"strategy": "sum"}}
        for name in ("read", "startSpark", "stage", "commit")
    },
    "reduce": {"strategy": "merge"},
}
"""Seconds, by what was done (`introspection.Stage`). Documents of older releases have none."""

_STATS_SCHEMA: Final[Json] = {
    "type": "object",
    "required": ["shard", "ts", "txnCount", "openSecondsTotal"],
    "properties": {
        "shard": {
            "type": "object",
            "required": ["kind", "name", "keyBegin", "rClockBegin", "build"],
            "properties": {
                "kind": {"type": "string"},
                "name": {"type": "string"},
                "keyBegin": {"type": "string"},
                "rClockBegin": {"type": "string"},
                "build": {"type": "string"},
            },
        },
        "ts": {"type": "string", "format": "date-time"},
        "openSecondsTotal": {"type": "number", "reduce": {"strategy": "sum"}},
        "txnCount": {"type": "integer", "reduce": {"strategy": "sum"}},
        "phases": _PHASES,
        **_SECTIONS,
    },
    "reduce": {"strategy": "merge"},
}

_LOGS_SCHEMA: Final[Json] = {
    "type": "object",
    "required": ["shard", "ts", "level", "message"],
    "properties": {
        "shard": {
            "type": "object",
            "required": ["kind", "name"],
            "properties": {"kind": {"type": "string"}, "name": {"type": "string"}},
        },
        "ts": {"type": "string", "format": "date-time"},
        "level": {"type": "string"},
        "message": {"type": "string"},
        "fields": {"type": "object"},
    },
}


_QUARANTINE_SCHEMA: Final[Json] = {
    "type": "object",
    "required": ["shard", "ts", "collection", "origin", "reasons"],
    "properties": {
        "shard": {
            "type": "object",
            "required": ["kind", "name"],
            "properties": {"kind": {"type": "string"}, "name": {"type": "string"}},
        },
        "ts": {"type": "string", "format": "date-time"},
        "collection": {"type": "string"},
        "origin": {"type": "string"},
        "reasons": {"type": "array", "items": {"type": "string"}},
        "text": {"type": "string"},
    },
}


def _of_tasks(name: str, schema: Json, *key: str) -> CollectionSpec:
    return CollectionSpec(
        name=name,
        key=("/shard/kind", "/shard/name", "/ts", *key),
        write_schema=Frozen(schema),
        read_schema=Frozen(schema),
        fields=(
            Field(name="kind", location="/shard/kind", declared=True, partition=True),
            Field(name="name", location="/shard/name", declared=True, partition=True),
        ),
    )


STATS: Final = _of_tasks("ops/stats", _STATS_SCHEMA)
LOGS: Final = _of_tasks("ops/logs", _LOGS_SCHEMA)
QUARANTINE: Final = _of_tasks("ops/quarantine", _QUARANTINE_SCHEMA, "/collection", "/origin")
OPS: Final = (STATS, LOGS, QUARANTINE)


def journal_of(collection: CollectionSpec, *, kind: TaskKindName, task: str) -> JournalName:
    """Return the journal in which a task reports on itself."""
    return JournalName.of(collection.name, {"kind": kind, "name": task})
