"""Shipped test helpers: strategies, fixtures and stores that fail on purpose."""
