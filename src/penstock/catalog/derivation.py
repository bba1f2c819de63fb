"""Building derivations: sources, shuffles, and as much of their code as can be checked unrun."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias

from penstock.catalog import reading
from penstock.catalog.diagnostics import Diagnostic, Position, nearest
from penstock.catalog.nodes import Node
from penstock.catalog.scope import Known, Scope, build_shards, build_source, check_key, key_type
from penstock.catalog.tasks import MAX_TXN_S, build_endpoint
from penstock.model.spec import DerivationSpec, Transform

KeyType: TypeAlias = Literal["boolean", "integer", "string"]
Engine: TypeAlias = Literal["sqlite", "spark", "python", "local", "connector"]

_ENGINES: tuple[Engine, ...] = ("sqlite", "spark", "python", "local", "connector")
_KEY_TYPES: tuple[KeyType, ...] = ("boolean", "integer", "string")
_SQL_NOISE = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|--[^\n]*|/\*.*?\*/", re.DOTALL)
_PARAMETER = re.compile(r"(?<![\w$])\$([A-Za-z_][\w$]*)")


def build_derivation(node: Node, scope: Scope, environ: Mapping[str, str]) -> DerivationSpec | None:
    """The `derive` stanza of a collection; None if it has no engine that runs here."""
    using = node.get("using")
    engine = next((e for e in _ENGINES if using and e in using.members), None)
    transforms_node = node.get("transforms")
    transforms: dict[str, Transform] = {}
    types: dict[str, tuple[KeyType, ...]] = {}
    places: dict[str, Node] = {}
    for item in transforms_node.items if transforms_node else ():
        name = item.text_of("name")
        if name is None:
            continue
        if name in places:
            message = f'transform "{name}" is defined twice'
            scope.sources.error(item.members["name"], "E-DUP", message, see=places[name])
        places[name] = item
        source, known = build_source(item.get("source"), scope)
        shuffle = _shuffle(item, known, scope)
        code = _code(item, engine, known, scope)
        if known and not _is_any(item):
            types[name] = _key_types(known, shuffle)
        if source is not None:
            transforms[name] = Transform(
                name=name,
                source=source,
                shuffle=shuffle,
                shuffle_any=_is_any(item),
                code=code,
                read_delay_s=reading.seconds(item, "readDelay", 0),
                priority=reading.whole(item, "priority", 0),
                disable=reading.flag(item, "disable"),
                backfill=reading.whole(item, "backfill", 0),
            )
    key_types = _agreed_types(node, types, places, scope)
    if using is None or engine is None:
        return None
    inner = using.members[engine]
    migrations = inner.get("migrations")
    is_sql = engine in ("sqlite", "spark")
    _check_module(inner.get("module"), scope)
    return DerivationSpec(
        using=engine,
        transforms=tuple(transforms.values()),
        shuffle_key_types=key_types,
        migrations=tuple(
            scope.sources.code(m) or "" for m in (migrations.items if migrations else ())
        ),
        views=reading.text_pairs(inner.get("views")),
        nonlinear=inner.text_of("nonlinear") == "allow",
        endpoint=None if is_sql else build_endpoint(using, scope, environ),
        dependencies=reading.texts(inner.get("dependencies")),
        batch=reading.flag(inner, "batch"),
        redact_salt=node.text_of("redactSalt"),
        shards=build_shards(node.get("shards"), scope, max_txn_s=MAX_TXN_S),
    )


# --- shuffles ---


def _is_any(transform: Node) -> bool:
    return transform.text_of("shuffle") == "any"


def _shuffle(transform: Node, known: Known | None, scope: Scope) -> tuple[str, ...]:
    shuffle = transform.get("shuffle")
    key = shuffle.get("key") if shuffle else None
    if key is None:
        return known.spec.key if known else ()
    pointers = [item for item in key.items if (item.text or "").startswith("/")]
    for item in pointers:
        if known:
            what, at = f"shuffle key {item.text}", item.text or ""
            check_key(item, what, at, known.shape, scope.sources, must_exist=False)
    return tuple(item.text or "" for item in pointers)


def _key_types(known: Known, shuffle: tuple[str, ...]) -> tuple[KeyType, ...]:
    found = [key_type(known.shape, pointer) for pointer in shuffle]
    return tuple(t for f in found for t in _KEY_TYPES if t == f)


def _agreed_types(
    node: Node,
    types: Mapping[str, tuple[KeyType, ...]],
    places: Mapping[str, Node],
    scope: Scope,
) -> tuple[KeyType, ...]:
    """All shuffle keys have equal length and types, since they meet on the same shards."""
    declared = node.get("shuffleKeyTypes")
    if declared is not None:
        agreed = tuple(t for text in reading.texts(declared) for t in _KEY_TYPES if t == text)
        first = "shuffleKeyTypes says"
        see = declared
    elif types:
        name, agreed = next(iter(types.items()))
        first = f"{name} shuffles on"
        see = places[name]
    else:
        return ()
    for name, found in types.items():
        if found != agreed:
            scope.sources.error(
                places[name].get("shuffle") or places[name],
                "E-SHUFFLE-TYPES",
                f"{first} ({', '.join(agreed)}), {name} on ({', '.join(found)})",
                hint="give every transform a shuffle key of the same types, or shuffle: any",
                see=see,
            )
    return agreed


# --- code ---


def _code(transform: Node, engine: Engine | None, known: Known | None, scope: Scope) -> str | None:
    node = transform.get("lambda")
    if node is None:
        if engine in ("sqlite", "spark"):
            scope.sources.error(
                transform, "E-REQUIRED", f'a transform needs "lambda", using {engine}'
            )
        return None
    if engine == "python":
        scope.sources.error(
            node,
            "E-KEY",
            '"lambda" has no place beside using: python',
            hint="a transform is a method of the module, named after it",
        )
        return None
    code = scope.sources.code(node)
    if code is not None and engine == "sqlite" and known:
        _check_parameters(node, code, known, scope)
    return code


def parameter(field: str) -> str:
    """The SQL parameter of a field (P-2), without its `$`: `object/foo` is `object$foo`."""
    return re.sub(r"[^0-9A-Za-z$]", "_", field.replace("/", "$"))


def _check_parameters(node: Node, code: str, known: Known, scope: Scope) -> None:
    fields: dict[str, list[str]] = {}
    for field in known.spec.fields:
        fields.setdefault(parameter(field.name), []).append(field.name)
    blank = _SQL_NOISE.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), code)
    for used, offset in _parameters(blank):
        found = fields.get(used)
        if found is None:
            close = nearest(used, fields, 3) or sorted(fields)[:3]
            _report_in_code(
                node,
                code,
                offset,
                "E-PARAM",
                f"${used} is not a field of {known.spec.name}",
                f"nearest: {', '.join(f'${c}' for c in close)}",
                scope,
            )
        elif len(found) > 1:
            both = " and ".join(f'"{name}"' for name in found)
            message = f"${used} may be {both}"
            hint = "name one of them by a projection of its own"
            _report_in_code(node, code, offset, "E-PARAM", message, hint, scope)


def _parameters(sql: str) -> Iterator[tuple[str, int]]:
    seen: set[str] = set()
    for match in _PARAMETER.finditer(sql):
        if match[1] not in seen:
            seen.add(match[1])
            yield match[1], match.start()


def _check_module(node: Node | None, scope: Scope) -> None:
    """Python that does not parse is found here rather than in a worker."""
    code = scope.sources.code(node) if node else None
    if node is None or code is None:
        return
    try:
        ast.parse(code)
    except SyntaxError as e:
        line = e.lineno or 1
        offset = sum(len(text) + 1 for text in code.split("\n")[: line - 1])
        message = f"line {line} of module: {e.msg}"
        _report_in_code(node, code, offset, "E-LAMBDA", message, None, scope)
    except ValueError as e:
        scope.sources.error(node, "E-LAMBDA", f"module: {e}")


def _report_in_code(
    node: Node, code: str, offset: int, error: str, message: str, hint: str | None, scope: Scope
) -> None:
    """Report a place inside of code; inline code of several lines begins on the next line."""
    line = code.count("\n", 0, offset)
    inline = node.text == code and "\n" in code
    at = Position(node.at.file, node.at.line + 1 + line, 1) if inline else node.at
    scope.sources.diagnostics.report(
        Diagnostic(at=at, pointer=node.pointer, code=error, message=message, hint=hint)
    )
