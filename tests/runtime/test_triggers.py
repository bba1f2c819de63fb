"""Webhooks: their bodies, and how often they are called."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from penstock.errors import UserError
from penstock.model.spec import Trigger
from penstock.runtime.secrets import resolve
from penstock.runtime.templates import Template
from penstock.runtime.triggers import TriggerFailed, Triggers

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
        Triggers("acme/views", [Trigger(url="http://127.0.0.1/", payload_template=template)])
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


def hooks(receiver: Receiver, *, attempts: int = 3, **more: object) -> Triggers:
    spec = Trigger(
        url=receiver.url,
        payload_template='{"run": {{json run_id}}}',
        attempts_max=attempts,
        headers=(("X-Token", "${env:TOKEN}"),),
        **more,  # type: ignore[arg-type]
    )
    return Triggers("acme/views", [spec])


async def called(triggers: Triggers) -> list[float]:
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
        await called(Triggers("acme/views", [nobody, somebody]))
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
