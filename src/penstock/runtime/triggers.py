"""Webhooks that are called when a transaction has stored something.

The variables of a call are durable before the transaction commits, and are forgotten after every
webhook has accepted it. So a call is made at least once, after the data is visible in the endpoint,
and again with the same body and `run_id` if the task died in between: receivers tell repetitions
by `run_id`.

A webhook that keeps failing ends the session: the next one tries again. Meanwhile nothing further
commits, so no call is lost or overtaken.

Redirects are not followed: headers, and the secrets in them, would go where the catalog does not
say. Of an answer that refuses, the beginning is shown, without the secrets that it was sent.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import httpx

from penstock.errors import PenstockError, UserError
from penstock.model.json_order import Json
from penstock.model.spec import Trigger
from penstock.model.webhook import header_problem, url_problem
from penstock.runtime.redaction import Redaction, secrets_of_header, secrets_of_url
from penstock.runtime.secrets import referenced, resolve
from penstock.runtime.templates import Template

_log = logging.getLogger(__name__)

_BACKOFF_S: Final = 1.0
_BACKOFF_S_MAX: Final = 30.0
_READ_BYTES_MAX: Final = 16 << 10
"""Bytes read of an answer: its sender may send for ever."""
_SHOWN: Final = 256
_RETRIED: Final = frozenset({408, 429})
_DEFAULTS: Final = {"Content-Type": "application/json", "Accept-Encoding": "identity"}

_SAMPLE: Final[Mapping[str, Json]] = {
    "materialization_name": "acme/views",
    "connector_image": "penstock/materialize-sqlite",
    "collection_names": ["acme/orders", "acme/items"],
    "published_at_min": "2026-01-01T00:00:00Z",
    "published_at_max": "2026-01-01T00:00:01Z",
    "run_id": "2026-01-01T00:00:02Z",
}


class TriggerFailed(PenstockError):
    """A webhook did not accept a call; it is pending, and will be made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hook:
    place: str
    """For people: no path or query, which may hold a token."""
    spec: Trigger
    template: Template


class Webhooks:
    """The webhooks of a materialization, checked when they are made."""

    def __init__(self, task: str, hooks: Sequence[Trigger]) -> None:
        self._hooks = tuple(
            _Hook(
                place=f"{task}, webhook {index} ({_place(hook.url)})",
                spec=hook,
                template=Template(hook.payload_template, where=f"{task}, webhook {index}"),
            )
            for index, hook in enumerate(hooks)
        )
        for hook in self._hooks:
            headers: Json = {name: "…" for name, _ in hook.spec.headers}
            hook.template.render({**_SAMPLE, "headers": headers})

    def __bool__(self) -> bool:
        return bool(self._hooks)

    async def call(
        self,
        variables: Mapping[str, Json],
        *,
        client: httpx.AsyncClient | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Call every webhook, at once; raises one error for all that did not accept."""
        if client is None:
            async with httpx.AsyncClient(follow_redirects=False) as own:
                await self.call(variables, client=own, sleep=sleep, environ=environ)
            return
        outcomes = await asyncio.gather(
            *(_deliver(hook, variables, client, sleep, environ) for hook in self._hooks),
            return_exceptions=True,
        )
        failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for outcome in failed:
            if not isinstance(outcome, PenstockError):
                raise outcome
        if failed:
            raise TriggerFailed(
                f"{len(failed)} of {len(self._hooks)} webhooks did not accept a call",
                why="; ".join(str(outcome) for outcome in failed),
                fix="the data is stored, and the call is made again when the task starts; "
                "correct the webhook, or remove it from the catalog",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """A call with everything that it needs, secrets too: it is never shown."""

    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes
    timeout_s: int
    redacted: Redaction


async def _deliver(
    hook: _Hook,
    variables: Mapping[str, Json],
    client: httpx.AsyncClient,
    sleep: Callable[[float], Awaitable[None]],
    environ: Mapping[str, str],
) -> None:
    request = _request(hook, variables, environ)
    attempts = max(1, hook.spec.attempts_max)
    for attempt in range(1, attempts + 1):
        refused, again = await _try(client, request)
        if refused is None:
            return
        if attempt == attempts or not again:
            raise UserError(f"{hook.place}: {refused} (attempt {attempt} of {attempts})")
        wait_s = min(_BACKOFF_S * 2 ** (attempt - 1), _BACKOFF_S_MAX)
        _log.warning("%s: %s; trying again in %.0f s", hook.place, refused, wait_s)
        await sleep(wait_s)


def _request(hook: _Hook, variables: Mapping[str, Json], environ: Mapping[str, str]) -> _Request:
    """The call, with its secrets in it; raises `UserError` if one makes it impossible."""
    spec = hook.spec
    secrets: list[str] = []

    def resolved(text: str, where: str) -> str:
        secrets.extend(referenced(text, where=where, environ=environ))
        return str(resolve(text, where=where, environ=environ))

    headers: dict[str, str] = {}
    for name, value in spec.headers:
        where = f"{hook.place}, header {name}"
        headers[name] = resolved(value, where)
        if problem := header_problem(name, headers[name]):
            raise UserError(f"a header cannot be sent: {problem}", where=where)
        secrets.extend(secrets_of_header(name, headers[name]))
    url = resolved(spec.url, hook.place)
    if problem := url_problem(url):
        raise UserError(f"the webhook cannot be called: {problem}", where=hook.place)
    secrets.extend(secrets_of_url(url))
    body = hook.template.render({**variables, "headers": dict(headers)}).encode()
    given = {name.lower() for name in headers}
    headers |= {name: value for name, value in _DEFAULTS.items() if name.lower() not in given}
    return _Request(
        method=spec.method,
        url=url,
        headers=headers,
        body=body,
        timeout_s=spec.timeout_s,
        redacted=Redaction(secrets),
    )


async def _try(client: httpx.AsyncClient, request: _Request) -> tuple[str | None, bool]:
    """Why a call was not accepted, if it was not; and whether it may be the next time.

    The timeout is for all of it: connecting, sending, and however slowly an answer comes.
    """
    try:
        async with (
            asyncio.timeout(request.timeout_s),
            client.stream(
                request.method,
                request.url,
                content=request.body,
                headers=request.headers,
                timeout=request.timeout_s,
            ) as answer,
        ):
            if answer.is_success:
                return None, False  # whatever it says
            text, cut = await _beginning(answer)
    except (TimeoutError, httpx.TimeoutException):
        return f"no answer within {request.timeout_s} s", True
    except httpx.InvalidURL:
        return "its URL is not one", False
    except httpx.HTTPError as error:
        return f"cannot be reached ({type(error).__name__})", True
    said = request.redacted(text, cut=cut).strip()[:_SHOWN]
    again = answer.status_code >= 500 or answer.status_code in _RETRIED
    if answer.is_redirect:
        said = "redirects are not followed, give the URL that accepts the call"
    return f"answered {answer.status_code}{f': {said}' if said else ''}", again


async def _beginning(answer: httpx.Response) -> tuple[str, bool]:
    """The beginning of a body, and whether there is more; nothing of one that is compressed."""
    if answer.headers.get("Content-Encoding", "identity") != "identity":
        return "", False
    data = b""
    async for some in answer.aiter_raw():
        data += some
        if len(data) > _READ_BYTES_MAX:
            return data[:_READ_BYTES_MAX].decode(errors="replace"), True
    return data.decode(errors="replace"), False


def _place(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        return "a webhook"
    return f"{parts.scheme}://{parts.hostname or ''}" if parts.scheme else "a webhook"
