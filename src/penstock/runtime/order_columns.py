"""The columns of a row that order documents of one binding."""

from __future__ import annotations

from penstock.journal.rows import stamp_names
from penstock.model.columns import Column
from penstock.shuffle.order import Order


def stamps_for(root: Column, order: Order) -> tuple[str, ...]:
    """Return the columns of stamps that an order needs."""
    names = stamp_names(root)
    return (names.clock,) if order is Order.CLOCK else (names.clock, names.producer)


def order_columns(root: Column, order: Order) -> tuple[str, ...]:
    """Return the columns that order documents."""
    stamps = stamps_for(root, order)
    return (stamp_names(root).level, *stamps) if order is Order.COMMIT else stamps
