"""Logs, metrics, the admin page, secrets and the gRPC transport; knows nothing of Penstock."""
