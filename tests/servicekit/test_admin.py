"""The admin page answers on loopback, and says whether the process can work."""

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from urllib.parse import quote

import pytest

from penstock.servicekit import admin
from penstock.servicekit.admin import application, serving
from penstock.servicekit.metrics import Registry
from penstock.servicekit.readiness import Readiness


async def get(port: int, path: str) -> tuple[int, str]:
    def blocking() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return await asyncio.to_thread(blocking)


async def test_pages_follow_the_state_of_the_process() -> None:
    registry = Registry("p_")
    registry.counter("things", "things").add(2)
    state = Readiness(False, "waiting for the database")
    async with serving(application(registry, lambda: state), 0) as port:
        assert await get(port, "/healthz") == (200, "alive\n")
        assert await get(port, "/readyz") == (503, "waiting for the database\n")
        state = Readiness(True)
        assert await get(port, "/readyz") == (200, "ready\n")
        status, text = await get(port, "/metrics")
        assert status == 200
        assert "p_things_total 2.0" in text
        assert (await get(port, "/nothing"))[0] == 404


async def test_relations_are_served_as_json_and_limited() -> None:
    rows = [{"number": number} for number in range(admin.ROWS_MAX + 5)]
    app = application(Registry("p_"), lambda: Readiness(True), {"numbers": lambda: rows})
    async with serving(app, 0) as port:
        base = "/introspection/v1"
        assert json.loads((await get(port, base))[1]) == {"relations": ["numbers"]}
        found = json.loads((await get(port, f"{base}/numbers"))[1])
        assert (len(found["rows"]), found["truncated"]) == (admin.ROWS_MAX, True)
        assert found["as_of"].endswith("Z")
        found = json.loads((await get(port, f"{base}/numbers?limit=2"))[1])
        assert found["rows"] == rows[:2]
        for limit in ("-1", "x", "\u0663"):
            assert (await get(port, f"{base}/numbers?limit={quote(limit)}"))[0] == 400
        status, text = await get(port, f"{base}/others")
        assert (status, text) == (404, "no relation has this name; there are numbers\n")
    async with serving(application(Registry("p_"), lambda: Readiness(True)), 0) as port:
        assert (await get(port, "/introspection/v1/tasks"))[0] == 404


async def test_rows_may_have_to_be_waited_for() -> None:
    async def asked_elsewhere() -> list[dict[str, object]]:
        await asyncio.sleep(0)
        return [{"number": 1}]

    app = application(Registry("p_"), lambda: Readiness(True), {"numbers": asked_elsewhere})
    async with serving(app, 0) as port:
        found = json.loads((await get(port, "/introspection/v1/numbers"))[1])
    assert found["rows"] == [{"number": 1}]


async def test_a_taken_port_is_an_error_of_the_caller() -> None:
    app = application(Registry("p_"), lambda: Readiness(True))
    async with serving(app, 0) as port:
        with pytest.raises(OSError, match="in use"):
            async with serving(app, port):
                pass


@contextlib.asynccontextmanager
async def connected(port: int, said: bytes) -> AsyncIterator[asyncio.StreamReader]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(said)
    try:
        yield reader
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_idle_connections_do_not_shut_out_a_request() -> None:
    async with (
        serving(application(Registry("p_"), lambda: Readiness(True)), 0) as port,
        contextlib.AsyncExitStack() as stack,
    ):
        half = b"GET /healthz HTTP/1.1\r\nX: "
        waiting = [await stack.enter_async_context(connected(port, half)) for _ in range(300)]
        assert await get(port, "/healthz") == (200, "alive\n")
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):  # the oldest has made room
                assert await waiting[0].read() == b""


async def test_a_connection_does_not_stay_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "CONNECTION_S", 0.1)
    async with (
        serving(application(Registry("p_"), lambda: Readiness(True)), 0) as port,
        connected(port, b"GET /healthz HTTP/1.1\r\nX: ") as reader,
    ):
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(20):
                assert await reader.read() == b""


@pytest.mark.parametrize(
    ("said", "status"),
    [
        pytest.param(b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 100_000, b"400", id="headers"),
        pytest.param(
            b"POST /healthz HTTP/1.1\r\nHost: h\r\nContent-Length: 9999999999\r\n\r\n",
            b"405",
            id="a body",
        ),
        pytest.param(b"\x00\xff\r\n\r\n", b"400", id="no HTTP"),
    ],
)
async def test_what_is_no_request_for_a_page_is_refused(
    said: bytes, status: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        serving(application(Registry("p_"), lambda: Readiness(True)), 0) as port,
        connected(port, said) as reader,
    ):
        async with asyncio.timeout(20):
            assert status in await reader.readline()
        assert await get(port, "/readyz") == (200, "ready\n")
    assert not caplog.records
