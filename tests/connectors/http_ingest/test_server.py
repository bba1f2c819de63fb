"""Real requests to a real endpoint: every status, every limit, and what was committed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from connectors.http_ingest.ingest_world import Endpoint, bindings
from penstock.connectors.http_ingest.source import HttpIngest
from penstock.errors import UserError
from penstock.model.json_order import Json
from penstock.runtime.connector.capture import Idle, Opening
from penstock.runtime.connector.common import ConnectorError
from servicekit.rpc.certificates import certificate

ORDERS, TRACED = "acme/orders", "acme/traced"


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    with Endpoint(tmp_path).open() as opened:
        yield opened


def with_config(tmp_path: Path, **config: Json) -> contextlib.AbstractContextManager[Endpoint]:
    return Endpoint(tmp_path, config=config).open()


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.01)


# --------------------------------------------------------------------------------------- documents


@pytest.mark.parametrize(
    ("body", "kind", "wanted"),
    [
        pytest.param(b'{"id": 1}', "application/json", [1], id="an object"),
        pytest.param(b'\n {\n"id": 1\n}\n', "application/json", [1], id="spread over lines"),
        pytest.param(b'[{"id": 1}, {"id": 2}]', "application/json", [1, 2], id="an array"),
        pytest.param(b'{"id":1}\n\n{"id":2}\r\n', "application/x-ndjson", [1, 2], id="lines"),
        pytest.param(b"[]", "application/json", [], id="none at all"),
    ],
)
def test_documents_are_published(
    endpoint: Endpoint, body: bytes, kind: str, wanted: list[int]
) -> None:
    answer = endpoint.post("orders", body, headers={"content-type": kind})
    assert (answer.status_code, answer.json()) == (200, {"published": len(wanted)})
    assert endpoint.committed == [(ORDERS, {"id": number}) for number in wanted]


def test_200_comes_after_the_commit(endpoint: Endpoint) -> None:
    endpoint.commits.clear()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(endpoint.post, "orders", {"id": 1})
        eventually(lambda: endpoint.sequences == 1)
        with pytest.raises(TimeoutError):
            asked.result(timeout=0.2)
        assert endpoint.committed == []
        endpoint.commits.set()
        assert asked.result().status_code == 200
    assert endpoint.committed == [(ORDERS, {"id": 1})]


def test_meta_says_where_a_document_comes_from(endpoint: Endpoint) -> None:
    assert endpoint.post("traced", {"id": 1}, headers={"idempotency-key": "k1"}).status_code == 200
    ((name, document),) = endpoint.committed
    assert name == TRACED
    source = document["_meta"]["source"]
    assert (source["path"], source["idempotencyKey"]) == ("traced", "k1")
    assert source["receivedAt"].endswith("Z")


def test_requests_that_come_together_are_one_sequence(endpoint: Endpoint) -> None:
    endpoint.commits.clear()
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        first = pool.submit(endpoint.post, "orders", {"id": 0})
        eventually(lambda: endpoint.sequences == 1)
        endpoint.polls.clear()
        others = [pool.submit(endpoint.post, "orders", {"id": n}) for n in range(1, 9)]
        eventually(lambda: endpoint.admitted == 9)
        time.sleep(0.05)
        endpoint.commits.set()
        endpoint.polls.set()
        assert {each.result().status_code for each in [first, *others]} == {200}
    assert endpoint.sequences == 2
    assert sorted(document["id"] for _, document in endpoint.committed) == list(range(9))


# ----------------------------------------------------------------------------------------- refusals


def test_an_invalid_document_is_named_and_nothing_of_its_request_is_published(
    endpoint: Endpoint,
) -> None:
    answer = endpoint.post("orders", [{"id": 1}, {"id": "x"}, {"n": 3}, {"id": 2, "n": 10}])
    assert answer.status_code == 400
    said = answer.json()
    assert said["error"] == "nothing was published: 3 documents do not fit the schema"
    assert [(each["index"], each["pointer"]) for each in said["invalid"]] == [
        (1, "/id"),
        (2, "/id"),
        (3, "/n"),
    ]
    assert endpoint.post("orders", {"id": 7}).status_code == 200
    assert endpoint.committed == [(ORDERS, {"id": 7})]


def test_large_requests_are_judged_as_small_ones_are(endpoint: Endpoint) -> None:
    many: list[dict[str, Any]] = [{"id": number, "n": 1} for number in range(5000)]
    assert endpoint.post("orders", many).json() == {"published": 5000}
    many[4321] = {"id": 1, "other": True}
    answer = endpoint.post("orders", many)
    assert answer.status_code == 400
    assert [(each["index"], each["pointer"]) for each in answer.json()["invalid"]] == [
        (4321, "/other")
    ]
    assert len(endpoint.committed) == 5000


@pytest.mark.parametrize(
    ("body", "kind", "part"),
    [
        (b"{", "application/json", "is not a JSON document"),
        (b"", "application/json", "the body is empty"),
        (b'[{"id": 1}', "application/json", "not a JSON array"),
        (b'{"id": 1}\n{"id"', "application/x-ndjson", "is not a JSON document"),
        (b'{"id":\n{}}{"id": 1}', "application/x-ndjson", "is not a JSON document"),
        (b"[1]", "application/json", "invalid"),
        (b'{"id": 99999999999999999999}', "application/json", "64 bits"),
    ],
)
def test_what_is_no_document_is_refused(
    endpoint: Endpoint, body: bytes, kind: str, part: str
) -> None:
    answer = endpoint.post("orders", body, headers={"content-type": kind})
    assert answer.status_code == 400
    assert part in answer.text
    assert endpoint.committed == []


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "part"),
    [
        ("POST", "nowhere", {}, 404, "/orders"),
        ("PUT", "orders", {}, 405, "POST"),
        ("GET", "orders", {}, 405, "POST"),
        ("POST", "orders", {"content-type": "text/plain"}, 415, "application/x-ndjson"),
        ("POST", "orders", {"content-encoding": "gzip"}, 415, "Content-Encoding"),
        ("POST", "orders", {"host": "evil.example"}, 421, "this machine only"),
        ("POST", "orders", {"idempotency-key": "k" * 256}, 400, "Idempotency-Key"),
        ("POST", "orders", {"idempotency-key": ""}, 400, "Idempotency-Key"),
    ],
)
def test_requests_that_cannot_be_meant(
    endpoint: Endpoint, method: str, path: str, headers: dict[str, str], status: int, part: str
) -> None:
    given = {"content-type": "application/json", **headers}
    url = f"{endpoint.url}/{path}"
    answer = httpx.request(method, url, content=b'{"id": 1}', headers=given)
    assert answer.status_code == status
    assert part in answer.json()["error"]
    assert endpoint.committed == []


# -------------------------------------------------------------------------------------- idempotency


def test_a_repeat_is_answered_as_the_first_was_and_publishes_nothing(endpoint: Endpoint) -> None:
    key = {"idempotency-key": "k1"}
    first = endpoint.post("orders", [{"id": 1}, {"id": 2}], headers=key)
    again = endpoint.post("orders", [{"id": 1}, {"id": 2}], headers=key)
    assert first.json() == again.json() == {"published": 2}
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    assert len(endpoint.committed) == 2
    other = endpoint.post("orders", [{"id": 3}], headers=key)
    assert other.status_code == 422
    assert endpoint.post("orders", [{"id": 1}, {"id": 2}]).status_code == 200
    assert len(endpoint.committed) == 4, "without the key, it is another request"


def test_keys_survive_sessions_but_only_with_their_documents(tmp_path: Path) -> None:
    endpoint = Endpoint(tmp_path)
    with endpoint.open():
        assert endpoint.post("orders", {"id": 1}, headers={"idempotency-key": "a"}).is_success
        endpoint.commits.clear()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            lost = pool.submit(endpoint.post, "orders", {"id": 2}, headers={"idempotency-key": "b"})
            eventually(lambda: endpoint.sequences == 2)
            endpoint._stop.set()
            endpoint.commits.set()
            assert endpoint.session is not None
            endpoint.session.close()
            assert lost.result().status_code == 503
            assert int(lost.result().headers["retry-after"]) >= 1
    with endpoint.open():
        assert endpoint.post("orders", {"id": 1}, headers={"idempotency-key": "a"}).is_success
        assert endpoint.post("orders", {"id": 2}, headers={"idempotency-key": "b"}).is_success
    assert [document["id"] for _, document in endpoint.committed] == [1, 2]


def test_repeats_at_the_same_time_have_one_outcome(endpoint: Endpoint) -> None:
    endpoint.polls.clear()
    time.sleep(0.1)  # a poll that is under way ends
    key = {"idempotency-key": "k"}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(endpoint.post, "orders", {"id": 1}, headers=key) for _ in range(8)]
        eventually(lambda: endpoint.admitted >= 1)
        time.sleep(0.5)  # the others come as well
        endpoint.polls.set()
        answers = [each.result() for each in asked]
    assert {answer.status_code for answer in answers} == {200}
    assert sum("idempotency-replayed" in answer.headers for answer in answers) == 7
    assert endpoint.committed == [(ORDERS, {"id": 1})]


def test_a_refused_request_may_be_mended_under_its_key(endpoint: Endpoint) -> None:
    key = {"idempotency-key": "k"}
    assert endpoint.post("orders", {"id": "x"}, headers=key).status_code == 400
    assert endpoint.post("orders", {"id": 1}, headers=key).status_code == 200


def test_a_patch_has_the_new_keys_only(endpoint: Endpoint) -> None:
    for number in range(3):
        endpoint.post("orders", {"id": number}, headers={"idempotency-key": str(number)})
    endpoint.post("orders", {"id": 9})
    sizes = [len(json.dumps(patch)) for patch in endpoint.patches]
    assert len(sizes) == 3, "a request without a key changes no state"
    assert max(sizes) < 120


# ------------------------------------------------------------------------------------------ limits


def test_a_body_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with with_config(tmp_path, maxBodyBytes=1000) as endpoint:
        assert endpoint.post("orders", b" " * 990 + b'{"id":1}').status_code == 200
        assert endpoint.post("orders", b" " * 2000 + b'{"id":1}').status_code == 413
        huge = b" " * (8 << 20)
        assert endpoint.post("orders", huge).status_code == 413, "it is told, and not cut off"

        def chunks() -> Iterator[bytes]:
            for _ in range(20):
                yield b" " * 100

        answer = httpx.post(
            f"{endpoint.url}/orders",
            content=chunks(),
            headers={"content-type": "application/json"},
        )
        assert answer.status_code == 413
        assert len(endpoint.committed) == 1


def test_too_many_documents_are_refused(tmp_path: Path) -> None:
    with with_config(tmp_path, maxDocuments=3) as endpoint:
        assert endpoint.post("orders", [{"id": 1}] * 3).status_code == 200
        assert endpoint.post("orders", [{"id": 1}] * 4).status_code == 413


def test_too_many_requests_in_a_second_are_refused(tmp_path: Path) -> None:
    with with_config(tmp_path, requestsPerSecond=2) as endpoint:
        answers = [endpoint.post("orders", {"id": 1}) for _ in range(12)]
        refused = [each for each in answers if each.status_code == 429]
        assert refused
        assert int(refused[0].headers["retry-after"]) == 1
        assert len(endpoint.committed) == 12 - len(refused)


def test_what_waits_for_a_commit_is_limited_by_requests(tmp_path: Path) -> None:
    with with_config(tmp_path, maxInflightRequests=2) as endpoint:
        endpoint.commits.clear()
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(endpoint.post, "orders", {"id": n}) for n in range(2)]
            eventually(lambda: endpoint.admitted == 2)
            answer = endpoint.post("orders", {"id": 3})
            assert (answer.status_code, "retry-after" in answer.headers) == (429, True)
            endpoint.commits.set()
            assert {each.result().status_code for each in waiting} == {200}
        assert endpoint.post("orders", {"id": 3}).status_code == 200


def test_what_waits_for_a_commit_is_limited_by_bytes(tmp_path: Path) -> None:
    with with_config(tmp_path, maxInflightBytes=1000) as endpoint:
        endpoint.commits.clear()
        padded = b" " * 600 + b'{"id": 1}'
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(endpoint.post, "orders", padded)
            eventually(lambda: endpoint.admitted == 1)
            answer = endpoint.post("orders", padded)
            assert (answer.status_code, "retry-after" in answer.headers) == (429, True)
            endpoint.commits.set()
            assert waiting.result().status_code == 200
        assert endpoint.post("orders", padded).status_code == 200


def connect(endpoint: Endpoint) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", endpoint.port))
    made.settimeout(20)
    return made


def test_slow_clients_are_cut_off_and_hold_nobody(tmp_path: Path) -> None:
    with with_config(tmp_path, headerTimeout=0.5, bodyTimeout=0.5) as endpoint:
        slow = [connect(endpoint) for _ in range(20)]
        for each in slow[:10]:
            each.sendall(b"POST /orders HT")
        for each in slow[10:]:
            head = b"POST /orders HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            each.sendall(head + b"content-length: 100\r\n\r\n{")
        assert endpoint.post("orders", {"id": 1}).status_code == 200
        assert {each.recv(1000)[:12] for each in slow[:10]} == {b""}, "no headers: closed"
        assert {each.recv(1000)[9:12] for each in slow[10:]} == {b"408"}
        for each in slow:
            each.close()


def test_a_second_request_may_not_be_slow_either(tmp_path: Path) -> None:
    with with_config(tmp_path, headerTimeout=0.5) as endpoint, connect(endpoint) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b"alive\n"):
            answer += client.recv(1000)
        client.sendall(b"GET /heal")
        assert client.recv(1000) == b""


def test_idle_connections_make_room_for_new_ones(tmp_path: Path) -> None:
    with with_config(tmp_path, maxConnections=5) as endpoint:
        idle = [connect(endpoint) for _ in range(10)]
        assert endpoint.post("orders", {"id": 1}).status_code == 200
        for each in idle:
            each.close()


def test_without_room_a_client_is_told(tmp_path: Path) -> None:
    with with_config(tmp_path, maxConnections=2) as endpoint:
        endpoint.commits.clear()
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(endpoint.post, "orders", {"id": n}) for n in range(2)]
            eventually(lambda: endpoint.admitted == 2)
            answer = endpoint.post("orders", {"id": 3})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            endpoint.commits.set()
            assert {each.result().status_code for each in waiting} == {200}


def test_headers_are_limited(endpoint: Endpoint) -> None:
    answer = endpoint.post("orders", {"id": 1}, headers={"x-long": "x" * (64 << 10)})
    assert answer.status_code == 431


# ------------------------------------------------------------------------------- who may, and TLS

TOKEN = "a-token-of-some-length"  # noqa: S105


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def test_a_token_is_asked_for_before_the_body(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGEST_TOKEN", TOKEN)
    with with_config(tmp_path, token="${env:INGEST_TOKEN}") as endpoint:  # noqa: S106
        with connect(endpoint) as client:
            client.sendall(
                b"POST /orders HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                b"content-length: 100000\r\n\r\n"
            )
            answer = client.recv(1000)
            assert answer[9:12] == b"401", "answered, though the body never comes"
            while answer:
                answer = client.recv(1000)  # to the end: the connection is not kept for the body
        for wrong in ({}, bearer("another-token"), {"authorization": f"Basic {TOKEN}"}):
            answer = endpoint.post("orders", {"id": 1}, headers=wrong)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert endpoint.post("orders", {"id": 1}, headers=bearer(TOKEN)).status_code == 200
        assert httpx.get(f"{endpoint.url}/openapi.json").status_code == 401
        assert httpx.get(f"{endpoint.url}/healthz").status_code == 200
        assert len(endpoint.committed) == 1


def test_tokens_of_a_file_have_roles_and_prefixes(tmp_path: Path) -> None:
    import hashlib

    digest = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("w", "r", "t")}
    file = tmp_path / "tokens"
    file.write_text(
        f"shop writer orders {digest['w']}\nlook reader * {digest['r']}\n"
        f"all writer * {digest['t']}\n"
    )
    with with_config(tmp_path, tokenFile=str(file)) as endpoint:
        assert endpoint.post("orders", {"id": 1}, headers=bearer("w")).status_code == 200
        assert endpoint.post("traced", {"id": 1}, headers=bearer("w")).status_code == 403
        assert endpoint.post("orders", {"id": 1}, headers=bearer("r")).status_code == 403
        assert endpoint.post("traced", {"id": 1}, headers=bearer("t")).status_code == 200
        assert endpoint.post("traced", {"id": 1}, headers=bearer("x")).status_code == 401


def test_tls(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "ingest")
    config = {"certFile": str(cert), "keyFile": str(key), "token": TOKEN}
    with with_config(tmp_path, listen="0.0.0.0:0", **config) as endpoint:
        trusting = ssl.create_default_context(cafile=str(cert))
        answer = httpx.post(
            f"https://127.0.0.1:{endpoint.port}/orders",
            json={"id": 1},
            headers=bearer(TOKEN),
            verify=trusting,
        )
        assert answer.json() == {"published": 1}
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{endpoint.port}/healthz")


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"listen": "0.0.0.0:8780"}, "without certFile and keyFile and token"),
        ({"listen": "0.0.0.0:8780", "token": TOKEN}, "without certFile and keyFile"),
        (
            {"listen": "0.0.0.0:8780", "certFile": "a", "keyFile": "b"},
            "without token (or tokenFile)",
        ),
        ({"certFile": "a"}, "belong together"),
        ({"token": TOKEN, "tokenFile": "x"}, "exclude each other"),
        ({"token": "short"}, "of at least 16 characters"),
        ({"token": "${env:NOT_SET_ANYWHERE}"}, "NOT_SET_ANYWHERE is not set"),
        ({"listen": "127.0.0.1:99999"}, "cannot listen"),
        ({"listne": "127.0.0.1:1"}, 'unknown key "listne"'),
        ({"maxBodyBytes": 0}, "a number of bytes"),
    ],
)
def test_wrong_configurations(config: dict[str, Any], part: str) -> None:
    with pytest.raises(UserError) as raised:
        HttpIngest(config, where="capture acme/in")
    assert part in str(raised.value)
    assert TOKEN not in str(raised.value)


def test_a_certificate_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "ingest")
    key.write_text("nonsense")
    source = HttpIngest({"certFile": str(cert), "keyFile": str(key)}, where="capture acme/in")
    with pytest.raises(UserError, match="not a certificate and its key"):
        source.check()


# ------------------------------------------------------------------------------ pages and sessions


def test_the_endpoint_describes_itself(endpoint: Endpoint) -> None:
    found = httpx.get(f"{endpoint.url}/openapi.json").json()
    assert found["openapi"] == "3.1.0"
    assert sorted(found["paths"]) == ["/orders", "/traced"]
    operation = found["paths"]["/orders"]["post"]
    document, many = operation["requestBody"]["content"]["application/json"]["schema"]["anyOf"]
    assert document["required"] == ["id"]
    assert many["items"] == document
    page = httpx.get(f"{endpoint.url}/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "POST /orders" in page.text
    assert "<script" not in page.text
    assert "src=" not in page.text
    assert httpx.get(f"{endpoint.url}/healthz").text == "alive\n"


def test_a_port_that_is_taken_is_named(tmp_path: Path, endpoint: Endpoint) -> None:
    source = HttpIngest({"listen": f"127.0.0.1:{endpoint.port}"}, where="capture acme/in")
    with pytest.raises(ConnectorError, match=f"port {endpoint.port} is taken") as raised:
        source.check()
    assert raised.value.transient
    with pytest.raises(ConnectorError, match=f"port {endpoint.port} is taken"):
        source.open(Opening(task="acme/in", bindings=bindings(tmp_path), state={}))


@pytest.mark.parametrize(
    ("opening", "idle"),
    [({"ends": True}, Idle.NOTHING), ({"ends": True, "preview": True}, Idle.NOTHING),
     ({"preview": True}, Idle.END)],
)  # fmt: skip
def test_a_run_that_ends_opens_no_port(
    tmp_path: Path, endpoint: Endpoint, opening: dict[str, bool], idle: Idle
) -> None:
    taken = HttpIngest({"listen": f"127.0.0.1:{endpoint.port}"}, where="capture acme/in")
    session = taken.open(Opening(task="acme/in", bindings=bindings(tmp_path), state={}, **opening))
    assert session.poll(10) is idle
    session.acknowledge(0)
    session.close()


def test_there_is_nothing_to_discover() -> None:
    with pytest.raises(UserError, match="clients send what they have"):
        HttpIngest({}, where="capture acme/in").discover()


def test_an_interrupt_ends_a_poll(tmp_path: Path) -> None:
    source = HttpIngest({"listen": "127.0.0.1:0"}, where="capture acme/in")
    session = source.open(Opening(task="acme/in", bindings=bindings(tmp_path), state={}))
    polled: list[object] = []
    thread = threading.Thread(target=lambda: polled.append(session.poll(600)))
    thread.start()
    source.interrupt()
    thread.join(30)
    session.close()
    assert polled == [Idle.PENDING]


def test_secrets_are_in_no_repr() -> None:
    source = HttpIngest({"token": TOKEN}, where="capture acme/in")
    assert TOKEN not in repr(source._options)
