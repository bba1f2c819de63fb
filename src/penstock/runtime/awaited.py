"""PURE: what tasks wait for, in words: what it is, and what to do about it.

A task that waits, the log of its process and `penstock status` say the same, because all of them
say it from here.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from msgspec import Struct

IN_REPORT: Final = "in_report"
"""The attribute of log records that say what the report of a task does: who shows reports need not
show these."""


class Awaited(NamedTuple):
    """Something that others have to do before a task goes on."""

    what: str
    """As in "waits for …"."""
    fix: str
    """What a person can do about it."""


class Wait(Struct, frozen=True):
    """A wait that has lasted long enough to be told."""

    what: str
    fix: str
    since: float
    """Unix time."""


STORE: Final = Awaited(
    "the consensus store",
    "check that its database runs, is reachable and not locked (penstock doctor); tasks "
    "then continue by themselves",
)
ENDPOINT: Final = Awaited(
    "its endpoint",
    "the task continues by itself when the endpoint is free; if that takes too long, end what "
    "blocks it",
)
SOURCE: Final = Awaited(
    "its source",
    "the task continues by itself when the source answers; check that it runs and is reachable",
)
BLOBS: Final = Awaited(
    "the blob store", "check that it is reachable (penstock doctor); the task continues by itself"
)
WEBHOOKS: Final = Awaited(
    "its webhooks", "check that the services behind `triggers` answer; the transaction is committed"
)
SPARK_STARTS: Final = Awaited(
    "Spark to start",
    "this takes a few seconds, and twice as long without penstock prepare",
)
SPARK: Final = Awaited("Spark", "it is working; penstock status shows the phase")


def store_at(url: str) -> Awaited:
    """The consensus store at this URL, which must be masked."""
    return Awaited(f"{STORE.what} {url}", STORE.fix)


def spark_slots(holders: dict[str, int]) -> Awaited:
    """A free slot of Spark; `holders` are those whose tasks run now, with how many."""
    if not holders:
        return Awaited(
            "an executor of Spark: none runs its tasks",
            "check that the cluster has reachable workers with free cores",
        )
    most = sorted(holders.items(), key=lambda each: (-each[1], each[0]))
    named = ", ".join(f"{count} of {name}" for name, count in most[:3])
    more = f" and {len(most) - 3} others" if len(most) > 3 else ""
    return Awaited(
        f"a free slot of Spark: all are taken, {named}{more}",
        "the task continues by itself when one is free; give Spark more cores (--master), or stop "
        "a task: penstock task stop TASK",
    )
