"""The admin page answers on loopback, and says whether the process can work."""

import asyncio
import urllib.error
import urllib.request

import pytest

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


async def test_a_taken_port_is_an_error_of_the_caller() -> None:
    app = application(Registry("p_"), lambda: Readiness(True))
    async with serving(app, 0) as port:
        with pytest.raises(OSError, match="in use"):
            async with serving(app, port):
                pass
