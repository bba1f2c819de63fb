"""Captures by packages that are installed apart, and run as processes of their own."""
