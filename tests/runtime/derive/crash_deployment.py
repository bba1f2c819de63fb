"""Pipelines of two hops that die for real: a derivation in each language, and a table behind it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock import failpoints
from penstock.batch import make_world, run_graph, tasks_to_run
from penstock.catalog import desired
from penstock.consensus.open import open_consensus
from penstock.runtime import reading
from penstock.runtime.derive import row_jobs, transaction_jobs
from runtime.crash_world import Deployment

Document = dict[str, Any]

SOURCE = """
collections:
  acme/transfers:
    key: [/id]
    schema:
      type: object
      required: [id, sender, recipient, amount]
      properties:
        id: {type: integer}
        sender: {type: string}
        recipient: {type: string}
        amount: {type: integer}
  acme/balances:
    key: [/account]
    schema:
      type: object
      required: [account]
      additionalProperties: false
      reduce: {strategy: merge}
      properties:
        account: {type: string}
        amount: {type: integer, reduce: {strategy: sum}}
        count: {type: integer, reduce: {strategy: sum}}
        last: {type: integer}
        seen: {type: integer, reduce: {strategy: maximize}}
    derive:
%s
materializations:
  acme/views:
    endpoint: {connector: {image: penstock/materialize-sqlite, config: {path: views.db}}}
    bindings: [{source: acme/balances, resource: {table: balances}}]
"""

SPARK = """
      using: {spark: {}}
      transforms:
        - name: fromTransfers
          source: acme/transfers
          shuffle: any
          lambda: |
            select recipient as account, amount, 1L as count, id as last from source
            union all
            select sender, -amount, 1L, id from source
"""

SQLITE = """
      using:
        sqlite:
          migrations:
            - create table seen (account text primary key, n integer not null)
      transforms:
        - name: credits
          source: acme/transfers
          shuffle: {key: [/recipient]}
          lambda: |
            insert into seen (account, n) values ($recipient, 1)
              on conflict (account) do update set n = n + 1;
            select $recipient as account, $amount as amount, 1 as count, $id as last, n as seen
              from seen where account = $recipient;
        - name: debits
          source: acme/transfers
          shuffle: {key: [/sender]}
          lambda: |
            insert into seen (account, n) values ($sender, 1)
              on conflict (account) do update set n = n + 1;
            select $sender as account, -$amount as amount, 1 as count, $id as last, n as seen
              from seen where account = $sender;
"""

PYTHON = """
      using:
        python:
          module: |
            from acme.balances import Document, IDerivation

            class Derivation(IDerivation):
                def credits(self, read):
                    return [self.moved(read.doc, read.doc.recipient, read.doc.amount)]

                def debits(self, read):
                    return [self.moved(read.doc, read.doc.sender, -read.doc.amount)]

                def moved(self, doc, account, amount):
                    seen = self.keyed.setdefault(account, {"n": 0})
                    seen["n"] += 1
                    return Document(
                        account=account, amount=amount, count=1, last=doc.id, seen=seen["n"]
                    )
      transforms:
        - {name: credits, source: acme/transfers, shuffle: {key: [/recipient]}}
        - {name: debits, source: acme/transfers, shuffle: {key: [/sender]}}
"""

LANGUAGES = {"spark": SPARK, "sqlite": SQLITE, "python": PYTHON}


def catalog_text(language: str) -> str:
    return SOURCE % LANGUAGES[language]


def transfers(start: int, count: int) -> list[Document]:
    return [
        {"id": i, "sender": f"a{i % 5}", "recipient": f"a{(i * 3 + 1) % 7}", "amount": i * i % 97}
        for i in range(start, start + count)
    ]


def oracle(docs: Sequence[Document], *, counts_seen: bool) -> dict[str, Document]:
    """What the table must hold, worked out by hand."""
    rows: dict[str, Document] = {}
    for doc in docs:
        for account, amount in ((doc["recipient"], doc["amount"]), (doc["sender"], -doc["amount"])):
            row = rows.setdefault(account, {"amount": 0, "count": 0, "last": 0, "seen": None})
            row["amount"] += amount
            row["count"] += 1
            row["last"] = doc["id"]
            if counts_seen:
                row["seen"] = row["count"]
    return rows


def table(path: Path) -> dict[str, Document]:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.row_factory = sqlite3.Row
        rows = [dict(row) for row in database.execute("SELECT * FROM balances")]
    return {
        row["account"]: {name: row[name] for name in ("amount", "count", "last", "seen")}
        for row in rows
    }


@dataclass
class Pipeline(Deployment):
    """A deployment whose whole graph is run."""

    language: str = "spark"

    def run(self, failpoint: str | None = None) -> int:
        async def run() -> None:
            os.chdir(self.directory)
            if self.through_tasks:
                reading.SMALL_BYTES = row_jobs.INLINE_BYTES = -1  # type: ignore[misc]
                transaction_jobs.HERE_BYTES = -1  # type: ignore[misc]
            store = await open_consensus(self.settings.consensus)
            catalog = await desired.load(store)
            world = replace(make_world(self.settings, store), spark=lambda _: self.spark)
            failpoints.arm(failpoint)
            runs = await run_graph(catalog, tasks_to_run(catalog), world, shards=self.shards)
            failpoints.arm(None)
            await store.close()
            for each in runs:
                if each.error is not None:
                    raise each.error

        return self._forked(run)

    def inputs(self) -> list[int]:
        """Documents that each committed transaction of the derivation read."""
        return [
            transform["input"]["docsTotal"]
            for stats in self.read_stats()
            if "derive" in stats
            for transform in stats["derive"]["transforms"].values()
        ]
