"""A collection partition is a journal: an ordered list of immutable Parquet fragments."""
