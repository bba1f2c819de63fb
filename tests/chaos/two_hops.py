"""Two derivations behind `acme/accounts`, and what the table behind them must hold.

The first one is Spark SQL; the second one is SQLite, and counts the documents of each account in
its state. Beside sums, which reveal anything lost or doubled on the way, the table has the last
count: it differs from the number of documents if the state lost or doubled anything.
"""

from __future__ import annotations

from typing import Any

from runtime.sessions import accounts

Document = dict[str, Any]

INTEGER = {"type": "integer"}
CLEAN: Document = {
    "key": ["/total"],
    "schema": {
        "type": "object",
        "required": ["account", "total", "top"],
        "additionalProperties": False,
        "properties": {"account": INTEGER, "total": INTEGER, "top": INTEGER},
    },
    "derive": {
        "using": {"spark": {}},
        "transforms": [
            {
                "name": "fromAccounts",
                "source": "acme/accounts",
                "shuffle": "any",
                "lambda": "select account, total, top from source where region is not null",
            }
        ],
    },
}
COUNTED: Document = {
    "key": ["/account"],
    "schema": {
        "type": "object",
        "required": ["account"],
        "additionalProperties": False,
        "reduce": {"strategy": "merge"},
        "properties": {
            "account": INTEGER,
            "count": {"type": "integer", "reduce": {"strategy": "sum"}},
            "total": {"type": "integer", "reduce": {"strategy": "sum"}},
            "top": {"type": "integer", "reduce": {"strategy": "maximize"}},
            "seen": {"type": "integer", "reduce": {"strategy": "maximize"}},
        },
    },
    "derive": {
        "using": {
            "sqlite": {
                "migrations": [
                    "create table seen (account integer primary key, n integer not null)"
                ]
            }
        },
        "transforms": [
            {
                "name": "fromClean",
                "source": "acme/clean",
                "shuffle": {"key": ["/account"]},
                "lambda": "insert into seen values ($account, 1)"
                " on conflict (account) do update set n = n + 1;"
                "select $account as account, 1 as count, $total as total, $top as top, n as seen"
                " from seen where account = $account;",
            }
        ],
    },
}
ROWS = "SELECT account, count, cast(total AS bigint), top, seen FROM accounts"


def oracle(documents: int, keys: int) -> dict[int, tuple[int, ...]]:
    """What the table must hold, worked out by hand: by account, its columns."""
    rows: dict[int, tuple[int, ...]] = {}
    for doc in accounts(0, documents, keys=keys):
        count, total, top, _ = rows.get(doc["account"], (0, 0, 0, 0))
        rows[doc["account"]] = (
            count + 1,
            total + doc["total"],
            max(top, doc["top"]),
            count + 1,
        )
    return rows
