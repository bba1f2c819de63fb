"""Requests to a running task from another process: one small state log per task.

The log counts requests. The process that runs the task follows it, and acts on counts
that grow meanwhile; requests to a task that was not running are forgotten.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from penstock.consensus.statelog import StateLog, follow
from penstock.consensus.store import Consensus

CLOSE_NOW: Final = "close-now"


class Closes(Protocol):
    """Something that can close its open transaction."""

    def close_now(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Machine:
    """Counts requests by name (`consensus.replica.Machine`)."""

    format: int = 1

    def initial(self) -> dict[str, int]:
        return {}

    def apply(self, state: dict[str, int], diff: str, revision: int) -> dict[str, int]:
        return {**state, diff: state.get(diff, 0) + 1}

    def encode_diff(self, diff: str) -> bytes:
        return diff.encode()

    def decode_diff(self, data: bytes, format: int) -> str:  # noqa: A002
        return data.decode()

    def encode_state(self, state: dict[str, int]) -> bytes:
        return msgspec.json.encode(state, order="deterministic")

    def decode_state(self, data: bytes, format: int, revision: int) -> dict[str, int]:  # noqa: A002
        return msgspec.json.decode(data, type=dict[str, int])


def _key(task: str) -> str:
    return f"request/{task}"


async def request(store: Consensus, task: str, what: str) -> None:
    """Ask something of the process that runs the task now."""
    log = await StateLog.open(store, _key(task), _Machine())
    await log.append(lambda _: what)


async def obey(store: Consensus, task: str, control: Closes) -> None:
    """Do what is asked of a task, until cancelled."""
    known: dict[str, int] | None = None
    moves = follow(store, _key(task), _Machine())
    async with aclosing(moves) as states:  # type: ignore[type-var]
        async for followed in states:
            asked = followed.replica.state
            if known is not None and asked.get(CLOSE_NOW, 0) > known.get(CLOSE_NOW, 0):
                control.close_now()
            known = asked
