"""Documents over HTTP: 64 clients, each of which sends the next request when it has its answer.

An answer comes after the commit, so its time is what a durable, exactly-once write costs. Clients
keep their connections, and share the machine with what they measure.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.model.json_order import Json
from penstock.testing.postgres import free_port
from penstock_bench import processes
from penstock_bench.frame import Bench, Report, Result

CLIENTS: Final = 64
SIZES: Final = (1, 100)
"""Documents in a request."""

COLLECTION: Final = "bench/orders"
READY_S: Final = 60.0


def catalog(port: int) -> Json:
    """Return a catalog that takes documents in at a port."""
    endpoint: Json = {
        "connector": {
            "image": "penstock/source-http-ingest",
            "config": {"listen": f"127.0.0.1:{port}"},
        }
    }
    schema: Json = {
        "type": "object",
        "required": ["id"],
        "properties": {"id": {"type": "integer"}, "n": {"type": "integer"}},
    }
    binding: Json = {"resource": {"path": "orders"}, "target": COLLECTION}
    return {
        "collections": {COLLECTION: {"key": ["/id"], "schema": schema}},
        "captures": {"bench/ingest": {"endpoint": endpoint, "bindings": [binding]}},
    }


async def client(port: int, number: int, size: int, until: float) -> list[float]:
    """Send requests until then, and return how long each answer took."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    took: list[float] = []
    while time.monotonic() < until:
        first = number * 100_000_000 + len(took) * size
        body = json.dumps([{"id": first + at, "n": at % 10} for at in range(size)]).encode()
        head = (
            "POST /orders HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"idempotency-key: {size}-{first}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        began = time.monotonic()
        writer.write(head.encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if not answer.startswith("http/1.1 200"):
            raise RuntimeError(f"a request was refused: {answer.splitlines()[0]}")
        length = next(
            int(line.partition(":")[2])
            for line in answer.split("\r\n")
            if line.startswith("content-length")
        )
        await reader.readexactly(length)
        took.append(time.monotonic() - began)
    writer.close()
    return took


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What clients saw."""

    per_s: float
    p50_ms: float
    p99_ms: float


async def load(port: int, size: int, seconds: float) -> Load:
    """Let all clients send requests of a size."""
    until = time.monotonic() + seconds
    each = await asyncio.gather(*(client(port, at, size, until) for at in range(CLIENTS)))
    took = sorted(seconds for some in each for seconds in some)
    return Load(
        per_s=len(took) * size / seconds,
        p50_ms=took[len(took) // 2] * 1000,
        p99_ms=took[len(took) * 99 // 100] * 1000,
    )


async def ready(port: int) -> None:
    """Wait until somebody listens."""
    until = time.monotonic() + READY_S
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.1)
        else:
            writer.close()
            return


def run(bench: Bench) -> Report:
    """Measure requests of each size."""
    seconds = bench.size(full=20, quick=5)
    port = free_port()
    loads: dict[int, Load] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temp_dir:
        directory = Path(temp_dir)
        (directory / "catalog.yaml").write_text(json.dumps(catalog(port)))
        command: list[str | Path] = [
            sys.executable, "-m", "penstock", "up", directory / "catalog.yaml",
            "--data", directory / "data",
        ]  # fmt: skip
        with processes.running_process(command, log=directory / "log"):
            asyncio.run(ready(port))
            asyncio.run(load(port, 1, 2.0))  # warms up
            for size in SIZES:
                bench.say(f"HTTP, {CLIENTS} clients, {size} documents in a request")
                loads[size] = asyncio.run(load(port, size, seconds))
    return build_report(loads)


def build_report(loads: Mapping[int, Load]) -> Report:
    """Build the report. There is nothing beside it: a commit for each answer is the point."""
    results = []
    for size, found in loads.items():
        name = f"HTTP, {CLIENTS} clients, {size} in a request"
        results += [
            Result(name=f"{name}: rate", value=found.per_s, unit="documents/s"),
            Result(name=f"{name}: p50", value=found.p50_ms, unit="ms"),
            Result(name=f"{name}: p99", value=found.p99_ms, unit="ms"),
        ]
    return Report(results=tuple(results), goals=(), charts=())
