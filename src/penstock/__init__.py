"""Exactly-once data pipelines on Apache Spark."""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("penstock")
