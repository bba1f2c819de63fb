"""Captures by a function in Python, or by a dlt resource. README.md is the map."""
