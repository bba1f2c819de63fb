"""The committer: one process owns the database, and all others share it."""
