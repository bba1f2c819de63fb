"""PURE: the templates of webhook bodies.

    {{name}}                                  a variable, as it is
    {{json name}}                             a variable as JSON: quoted, escaped
    {{headers.Name}}                          a header of this webhook
    {{#each names}}…{{this}}…{{/each}}        once for each item of a list
    {{#unless @last}},{{/unless}}             within it: for all but the last

An unknown variable is an error and not an empty string: a webhook that says nothing is noticed
late. Nothing is escaped, since bodies are rarely HTML; `json` is there for quoting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.errors import UserError
from penstock.model.json_order import Json

_TAG: Final = re.compile(r"\{\{\s*(?P<tag>[^{}]*?)\s*\}\}")
_NAME: Final = re.compile(r"[A-Za-z_][\w.-]*|this")


@dataclass(frozen=True, slots=True)
class _Text:
    text: str


@dataclass(frozen=True, slots=True)
class _Value:
    name: str
    as_json: bool


@dataclass(frozen=True, slots=True)
class _Each:
    name: str
    body: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _UnlessLast:
    body: tuple[_Node, ...]


_Node = _Text | _Value | _Each | _UnlessLast


class Template:
    """A template that was read without complaint."""

    def __init__(self, source: str, *, where: str) -> None:
        self._where = where
        tokens = list(_tokens(source))
        self._nodes, rest = self._parse(tokens, 0, closes=None)
        if rest != len(tokens):
            raise self._wrong(f"{{{{{tokens[rest]}}}}} closes nothing")

    def render(self, variables: Mapping[str, Json]) -> str:
        """The body for these variables, `headers` a mapping among them."""
        return "".join(self._rendered(self._nodes, variables, last=True))

    # ----------------------------------------------------------------------------------- reading

    def _parse(
        self, tokens: Sequence[_Text | str], at: int, *, closes: str | None
    ) -> tuple[tuple[_Node, ...], int]:
        nodes: list[_Node] = []
        while at < len(tokens):
            token = tokens[at]
            at += 1
            match token:
                case _Text():
                    nodes.append(token)
                case "/each" | "/unless":
                    if token != closes:
                        return tuple(nodes), at - 1
                    return tuple(nodes), at
                case "#unless @last":
                    body, at = self._parse(tokens, at, closes="/unless")
                    nodes.append(_UnlessLast(body))
                case str() if token.startswith("#each "):
                    body, at = self._parse(tokens, at, closes="/each")
                    nodes.append(_Each(self._name(token.removeprefix("#each ")), body))
                case str() if token.startswith("json "):
                    nodes.append(_Value(self._name(token.removeprefix("json ")), as_json=True))
                case str():
                    nodes.append(_Value(self._name(token), as_json=False))
        if closes is not None:
            raise self._wrong(f"{{{{{closes}}}}} is missing")
        return tuple(nodes), at

    def _name(self, text: str) -> str:
        if not _NAME.fullmatch(text.strip()):
            raise self._wrong(f"{{{{{text}}}}} is not understood")
        return text.strip()

    # --------------------------------------------------------------------------------- rendering

    def _rendered(
        self, nodes: Sequence[_Node], variables: Mapping[str, Json], *, last: bool
    ) -> Iterator[str]:
        for node in nodes:
            match node:
                case _Text(text):
                    yield text
                case _Value(name, as_json):
                    value = self._find(variables, name)
                    plain = isinstance(value, str) and not as_json
                    yield str(value) if plain else json.dumps(value, ensure_ascii=False)
                case _UnlessLast(body):
                    if not last:
                        yield from self._rendered(body, variables, last=last)
                case _Each(name, body):
                    items = self._find(variables, name)
                    if not isinstance(items, list):
                        raise self._wrong(f"{name} is not a list")
                    for index, item in enumerate(items):
                        yield from self._rendered(
                            body, {**variables, "this": item}, last=index == len(items) - 1
                        )

    def _find(self, variables: Mapping[str, Json], name: str) -> Json:
        known: Json = dict(variables)
        for part in name.split(".", 1):
            if not isinstance(known, dict) or part not in known:
                raise self._wrong(f"there is no variable {name}")
            known = known[part]
        return known

    def _wrong(self, why: str) -> UserError:
        return UserError(
            "the template of a webhook cannot be used",
            where=self._where,
            why=why,
            fix="variables are materialization_name, connector_image, collection_names, "
            "published_at_min, published_at_max, run_id and headers.<Name>",
        )


def _tokens(source: str) -> Iterator[_Text | str]:
    """Text, and what stands between braces."""
    at = 0
    for tag in _TAG.finditer(source):
        if tag.start() > at:
            yield _Text(source[at : tag.start()])
        yield re.sub(r"\s+", " ", tag["tag"])
        at = tag.end()
    if at < len(source):
        yield _Text(source[at:])
