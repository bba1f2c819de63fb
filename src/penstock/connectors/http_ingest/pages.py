"""PURE: what the endpoint says of itself: an OpenAPI description, and a page for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from penstock.connectors.http_ingest.bodies import JSON, LINES
from penstock.connectors.http_ingest.options import Limits
from penstock.model.json_order import Json

_ANSWERS: Final = {
    "200": "The documents are committed.",
    "400": "The body is not what its type says, or documents do not fit the schema; nothing of "
    "the request is published.",
    "401": "A token is required, or the one that was sent is not valid.",
    "403": "The token does not allow this path.",
    "408": "The body took too long.",
    "413": "The body, or the number of documents, is too large.",
    "415": "The body has another type.",
    "422": "The Idempotency-Key belongs to another request.",
    "431": "The headers are too large.",
    "429": "Too much at once: try again after Retry-After seconds.",
    "503": "The capture stops: try again after Retry-After seconds. With an Idempotency-Key that "
    "publishes nothing twice.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestPath:
    """A path, and the collection that documents sent to it go to."""

    path: str
    collection: str
    schema_text: str


def openapi(
    task: str, places: Sequence[IngestPath], limits: Limits, *, guarded: bool
) -> dict[str, Any]:
    """The description of all paths, in OpenAPI 3.1."""
    description: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": task,
            "version": "1",
            "description": "Documents are committed, exactly once for clients that send an "
            "Idempotency-Key with each request and repeat it until it is answered.",
        },
        "paths": {f"/{place.path}": {"post": _operation(place, limits)} for place in places},
    }
    if guarded:
        scheme = {"type": "http", "scheme": "bearer"}
        description["components"] = {"securitySchemes": {"token": scheme}}
        description["security"] = [{"token": []}]
    return description


def _operation(place: IngestPath, limits: Limits) -> dict[str, Any]:
    document = json.loads(place.schema_text)
    many = {"type": "array", "maxItems": limits.documents, "items": document}
    answers: dict[str, Any] = {status: {"description": text} for status, text in _ANSWERS.items()}
    answers["200"]["content"] = {
        JSON: {
            "schema": {
                "type": "object",
                "required": ["published"],
                "properties": {"published": {"type": "integer"}},
            }
        }
    }
    return {
        "summary": f"Publish documents to {place.collection}",
        "parameters": [
            {
                "name": "Idempotency-Key",
                "in": "header",
                "description": "Names the request: a repeat within 24 hours publishes nothing, "
                "and is answered as the first was.",
                "schema": {"type": "string", "minLength": 1, "maxLength": 255},
            }
        ],
        "requestBody": {
            "required": True,
            "content": {
                JSON: {"schema": {"anyOf": [document, many]}},
                LINES: {"schema": {"type": "string", "description": "One document per line."}},
            },
        },
        "responses": answers,
    }


_STYLE: Final = (
    "body{font:16px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "pre{background:#f4f4f4;padding:.7rem;overflow:auto}code{background:#f4f4f4}"
)


def page(
    task: str, places: Sequence[IngestPath], limits: Limits, *, base: str, guarded: bool
) -> str:
    """A page for people. Needs nothing from elsewhere."""
    token = "     -H 'Authorization: Bearer …' \\\n" if guarded else ""
    parts = []
    for place in places:
        pretty = json.dumps(json.loads(place.schema_text), indent=2, ensure_ascii=False)
        curl = (
            f"curl {base}/{place.path} \\\n{token}"
            "     -H 'Content-Type: application/json' -H 'Idempotency-Key: 7b1c' \\\n"
            "     -d '{…}'"
        )
        parts.append(
            f"<h2><code>POST /{escape(place.path)}</code></h2>"
            f"<p>Documents of <code>{escape(place.collection)}</code>.</p>"
            f"<pre>{escape(curl)}</pre>"
            f"<details><summary>Schema</summary><pre>{escape(pretty)}</pre></details>"
        )
    limits_text = (
        f"At most {limits.body_bytes:,} bytes and {limits.documents:,} documents in a request."
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(task)}</title>"
        f"<style>{_STYLE}</style><h1>{escape(task)}</h1>"
        "<p>Send one JSON object, an array of them, or one per line "
        f"(<code>{LINES}</code>). <code>200</code> comes after the commit. {limits_text} "
        '<a href="/openapi.json">openapi.json</a></p>' + "".join(parts) + "</html>"
    )


def problem(message: str, **more: Json) -> bytes:
    """The body of an answer that is not 200."""
    return json.dumps({"error": message, **more}, ensure_ascii=False).encode()
