"""SPARK: few rows of one partition, evaluated by the calling thread instead of by a job.

To run a job on a hundred rows takes five times the CPU of evaluating its plan: stages, tasks, their
serialisation, and all that listens to them. So a frame that is planned once and has one partition
needs no job: `DirectPlans.java` evaluates the same plan, by the same generated code, as a task of
Spark would.

It is a shortcut, which answers or gives up: whatever fails here is done again by a job, which says
what is wrong in the usual way.
"""

from __future__ import annotations

import logging
import threading
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import pyarrow
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession

pa: Any = pyarrow

_log = logging.getLogger("penstock.spark")

_PYTHON: Final = ("Python", "InArrow", "InPandas")
"""Parts of the names of operators that need Python workers, which belong to tasks."""

_lock = threading.Lock()
_compiled: WeakKeyDictionary[SparkContext, Any] = WeakKeyDictionary()
"""The compiled `DirectPlans`, by the context that it was compiled for."""


class SmallFrame:
    """A frame of few rows in one partition, without exchanges; its files change between runs."""

    def __init__(self, frame: DataFrame, answer: Path) -> None:
        """`answer` is the name of a file for its rows."""
        self.frame = frame
        self._answer = answer
        self._plan: Any = None
        self._needs_job = any(name in executed_plan(frame) for name in _PYTHON)

    def evaluate(self) -> list[pyarrow.RecordBatch] | None:
        """Return the rows that it has now; None if it takes a job to find out."""
        if self._plan is None and not self._needs_job:
            self._plan = _direct_plan(self.frame)
            self._needs_job = self._plan is None
        if self._needs_job:
            return None
        try:
            self._plan.collect(str(self._answer))
        except (Py4JError, PySparkException) as error:
            _log.debug("a job evaluates again what failed: %s", error)
            return None
        with pa.ipc.open_stream(self._answer.read_bytes()) as batches:
            return list(batches)


def _direct_plan(frame: DataFrame) -> Any:  # noqa: ANN401 - an object of the JVM
    """Return the plan of a frame as the JVM can evaluate it; None if it cannot."""
    try:
        return _direct_plans(frame.sparkSession).plan(frame._jdf)  # noqa: SLF001
    except (Py4JError, PySparkException) as error:
        _log.warning("small transactions of one kind take a Spark job each: %s", _first(error))
        return None


def _first(error: Exception) -> str:
    """The line of an error of the JVM that says what is wrong."""
    return next((line for line in str(error).splitlines() if line.startswith(": ")), str(error))


def cancel_group(spark: SparkSession, group: str) -> None:
    """End the jobs of a group, and what is evaluated without one."""
    spark.sparkContext.cancelJobGroup(group)
    if (plans := _compiled.get(spark.sparkContext)) is not None:
        plans.cancel(group)


def executed_plan(frame: DataFrame) -> str:
    """Return the plan of a frame as Spark shows it."""
    return str(frame._jdf.queryExecution().executedPlan())  # noqa: SLF001 - shown nowhere else


def _direct_plans(spark: SparkSession) -> Any:  # noqa: ANN401 - an object of the JVM
    context: Any = spark.sparkContext
    with _lock:
        if context not in _compiled:
            jvm = context._jvm  # noqa: SLF001 - pyspark has no public way to its JVM
            compiler = jvm.org.codehaus.janino.SimpleCompiler()
            compiler.setParentClassLoader(jvm.Thread.currentThread().getContextClassLoader())
            compiler.cook(resources.files(__package__).joinpath("DirectPlans.java").read_text())
            made = compiler.getClassLoader().loadClass("penstock.DirectPlans")
            arguments = context._gateway.new_array(jvm.Object, 1)  # noqa: SLF001
            arguments[0] = context._jsc.sc().conf()  # noqa: SLF001
            _compiled[context] = made.getConstructors()[0].newInstance(arguments)
        return _compiled[context]
