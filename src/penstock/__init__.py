"""Exactly-once data pipelines on Apache Spark.

import penstock

with penstock.open(data="./.penstock") as p:
    p.apply("catalog.yaml")
    p.append("acme/orders", [{"id": 1, "total": 9.5}])
    p.run()
    p.read("acme/orders").show()
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from penstock.api import (
        ApplyResult,
        Documents,
        DocumentsRefused,
        Frame,
        Penstock,
        PenstockError,
        TaskRun,
        TaskStatus,
        Unavailable,
        UsageError,
        UserError,
        open,  # noqa: A004 - it is called as penstock.open
    )

    __version__: str

__all__ = [
    "ApplyResult",
    "Documents",
    "DocumentsRefused",
    "Frame",
    "Penstock",
    "PenstockError",
    "TaskRun",
    "TaskStatus",
    "Unavailable",
    "UsageError",
    "UserError",
    "__version__",
    "open",
]


def __getattr__(name: str) -> "Any":  # noqa: ANN401 - whatever it is
    """Import what is asked for, when it is: commands and executors need little of it."""
    if name == "__version__":
        from importlib.metadata import version

        return version("penstock")
    if name in __all__:
        from importlib import import_module

        return getattr(import_module("penstock.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
