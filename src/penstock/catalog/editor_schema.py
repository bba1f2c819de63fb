"""The JSON Schema of catalogs, with which editors complete and check YAML while it is typed.

It is rendered from the grammar and from the schemas of connectors, so it knows every key that
`penstock check` knows. What needs more than the file itself is left to `penstock check`: names of
other definitions, SQL, whether secrets are set. So a catalog that passes `penstock check` fits this
schema. It is draft-07, and its patterns are ECMAScript's: what most editors understand.
"""

from __future__ import annotations

import re
from typing import Any, Final

from penstock.catalog.connectors import Connectors
from penstock.catalog.forms import (
    AnyMapping,
    Anything,
    BooleanValue,
    Choice,
    Either,
    Form,
    Key,
    KeyedMapping,
    ListOf,
    MapOf,
    Null,
    SchemaMapping,
    Text,
    WholeNumber,
)
from penstock.catalog.grammar import CATALOG
from penstock.model.config_schema import ConfigSchema
from penstock.model.json_order import Json
from penstock.model.reduce import Strategy
from penstock.model.shape import TYPES

FILE_NAME: Final = "catalog.schema.json"
"""The name of the schema beside a catalog, by convention."""

COMMENT: Final = f"# yaml-language-server: $schema={FILE_NAME}"
"""The first line of a catalog: it tells editors where the schema is."""

_DIALECT: Final = "http://json-schema.org/draft-07/schema#"
_DOCUMENTS: Final = "#/definitions/documents"
_REFERENCE: Final = {"type": "string", "pattern": r"\$\{(env|file):[^}]*\}"}
"""A text with a reference to a secret. What it stands for is not known to an editor."""

_OF_TEXTS: Final = frozenset({"pattern", "enum", "minLength", "maxLength", "format"})
_TASKS: Final = (("capture", "captures"), ("materialization", "materializations"))


def editor_schema(connectors: Connectors) -> dict[str, Any]:
    """Return the schema of whole catalogs whose tasks use these connectors."""
    catalog = form_schema(CATALOG)
    for kind, section in _TASKS:
        [task] = catalog["properties"][section]["patternProperties"].values()
        image = task["properties"]["endpoint"]["properties"]["connector"]["properties"]["image"]
        image["examples"] = [each for each in connectors.images(kind) if not each.endswith("…")]
        task["allOf"] = [_known_images(kind, connectors), *_conditions(kind, connectors)]
    return {
        "$schema": _DIALECT,
        "title": "Penstock catalog",
        **catalog,
        "definitions": {"documents": _schema_of_documents()},
    }


# ------------------------------------------------------------------------------------------ forms


def form_schema(form: Form) -> dict[str, Any]:
    """Render one form of the grammar."""
    match form:
        case Text():
            return _text_schema(form)
        case Choice():
            return {"type": "string", "enum": list(form.words)}
        case BooleanValue():
            return {"type": "boolean"}
        case WholeNumber():
            return {"type": "integer", "minimum": form.minimum}
        case Null():
            return {"type": "null"}
        case Anything():
            return {}
        case AnyMapping():
            return {"type": "object"}
        case SchemaMapping():
            return {"$ref": _DOCUMENTS}
        case ListOf():
            return {"type": "array", "items": form_schema(form.item), "minItems": form.at_least}
        case MapOf():
            return _map_schema(form)
        case Either():
            return {"anyOf": [form_schema(each) for each in form.forms]}
        case KeyedMapping():
            return _mapping_schema(form)


def _text_schema(form: Text) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    if form.pattern:
        schema["pattern"] = f"^(?:{portable(form.pattern)})$"
        schema["patternErrorMessage"] = f"expected {form.expected}"
    if form.path_bytes_max is not None:
        schema["maxLength"] = form.path_bytes_max  # bytes are at least as many as letters
    return schema


def _map_schema(form: MapOf) -> dict[str, Any]:
    value = form_schema(form.value)
    if not form.names.pattern:
        names = {"minLength": 1}
        return {"type": "object", "propertyNames": names, "additionalProperties": value}
    names = _text_schema(form.names)
    return {
        "type": "object",
        "propertyNames": names,
        "patternProperties": {names["pattern"]: value},
        "additionalProperties": False,
    }


def _mapping_schema(record: KeyedMapping) -> dict[str, Any]:
    keys = {name: key for name, key in record.keys.items() if isinstance(key, Key)}
    schema: dict[str, Any] = {
        "type": "object",
        "title": record.what,
        "properties": {name: _key_schema(key) for name, key in keys.items()},
        "additionalProperties": False,
    }
    if required := [name for name, key in keys.items() if key.required]:
        schema["required"] = required
    if record.one_of:
        schema["oneOf"] = [{"required": [n]} for n in record.one_of if n in keys]
    if record.together:
        schema["dependencies"] = {
            name: [other] for a, b in record.together for name, other in ((a, b), (b, a))
        }
    if record.exclusive:
        schema["not"] = {"anyOf": [{"required": [a, b]} for a, b in record.exclusive]}
    return schema


def _key_schema(key: Key) -> dict[str, Any]:
    shown: dict[str, Any] = {"description": key.about}
    if key.default is not None:
        shown["default"] = key.default
    return shown | form_schema(key.form)


def portable(pattern: str) -> str:
    r"""Return a regular expression that ECMAScript reads alike: `\w` is not ASCII's alone, `(?i:…)`
    is spelt out. `\w` must be inside of brackets.
    """
    return re.sub(
        r"\(\?i:([^()]*)\)",
        lambda found: f"(?:{re.sub('[A-Za-z]', _either_case, found[1])})",
        pattern.replace(r"\w", r"\p{L}\p{N}_"),
    )


def _either_case(letter: re.Match[str]) -> str:
    return f"[{letter[0].lower()}{letter[0].upper()}]"


# ------------------------------------------------------------------------------------- connectors


def _known_images(kind: str, connectors: Connectors) -> dict[str, Any]:
    """Refuse an image that no connector has, unless the task never runs."""
    patterns = "|".join(_pattern_of(image) for image in connectors.images(kind))
    image = {
        "pattern": f"^(?:{patterns})$",
        "patternErrorMessage": f"there is no such connector for a {kind}",
    }
    disabled = _having("disable", {"const": True})
    never_runs = {"anyOf": [_having("delete", {"const": True}), _having("shards", disabled)]}
    return {"if": {"not": never_runs}, "then": _inside_connector({"image": image})}


def _conditions(kind: str, connectors: Connectors) -> list[dict[str, Any]]:
    """Return what each connector demands of the configuration and the resources of its tasks."""
    found = []
    for image in connectors.images(kind):
        schemas = connectors.schemas(kind, image)
        if schemas is None:
            continue
        named = _having("image", {"pattern": f"^(?:{_pattern_of(image)})$"})
        config = {"anyOf": [{"type": "string"}, _config(schemas.config)]}
        needed = ["config"] if schemas.config.value["required"] else []
        then = _inside_connector({"config": config}, needed)
        then["properties"] |= _resources(schemas.resource)
        found.append({"if": _having("endpoint", _having("connector", named)), "then": then})
    for name in ("ingest", "python"):
        special = connectors.endpoint_schemas(kind, name)
        if special is None:
            continue
        then = {"properties": _resources(special.resource)}
        if name == "ingest":
            then["properties"]["endpoint"] = {"properties": {name: _config(special.config)}}
        found.append({"if": _having("endpoint", {"required": [name]}), "then": then})
    return found


def _pattern_of(image: str) -> str:
    """Return the pattern of names for one connector: any registry, and any tag."""
    protocol, _, rest = image.partition(":")
    if rest == "…":
        return f"{re.escape(protocol)}(?::.*)?"
    return rf"(?:.*/)?{image.rsplit('/', 1)[-1]}(?:[:@][^/]*)?"


def _having(name: str, value: Json) -> dict[str, Any]:
    return {"properties": {name: value}, "required": [name]}


def _inside_connector(members: dict[str, Any], needed: list[str] | None = None) -> dict[str, Any]:
    connector = {"properties": members} | ({"required": needed} if needed else {})
    return {"properties": {"endpoint": {"properties": {"connector": connector}}}}


def _resources(schema: ConfigSchema) -> dict[str, Any]:
    return {"bindings": {"items": {"properties": {"resource": _config(schema)}}}}


def _config(schema: ConfigSchema) -> dict[str, Any]:
    rendered: dict[str, Any] = _with_references(schema.value)
    return {name: value for name, value in rendered.items() if name != "title"}


def _with_references(schema: Any) -> Any:  # noqa: ANN401 - a schema, or true or false
    """Allow a reference to a secret wherever a text is limited, as `ConfigSchema` does."""
    if not isinstance(schema, dict):
        return schema
    limits = {name: schema[name] for name in schema.keys() & (_OF_TEXTS | {"type"})}
    if limits.keys() & _OF_TEXTS and schema.get("type", "string") == "string":
        if "pattern" in limits:
            limits["pattern"] = portable(limits["pattern"])
        shown = {name: value for name, value in schema.items() if name not in limits}
        return shown | {"anyOf": [limits, _REFERENCE]}
    inner = dict(schema)
    for name in schema.keys() & {"items", "additionalProperties"}:
        inner[name] = _with_references(schema[name])
    if "properties" in schema:
        inner["properties"] = {n: _with_references(m) for n, m in schema["properties"].items()}
    return inner


# ---------------------------------------------------------------------------- schemas of documents


def _schema_of_documents() -> dict[str, Any]:
    """Return a schema of schemas: it completes the usual words, and allows all others."""
    one = {"anyOf": [{"type": "boolean"}, {"$ref": _DOCUMENTS}]}
    several = {"type": "object", "additionalProperties": one}
    text, number, count = {"type": "string"}, {"type": "number"}, {"type": "integer", "minimum": 0}
    kind = {"type": "string", "enum": sorted(TYPES)}
    formats = ["date", "date-time", "time", "uuid", "integer", "number"]
    strategies = [strategy.value for strategy in Strategy]
    described: dict[str, tuple[str, dict[str, Any]]] = {
        "type": ("The JSON type, or a list of types.", _either(kind, _listing(kind))),
        "properties": ("The members of an object, and the schema of each.", several),
        "required": ("Members that every document has.", _listing(text)),
        "items": ("The schema of the items of an array.", _either(one, _listing(one))),
        "additionalProperties": ("The schema of members that properties does not name.", one),
        "format": ("The form of a string, such as date-time.", text | {"examples": formats}),
        "enum": ("The allowed values.", {"type": "array"}),
        "const": ("The only allowed value.", {}),
        "default": ("The value if the member is absent.", {}),
        "title": ("A short name.", text),
        "description": ("What it means.", text),
        "minimum": ("The smallest allowed number.", number),
        "maximum": ("The largest allowed number.", number),
        "multipleOf": ("Numbers are multiples of this one.", number),
        "minLength": ("The least number of characters.", count),
        "maxLength": ("The largest number of characters.", count),
        "pattern": ("A regular expression that a string matches.", text),
        "allOf": ("Schemas that all hold.", _listing(one)),
        "anyOf": ("Schemas of which at least one holds.", _listing(one)),
        "oneOf": ("Schemas of which exactly one holds.", _listing(one)),
        "$ref": ("A schema elsewhere: #/$defs/name, or a file.", text),
        "$defs": ("Schemas to refer to.", several),
        "reduce": (
            "How two values of one key are reduced to one; by default, the last one wins.",
            {
                "type": "object",
                "required": ["strategy"],
                "properties": {
                    "strategy": {
                        "description": "The strategy.",
                        "type": "string",
                        "enum": strategies,
                    },
                    "key": {
                        "description": "Pointers by which items are compared.",
                        **_listing(text),
                    },
                    "delete": {
                        "description": "Remove the value.",
                        "type": "boolean",
                    },
                    "associative": {
                        "description": "false if the order of reductions matters.",
                        "type": "boolean",
                    },
                },
                "additionalProperties": False,
            },
        ),
        "redact": (
            "Remove the value (block) or hash it (sha256) before it is stored.",
            {
                "type": "object",
                "required": ["strategy"],
                "properties": {"strategy": {"type": "string", "enum": ["block", "sha256"]}},
                "additionalProperties": False,
            },
        ),
    }
    return {
        "type": "object",
        "title": "a JSON Schema",
        "properties": {
            name: {"description": text_of_it} | schema
            for name, (text_of_it, schema) in described.items()
        },
    }


def _listing(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


def _either(*forms: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": list(forms)}
