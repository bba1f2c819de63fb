"""Collections and lambdas that tests with and without Spark share."""
# ruff: noqa: E501, S608 - queries are what is tested

from __future__ import annotations

from penstock.model.json_order import Json
from support.specs import collection

TEXT: Json = {"type": "string"}
INTEGER: Json = {"type": "integer"}
NUMBER: Json = {"type": "number"}

SOURCE = collection(
    "acme/transfers",
    {
        "id": INTEGER,
        "sender": TEXT,
        "recipient": TEXT,
        "amount": NUMBER,
        "tags": {"type": "array", "items": TEXT},
        "at": {"type": "object", "properties": {"city": TEXT}},
        "loose": {},
    },
    projections={"town": "/at/city"},
)
SUMS = collection(
    "acme/sums",
    {
        "account": TEXT,
        "amount": {"type": "number", "reduce": {"strategy": "sum"}},
        "last": {"type": "integer", "reduce": {"strategy": "maximize"}},
        "first": {"type": "integer", "reduce": {"strategy": "minimize"}},
    },
    key=["/account"],
    additionalProperties=False,
    reduce={"strategy": "merge"},
)
LAST = collection(
    "acme/last",
    {
        "account": TEXT,
        "city": TEXT,
        "count": INTEGER,
        "loose": {},
        "on": {"type": "string", "format": "date"},
        "geo": {"type": "object", "properties": {"city": TEXT}},
        "tags": {"type": "array", "items": TEXT},
    },
    key=["/account"],
)
VIEWS = {"rates": "select * from values ('a', 1.5) as t(who, rate)"}


ORD = "`source`.`$ord`"

LINEAR: list[tuple[str, str]] = [
    (
        "select recipient as account from source",
        f"select recipient as account, {ORD} from source",
    ),
    (
        "SELECT recipient account, at.city\n  -- why\nFROM source s WHERE s.amount > 1 ;",
        "SELECT recipient account, at.city, `s`.`$ord`\n  -- why\n"
        "FROM source s WHERE s.amount > 1  ",
    ),
    (
        "from source select recipient as account",
        f"from source select recipient as account, {ORD}",
    ),
    (
        "select sender as account from source union all (select recipient from source)",
        f"select sender as account, {ORD} from source union all (select recipient, {ORD} from source)",
    ),
    (
        "with c(a, b) as (select sender, id from source) select a as account, b as count from c",
        f"with c(a, b, `$ord`) as (select sender, id, {ORD} from source) "
        "select a as account, b as count, `c`.`$ord` from c",
    ),
    (
        "select account from (select sender as account from source)",
        f"select account, `$ord` from (select sender as account, {ORD} from source)",
    ),
    (
        "select x.account from (select sender from source) x(account)",
        f"select x.account, `x`.`$ord` from (select sender, {ORD} from source) x(account, `$ord`)",
    ),
    (
        "select *, sender as account from source",
        f"select * except ({ORD}), sender as account, {ORD} from source",
    ),
    (
        "select s.* except (id), town as account from source s",
        "select s.* except (id, `s`.`town`, `s`.`$ord`), town as account, `s`.`$ord` from source s",
    ),
    (
        "select sender as account, to_json(struct(*)) as city from source",
        f"select sender as account, to_json(struct(* except ({ORD}))) as city, {ORD} from source",
    ),
    (
        "select sender as account, tag as city from source lateral view explode(tags) t as tag",
        f"select sender as account, tag as city, {ORD} from source "
        "lateral view explode(tags) t as tag",
    ),
    (
        "select sender as account, rate as loose from rates join source s on who = s.sender",
        "select sender as account, rate as loose, `s`.`$ord` "
        "from rates join source s on who = s.sender",
    ),
    (
        "select sender as account, (select max(rate) from rates) as loose from source",
        f"select sender as account, (select max(rate) from rates) as loose, {ORD} from source",
    ),
    (
        "select sender as account, amount > 1 as big, big as bigger from source",
        f"select sender as account, amount > 1 as big, big as bigger, {ORD} from source",
    ),
    (
        "select sender as account, transform(tags, t -> upper(t)) as tags from source",
        f"select sender as account, transform(tags, t -> upper(t)) as tags, {ORD} from source",
    ),
    (
        "select sender as account, if(id > 0, at, null) as geo from source",
        f"select sender as account, if(id > 0, at, null) as geo, {ORD} from source",
    ),
]
"""Lambdas into LAST, and the text by which the order of documents travels along."""
