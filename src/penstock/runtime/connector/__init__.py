"""The connector interface: what a connector is, and what it promises.

A connector knows one endpoint: its types, its DDL, how rows get there and how they become visible.
The runtime knows documents: which ones, in which order, reduced how, and when a transaction is
complete. `common` holds what connectors of every kind share, `materialize` the interface of sinks.

**In Spark tasks** runs the heavy work. A task may run twice, at the same time, or die anywhere, so
whatever it writes carries the name of its attempt, and only what the winning attempt returned is
ever used. The rest is garbage, which the next session removes when it opens.

**On the leader**, once for all shards, results become visible. When they do is the sink's pattern:

    ENDPOINT    the endpoint has transactions: `start_commit` writes all rows and the checkpoint in
                one of them, which checks the fence. The endpoint is the authority.
    APPLY       the endpoint can apply a named unit once: `start_commit` names the units in a state
                patch, which commits with the recovery log; `acknowledge` applies them, repeatedly
                if it has to.
    DIRECT      neither: rows are visible as they are stored. At least once.

Every connector promises:

- Methods block, and the leader calls them in a thread, one at a time. A call must not outlast a
  stop: from another thread the leader interrupts it (`interrupt`) and asks what it is waiting for
  (`waits_for`).
- No secret of the configuration appears in an error, a log, a `repr` or a pickle.
- An error that another session may survive is marked transient; every other one stops the task.

A sink promises as well:

- `apply` can be repeated from any half-way point, and touches no data of unchanged bindings.
- `apply` reads from the endpoint itself under which state key a table was filled, whatever was
  applied last: a target may have been out of the catalog for a while.
- `apply` refuses what would make rows wrong: a resource that another task fills, and one that has
  lost rows that were stored there. `SinkTask.resumed` and the endpoint must tell the same story.
- `open` of an ENDPOINT raises the fence first and reads the checkpoint second, and refuses if it
  finds a greater fence. Otherwise a predecessor that was merely asleep could commit after the read.
- `acknowledge` is the first call of every session, and idempotent. The catalog may have changed
  since the transaction committed: a unit named for a target that the task does not have now stays
  named until the target is back, or until its table was emptied for another state key.
- `start_commit` is never repeated blindly: after a lost connection, the stored checkpoint tells
  whether the transaction committed.
- A `preview` changes nothing that a run of the task would find, even if its process is killed.

`penstock.testing.connector_suite` checks these promises; `docs/guides/add-a-sink.md` shows how to
write a sink and run the suite.
"""
