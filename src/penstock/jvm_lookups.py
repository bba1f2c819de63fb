"""What PySpark looks up in the JVM for each column of a query is looked up once.

A call of a function of Spark is three calls to its JVM: one for the class, one for the method, and
the call. A query has some hundred of them, and a small transaction waits for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from py4j.java_gateway import JVMView

_CLASSES: Final = ("org.apache.spark.sql.functions", "PythonUtils")
"""Those that hold static methods only, by the names that PySpark looks them up with."""


def remember_lookups(jvm: JVMView) -> None:
    """From now on, `jvm` knows these classes, and each of them the methods that were used."""
    from py4j.java_gateway import JavaClass

    class Remembered(JavaClass):  # type: ignore[misc] # it has no types
        def __getattr__(self, name: str) -> object:
            found: object = super().__getattr__(name)
            self.__dict__[name] = found
            return found

    for name in _CLASSES:
        looked_up = getattr(jvm, name)
        setattr(jvm, name, Remembered(looked_up._fqn, looked_up._gateway_client))  # noqa: SLF001
