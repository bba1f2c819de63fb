"""The interface of a derivation's language: code that runs on documents, one by one and in order.

    RowEngine     the code of one derivation, ready to be sent to another process
    Processor     that code at work: the documents of one shard, in one transaction

A processor is opened for every transaction, by the process that runs user code: a Python worker of
Spark, or `penstock test`. It is given documents in the order in which they are to be processed, and
yields what they publish. `finish` ends the transaction: last documents, and how the state changed.
Nothing that it does may be seen by anybody before the leader has committed what it returned: the
transaction may be run again, at the same time or after a crash, from the same state.

Languages that work on whole frames (`using: spark`) are not row engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from penstock.errors import UserError
from penstock.model.json_order import Json
from penstock.runtime.patches import Patches

if TYPE_CHECKING:
    import pyarrow

Document: TypeAlias = dict[str, Json]


@dataclass(frozen=True, slots=True)
class SourceRead:
    """One document that a transform reads."""

    transform: int
    """The index of the transform in its derivation, disabled ones counted."""
    document: Document
    """As the source's read schema admits it, with its UUID at `/_meta/uuid`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end of a shard's transaction."""

    documents: Sequence[Document] = ()
    """Published after all others."""
    patches: Patches = ()
    """Merged into the connector state of the task, in the order of shards."""


class LambdaFailed(UserError):
    """User code raised, or published something that is not a document.

    `where` names the transform and the line of its code. `read` is the position of the document
    among those that `process` was given; None if no single one is to blame.
    """

    read: int | None = None


class StateFiles(Protocol):
    """Where state that is too large for a record is kept: immutable files, by name. Picklable."""

    @property
    def local_dir(self) -> Path:
        """A directory of this machine, for copies that may be lost at any time."""
        ...

    def read(self, name: str) -> bytes:
        """Return a file that `write` made."""
        ...

    def write(self, data: bytes) -> str:
        """Write a new file under a name that no other attempt uses, and return the name.

        It counts if a committed patch names it, and is garbage otherwise.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardContext:
    """What a processor is opened with."""

    shard: int
    shards: int
    state: Json
    """The connector state of the task, as the last transaction committed it; `{}` at first."""
    files: StateFiles


class Processor(Protocol):
    """Runs the transforms of one shard in one transaction. Used by one thread."""

    def process(self, reads: Iterable[SourceRead]) -> Iterator[tuple[int, Document]]:
        """Yield what documents publish, in their order, each with the position of its read.

        Called once. Raises `LambdaFailed`.
        """
        ...

    def finish(self) -> Finished:
        """End the transaction, after all that `process` yielded was taken."""
        ...

    def close(self) -> None:
        """Release what it holds, whether it has finished or not. Changes nothing."""
        ...


@runtime_checkable
class BatchProcessor(Protocol):
    """A processor that may take the documents of one transform as Arrow batches."""

    @property
    def takes_batches(self) -> bool:
        """True if its code is written for batches."""
        ...

    def process_batches(
        self, transform: int, batch: pyarrow.RecordBatch
    ) -> Iterator[pyarrow.RecordBatch]:
        """Yield what a batch publishes, in the columns of the derived collection."""
        ...


class RowEngine(Protocol):
    """The code of a derivation. Picklable: it is sent to the process that runs it."""

    @property
    def stateful(self) -> bool:
        """True if documents must meet at the shard of their shuffle key, in order.

        Otherwise each document may be processed anywhere, and in any order.
        """
        ...

    def open(self, context: ShardContext) -> Processor:
        """Begin a transaction of one shard. Raises `LambdaFailed` if the code cannot be loaded."""
        ...
