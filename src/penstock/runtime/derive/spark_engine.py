"""SPARK: runs Spark lambdas on frames of documents.

The lambda sees its documents as `source` and constant tables by their names. All of these are WITH
queries around its text, so that nothing is registered under a name that another task could see: the
one temporary view that is needed has a name of its own, and is dropped once Spark has looked it up.
"""

from __future__ import annotations

import contextlib
import re
import threading
import uuid
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.sql import functions as f
from pyspark.sql import types as t

from penstock.errors import Bug
from penstock.model import pointer
from penstock.model.spec import CollectionSpec
from penstock.native import sql
from penstock.native.arrow_types import HIDDEN, NAMES
from penstock.native.spark_types import spark_schema
from penstock.runtime.derive.engine import LambdaFailed
from penstock.runtime.derive.spark_columns import (
    UUID_LOCATION,
    SourceColumns,
    output_location,
    write_layout,
)
from penstock.runtime.derive.spark_convert import MARK, Converter, Nulls, Unfit
from penstock.runtime.derive.spark_json import Object, Value
from penstock.runtime.derive.spark_query import SOURCE
from penstock.runtime.derive.spark_sql import SparkLambda

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_ROW: Final = "$row"
"""The last part of an order that is made total."""

_VIEW: Final = "penstock_"

_CASES: Final = "org.apache.spark.sql.catalyst.util.CollationAwareUTF8String"

_CONTAINERS: Final = (t.StructType, t.ArrayType, t.MapType)


def make_ready(spark: SparkSession, lambdas: Iterable[SparkLambda]) -> None:
    """Let Spark make what these lambdas will need, while their query is planned.

    In a JVM that has just started, the first `lower` or `upper` makes a table of all letters: for
    more than a second one task does that, and all others wait.
    """
    if any(each.may_change_case for each in lambdas):
        threading.Thread(
            target=_make_cases, args=[spark], name="penstock-cases", daemon=True
        ).start()


def _make_cases(spark: SparkSession) -> None:
    jvm: Any = spark._jvm  # noqa: SLF001 - pyspark has no public way to a class of Spark
    with contextlib.suppress(Py4JError, OSError):  # whoever needs them makes them
        jvm.java.lang.Class.forName(_CASES)


class SparkTransform:
    """One lambda between the columns of its source and those of its target."""

    def __init__(
        self,
        lambda_: SparkLambda,
        source: CollectionSpec,
        target: CollectionSpec,
        *,
        nulls: Nulls = "missing",
        name: str = "lambda",
    ) -> None:
        self._lambda = lambda_
        self._source = SourceColumns(source)
        self._target = target
        self._layout = write_layout(target)
        self._nulls: Nulls = nulls
        self._name = name

    @property
    def one_to_one(self) -> bool:
        """True if a document never becomes several rows, so that its order is the row's."""
        return self._lambda.one_to_one

    def apply(self, frame: DataFrame, *, order: str | None, uniform: bool = False) -> DataFrame:
        """Return what the lambda makes of documents, in the stored columns of the target.

        `frame` has the stored columns of the source as it is read, and perhaps stamps. With
        `order`, the column of that name orders documents, and the result has it as its last
        column: as it was if a document never becomes several rows, else as a struct that orders
        those, too. `uniform` makes the struct in any case, so that frames of several transforms
        can be put together. Where order does not matter to this lambda, its documents have none:
        it would make Spark sort what it can hash. Nothing runs yet. Raises LambdaFailed if Spark
        refuses the query.
        """
        travels = order if self._lambda.order_matters else None
        with self.errors():
            rows = self._run(frame, travels)
        none = f.lit(None) if order is None else f.lit(None).cast(frame.schema[order].dataType)
        return self._converted(rows, order, none, uniform=uniform)

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Around an action that runs the query: raises LambdaFailed for what the lambda did."""
        with lambda_errors(self._name, self._lambda):
            yield

    # --- the query ---

    def _run(self, frame: DataFrame, order: str | None) -> DataFrame:
        text = self._lambda.text if order is None else self._lambda.ordered_text
        if text is None:
            raise Bug("the order of documents cannot travel through this lambda")
        spark = frame.sparkSession
        view = f"{_VIEW}{uuid.uuid4().hex}"
        self._seen(frame, order).createTempView(view)
        try:
            return spark.sql(f"{_head(self._lambda, view)}{text}\n)")
        finally:
            spark.catalog.dropTempView(view)

    def _seen(self, frame: DataFrame, order: str | None) -> DataFrame:
        """The columns of `source` that the lambda may name."""
        names = dict.fromkeys(self._source.star if self._lambda.whole else ())
        names |= dict.fromkeys(self._lambda.fields)
        missing = set(frame.columns)
        columns: list[Column] = []
        for name in names:
            column = self._source.column(name)
            hidden = name in self._source.hidden and name not in missing
            columns.append(f.expr("NULL" if hidden else column.sql).alias(name))
        if order is not None:
            columns.append(f.col(sql.name(order)).alias(self._lambda.order_column))
        return frame.select(*columns or [f.lit(1).alias("$none")])

    # --- the result ---

    def _converted(
        self, rows: DataFrame, order: str | None, none: Column, *, uniform: bool
    ) -> DataFrame:
        given, at = self._given(rows)
        numbered = rows.toDF(*map(str, range(len(rows.columns))))
        converter = Converter(self._nulls)
        try:
            columns = converter.document(given, self._layout)
        except Unfit as e:
            raise LambdaFailed(
                f"{e.at} of {self._target.name} is {e.wanted}, and the lambda gives {e.found}",
                where=f"transform {self._name}",
                fix="cast it in the lambda, or change the schema",
            ) from None
        fields = {field.name: field for field in spark_schema(self._layout).fields}
        selected = [_typed(text, fields[name], same=same) for name, text, same in columns]
        if order is not None:
            document = none if at is None else f.col(str(at))
            selected.append(self._order(document, at, uniform=uniform).alias(order))
        return numbered.select(*selected)

    def _order(self, document: Column, at: int | None, *, uniform: bool) -> Column:
        if at is not None and self._lambda.one_to_one and not uniform:
            return document
        return f.struct(document.alias("$document"), f.monotonically_increasing_id().alias(_ROW))

    def _given(self, rows: DataFrame) -> tuple[Object, int | None]:
        """The result's columns by the locations they write, and the position of the order."""
        members: dict[str, Any] = {}
        nulls: tuple[str, tuple[str, ...]] | None = None
        extra: str | None = None
        order: int | None = None
        for at, field in enumerate(rows.schema.fields):
            value = Value(sql=sql.name(str(at)), type=field.dataType, metadata=field.metadata)
            hidden = field.metadata.get(HIDDEN)
            if field.name == self._lambda.order_column:
                order = at
            elif hidden == "nulls":
                nulls = value.sql, tuple(field.metadata[NAMES])
            elif hidden == "extra":
                extra = value.sql
            else:
                self._put(members, output_location(field.name, self._target), value)
        return Object(members=_objects(members), nulls=nulls, extra=extra), order

    def _put(self, members: dict[str, Any], location: str, value: Value) -> None:
        *path, last = pointer.parse(location) or ("",)
        inner = members
        for token in path:
            inner = inner.setdefault(token, {})
            if not isinstance(inner, dict):
                break
        if location in ("", UUID_LOCATION) or not isinstance(inner, dict) or last in inner:
            raise LambdaFailed(
                f"{location or 'the document'} is written twice, or cannot be written",
                where=f"transform {self._name}",
                fix="give each column of the query another name",
            )
        inner[last] = value


def _objects(members: dict[str, Any]) -> dict[str, Value | Object]:
    return {
        name: Object(members=_objects(inner)) if isinstance(inner, dict) else inner
        for name, inner in members.items()
    }


def _typed(text: str, field: t.StructField, *, same: bool) -> Column:
    column = f.expr(text)
    if isinstance(field.dataType, _CONTAINERS) and not same:
        column = column.cast(field.dataType)
    return column.alias(field.name, metadata=field.metadata)


def _head(lambda_: SparkLambda, view: str) -> str:
    """The text before a lambda's own."""
    tables = [f"{sql.name(SOURCE)} AS (TABLE {sql.name(view)})"]
    tables += [f"{sql.name(name)} AS (\n{_closed(text)}\n)" for name, text in lambda_.views]
    return f"WITH {', '.join(tables)}\nSELECT * FROM (\n"


def _closed(text: str) -> str:
    return re.sub(r";\s*$", "", text)


# --- errors ---

_ADVICE: Final = re.compile(r" (?:Use|If necessary|To tolerate)\b.*", re.DOTALL)
_LEAD: Final = re.compile(r"^\[[A-Z0-9_.]+\] ")
_STATE: Final = re.compile(r"\s*SQLSTATE: \w+.*", re.DOTALL)


@contextlib.contextmanager
def lambda_errors(name: str, lambda_: SparkLambda) -> Iterator[None]:
    """Around an action that runs a lambda's query: raises LambdaFailed, not Spark's account.

    What did not come from the lambda is raised as it is.
    """
    try:
        yield
    except (PySparkException, Py4JJavaError) as e:
        failed = _failure(e, name, lambda_)
        if failed is None:
            raise
        raise failed from None


def _failure(error: Exception, name: str, lambda_: SparkLambda) -> LambdaFailed | None:
    text = str(error)
    if (found := re.search(rf"{MARK}([^\n]*?)(?: SQLSTATE|$|\n)", text)) is not None:
        return LambdaFailed(
            f"the lambda gives a value that does not fit: {found[1]}",
            where=f"transform {name}",
            fix="cast or filter it in the lambda, or change the schema",
        )
    if not isinstance(error, PySparkException):
        return None
    place = _place(error, lambda_)
    if place is None and not isinstance(error, ParseException | AnalysisException):
        return None
    said = _LEAD.sub("", _ADVICE.sub("", _STATE.sub("", text))).strip().split("\n")[0]
    return LambdaFailed(said, where=f"transform {name}{place or ''}", fix="correct the lambda")


def _place(error: PySparkException, lambda_: SparkLambda) -> str | None:
    """The line of the lambda that Spark blames; None if it blames nothing of it."""
    head = len(_head(lambda_, f"{_VIEW}{uuid.UUID(int=0).hex}"))
    for context in error.getQueryContext():
        try:
            start, fragment = context.startIndex() - head, context.fragment()
        except PySparkException:
            continue  # the context of a DataFrame call, which has no place in a text
        for text in (lambda_.ordered_text or lambda_.text, lambda_.text):
            if start >= 0 and fragment and text.startswith(fragment, start):
                return f", line {text.count(chr(10), 0, start) + 1}: {fragment}"
    return None
