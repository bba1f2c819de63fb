"""`source-files`: documents from JSONL, CSV and Parquet files, of a directory or a bucket."""
