"""Hints for forms that other or older tools understand: what to write instead.

What they print is complete: pasted into the catalog, it passes `penstock check` and runs. The
methods of a sketched module publish nothing until somebody fills them in; the lambdas that they
replace stand above them, as comments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from penstock.catalog.nodes import Node
from penstock.model import pointer
from penstock.runtime.derive.python_names import method_name, module_name

_PLAIN = re.compile(r"[A-Za-z_][\w/-]*")
_WORDS = {"true", "false", "null", "any"}
_OPTIONS = ("readDelay", "priority", "disable", "backfill")
_LAMBDAS = ("lambda", "publish", "update")
_INDENT = "    "


def derive_instead(trail: Sequence[Node]) -> str:
    """Rewrite an old `derivation` as a `derive` stanza with the same transforms."""
    transforms = trail[-1].get("transform")
    named = list(transforms.members.items()) if transforms else []
    return "\n".join(["write it as a derive stanza:", *_stanza(trail[-1], named, ())])


def python_instead(trail: Sequence[Node]) -> str:
    """Rewrite a TypeScript derivation with a sketch of its Python module."""
    derive = trail[-3] if len(trail) > 2 else trail[-1]
    transforms = derive.get("transforms")
    items = transforms.items if transforms else ()
    named = [(item.text_of("name") or f"transform{at}", item) for at, item in enumerate(items)]
    kept = [
        f"  {key}: {_value(member)}"
        for key, member in derive.members.items()
        if key not in ("using", "transforms")
    ]
    return "\n".join(["write the same methods in Python:", *_stanza(derive, named, kept)])


def transforms_instead(trail: Sequence[Node]) -> str:
    """Rewrite the old `transform`, a mapping by name, as the list `transforms`."""
    named = trail[-1].members.items()
    lines = [line for name, item in named for line in _transform(name, item, keeps_lambda=True)]
    head = "write a list, in which each transform has a name:"
    return "\n".join([head, "transforms:", *lines] if lines else [head, "transforms: [{name: …}]"])


def _stanza(node: Node, named: Sequence[tuple[str, Node]], kept: Iterable[str]) -> list[str]:
    """The `derive` stanza of the collection that `node` is a part of, with a module inside."""
    at = pointer.parse(node.pointer)
    collection = at[at.index("collections") + 1] if "collections" in at[:-1] else "collection"
    module = [
        f"from {module_name(collection)} import Document, IDerivation",
        "",
        "class Derivation(IDerivation):",
        *[f"{_INDENT}{line}" for name, item in named for line in _method(name, item)],
    ]
    if not named:
        module.append(f"{_INDENT}pass")
    return [
        "derive:",
        "  using:",
        "    python:",
        "      module: |",
        *[f"        {line}".rstrip() for line in module],
        *kept,
        "  transforms:" if named else "  transforms: []",
        *[f"  {line}" for name, item in named for line in _transform(name, item)],
    ]


def _method(name: str, transform: Node) -> list[str]:
    was = [
        f"{_INDENT}# {line}".rstrip()
        for key in _LAMBDAS
        if (member := transform.get(key)) is not None
        for line in _lambda(key, member)
    ]
    body = f"{_INDENT}return []  # as in [Document(…), …], from read.doc"
    return [f"def {method_name(name)}(self, read):", *was, body]


def _lambda(key: str, node: Node) -> list[str]:
    text = node.text or node.text_of("lambda")
    return f"{key}: {text if text is not None else _value(node)}".splitlines()


def _transform(name: str, node: Node, *, keeps_lambda: bool = False) -> list[str]:
    lines = [f"name: {_text(name)}", f"source: {_source(node.get('source'))}"]
    shuffle = node.get("shuffle")
    if shuffle is not None and (shuffle.text or shuffle.get("key") is not None):
        key = shuffle.get("key")
        written = _value(shuffle) if key is None else f'{{"key": {_value(key)}}}'
        lines.append(f"shuffle: {written}")
    elif shuffle is not None:
        lines.append(f"# shuffle: {_value(shuffle)}")
    options = (*_OPTIONS, "lambda") if keeps_lambda else _OPTIONS
    given = ((key, node.get(key)) for key in options)
    lines += [f"{key}: {_value(value)}" for key, value in given if value is not None]
    return [f"  - {lines[0]}", *[f"    {line}" for line in lines[1:]]]


def _source(node: Node | None) -> str:
    if node is None or (node.text is None and node.get("name") is None):
        return "…"
    known = ("name", "partitions", "notBefore", "notAfter")
    kept = {key: member for key, member in node.members.items() if key in known}
    if not kept or list(kept) == ["name"]:
        return _text(node.text or node.text_of("name") or "…")
    return json.dumps({k: m.plain() for k, m in kept.items()}, ensure_ascii=False)


def _value(node: Node) -> str:
    if node.text is not None:
        return node.text if node.text == "any" else _text(node.text)
    return json.dumps(node.plain(), ensure_ascii=False)


def _text(text: str) -> str:
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return text if plain else json.dumps(text, ensure_ascii=False)
