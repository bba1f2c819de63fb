"""Pieces of Spark SQL text: names, literals and conditions, safe to put together.

Expressions are built as text because a DataFrame expression costs a call into the JVM for every
node, and because text can be shown to people.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal

TRUE = "true"
FALSE = "false"


def name(identifier: str) -> str:
    """A column or member name, quoted."""
    return f"`{identifier.replace('`', '``')}`"


def text(value: str) -> str:
    """A string literal. A dollar is escaped, as Spark substitutes `${…}` even inside of quotes."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'").replace("$", "\\u0024")
    return f"'{escaped}'"


def bigint(value: int) -> str:
    return f"CAST('{value}' AS BIGINT)"


def double(value: float) -> str:
    return f"CAST('{value!r}' AS DOUBLE)"


def decimal(value: Decimal) -> str:
    plain = f"{value:f}"
    whole, _, fraction = plain.removeprefix("-").partition(".")
    return f"CAST('{plain}' AS DECIMAL({max(len(whole) + len(fraction), 1)}, {len(fraction)}))"


def all_of(conditions: Iterable[str]) -> str:
    """All of the conditions; none of them may be NULL."""
    kept = list(dict.fromkeys(c for c in conditions if c != TRUE))
    if FALSE in kept:
        return FALSE
    return f"({' AND '.join(kept)})" if len(kept) > 1 else (kept or [TRUE])[0]


def any_of(conditions: Iterable[str]) -> str:
    """Any of the conditions; none of them may be NULL."""
    kept = list(dict.fromkeys(c for c in conditions if c != FALSE))
    if TRUE in kept:
        return TRUE
    return f"({' OR '.join(kept)})" if len(kept) > 1 else (kept or [FALSE])[0]


def negated(condition: str) -> str:
    return {TRUE: FALSE, FALSE: TRUE}.get(condition) or f"(NOT {condition})"
