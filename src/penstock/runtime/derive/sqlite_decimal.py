"""Exact numbers in SQLite lambdas: functions over text, as SQLite's own decimal extension has them.

    decimal_add(a, b)   decimal_sub(a, b)   decimal_mul(a, b)   decimal_cmp(a, b)   decimal_sum(x)

Arguments are numbers, or texts that write them, of any length; NULL gives NULL. Results are texts.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable
from typing import Final

import apsw

_EXACT: Final = decimal.Context(
    prec=100_000, traps=[decimal.Inexact, decimal.InvalidOperation, decimal.Overflow]
)


def add_decimals(db: apsw.Connection) -> None:
    """Give a connection the functions."""
    for name, operation in _OPERATIONS.items():
        db.create_scalar_function(name, _of_two(name, operation), 2, deterministic=True)
    db.create_aggregate_function("decimal_sum", _Sum, 1)


def _of_two(
    name: str, operation: Callable[[decimal.Decimal, decimal.Decimal], str | int]
) -> Callable[..., str | int | None]:
    def call(*given: apsw.SQLiteValue) -> str | int | None:
        if None in given:
            return None
        one, other = (_number(name, value) for value in given)
        try:
            return operation(one, other)
        except decimal.DecimalException:
            raise ValueError(f"the result of {name} has too many digits") from None

    return call


class _Sum:
    """The state of one `decimal_sum`."""

    def __init__(self) -> None:
        self.total: decimal.Decimal | None = None

    def step(self, *given: apsw.SQLiteValue) -> None:
        for value in given:
            if value is not None:
                total = decimal.Decimal(0) if self.total is None else self.total
                self.total = _EXACT.add(total, _number("decimal_sum", value))

    def final(self) -> str | None:
        return None if self.total is None else _text(self.total)


def _number(function: str, value: apsw.SQLiteValue) -> decimal.Decimal:
    try:
        found = decimal.Decimal(repr(value) if isinstance(value, float) else str(value))
    except decimal.InvalidOperation:
        found = decimal.Decimal("nan")
    if isinstance(value, bytes) or not found.is_finite():
        raise ValueError(f"{function} expects numbers, or texts that write them, not {value!r}")
    return found


def _text(value: decimal.Decimal) -> str:
    return format(value if value else abs(value), "f")  # zero has no sign


_OPERATIONS: Final[dict[str, Callable[[decimal.Decimal, decimal.Decimal], str | int]]] = {
    "decimal_add": lambda one, other: _text(_EXACT.add(one, other)),
    "decimal_sub": lambda one, other: _text(_EXACT.subtract(one, other)),
    "decimal_mul": lambda one, other: _text(_EXACT.multiply(one, other)),
    "decimal_cmp": lambda one, other: (one > other) - (one < other),
}
