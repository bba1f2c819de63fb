"""PURE: what applying a catalog does, as data: which keys change, and which tables are rebuilt.

A changed definition is compared in the catalog's own keys, not in those of specs, and without
values that are the default. Bindings are compared by their resource and transforms by their name,
so one that moved in its list did not change. Values that may be secrets are masked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from penstock.catalog.desired import Change, Spec
from penstock.model import pointer
from penstock.model.json_order import ABSENT, Absent, Json, canonical_json
from penstock.model.spec import (
    CaptureBinding,
    CaptureSpec,
    CatalogTest,
    CollectionSpec,
    Endpoint,
    Field,
    Frozen,
    MaterializationBinding,
    MaterializationSpec,
    Source,
    Transform,
)
from penstock.servicekit.secrets import REDACTED, mask, sounds_secret


class Difference(NamedTuple):
    """One key that differs; `ABSENT` is a key that is not there."""

    pointer: str
    before: Json | Absent
    after: Json | Absent

    def to_json(self) -> dict[str, Json]:
        """Return it for --json; a key that is not there has no member."""
        found: dict[str, Json] = {"key": self.pointer}
        if not isinstance(self.before, Absent):
            found["before"] = self.before
        if not isinstance(self.after, Absent):
            found["after"] = self.after
        return found


class Rebuild(NamedTuple):
    """What is read again from its beginning because of a change, and why."""

    what: str
    why: str

    def to_json(self) -> dict[str, Json]:
        return {"what": self.what, "why": self.why}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedChange:
    """A change with what it means."""

    change: Change
    keys: tuple[Difference, ...]
    """Of a definition that stays: the keys that differ."""
    rebuilds: tuple[Rebuild, ...]


def planned(change: Change) -> PlannedChange:
    """Return what a change means."""
    before, after = change.before, change.after
    if before is None or after is None:
        return PlannedChange(change=change, keys=(), rebuilds=())
    found = differences(in_catalog_keys(before), in_catalog_keys(after))
    return PlannedChange(
        change=change,
        keys=tuple(_without_secrets(each) for each in found),
        rebuilds=tuple(rebuilds(before, after)),
    )


def differences(before: Json, after: Json) -> tuple[Difference, ...]:
    """Compare two JSON values member by member, in the order of names; lists differ as a whole."""
    return tuple(_differences("", before, after))


def _differences(at: str, before: Json | Absent, after: Json | Absent) -> Iterator[Difference]:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            below = pointer.child(at, name)
            yield from _differences(below, before.get(name, ABSENT), after.get(name, ABSENT))
    elif _text(before) != _text(after):
        yield Difference(at, before, after)


def _text(value: Json | Absent) -> str | None:
    return None if isinstance(value, Absent) else canonical_json(value)


# ---------------------------------------------------------------------------------------- rebuilds


def rebuilds(before: Spec, after: Spec) -> Iterator[Rebuild]:
    """Yield what a changed definition reads again from its beginning."""
    if isinstance(before, CollectionSpec) and isinstance(after, CollectionSpec):
        old, new = before.derivation, after.derivation
        if old is not None and new is not None:
            yield from _backfilled(old.transforms, new.transforms, "transform {}")
    elif isinstance(before, CaptureSpec) and isinstance(after, CaptureSpec):
        yield from _backfilled(before.bindings, after.bindings, "the source of binding {}")
    elif isinstance(before, MaterializationSpec) and isinstance(after, MaterializationSpec):
        yield from _backfilled(before.bindings, after.bindings, "binding {}")


def _backfilled(before: Sequence[_Named], after: Sequence[_Named], what: str) -> Iterator[Rebuild]:
    old = _by_name(before)
    for name, binding in _by_name(after).items():
        if name in old and _reads_again(old[name], binding):
            why = f"backfill was {old[name].backfill}, and is {binding.backfill}"
            yield Rebuild(what.format(name), why)


def _reads_again(before: _Named, after: _Named) -> bool:
    """True if a counter was raised; a capture reads again for any other number."""
    if isinstance(after, CaptureBinding):
        return before.backfill != after.backfill
    return after.backfill > before.backfill


# -------------------------------------------------------------------------------- names of bindings

_Named = CaptureBinding | MaterializationBinding | Transform


def _by_name(bindings: Iterable[_Named]) -> dict[str, _Named]:
    """Bindings by what identifies them; the place in the list tells equal ones apart."""
    found: dict[str, _Named] = {}
    for number, binding in enumerate(bindings):
        name = binding.name if isinstance(binding, Transform) else _resource_name(binding.resource)
        while name in found:
            name += f" ({number})"
        found[name] = binding
    return found


def _resource_name(resource: Frozen) -> str:
    """Name a resource by its one text, such as a table's name, or by all of it."""
    value = resource.value
    texts = [each for each in value.values() if isinstance(each, str)]
    return texts[0] if len(texts) == 1 else canonical_json(value)


# -------------------------------------------------------------------------------- keys of catalogs

_KEYS: Final[Mapping[str, str]] = {
    "attempts_max": "maxAttempts",
    "code": "lambda",
    "codec": "compressionCodec",
    "derivation": "derive",
    "flush_interval_s": "flushInterval",
    "follows": "source",
    "hooks": "config",
    "interval_s": "interval",
    "length_bytes": "length",
    "max_txn_s": "maxTxnDuration",
    "min_txn_s": "minTxnDuration",
    "on_incompatible": "onIncompatibleSchemaChange",
    "read_delay_s": "readDelay",
    "recommended_depth": "recommended",
    "retention_s": "retention",
    "timeout_s": "timeout",
}
"""Keys of the catalog that are not the name of the field in camel case."""

_NOT_KEYS: Final = frozenset({"name", "prefix", "origin", "reads_inferred", "shuffle_any"})


def in_catalog_keys(spec: Spec) -> Json:
    """Return a definition as JSON, with the keys of the catalog and without defaults."""
    found: Json = _in_keys(spec)
    return found


def _in_keys(value: object) -> Any:  # noqa: ANN401 - any JSON value
    match value:
        case Frozen():
            return value.value
        case CollectionSpec():
            return _collection(value)
        case Endpoint():
            return {value.kind: _members(value, skip={"kind", "module_file"})}
        case Source():
            others = _members(value, skip={"collection"})
            return {"name": value.collection, **others} if others else value.collection
        case Transform() if value.shuffle_any:
            return {**_members(value, skip={"shuffle"}), "shuffle": "any"}
        case CatalogTest():
            steps = {str(at): _in_keys(step) for at, step in enumerate(value.steps, 1)}
            return {**_members(value, skip={"steps"}), "steps": steps}
        case tuple() if value and all(isinstance(each, _Named) for each in value):
            return {name: _in_keys(each) for name, each in _by_name(value).items()}
        case tuple() if value and all(_is_pair(each) for each in value):
            return {name: _in_keys(each) for name, each in value}
        case tuple():
            return [_in_keys(each) for each in value]
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _members(value)
        case _:
            return value


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)


def _collection(spec: CollectionSpec) -> dict[str, Any]:
    schemas = {"schema": spec.write_schema.value}
    if spec.read_schema != spec.write_schema:
        schemas = {"writeSchema": spec.write_schema.value, "readSchema": spec.read_schema.value}
    declared = {field.name: _projection(field) for field in spec.fields if field.declared}
    fragments = _members(spec.fragments)
    return {
        **_members(spec, skip={"write_schema", "read_schema", "fields", "fragments"}),
        **schemas,
        **({"projections": declared} if declared else {}),
        **({"journals": {"fragments": fragments}} if fragments else {}),
    }


def _projection(field: Field) -> Json:
    return {"location": field.location, "partition": True} if field.partition else field.location


def _members(spec: Any, *, skip: Iterable[str] = ()) -> dict[str, Any]:  # noqa: ANN401
    return {
        _KEYS.get(field.name) or _camel(field.name): _in_keys(getattr(spec, field.name))
        for field in dataclasses.fields(spec)
        if field.name not in skip
        and field.name not in _NOT_KEYS
        and getattr(spec, field.name) not in (field.default, None, ())
    }


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


# ----------------------------------------------------------------------------------------- secrets

_MAY_BE_SECRET: Final = frozenset({"config", "env", "headers", "redactSalt"})
"""Below these keys is what people give to connectors and webhooks."""


def _without_secrets(difference: Difference) -> Difference:
    names = pointer.parse(difference.pointer)
    begin = next((at for at, name in enumerate(names) if name in _MAY_BE_SECRET), None)
    if begin is None:
        return difference
    hide: Callable[[Json | Absent], Json | Absent] = _masked
    if names[begin] in ("env", "headers", "redactSalt") or any(map(sounds_secret, names[begin:])):
        hide = _hidden
    return difference._replace(before=hide(difference.before), after=hide(difference.after))


def _hidden(value: Json | Absent) -> Json | Absent:
    """Hide a value, but for a reference to a secret, which is none."""
    if value is None or isinstance(value, Absent):
        return value
    return value if isinstance(value, str) and value.startswith("${") else REDACTED


def _masked(value: Json | Absent) -> Json | Absent:
    match value:
        case str():
            return mask(value)
        case list():
            return [_value(_masked(each)) for each in value]
        case dict():
            return {
                name: _value((_hidden if sounds_secret(name) else _masked)(each))
                for name, each in value.items()
            }
        case _:
            return value


def _value(value: Json | Absent) -> Json:
    return None if isinstance(value, Absent) else value
