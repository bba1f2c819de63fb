"""Logs, metrics and the admin page; knows nothing of Penstock."""
