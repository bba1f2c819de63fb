"""A Unix socket serves only users whom its directory lets in."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from consensus.committer.daemon import running_persistd
from consensus.committer.scripted import COMMITTED, V
from penstock.consensus.committer.client import RpcConsensus
from penstock.consensus.open import open_consensus
from penstock.errors import UsageError


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A path in a directory that every user can reach, for a directory that not all can enter."""
    for directory in (tmp_path, *tmp_path.parents):
        if directory == Path(tempfile.gettempdir()):
            break
        directory.chmod(0o755)
    return tmp_path / "run" / "p.sock"


def bind(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


def as_nobody(path: Path) -> int:
    """The exit code of another user who connects."""
    code = (
        "import os, socket; os.setgroups([]); os.setgid(65534); os.setuid(65534); "
        f"socket.socket(socket.AF_UNIX).connect({str(path)!r})"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode


async def test_persistd_serves_its_own_user_and_leaves_nothing(place: Path) -> None:
    directory = place.parent.parent
    store_url = f"sqlite:///{directory}/c.db"
    with running_persistd(directory, store_url, "--listen", f"unix:{place}") as daemon:
        assert daemon.address[0] == f"unix:{place}"
        assert stat.S_IMODE(os.stat(place.parent).st_mode) == 0o700  # noqa: PTH116
        store = await open_consensus(f"grpc+unix://{place}")
        assert await store.compare_and_set("k", V(0, b"x")) is COMMITTED
        assert await store.head("k", fresh=True) == V(0, b"x")
        if os.geteuid() == 0:
            assert as_nobody(place) != 0
        with running_persistd(directory, store_url, "--listen", f"unix:{place}") as second:
            assert second.process.wait(60) == 1
            assert "another process does" in second.log
        assert await store.head("k", fresh=True) == V(0, b"x")
        await store.close()
        daemon.kill()
    with running_persistd(directory, store_url, "--listen", f"unix:{place}") as daemon:
        assert daemon.address[0] == f"unix:{place}"  # over what the killed one left
        assert daemon.terminate() == 0
    assert not list(directory.glob("run/*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
async def test_with_tokens_others_may_connect_and_need_one(place: Path) -> None:
    directory = place.parent.parent
    place.parent.mkdir(mode=0o755)
    tokens, token = directory / "tokens", directory / "token"
    tokens.write_text(f"ann writer * {hashlib.sha256(b'sesame').hexdigest()}\n")
    token.write_text("sesame\n")
    flags = ("--listen", f"unix:{place}", "--token-file", str(tokens))
    with running_persistd(directory, f"sqlite:///{directory}/c.db", *flags) as daemon:
        assert daemon.address
        assert as_nobody(place) == 0
        store = RpcConsensus(f"grpc+unix://{place}?token_file={token}")
        assert await store.compare_and_set("k", V(0, b"x")) is COMMITTED
        await store.close()
        daemon.wait_for("principal=ann")
        assert "Received connection from: unix principal=ann" in daemon.log


def test_a_client_does_not_follow_others(place: Path) -> None:
    place.parent.mkdir()
    place.parent.chmod(0o777)
    with bind(place), pytest.raises(UsageError, match="others may replace it"):
        RpcConsensus(f"grpc+unix://{place}")
