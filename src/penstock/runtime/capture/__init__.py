"""Captures: documents from where people have them, once. README.md is the map."""
