"""Catalog tests: documents in, the content of collections out, compared with what people expect."""
