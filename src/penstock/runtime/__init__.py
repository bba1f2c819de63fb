"""Transactions: what is in one, in what order it happens, and when it counts."""
