"""A visit lasts as long as its token is in force, and callers are identified by host."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from penstock.servicekit.rpc import gate
from penstock.servicekit.rpc.gate import Gate, Revoked, host_of
from penstock.servicekit.rpc.tokens import Principal, TokenFile

PATIENCE_S = 20.0


def write_role(path: Path, role: str) -> None:
    path.write_text(f"ann {role} * {hashlib.sha256(b't-ann').hexdigest()}\n")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_role(tmp_path / "tokens", "writer")
    return tmp_path / "tokens"


def ann(tokens: TokenFile) -> Principal:
    found = tokens.recognize("Bearer t-ann")
    assert isinstance(found, Principal)
    return found


async def test_a_narrower_line_ends_what_the_wider_one_opened(path: Path) -> None:
    tokens = TokenFile(path)
    who = ann(tokens)
    write_role(path, "reader")
    with pytest.raises(Revoked):
        async with asyncio.timeout(PATIENCE_S), Gate(tokens, recheck_s=0.01).visit(who):
            await asyncio.Event().wait()


async def test_a_visit_lasts_as_long_as_its_token_and_its_own_deadlines_are_its_own(
    path: Path,
) -> None:
    tokens = TokenFile(path)
    entrance = Gate(tokens, recheck_s=0.01)
    with pytest.raises(TimeoutError):
        async with entrance.visit(ann(tokens)), asyncio.timeout(0.1):
            await asyncio.Event().wait()
    async with entrance.visit(ann(tokens)):
        await asyncio.sleep(0.05)


def test_what_is_known_of_hosts_is_bounded() -> None:
    failures = gate._Failures()
    for n in range(5_000):
        failures._host(f"10.0.{n // 256}.{n % 256}")
    assert len(failures._hosts) <= 1_024


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.1.2.3:4567", "10.1.2.3"),
        ("ipv6:%5B::1%5D:4567", "::1"),
        ("ipv6:%5B2001:db8::1%5D:4567", "2001:db8::/64"),
        ("ipv6:[fe80::1%25eth0]:1", "fe80::/64"),
        ("unix:", "unix"),
    ],
)
def test_hosts_are_identified_by_address(peer: str, host: str) -> None:
    assert host_of(peer) == host
