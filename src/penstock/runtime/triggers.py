"""Webhooks that are called when a transaction has stored something.

The variables of a call are durable before the transaction commits, and are forgotten after every
webhook has accepted it. So a call is made at least once, after the data is visible in the endpoint,
and again with the same body and `run_id` if the task died in between: receivers tell repetitions
by `run_id`.

A webhook that keeps failing ends the session: the next one tries again. Meanwhile nothing further
commits, so no call is lost or overtaken.
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
from penstock.runtime.secrets import resolve
from penstock.runtime.templates import Template

_log = logging.getLogger(__name__)

_BACKOFF_S: Final = 1.0
_BACKOFF_S_MAX: Final = 30.0
_SHOWN_BYTES: Final = 256
_RETRIED: Final = frozenset({408, 429})
_JSON: Final = "application/json"

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


class Triggers:
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


async def _deliver(
    hook: _Hook,
    variables: Mapping[str, Json],
    client: httpx.AsyncClient,
    sleep: Callable[[float], Awaitable[None]],
    environ: Mapping[str, str],
) -> None:
    spec = hook.spec
    headers = {
        name: str(resolve(value, where=f"{hook.place}, header {name}", environ=environ))
        for name, value in spec.headers
    }
    body = hook.template.render({**variables, "headers": dict(headers)}).encode()
    if not any(name.lower() == "content-type" for name in headers):
        headers["Content-Type"] = _JSON
    url = str(resolve(spec.url, where=hook.place, environ=environ))
    attempts = max(1, spec.attempts_max)
    for attempt in range(1, attempts + 1):
        refused, again = await _try(client, spec, url, body, headers)
        if refused is None:
            return
        if attempt == attempts or not again:
            raise UserError(f"{hook.place}: {refused} (attempt {attempt} of {attempts})")
        wait_s = min(_BACKOFF_S * 2 ** (attempt - 1), _BACKOFF_S_MAX)
        _log.warning("%s: %s; trying again in %.0f s", hook.place, refused, wait_s)
        await sleep(wait_s)


async def _try(
    client: httpx.AsyncClient, spec: Trigger, url: str, body: bytes, headers: dict[str, str]
) -> tuple[str | None, bool]:
    """Why a call was not accepted, if it was not; and whether it may be the next time."""
    try:
        answer = await client.request(
            spec.method, url, content=body, headers=headers, timeout=float(spec.timeout_s)
        )
    except httpx.TimeoutException:
        return f"no answer within {spec.timeout_s} s", True
    except httpx.InvalidURL:
        return "its URL is not one", False
    except httpx.HTTPError as error:
        return f"cannot be reached ({type(error).__name__})", True
    if answer.is_success:
        return None, False
    text = answer.content[:_SHOWN_BYTES].decode(errors="replace").strip()
    again = answer.status_code >= 500 or answer.status_code in _RETRIED
    return f"answered {answer.status_code}{f': {text}' if text else ''}", again


def _place(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}" if parts.scheme else "a webhook"
