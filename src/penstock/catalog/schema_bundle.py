"""Bundle a schema that is spread over files into one self-contained schema.

A `$ref` may lead into the schema itself, to another file (`common.yaml#/$defs/money`), to an anchor
(`schema.yaml#Join`), or to a schema that Penstock provides (`flow://write-schema`). The result has
only references of the form `#/…`: what lies elsewhere is copied below `$defs`, once. So validation,
inference and executors never need another file.

Keywords beside a `$ref` count in every draft. Drafts before 2019-09 ignore them, and with them a
`required` or a `reduce` that its author meant; so there the reference moves into an `allOf`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import quote, unquote, urljoin

from penstock.catalog.diagnostics import did_you_mean
from penstock.catalog.load import ResolvedReference, Sources, find_fragment
from penstock.catalog.nodes import Node
from penstock.model import pointer as pointers
from penstock.model.draft import Draft
from penstock.model.json_order import ABSENT
from penstock.model.shape import Shape, locate

Schema: TypeAlias = Any
"""A schema, or a part of one, as plain JSON."""

WRITE = "flow://write-schema"
RELAXED = "flow://relaxed-write-schema"
INFERRED = "flow://inferred-schema"

_NOT_SCHEMAS = frozenset({"enum", "const", "default", "examples", "required", "reduce", "redact"})
_MAPS_OF_SCHEMAS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
_IN_PLACE_LISTS = ("allOf", "anyOf", "oneOf")
_IN_PLACE = ("if", "then", "else", "not")
_RESTRICTIONS = frozenset({"type", "required", "format", "not", "redact"})


@dataclass(frozen=True, slots=True, eq=False)
class BuiltSchema:
    """A self-contained JSON Schema that knows where each part of it was written."""

    value: dict[str, Any]
    root: Node
    embedded: Mapping[str, Node | BuiltSchema] = field(default_factory=dict)
    uses_inferred: bool = False
    broken: bool = False
    """A reference dangles or is circular. That is reported; conclude nothing from this schema."""

    def node_at(self, pointer: str) -> Node:
        """Return where the part at `pointer`, or the closest part around it, was written."""
        match pointers.parse(pointer):
            case "$defs", name, *rest if name in self.embedded:
                part, below = self.embedded[name], pointers.render(rest)
                return part.node_at(below) if isinstance(part, BuiltSchema) else part.closest(below)
            case _:
                return self.root.closest(pointer)


def bundle(
    node: Node,
    sources: Sources,
    provided: Mapping[str, BuiltSchema] | None = None,
    inferred: Schema = None,
) -> BuiltSchema | None:
    """Bundle the schema at `node`, inline or by reference; None if it cannot be read.

    `inferred` is what `flow://inferred-schema` stands for, if that is known yet.
    """
    target = sources.follow(node)
    if target is None:
        return None
    if not isinstance(target.node.value, Mapping):
        if node.text is not None:  # the grammar reports an inline one of another type
            sources.error(node, "E-SCHEMA", f"expected a schema, found {target.node.describe()}")
        return None
    return _Bundler(target, sources, provided or {}, inferred or {}).bundle()


def with_inferred(schema: Schema, inferred: Schema) -> Schema:
    """Return a bundled schema in which `flow://inferred-schema` stands for another one now."""
    return {**schema, "$defs": {**schema.get("$defs", {}), INFERRED: inferred}}


def relaxed(write: BuiltSchema, shape: Shape, key: Sequence[str]) -> BuiltSchema:
    """Return the write schema without required, type and format, except for the key.

    Its annotations stay: it contributes them beside an inferred schema that restricts. Only
    `redact` goes, because documents were redacted when written, and must not be again.
    """
    loose = _strip(write.value)
    loose["allOf"] = [*loose.get("allOf", []), *(_key_schema(shape, pointer) for pointer in key)]
    return BuiltSchema(loose, write.root, write.embedded)


def _strip(schema: Schema) -> Schema:
    """Return a wider schema with the same annotations.

    Conditions (`if`) stay, because they choose between annotations. `not` goes: a wider schema
    inside it would forbid more. `oneOf` becomes `anyOf`: its branches may overlap now.
    """
    if not isinstance(schema, dict):
        return schema
    stripped: dict[str, Any] = {}
    for word, value in schema.items():
        if word in _RESTRICTIONS:
            continue
        if word in _NOT_SCHEMAS or word == "if" or not isinstance(value, dict | list):
            stripped[word] = value
        elif word in _MAPS_OF_SCHEMAS and isinstance(value, dict):
            stripped[word] = {name: _strip(inner) for name, inner in value.items()}
        elif isinstance(value, list):
            stripped[word] = [_strip(inner) for inner in value]
        else:
            stripped[word] = _strip(value)
    if "oneOf" in stripped:
        branches = {"anyOf": stripped.pop("oneOf")}
        stripped["allOf"] = [*stripped.get("allOf", []), branches]
    return stripped


def _key_schema(shape: Shape, pointer: str) -> dict[str, Any]:
    leaf, _ = locate(shape, pointer)
    schema: dict[str, Any] = {"type": sorted(leaf.types)}
    if leaf.default is not ABSENT:
        schema["default"] = leaf.default
    for token in reversed(pointers.parse(pointer)):
        schema = {"type": "object", "properties": {token: schema}}
        if leaf.default is ABSENT:
            schema["required"] = [token]
    return schema


class _Bundler:
    def __init__(
        self,
        target: ResolvedReference,
        sources: Sources,
        provided: Mapping[str, BuiltSchema],
        inferred: Schema,
    ) -> None:
        self._inferred = inferred
        self._sources = sources
        self._provided = provided
        self._root = target.node
        self._home = target.root
        self._own_names = self._members(self._root, "$defs").keys()
        self._ids: dict[tuple[str, str], dict[str, Node]] = {}
        self._names: dict[tuple[str, str], str] = {}
        self._pending: list[tuple[str, Node, Node]] = []
        self._embedded: dict[str, Node | BuiltSchema] = {}
        self._definitions: dict[str, Any] = {}
        self._broken = False

    def bundle(self) -> BuiltSchema:
        value = self._schema(self._root, self._home)
        if draft := self._home.text_of("$schema"):
            value.setdefault("$schema", draft)
        while self._pending:
            name, node, home = self._pending.pop()
            self._definitions[name] = self._schema(node, home)
        if self._definitions:
            value["$defs"] = {**value.get("$defs", {}), **self._definitions}
        if not Draft.of(value).ref_has_siblings:
            value = _with_siblings(value)
        chain = _find_cycle(value)
        built = BuiltSchema(
            value,
            self._root,
            self._embedded,
            uses_inferred=INFERRED in self._embedded,
            broken=self._broken or chain is not None,
        )
        if chain is not None:
            places = [built.node_at(pointer) for pointer in chain]
            self._sources.error(
                places[0],
                "E-SCHEMA-REF",
                f"$ref leads back to itself: {' → '.join(_shown(p) for p in places)}",
                hint="remove one of the references",
            )
        return built

    @staticmethod
    def _members(node: Node, word: str) -> Mapping[str, Node]:
        inner = node.get(word)
        return inner.members if inner else {}

    def _schema(self, node: Node, home: Node) -> Schema:
        """Return a schema with its references rewritten; `home` is what "#" means in it."""
        if not isinstance(node.value, Mapping):
            return node.plain()
        own_id = node.text_of("$id")
        if own_id and not own_id.startswith("#"):
            home = node
        result: dict[str, Any] = {}
        for word, inner in node.members.items():
            if word in ("$ref", "$recursiveRef") and inner.text is not None:
                reference = self._reference(inner, inner.text, home)
                if reference is not None:
                    result["$ref"] = reference
                else:
                    self._broken = True
            elif word == "$id":
                continue  # every reference is rewritten, so nothing may change what "#" means
            elif word in _NOT_SCHEMAS:
                result[word] = inner.plain()
            elif word in _MAPS_OF_SCHEMAS and isinstance(inner.value, Mapping):
                result[word] = {n: self._schema(s, home) for n, s in inner.members.items()}
            elif inner.items:
                result[word] = [self._schema(item, home) for item in inner.items]
            else:
                result[word] = self._schema(inner, home)
        return result

    def _reference(self, node: Node, reference: str, home: Node) -> str | None:
        """Return the rewritten reference; None if it dangles, which is reported."""
        if reference.startswith(("http://json-schema.org/", "https://json-schema.org/")):
            return reference  # the validator knows the meta-schemas
        if reference in (WRITE, RELAXED, INFERRED):
            return self._provided_reference(node, reference)
        url, _, fragment = reference.partition("#")
        base = home if not url else self._by_id(url, home) or self._sources.open(node, url)
        if base is None:
            return None
        found = find_fragment(base, unquote(fragment))
        if found is None:
            siblings = self._members(base, "$defs") or self._members(base, "definitions")
            self._sources.error(
                node,
                "E-SCHEMA-REF",
                f'$ref "{reference}" points to nothing',
                hint=did_you_mean(fragment.rsplit("/", 1)[-1], siblings),
            )
            return None
        return self._address(found, base)

    def _provided_reference(self, node: Node, reference: str) -> str | None:
        prefix = _local(pointers.render(("$defs", reference)))
        if reference in self._embedded:
            return prefix
        if reference == INFERRED:
            # It is learnt from documents; until there are some it allows anything.
            self._embedded[reference] = node
            self._definitions[reference] = self._inferred
        elif built := self._provided.get(reference):
            self._embedded[reference] = built
            self._definitions[reference] = _reroot(built.value, prefix)
        else:
            self._sources.error(
                node,
                "E-SCHEMA-REF",
                f"{reference} can only be used in readSchema",
                hint="give the collection a writeSchema and a readSchema",
            )
            return None
        return prefix

    def _by_id(self, url: str, home: Node) -> Node | None:
        """Return the part of the same schema whose `$id` is `url`."""
        place = (home.at.file, home.pointer)
        if place not in self._ids:
            base = home.text_of("$id") or ""
            named = ((_joined(base, n.text_of("$id") or ""), n) for n in home.walk())
            self._ids[place] = {name: node for name, node in named if name != base}
        known = self._ids[place]
        return known.get(url) or known.get(_joined(home.text_of("$id") or "", url))

    def _address(self, node: Node, home: Node) -> str:
        """Return where the result holds `node`: in its own place, or as a copy below `$defs`."""
        inside = (
            node.at.file == self._root.at.file
            and self._home is self._root
            and f"{node.pointer}/".startswith(f"{self._root.pointer}/")
        )
        if node is self._root or inside:
            return _local(node.pointer.removeprefix(self._root.pointer))
        place = (node.at.file, node.pointer)
        if place not in self._names:
            stem = node.at.file.replace("\\", "/").rsplit("/", 1)[-1].split(".")[0]
            name = (pointers.parse(node.pointer) or (stem,))[-1]
            taken = self._own_names | self._embedded.keys()
            unique = next(n for n in _spellings(name, stem) if n not in taken)
            self._names[place] = unique
            self._embedded[unique] = node
            self._pending.append((unique, node, home))
        return _local(pointers.render(("$defs", self._names[place])))


def _local(pointer: str) -> str:
    """A pointer as a URL fragment."""
    return "#" + quote(pointer, safe="/~$:@!&'()*+,;=")


def _joined(base: str, url: str) -> str:
    try:
        return urljoin(base, url)
    except ValueError:  # not a URL, so take it literally
        return url


def _shown(node: Node) -> str:
    return f"{node.at.file}#{node.pointer}" if node.pointer else node.at.file


def _spellings(name: str, stem: str) -> Iterator[str]:
    yield name
    yield f"{stem}.{name}"
    count = 2
    while True:
        yield f"{stem}.{name}.{count}"
        count += 1


def _reroot(schema: Schema, prefix: str) -> Schema:
    """Rewrite the `#/…` references of a schema that is copied into another one."""
    if isinstance(schema, list):
        return [_reroot(item, prefix) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        word: prefix + value.removeprefix("#")
        if word == "$ref" and isinstance(value, str) and value.startswith("#")
        else value
        if word in _NOT_SCHEMAS
        else _reroot(value, prefix)
        for word, value in schema.items()
    }


def _with_siblings(schema: Schema) -> Schema:
    """Rewrite a schema so that the keywords beside its references count in older drafts too."""
    if isinstance(schema, list):
        return [_with_siblings(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {
        word: value if word in _NOT_SCHEMAS else _with_siblings(value)
        for word, value in schema.items()
    }
    if isinstance(result.get("$ref"), str) and len(result) > 1:
        reference = {"$ref": result.pop("$ref")}
        result["allOf"] = [*result.get("allOf", ()), reference]  # last: others keep their place
    return result


def _find_cycle(schema: dict[str, Any]) -> list[str] | None:
    """Return a chain of schemas that apply to one value and lead back to the first, if any.

    Validation and inference would never end. Recursion into members and items is fine.
    """
    done: set[str] = set()
    for start in _reference_targets(schema):
        path = {start: None}
        stack = [_in_place(schema, start)]
        while stack and start not in done:
            following = next(stack[-1], None)
            if following is None:
                stack.pop()
                done.add(path.popitem()[0])
            elif following in path:
                chain = list(path)
                return [*chain[chain.index(following) :], following]
            elif following not in done:
                path[following] = None
                stack.append(_in_place(schema, following))
    return None


def _reference_targets(schema: Schema) -> Iterator[str]:
    if isinstance(schema, dict):
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            yield unquote(reference[1:])
        for word, value in schema.items():
            if word not in _NOT_SCHEMAS:
                yield from _reference_targets(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from _reference_targets(item)


def _in_place(schema: Schema, pointer: str) -> Iterator[str]:
    """Yield the schemas that apply to the same value as the one at `pointer`."""
    here = pointers.get(schema, pointer)
    if not isinstance(here, dict):
        return
    reference = here.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        yield unquote(reference[1:])
    for word in _IN_PLACE_LISTS:
        branches = here.get(word)
        for i in range(len(branches)) if isinstance(branches, list) else ():
            yield f"{pointer}/{word}/{i}"
    for word in _IN_PLACE:
        if isinstance(here.get(word), dict):
            yield f"{pointer}/{word}"
