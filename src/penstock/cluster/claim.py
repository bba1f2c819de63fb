"""One process at a time runs a cluster: the newest that has claimed it, as its log says.

Nothing is locked: a claim needs no answer of the process before, which may be dead or cut off. That
one ends when it reads of the claim. Until it does, both may run the same tasks, of which each has
one leader at a time.
"""

from __future__ import annotations

import os
import socket

from penstock.cluster.state import Claim, ClusterMachine, ClusterState, log_key
from penstock.consensus.statelog import StateLog
from penstock.consensus.store import Consensus
from penstock.errors import Bug, UserError


class ClusterTaken(UserError):
    """Another process runs the cluster."""

    @classmethod
    def by(cls, holder: str) -> ClusterTaken:
        return cls(
            "another process runs this deployment now, and this one ends",
            where=holder,
            why="the newest that is started takes over",
            fix="end the one that is not wanted; both would run the same tasks",
        )


def this_process() -> str:
    """Return the name of this process, for people."""
    return f"process {os.getpid()} on {socket.gethostname()}"


async def claim_cluster(store: Consensus, cluster: str) -> int:
    """Make this process the one that runs the cluster; return the number of the claim."""
    log = await StateLog.open(store, log_key(cluster), ClusterMachine())
    committed = await log.append(lambda _: Claim(holder=this_process()))
    if committed is None:
        raise Bug("a cluster was not claimed", where=log.key)
    return committed.state.claim


def check_claim(state: ClusterState, claim: int) -> None:
    """Raise if another process has claimed the cluster since."""
    if state.claim > claim:
        raise ClusterTaken.by(state.claimed_by)
