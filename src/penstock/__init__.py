"""Exactly-once data pipelines on Apache Spark."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.api import Penstock, open  # noqa: A004 - it is called as penstock.open

__all__ = ["Penstock", "__version__", "open"]

__version__ = version("penstock")


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever it is
    """Import what is asked for, when it is: commands and executors need little of it."""
    if name in __all__:
        return getattr(import_module("penstock.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
