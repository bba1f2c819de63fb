"""`python -m penstock.worker_daemon`: the process that Spark forks its Python workers from.

PySpark's own forks first, and each worker imports all that its tasks need: a second of a core for
each, while the data waits. This one has imported it before. The one thread that this starts belongs
to an allocator, which knows how to be forked.
"""

from __future__ import annotations

import gc
import importlib
from typing import Final

from pyspark import daemon

_NEEDED: Final = (
    "pandas",  # by Arrow, for whatever it converts
    "penstock.runtime.capture.jobs",
    "penstock.runtime.derive.publish_jobs",
    "penstock.runtime.derive.row_jobs",
    "penstock.runtime.materialize.jobs",
    "pyarrow.parquet",
    "pyspark.sql.pandas.serializers",
    "pyspark.worker",
)


def main() -> None:
    """Import what tasks need, and then fork a worker whenever Spark wants one."""
    for name in _NEEDED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a fork shares what it does not touch
    daemon.manager()


if __name__ == "__main__":
    main()
