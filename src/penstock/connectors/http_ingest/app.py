"""The requests of `source-http-ingest`: who may send, how much, and which answer there is."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.connectors.http_ingest import pages
from penstock.connectors.http_ingest.bodies import JSON, LINES, NotDocuments, media_type, split
from penstock.connectors.http_ingest.desk import Desk
from penstock.connectors.http_ingest.intake import (
    Conflict,
    Outcome,
    Published,
    Refused,
    Stopped,
    Ticket,
)
from penstock.connectors.http_ingest.judging import QUICK_BYTES, SHOWN_MAX, Judge
from penstock.connectors.http_ingest.keys import KeyedRequest
from penstock.connectors.http_ingest.options import Options
from penstock.connectors.http_ingest.pages import IngestPath, problem
from penstock.connectors.http_ingest.rates import TokenBucket
from penstock.model.json_order import Json
from penstock.servicekit.rpc.address import is_surely_local
from penstock.servicekit.rpc.tokens import Access, Principal, TokenFile, TokenRefusal

HEADER_BYTES_MAX: Final = 16 << 10
"""Size of a request without its body."""

_KEY_CHARS_MAX: Final = 255
_LOCAL: Final = frozenset({"127.0.0.1", "localhost", "::1"})
_PAGE_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A path for documents."""

    binding: int
    place: IngestPath
    judge: Judge
    wants_meta: bool


class Refusal(Exception):
    """The request is not let in; the response says why."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        headers: Mapping[str, str] | None = None,
        more: Mapping[str, Json] | None = None,
    ) -> None:
        super().__init__(message)
        self.response = Response(
            problem(message, **(more or {})),
            status_code=status,
            headers=dict(headers or {}),
            media_type=JSON,
        )


class IngestApp:
    """An ASGI application. Runs on one event loop."""

    def __init__(
        self,
        task: str,
        routes: Mapping[str, Route],
        options: Options,
        desk: Desk,
        threads: Executor,
        tokens: TokenFile | None,
    ) -> None:
        self._task = task
        self._routes = routes
        self._options = options
        self._limits = options.limits
        self._desk = desk
        self._threads = threads
        self._tokens = tokens
        self._reading_bytes = 0
        """Of bodies that are not complete."""
        rate = options.limits.requests_per_s
        self._bucket = None if rate is None else TokenBucket.full(rate, time.monotonic())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        try:
            response = await self._respond(request)
        except Refusal as refusal:
            response = refusal.response
        except ClientDisconnect:
            return
        await response(scope, receive, send)

    async def _respond(self, request: Request) -> Response:
        if sum(len(name) + len(value) for name, value in request.headers.raw) > HEADER_BYTES_MAX:
            raise Refusal(431, f"the headers have more than {HEADER_BYTES_MAX} bytes")
        path = str(request.scope["path"]).strip("/")
        if path == "healthz" and request.method in ("GET", "HEAD"):
            return Response("stopping\n" if self._desk.stopping else "alive\n")
        allowed = self._authenticate(request)
        if request.method in ("GET", "HEAD") and path in ("", "openapi.json"):
            return self._describe(request, path)
        route = self._routes.get(path)
        if route is None:
            known = ", ".join(f"/{each}" for each in self._routes)
            raise Refusal(404, f"there is no path /{path}; paths for documents: {known}")
        if request.method != "POST":
            raise Refusal(405, "documents are sent by POST", headers={"allow": "POST"})
        if not allowed.allows(Access.APPEND, path):
            raise Refusal(403, f"the token does not allow to send documents to /{path}")
        return _answer(await self._take(request, route), self._desk.retry_s)

    # ---------------------------------------------------------------------------- before the body

    def _authenticate(self, request: Request) -> Principal:
        """Find out who sends, before anything of the body is read."""
        authorization = request.headers.get("authorization")
        if self._tokens is not None:
            found = self._tokens.recognize(authorization)
            if isinstance(found, TokenRefusal):
                raise _unknown(found)
            return found
        if self._options.token is None:
            self._check_host(request)
            return _ANYBODY
        scheme, _, token = (authorization or "").partition(" ")
        same = hmac.compare_digest(token.strip().encode(), self._options.token.encode())
        if not same or scheme.lower() != "bearer":
            raise _unknown(TokenRefusal.INVALID if authorization else TokenRefusal.MISSING)
        return _ANYBODY

    def _check_host(self, request: Request) -> None:
        """Without tokens, a page whose name was made to mean loopback must not get through."""
        host = request.headers.get("host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        name = name.removeprefix("[").removesuffix("]")
        if name not in _LOCAL and name != self._options.host and not is_surely_local(name):
            raise Refusal(421, "this address is for this machine only: send to it by that name")

    def _check_rate(self) -> None:
        if self._bucket is None:
            return
        wait_s = self._bucket.take(time.monotonic())
        if wait_s > 0:
            raise _later(429, "more requests than requestsPerSecond allows", int(wait_s) + 1)

    def _check_room(self, more_bytes: int) -> None:
        """Turn a request away if too much waits for a commit already."""
        desk, limits = self._desk, self._limits
        if desk.stopping:
            raise _later(503, "the capture is stopping", desk.retry_s)
        if desk.admitted >= limits.inflight_requests:
            raise _later(429, "too many requests wait for a commit", desk.retry_s)
        if desk.admitted_bytes + self._reading_bytes + more_bytes > limits.inflight_bytes:
            raise _later(429, "too many bytes wait for a commit", desk.retry_s)

    # -------------------------------------------------------------------------------- the documents

    async def _take(self, request: Request, route: Route) -> Outcome | Conflict:
        self._check_rate()
        self._check_room(0)
        media = media_type(request.headers.get("content-type"))
        if media is None:
            raise Refusal(415, f"the Content-Type has to be {JSON} or {LINES}")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise Refusal(415, "the body has a Content-Encoding; send it as it is")
        key = _key(request)
        body = await self._read(request)
        texts = self._split(body, media)
        if not texts:
            return Published(0)
        ticket = Ticket(
            binding=route.binding,
            texts=texts,
            bytes=len(body),
            received_s=time.time(),
            keyed=None if key is None else KeyedRequest.of(key, body),
            key=key,
        )
        found = self._desk.admit(ticket)
        if found is ticket:
            await self._judge(ticket, route)
        if not isinstance(found, Ticket):
            return found
        outcome: Outcome = await asyncio.shield(found.waiter)
        if isinstance(outcome, Published) and found is not ticket:
            return Published(outcome.documents, repeated=True)
        return outcome

    async def _read(self, request: Request) -> bytes:
        """Read the body, for as long and as far as the limits allow."""
        most = self._limits.body_bytes
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > most:
            raise _too_large(most)
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_s):
                async with contextlib.aclosing(request.stream()) as chunks:
                    async for chunk in chunks:
                        if len(body) + len(chunk) > most:
                            raise _too_large(most)
                        self._check_room(len(chunk))
                        body += chunk
                        self._reading_bytes += len(chunk)
        except TimeoutError:
            raise Refusal(408, f"the body took more than {self._limits.body_s:g} s") from None
        finally:
            self._reading_bytes -= len(body)
        return bytes(body)

    def _split(self, body: bytes, media: str) -> list[bytes]:
        try:
            texts = split(body, media)
        except NotDocuments as wrong:
            raise Refusal(400, str(wrong)) from None
        if len(texts) > self._limits.documents:
            most = self._limits.documents
            raise Refusal(413, f"{len(texts)} documents are more than {most}: send fewer at once")
        return texts

    async def _judge(self, ticket: Ticket, route: Route) -> None:
        """Let the request wait for its commit, or refuse it."""
        meta = meta_of(ticket, route.place.path) if route.wants_meta else None
        try:
            if ticket.bytes <= QUICK_BYTES:
                invalid = route.judge.invalid(ticket.texts, meta)
            else:
                loop = asyncio.get_running_loop()
                invalid = await loop.run_in_executor(
                    self._threads, route.judge.invalid, ticket.texts, meta
                )
        except BaseException:
            self._desk.refuse(ticket, Stopped())  # repeats of it must not wait for ever
            raise
        if invalid:
            self._desk.refuse(ticket, Refused(invalid))
        else:
            self._desk.wait(ticket)

    # ------------------------------------------------------------------------------------ the pages

    def _describe(self, request: Request, path: str) -> Response:
        places = [route.place for route in self._routes.values()]
        guarded = self._options.guarded
        if path:
            found = pages.openapi(self._task, places, self._limits, guarded=guarded)
            return Response(json.dumps(found), media_type=JSON, headers=_PAGE_HEADERS)
        base = str(request.base_url).rstrip("/")
        html = pages.page(self._task, places, self._limits, base=base, guarded=guarded)
        return Response(html, media_type="text/html", headers=_PAGE_HEADERS)


_ANYBODY: Final = Principal(name="anybody", access=Access.APPEND, prefix="")


def meta_of(ticket: Ticket, path: str) -> dict[str, Json]:
    """What `/_meta` says of the documents of a request."""
    at = datetime.fromtimestamp(ticket.received_s, UTC).isoformat(timespec="milliseconds")
    source: dict[str, Json] = {"receivedAt": at.replace("+00:00", "Z"), "path": path}
    if ticket.key is not None:
        source["idempotencyKey"] = ticket.key
    return {"source": source}


def _key(request: Request) -> str | None:
    keys = request.headers.getlist("idempotency-key")
    if not keys:
        return None
    key = keys[0].strip()
    if len(keys) > 1 or not 0 < len(key) <= _KEY_CHARS_MAX or not key.isprintable():
        raise Refusal(
            400, f"Idempotency-Key is one text of 1 to {_KEY_CHARS_MAX} printable characters"
        )
    return key


def _answer(outcome: Outcome | Conflict, retry_s: int) -> Response:
    match outcome:
        case Published(documents, repeated):
            return Response(
                json.dumps({"published": documents}),
                media_type=JSON,
                headers={"idempotency-replayed": "true"} if repeated else None,
            )
        case Refused(invalid):
            many = len({each["index"] for each in invalid})
            some = "1 document does" if many == 1 else f"{many} documents do"
            if many >= SHOWN_MAX:
                some = f"{many} documents or more do"
            message = f"nothing was published: {some} not fit the schema"
            raise Refusal(400, message, more={"invalid": list(invalid)})
        case Conflict():
            raise Refusal(
                422, "the Idempotency-Key belongs to a request with another body: use another key"
            )
        case Stopped():
            raise _later(503, "the capture stopped before the commit; try again", retry_s)


def _later(status: int, message: str, retry_s: int) -> Refusal:
    return Refusal(status, message, headers={"retry-after": str(retry_s)})


def _unknown(why: TokenRefusal) -> Refusal:
    return Refusal(401, why.value, headers={"www-authenticate": "Bearer"})


def _too_large(most: int) -> Refusal:
    return Refusal(413, f"the body has more than {most} bytes: send fewer documents at once")
