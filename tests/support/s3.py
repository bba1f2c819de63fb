"""An S3 server on a free loopback port, in a process of its own.

It is moto's, which keeps objects in memory and accepts every signature: good enough to exercise the
client, its requests and its errors, and nothing more.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from urllib.parse import quote

from penstock.errors import Unavailable
from penstock.testing.postgres import free_port

SECRET_KEY = "s3cr/et+key"  # noqa: S105 - of a server that lives as long as a test
BUCKET = "bucket"

_START_S_MAX = 60


@contextlib.contextmanager
def running_s3() -> Iterator[str]:
    """Run a server with one empty bucket, and give the URL of that bucket."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            _make_bucket(port, server)
            yield (
                f"s3://key:{quote(SECRET_KEY, safe='')}@{BUCKET}"
                f"?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
            )
        finally:
            server.terminate()


def _make_bucket(port: int, server: subprocess.Popen[bytes]) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
    deadline = time.monotonic() + _START_S_MAX
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(request, timeout=10).close()  # noqa: S310 - http, as written
        except urllib.error.URLError:
            time.sleep(0.05)  # not listening yet
        else:
            return
    raise Unavailable(
        "the S3 server does not start",
        why=f"exit code {server.poll()}",
        fix="pip install 'moto[s3,server]'",
    )
