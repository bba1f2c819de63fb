"""A sink for SQL databases, of which a database is a dialect."""
