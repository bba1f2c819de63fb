"""Measures the endpoint under load: `python -m connectors.http_ingest.load [clients] [seconds]`.

Clients keep their connection, and send the next request when the last one was answered. Prints a
line for each size of requests: documents per second, and the times from request to answer.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

from connectors.http_ingest.ingest_world import Deployment


async def client(port: int, number: int, size: int, until: float, took: list[float]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = 0
    while time.monotonic() < until:
        first = number * 100_000_000 + sent * size
        body = json.dumps([{"id": first + n, "n": n % 10} for n in range(size)]).encode()
        head = (
            f"POST /orders HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"idempotency-key: {size}-{first}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        began = time.monotonic()
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise SystemExit(answer.decode())
        lines = answer.decode().lower().split("\r\n")
        length = next(int(line.split(":")[1]) for line in lines if line.startswith("content-le"))
        await reader.readexactly(length)
        took.append(time.monotonic() - began)
        sent += 1
    writer.close()


async def load(port: int, clients: int, size: int, seconds: float) -> dict[str, float]:
    took: list[float] = []
    until = time.monotonic() + seconds
    await asyncio.gather(*(client(port, n, size, until, took) for n in range(clients)))
    took.sort()
    return {
        "documents/s": round(len(took) * size / seconds),
        "requests/s": round(len(took) / seconds),
        "p50 ms": round(took[len(took) // 2] * 1000, 1),
        "p99 ms": round(took[len(took) * 99 // 100] * 1000, 1),
    }


def main() -> None:
    clients = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 10.0
    with tempfile.TemporaryDirectory() as directory:
        deployment = Deployment(Path(directory))
        deployment.apply()
        deployment.start()
        deployment.wait_until_it_serves()
        asyncio.run(load(deployment.port, clients, 1, 2.0))  # warms up
        for size in (1, 10, 100, 1000):
            found = asyncio.run(load(deployment.port, clients, size, seconds))
            print(f"{clients} clients, {size} documents per request: {found}")  # noqa: T201
        deployment.stop()


if __name__ == "__main__":
    main()
