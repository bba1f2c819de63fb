"""PURE: texts of others without the secrets that they were given.

A server may answer with what it was sent: plainly, or as it understood it. So a secret is looked
for in the forms in which servers repeat things: as it is, percent-encoded, as JSON, as HTML, in
base64 at any place of a longer text.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Iterable, Iterator
from typing import Final
from urllib.parse import parse_qsl, quote, quote_plus, unquote, urlsplit

from penstock.servicekit.secrets import REDACTED

TELLING: Final = 6
"""Literal texts of a request count as secrets from this length on."""

_BASE64_MIN: Final = 4
_HARMLESS: Final = frozenset({"accept", "content-type", "user-agent"})


class Redaction:
    """Knows some secrets, and keeps them out of texts."""

    def __init__(self, secrets: Iterable[str]) -> None:
        forms = {form for secret in secrets if secret for form in _forms(secret)}
        self._forms = sorted(forms, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, self._forms)) or r"(?!)")

    def __call__(self, text: str, *, cut: bool = False) -> str:
        """The text without them; if it was `cut`, also without a beginning of one at its end."""
        text = self._any.sub(REDACTED, text)
        while cut and (begun := max((self._begun(text, form) for form in self._forms), default=0)):
            text = text[: len(text) - begun]
        return text

    def _begun(self, text: str, form: str) -> int:
        lengths = range(min(len(form) - 1, len(text)), 0, -1)
        return next((n for n in lengths if text.endswith(form[:n])), 0)


def secrets_of_header(name: str, value: str) -> Iterator[str]:
    """Return what may be secret in a literal header: a token after its scheme, a password."""
    if name.lower() in _HARMLESS:
        return
    yield from (part for part in (value, *value.split()) if len(part) >= TELLING)
    scheme, _, rest = value.partition(" ")
    if scheme.lower() == "basic":
        try:
            user, _, password = base64.b64decode(rest, validate=True).decode().partition(":")
        except ValueError:
            return
        yield from (part for part in (f"{user}:{password}", password) if len(part) > 1)


def secrets_of_url(url: str) -> Iterator[str]:
    """Return what may be secret in a URL: everything but its host."""
    parts = urlsplit(url)
    if parts.password is not None:
        user, password = unquote(parts.username or ""), unquote(parts.password)
        yield from (f"{user}:{password}", password)
    target = f"{parts.path}?{parts.query}" if parts.query else parts.path
    values = (value for _, value in parse_qsl(parts.query))
    for part in (target, *parts.path.split("/"), *values):
        if len(part) >= TELLING:
            yield from (part, unquote(part))


def _forms(secret: str) -> Iterator[str]:
    yield secret
    for encoded in (quote(secret, safe=""), quote(secret), quote_plus(secret)):
        yield from (encoded, encoded.replace("%2F", "/"))
        yield _lower_hex(encoded)
    for as_json in (json.dumps(secret), json.dumps(secret, ensure_ascii=False)):
        yield as_json[1:-1]
    yield from (html.escape(secret), html.escape(secret, quote=False))
    data = secret.encode()
    if len(data) < _BASE64_MIN:
        return
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        yield from (whole := encode(data).decode(), whole.rstrip("="))
    for before in range(3):
        # The digits that depend on the secret alone, wherever it stands in what is encoded.
        first, last = (before * 8 + 5) // 6, (before + len(data)) * 8 // 6
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            yield encode(b"\0" * before + data).decode()[first:last]


def _lower_hex(text: str) -> str:
    parts = text.split("%")
    return "%".join([parts[0], *(part[:2].lower() + part[2:] for part in parts[1:])])
