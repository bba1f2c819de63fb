"""Webhooks: their bodies, and how often they are called."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import html
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.errors import UserError
from penstock.model.spec import Trigger
from penstock.runtime.redaction import Redaction
from penstock.runtime.secrets import resolve
from penstock.runtime.templates import Template
from penstock.runtime.triggers import TriggerFailed, Webhooks

VARIABLES = {
    "materialization_name": "acme/views",
    "connector_image": "penstock/materialize-sqlite",
    "collection_names": ["acme/orders", 'acme/"items"'],
    "published_at_min": "2026-01-01T00:00:00Z",
    "published_at_max": "2026-01-01T00:00:01Z",
    "run_id": "2026-01-01T00:00:02.000000003Z",
}

# -------------------------------------------------------------------------------------- templates


@pytest.mark.parametrize(
    ("template", "body"),
    [
        pytest.param("nothing", "nothing", id="text"),
        pytest.param("{{run_id}}", "2026-01-01T00:00:02.000000003Z", id="variable"),
        pytest.param("{{ run_id }}", "2026-01-01T00:00:02.000000003Z", id="spaces"),
        pytest.param("{{json run_id}}", '"2026-01-01T00:00:02.000000003Z"', id="json of text"),
        pytest.param(
            "{{json collection_names}}", r'["acme/orders", "acme/\"items\""]', id="json of a list"
        ),
        pytest.param(
            "[{{#each collection_names}}{{json this}}{{#unless @last}},{{/unless}}{{/each}}]",
            r'["acme/orders","acme/\"items\""]',
            id="each, but for the last",
        ),
        pytest.param("{{headers.X-Token}}!", "secret!", id="header"),
        pytest.param("{ {{run_id}} }", "{ 2026-01-01T00:00:02.000000003Z }", id="braces"),
    ],
)
def test_a_template_becomes_a_body(template: str, body: str) -> None:
    made = Template(template, where="here")
    assert made.render({**VARIABLES, "headers": {"X-Token": "secret"}}) == body


@pytest.mark.parametrize(
    ("template", "why"),
    [
        pytest.param("{{flow_run_id}}", "no variable flow_run_id", id="unknown variable"),
        pytest.param("{{headers.Other}}", "no variable headers.Other", id="unknown header"),
        pytest.param("{{#each run_id}}{{/each}}", "run_id is not a list", id="not a list"),
        pytest.param("{{#each collection_names}}", "/each}} is missing", id="not closed"),
        pytest.param("{{/each}}", "closes nothing", id="not opened"),
        pytest.param("{{#each collection_names}}{{/unless}}", "closes nothing", id="by another"),
        pytest.param("{{#if run_id}}", "is not understood", id="another helper"),
    ],
)
def test_a_template_that_cannot_be_used_says_so_before_it_is_needed(
    template: str, why: str
) -> None:
    with pytest.raises(UserError) as refused:
        Webhooks("acme/views", [Trigger(url="http://127.0.0.1/", payload_template=template)])
    assert why in str(refused.value)
    assert "acme/views, webhook 0" in str(refused.value)


# ---------------------------------------------------------------------------------------- calling


@dataclass
class Receiver:
    """A web server that answers as it is told, and remembers what it was asked."""

    answers: list[int]
    asked: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?token=hidden"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    told = Receiver(answers=[])

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            told.asked.append((self.command, dict(self.headers), body))
            status = told.answers.pop(0) if told.answers else 200
            if status == 0:
                self.close_connection = True  # as if the connection were lost
                return
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"said")

        do_POST = do_PUT = do_PATCH = _answer  # noqa: N815 - the names http.server looks for

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    told.port = server.server_port
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield told
    server.shutdown()
    thread.join()
    server.server_close()


def hooks(receiver: Receiver, *, attempts: int = 3, **more: object) -> Webhooks:
    spec = Trigger(
        url=receiver.url,
        payload_template='{"run": {{json run_id}}}',
        attempts_max=attempts,
        headers=(("X-Token", "${env:TOKEN}"),),
        **more,  # type: ignore[arg-type]
    )
    return Webhooks("acme/views", [spec])


async def called(triggers: Webhooks) -> list[float]:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    await triggers.call(VARIABLES, sleep=sleep, environ={"TOKEN": "s3cr3t"})
    return waits


@pytest.mark.parametrize(
    ("answers", "attempts", "waits"),
    [
        pytest.param([200], 3, [], id="accepted"),
        pytest.param([204], 3, [], id="accepted without content"),
        pytest.param([429, 429, 200], 3, [1, 2], id="too many requests, twice"),
        pytest.param([500, 503, 200], 3, [1, 2], id="out of order, twice"),
        pytest.param([408, 200], 3, [1], id="timed out there"),
        pytest.param([0, 200], 3, [1], id="connection lost"),
        pytest.param([500] * 7 + [200], 9, [1, 2, 4, 8, 16, 30, 30], id="for long"),
        pytest.param([200], 0, [], id="no attempts are one"),
    ],
)
async def test_a_call_is_repeated_until_it_is_accepted(
    receiver: Receiver, answers: Sequence[int], attempts: int, waits: Sequence[float]
) -> None:
    receiver.answers += answers
    assert await called(hooks(receiver, attempts=attempts)) == waits
    assert len(receiver.asked) == len(answers)
    assert len({body for _, _, body in receiver.asked}) == 1, "every attempt says the same"


@pytest.mark.parametrize(
    ("answers", "attempts", "calls"),
    [
        pytest.param([500, 500, 500], 2, 2, id="never accepted"),
        pytest.param([400, 200], 3, 1, id="refused for good"),
        pytest.param([302, 200], 3, 1, id="redirected"),
        pytest.param([500, 500], 0, 1, id="no attempts are one"),
    ],
)
async def test_a_call_that_is_not_accepted_ends_the_session(
    receiver: Receiver, answers: Sequence[int], attempts: int, calls: int
) -> None:
    receiver.answers += answers
    with pytest.raises(TriggerFailed) as failed:
        await called(hooks(receiver, attempts=attempts))
    assert len(receiver.asked) == calls
    assert f"answered {answers[0]}" in str(failed.value)
    for hidden in ("s3cr3t", "token", "hidden"):
        assert hidden not in str(failed.value)


async def test_headers_are_resolved_and_the_body_is_json_unless_told_otherwise(
    receiver: Receiver,
) -> None:
    await called(hooks(receiver, method="PUT"))
    [(method, headers, body)] = receiver.asked
    assert (method, body) == ("PUT", b'{"run": "2026-01-01T00:00:02.000000003Z"}')
    assert headers["X-Token"] == "s3cr3t"
    assert headers["Content-Type"] == "application/json"


async def test_one_webhook_that_fails_does_not_keep_another_from_being_called(
    receiver: Receiver,
) -> None:
    nobody = Trigger(url="http://127.0.0.1:1/", payload_template="x", attempts_max=1)
    somebody = Trigger(url=receiver.url, payload_template="y")
    with pytest.raises(TriggerFailed, match="1 of 2 webhooks"):
        await called(Webhooks("acme/views", [nobody, somebody]))
    assert [body for _, _, body in receiver.asked] == [b"y"]


# ---------------------------------------------------------------------------------------- secrets


def test_references_become_values_and_nothing_else_changes(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("from file\n")
    config = {
        "user": "${env:USER_NAME}",
        "url": "db://${env:USER_NAME}@host",
        "list": [f"${{file:{tmp_path}/password}}", 7, None],
        "literal": "$${env:USER_NAME}",
    }
    assert resolve(config, where="task", environ={"USER_NAME": "ada"}) == {
        "user": "ada",
        "url": "db://ada@host",
        "list": ["from file", 7, None],
        "literal": "${env:USER_NAME}",
    }


@pytest.mark.parametrize("reference", ["${env:MISSING}", "${file:/nowhere/at/all}"])
def test_a_reference_to_nothing_says_where_it_stands(reference: str) -> None:
    with pytest.raises(UserError) as refused:
        resolve({"a": {"b": reference}}, where="acme/views", environ={})
    assert "acme/views: /a/b" in str(refused.value)


# ----------------------------------------------------------- servers that do not behave themselves


@dataclass
class Rude:
    """A server that does with a connection what it is told to."""

    serve: Callable[[socket.socket, bytes], None]
    port: int = 0
    sent: int = 0

    def hook(self, **more: Any) -> Trigger:  # noqa: ANN401 - fields of a trigger
        given: dict[str, Any] = {"payload_template": "x", "attempts_max": 1, **more}
        return Trigger(url=f"http://127.0.0.1:{self.port}/hook", **given)


@contextlib.contextmanager
def rude(serve: Callable[[socket.socket, bytes], None]) -> Iterator[Rude]:
    told = Rude(serve)
    done = threading.Event()

    def accept() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                request = b""
                while not _whole(request):
                    request += connection.recv(65_536)
                told.serve(connection, request)
                done.wait(0.05)

    with socket.create_server(("127.0.0.1", 0)) as server:
        told.port = server.getsockname()[1]
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield told
        done.set()
        server.shutdown(socket.SHUT_RDWR)


def _whole(request: bytes) -> bool:
    head, end, body = request.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    return bool(end) and length is not None and len(body) >= int(length[1])


async def refusal(hook: Trigger, environ: Mapping[str, str] | None = None) -> str:
    with pytest.raises(TriggerFailed) as failed:
        await Webhooks("acme/views", [hook]).call(VARIABLES, environ=environ or {})
    return str(failed.value)


def dripping(head: bytes) -> Callable[[socket.socket, bytes], None]:
    def drip(connection: socket.socket, _: bytes) -> None:
        connection.sendall(head)
        for _ in range(600):
            connection.sendall(b"a")
            time.sleep(0.1)

    return drip


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"", id="the status line"),
        pytest.param(b"HTTP/1.1 500 Sorry\r\nX-Slow: ", id="a header"),
        pytest.param(b"HTTP/1.1 500 Sorry\r\nContent-Length: 1000000\r\n\r\n", id="the body"),
    ],
)
async def test_a_timeout_is_for_the_whole_call_however_slowly_an_answer_comes(head: bytes) -> None:
    with rude(dripping(head)) as server:
        async with asyncio.timeout(20):  # a byte every 0.1 s would take a minute
            assert "no answer within 1 s" in await refusal(server.hook(timeout_s=1))


async def test_a_body_is_read_up_to_a_limit() -> None:
    def flood(connection: socket.socket, _: bytes) -> None:
        connection.sendall(b"HTTP/1.1 500 Sorry\r\nContent-Length: 400000000\r\n\r\n")
        for _ in range(400):
            connection.sendall(b"a" * 1_000_000)
            server.sent += 1

    with rude(flood) as server:
        assert "answered 500: aaa" in await refusal(server.hook())
        assert server.sent < 50, "the connection was closed, and not read to its end"


async def test_a_compressed_body_is_not_unpacked() -> None:
    def bomb(connection: socket.socket, _: bytes) -> None:
        body = gzip.compress(b"a" * 10_000_000)
        head = f"Content-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(b"HTTP/1.1 500 Sorry\r\n" + head.encode() + body)

    with rude(bomb) as server:
        said = await refusal(server.hook())
        assert "answered 500 (attempt" in said


SECRET = 'pa55 wörd/"<&>'  # noqa: S105


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda s: s, id="plain"),
        pytest.param(lambda s: quote(s), id="percent-encoded"),
        pytest.param(lambda s: quote_plus(s).lower(), id="as of a form, in lower case"),
        pytest.param(lambda s: json.dumps(s), id="JSON"),
        pytest.param(lambda s: json.dumps(s, ensure_ascii=False), id="JSON, not ASCII"),
        pytest.param(lambda s: html.escape(s), id="HTML"),
        pytest.param(lambda s: base64.b64encode(s.encode()).decode(), id="base64"),
        pytest.param(
            lambda s: base64.b64encode(f"user:{s}, and more".encode()).decode(), id="base64 of more"
        ),
    ],
)
async def test_an_endpoint_that_repeats_what_it_was_sent_does_not_reveal_a_secret(
    form: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    token = "tok-0123456789"  # noqa: S105

    def echo(connection: socket.socket, request: bytes) -> None:
        said = f"you said {form(SECRET)} and {form(token)}; ".encode() + request
        head = f"HTTP/1.1 503 Sorry\r\nConnection: close\r\nContent-Length: {len(said)}\r\n\r\n"
        connection.sendall(head.encode() + said)

    async def no_sleep(_: float) -> None:
        pass

    with rude(echo) as server:
        hook = replace(
            server.hook(attempts_max=2, headers=(("Authorization", "Bearer ${env:TOKEN}"),)),
            payload_template="the password is in the URL, {{headers.Authorization}}",
            url=f"http://127.0.0.1:{server.port}/hook?password=${{env:PASSWORD}}",
        )
        environ = {"TOKEN": token, "PASSWORD": quote(SECRET, safe="")}
        with pytest.raises(TriggerFailed) as failed:
            await Webhooks("acme/views", [hook]).call(VARIABLES, sleep=no_sleep, environ=environ)
    for said in (str(failed.value), caplog.text):
        assert "answered 503: you said" in said
        for secret in (token, SECRET, form(token), form(SECRET), "0123456789", "pa55"):
            assert secret not in said


@given(
    secret=st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=8),
    before=st.text(max_size=20),
    kept=st.integers(0, 40),
)
@example(secret="10000000", before="1", kept=1)  # noqa: S106 - made up
def test_no_part_of_a_secret_is_left_where_a_text_was_cut(
    secret: str, before: str, kept: int
) -> None:
    redacted = Redaction([secret])
    assert secret not in redacted(before + secret + before)
    cut = (before + secret)[: len(before) + kept]
    shown = redacted(cut, cut=True)
    assert not any(shown.endswith(secret[:n]) for n in range(1, len(secret) + 1))


async def test_a_secret_that_no_header_can_carry_is_not_sent_and_not_shown() -> None:
    with rude(dripping(b"HTTP/1.1 200 Fine\r\nContent-Length: 0\r\n\r\n")) as server:
        hook = server.hook(headers=(("X-Token", "${env:TOKEN}"),))
        said = await refusal(hook, {"TOKEN": "s3cr3t\nX-Other: 1"})
    assert "header X-Token" in said
    assert "s3cr3t" not in said


async def test_redirects_are_not_followed_and_the_error_says_so(receiver: Receiver) -> None:
    receiver.answers.append(307)
    with pytest.raises(TriggerFailed, match="redirects are not followed"):
        await called(hooks(receiver))
    assert len(receiver.asked) == 1
