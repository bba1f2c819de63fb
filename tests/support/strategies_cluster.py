"""Commands and diffs of a cluster's log: small domains, so that they meet."""

from __future__ import annotations

from hypothesis import strategies as st

from penstock.cluster.state import (
    Change,
    Claim,
    Command,
    Compact,
    Diff,
    Open,
    Put,
    Reconcile,
    object_id,
)
from penstock.model.domain import Domain
from penstock.runtime.ops import TASK_KINDS

kinds = st.sampled_from(TASK_KINDS)
names = st.sampled_from(["a", "b", "c"])
domains = st.sampled_from(list(Domain))
epochs = st.integers(0, 3)

puts = st.builds(Put, kind=kinds, name=names, digest=st.sampled_from(["1", "2"]))
compacts = st.builds(
    Compact, id=st.builds(object_id, kinds, names), since=st.none() | st.integers(0, 3)
)
commands: st.SearchStrategy[Command] = puts | compacts
batches = st.lists(commands, max_size=6).map(tuple)

diffs: st.SearchStrategy[Open | Reconcile | Change] = (
    st.builds(Open, domain=domains, nonce=st.binary(min_size=1, max_size=2), holder=st.just("me"))
    | st.builds(Reconcile, domain=domains, epoch=epochs, batch=batches)
    | st.builds(Change, domain=domains, epoch=epochs, commands=batches)
)
claims = st.builds(Claim, holder=st.sampled_from(["one", "other"]))
histories: st.SearchStrategy[list[Diff]] = st.lists(diffs | claims, max_size=12)
