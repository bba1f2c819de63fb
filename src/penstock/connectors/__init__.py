"""Endpoints that Penstock writes to: one file each, and a table of their names."""
