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
    "see that its database runs, can be reached and is not locked (penstock doctor); all goes on "
    "by itself then",
)
ENDPOINT: Final = Awaited(
    "its endpoint",
    "the task goes on by itself when the endpoint lets it; end what holds it up, if that does not "
    "end by itself",
)
SOURCE: Final = Awaited(
    "its source",
    "the task goes on by itself when the source answers; see that it runs and can be reached",
)
BLOBS: Final = Awaited(
    "the blob store", "see that it can be reached (penstock doctor); the task goes on by itself"
)
WEBHOOKS: Final = Awaited(
    "its webhooks", "see that the services behind `triggers` answer; the transaction is committed"
)
SPARK_STARTS: Final = Awaited(
    "Spark to start",
    "it takes some seconds, and twice as many where penstock prepare has not been run",
)
SPARK: Final = Awaited("Spark", "it works; penstock status shows the phase")


def store_at(url: str) -> Awaited:
    """The consensus store at this URL, which must be masked."""
    return Awaited(f"{STORE.what} {url}", STORE.fix)


def spark_slots(holders: dict[str, int]) -> Awaited:
    """A free slot of Spark; `holders` are those whose tasks run now, with how many."""
    if not holders:
        return Awaited(
            "an executor of Spark: none runs its tasks",
            "see that the cluster has workers with free cores, and that they can be reached",
        )
    most = sorted(holders.items(), key=lambda each: (-each[1], each[0]))
    named = ", ".join(f"{count} of {name}" for name, count in most[:3])
    more = f" and {len(most) - 3} others" if len(most) > 3 else ""
    return Awaited(
        f"a free slot of Spark: all run tasks, {named}{more}",
        "the task goes on by itself when one ends; give Spark more cores (--master), or stop one: "
        "penstock task stop TASK",
    )
