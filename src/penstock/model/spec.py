"""Specs: the meaning of a catalog, as values.

A spec holds no reference to a position or another spec: names stand for collections and tasks,
code and schemas are inside, secrets stay references (`${env:NAME}`), and paths of endpoints are
absolute. So a spec can be recorded, compared, and sent to another process, and the same catalog
gives the same specs wherever a command runs.

`fingerprint` is equal for equal specs, in any process and version of Python. Applying a catalog
again leaves tasks alone whose fingerprint did not change.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias, TypeVar

import msgspec

from penstock.model.json_order import Json, canonical_json

Codec: TypeAlias = Literal["NONE", "GZIP", "ZSTANDARD", "SNAPPY"]
"""How Parquet files are compressed."""

Scalar: TypeAlias = bool | int | str | None
"""A value of a key or a partition field."""

SECRET_REFERENCE: Final = re.compile(r"(?<!\$)\$\{(?P<kind>env|file):(?P<name>[^}]*)\}")
"""`${env:NAME}` or `${file:path}`, as a whole text or a part of one; `$${` is a literal `${`."""

_T = TypeVar("_T")


class Frozen:
    """An immutable JSON value: stored as its canonical text, and compared by it."""

    __slots__ = ("text",)
    text: str

    def __init__(self, value: Json) -> None:
        object.__setattr__(self, "text", canonical_json(value))

    @property
    def value(self) -> Any:  # noqa: ANN401 - any JSON value, and callers know which
        """The value; a new object each time."""
        return json.loads(self.text)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Frozen value is immutable")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frozen) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"Frozen({self.text})"

    def __reduce__(self) -> tuple[object, ...]:
        return Frozen, (self.value,)


# --- collections ---


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A named location: a column, a parameter, perhaps a partition. Names are unique.

    Every location that the schema names is a field, named by its pointer without the first slash.
    `declared` fields are the catalog's own projections.
    """

    name: str
    location: str
    declared: bool = False
    partition: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fragments:
    """How a journal's files are written and kept; None is the deployment's default."""

    codec: Codec | None = None
    length_bytes: int | None = None
    retention_s: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CollectionSpec:
    """A keyed set of documents. The read schema reduces documents of one key."""

    name: str
    key: tuple[str, ...]
    write_schema: Frozen
    read_schema: Frozen
    reads_inferred: bool = False
    """The read schema refers to the inferred schema, which grows with the documents."""
    fields: tuple[Field, ...]
    fragments: Fragments = Fragments()
    derivation: DerivationSpec | None = None

    def field(self, name: str) -> Field | None:
        return next((f for f in self.fields if f.name == name), None)

    @property
    def partitions(self) -> tuple[Field, ...]:
        """The fields whose values split the collection, sorted by name."""
        return tuple(sorted((f for f in self.fields if f.partition), key=lambda f: f.name))


# --- shared by tasks ---


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FieldValues:
    """A partition field and some of its values."""

    field: str
    values: tuple[Scalar, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """Selects partitions: every included field has a listed value, no excluded field has one."""

    include: tuple[FieldValues, ...] = ()
    exclude: tuple[FieldValues, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The source of a transform or binding. Times filter by publish time: RFC 3339, in UTC."""

    collection: str
    selector: Selector = Selector()
    not_before: str | None = None
    not_after: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """How a task runs; None is the deployment's default."""

    disable: bool = False
    min_txn_s: int = 0
    max_txn_s: int
    log_level: Literal["error", "warn", "info", "debug", "trace"] = "info"
    count: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A connector and its configuration. Secrets in it are references."""

    kind: Literal["connector", "local", "python", "ingest"]
    config: Frozen
    image: str | None = None
    command: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    protobuf: bool = False
    module: str | None = None
    module_file: str | None = dataclasses.field(default=None, compare=False)
    """The file that the module is from, as the catalog names it; for errors."""
    config_schema: Frozen | None = None


# --- derivations ---


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    """One source of a derivation, and the code that runs on it."""

    name: str
    source: Source
    shuffle: tuple[str, ...]
    """Locations by whose values documents meet; by default, the source's key."""
    shuffle_any: bool = False
    """No documents need to meet: `shuffle` is the source's key, and only spreads the work."""
    code: str | None = None
    read_delay_s: int = 0
    priority: int = 0
    disable: bool = False
    backfill: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DerivationSpec:
    """How a collection is computed from others. The order of transforms breaks ties."""

    using: Literal["sqlite", "spark", "python", "local", "connector"]
    transforms: tuple[Transform, ...]
    shuffle_key_types: tuple[Literal["boolean", "integer", "string"], ...]
    migrations: tuple[str, ...] = ()
    views: tuple[tuple[str, str], ...] = ()
    nonlinear: bool = False
    endpoint: Endpoint | None = None
    """The module, program or connector of a derivation that is not SQL."""
    files: tuple[tuple[str, str], ...] = ()
    """A Python project instead of a module: the path of each file, and its text."""
    dependencies: tuple[str, ...] = ()
    batch: bool = False
    redact_salt: str | None = None
    shards: Shards


# --- captures ---


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CaptureBinding:
    """A resource of the endpoint, and the collection that it fills."""

    resource: Frozen
    target: str | None
    on_invalid: Literal["stop", "skip", "quarantine"] = "stop"
    disable: bool = False
    backfill: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSpec:
    """A task that fills collections."""

    name: str
    endpoint: Endpoint
    bindings: tuple[CaptureBinding, ...]
    interval_s: int = 300
    redact_salt: str | None = None
    renamed_from: str | None = None
    """The task's former name: it continues from where that task was."""
    shards: Shards


# --- materializations ---

OnIncompatible: TypeAlias = Literal["abort", "backfill", "disableBinding", "disableTask"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FieldSelection:
    """Which fields become columns; the connector decides about the rest."""

    recommended_depth: int | None = None
    """Levels of recommended fields to take; None is all, 0 is none."""
    require: tuple[tuple[str, Frozen], ...] = ()
    """Required fields, each with options for the connector."""
    exclude: tuple[str, ...] = ()
    group_by: tuple[str, ...] = ()
    """Fields that are the key of this resource instead of the collection's."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MaterializationBinding:
    """A collection, and the resource that is kept equal to it."""

    resource: Frozen
    source: Source
    fields: FieldSelection = FieldSelection()
    on_incompatible: OnIncompatible = "backfill"
    priority: int = 0
    disable: bool = False
    backfill: int = 0
    takeover: bool = False
    """Take the resource even from another task; it is filled again."""
    renamed_from: Frozen | None = None
    """The resource that the binding had before: it is renamed, and the binding goes on."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FollowedCapture:
    """A capture whose bindings a materialization follows as they appear."""

    capture: str
    target_naming: Frozen | None = None
    delta_updates: bool = False
    recommended_depth: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """A webhook. Its headers may hold references to secrets."""

    url: str
    method: Literal["POST", "PUT", "PATCH"] = "POST"
    headers: tuple[tuple[str, str], ...] = ()
    payload_template: str
    timeout_s: int = 30
    attempts_max: int = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Triggers:
    """Webhooks to call after commits."""

    hooks: tuple[Trigger, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MaterializationSpec:
    """A task that keeps resources of an endpoint equal to collections."""

    name: str
    endpoint: Endpoint
    bindings: tuple[MaterializationBinding, ...]
    follows: FollowedCapture | None = None
    on_incompatible: OnIncompatible = "backfill"
    triggers: Triggers | None = None
    renamed_from: str | None = None
    """The task's former name: it continues from where that task was."""
    shards: Shards


# --- tests, and the whole ---


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Ingests documents into a collection, or verifies its whole content."""

    action: Literal["ingest", "verify"]
    collection: str
    documents: Frozen
    selector: Selector = Selector()
    description: str | None = None
    origin: str = dataclasses.field(default="", compare=False)
    """`file:line` for messages; not part of the fingerprint."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CatalogTest:
    """An example: the content of collections after given documents."""

    name: str
    description: str | None = None
    steps: tuple[Step, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """A whole catalog, each kind sorted by name. Whatever a spec names is in it."""

    collections: tuple[CollectionSpec, ...] = ()
    captures: tuple[CaptureSpec, ...] = ()
    materializations: tuple[MaterializationSpec, ...] = ()
    tests: tuple[CatalogTest, ...] = ()

    def collection(self, name: str) -> CollectionSpec | None:
        return next((c for c in self.collections if c.name == name), None)

    @property
    def derivations(self) -> tuple[CollectionSpec, ...]:
        return tuple(c for c in self.collections if c.derivation)


# --- specs as JSON ---


def to_json(spec: object) -> Json:
    """Convert a spec to plain JSON; the inverse of `from_json`."""
    plain: Json = _plain(spec, whole=True)
    return plain


def from_json(kind: type[_T], data: Json) -> _T:
    """Build a spec of the given class from its JSON."""

    def decode(wanted: type, value: Any) -> Any:  # noqa: ANN401 - msgspec's own signature
        return wanted(value)

    return msgspec.convert(data, kind, dec_hook=decode)


def fingerprint(spec: object) -> str:
    """Return 32 hexadecimal digits that are equal for equal specs."""
    text = spec.text if isinstance(spec, Frozen) else canonical_json(_plain(spec, whole=False))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _plain(value: object, *, whole: bool) -> Any:  # noqa: ANN401
    match value:
        case Frozen():
            return value.value
        case tuple():
            return [_plain(item, whole=whole) for item in value]
        case Mapping():
            return {str(k): _plain(v, whole=whole) for k, v in value.items()}
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {
                field.name: _plain(getattr(value, field.name), whole=whole)
                for field in dataclasses.fields(value)
                if whole or field.compare
            }
        case _:
            return value
