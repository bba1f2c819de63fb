"""`penstock/source-http-ingest`: documents that clients send over HTTP. README.md is the map."""
