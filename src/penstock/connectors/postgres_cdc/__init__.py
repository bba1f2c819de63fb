"""PostgreSQL as a source: a snapshot of its tables, and every change after it."""
