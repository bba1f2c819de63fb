"""`using: python`: runs the methods of a class `Derivation` on documents.

The module is loaded once per process, and the class is made anew for every transaction, from the
state that the last one committed: an attempt that runs again starts from the same place. What takes
long to load belongs at the top of the module.

Three generations of the interface are alike but for the end of a transaction: `flush` publishes
what is left, and either `start_commit` returns how the state changes, or `flush` sets it. Methods
may be plain functions, generators, coroutines or asynchronous generators. Plain ones run without
an event loop. Asynchronous ones run in a few workers, each of which takes the next document when
it has finished one, so that reads begin in order, some wait while others go on, and nothing is
spent on scheduling where no method waits. What they publish is yielded in the order of reads.

    connector state   {"python": {"state": …, "keyed": {…}}}
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import json
from collections.abc import (
    AsyncIterable,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import pyarrow as pa
import pydantic
import pydantic_core

from penstock.errors import Bug, UserError
from penstock.journal.schemas import layout
from penstock.model.json_order import Json, NotJson, canonical_json
from penstock.model.spec import Catalog, CollectionSpec, DerivationSpec
from penstock.native.arrow import to_json
from penstock.runtime.derive.engine import (
    Document,
    Finished,
    LambdaFailed,
    ShardContext,
    SourceRead,
)
from penstock.runtime.derive.keyed_state import KeyedState, keyed_patches
from penstock.runtime.derive.python_batches import conforming, process_rows
from penstock.runtime.derive.python_code import PythonCode, code_of, find_class
from penstock.runtime.derive.python_loader import LoadedCode
from penstock.runtime.derive.python_models import Model, to_document
from penstock.runtime.derive.python_names import method_name
from penstock.runtime.derive.python_types import (
    BaseDerivation,
    ConnectorState,
    DerivationTypes,
    Flush,
    Flushed,
    Open,
    StartCommit,
    StartedCommit,
    TransformTypes,
    make_types,
    state_of,
)
from penstock.runtime.patches import Patches, updated
from penstock.runtime.secrets import resolve

MEMBER: Final = "python"
CONCURRENCY: Final = 16
"""Reads that asynchronous methods of a class without state work on at once."""
READS_MAX: Final = 512
"""Reads whose documents are held while asynchronous methods run."""

_USER_ERRORS: Final = (Exception, SystemExit)

_T = TypeVar("_T")
Method: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonEngine:
    """The code of a Python derivation. Loaded code is shared by all engines that are equal."""

    collection: str
    code: PythonCode
    write_schema: str
    transforms: tuple[TransformTypes, ...]
    disabled: frozenset[int]
    config: str
    """The configuration as canonical JSON, with references to secrets in it."""
    config_schema: str | None
    batch: bool
    """Methods take and yield Arrow batches: see `python_batches`."""
    stateful: bool
    keeps_state: bool
    """One state for all documents, which only one shard can keep."""
    packages: str | None = None
    """The directory of installed dependencies."""

    @staticmethod
    def of(
        catalog: Catalog, collection: CollectionSpec, *, packages: str | None = None
    ) -> PythonEngine:
        """The engine of a derivation that `penstock check` accepts."""
        derivation = collection.derivation
        code = _code(derivation) if derivation else None
        if derivation is None or derivation.endpoint is None or code is None:
            raise Bug(f"{collection.name} is no Python derivation")
        found = find_class(code)
        schema = derivation.endpoint.config_schema
        return PythonEngine(
            collection=collection.name,
            code=code,
            write_schema=collection.write_schema.text,
            transforms=tuple(
                TransformTypes(
                    name=transform.name,
                    read_schema=_read_schema(catalog, transform.source.collection),
                )
                for transform in derivation.transforms
            ),
            disabled=frozenset(i for i, t in enumerate(derivation.transforms) if t.disable),
            config=derivation.endpoint.config.text,
            config_schema=schema.text if schema else None,
            batch=derivation.batch,
            stateful=found is None or found.stateful,
            keeps_state=found is not None and found.persists,
            packages=packages,
        )

    def open(self, context: ShardContext) -> PythonProcessor:
        """Begin a transaction of one shard."""
        if self.keeps_state and context.shards > 1:
            raise _one_shard(self.collection, context.shards)
        loaded, types = _loaded(self)
        return PythonProcessor(self, loaded, types, context)


def _code(derivation: DerivationSpec) -> PythonCode | None:
    return code_of(derivation.endpoint.module if derivation.endpoint else None, derivation.files)


def _read_schema(catalog: Catalog, name: str) -> str:
    source = catalog.collection(name)
    if source is None:
        raise Bug(f"{name} is not in the catalog")
    return source.read_schema.text


@functools.lru_cache(maxsize=64)
def _loaded(engine: PythonEngine) -> tuple[LoadedCode, DerivationTypes]:
    types = make_types(
        engine.collection, engine.write_schema, engine.transforms, engine.config_schema
    )
    return LoadedCode(engine.collection, engine.code, types.module, engine.packages), types


def _one_shard(collection: str, shards: int) -> UserError:
    return UserError(
        f"{collection} keeps one state for all documents, and cannot have {shards} shards",
        why="shards run at the same time, and would each change a copy of it",
        fix="set shards: {count: 1}, or keep state by key in self.keyed",
    )


class PythonProcessor:
    """One shard's transaction. Must not be used in a thread whose event loop is running."""

    def __init__(
        self,
        engine: PythonEngine,
        loaded: LoadedCode,
        types: DerivationTypes,
        context: ShardContext,
    ) -> None:
        self._engine = engine
        self._loaded = loaded
        self._shards = context.shards
        stored = context.state.get(MEMBER) if isinstance(context.state, dict) else None
        stored = stored if isinstance(stored, dict) else {}
        self._state: Json = stored.get("state", {})
        keyed: Any = stored.get("keyed", {})
        self._keyed = KeyedState(keyed)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reads = [_reader(model) for model in types.reads]
        with loaded.active():
            self._derivation = self._make(types)
            self._methods = [self._method(at) for at in range(len(engine.transforms))]

    # --- opening ---

    def _make(self, types: DerivationTypes) -> Any:  # noqa: ANN401 - the user's class
        cls = self._loaded.derivation
        where = f"config of {self._engine.collection}"
        config = resolve(pydantic_core.from_json(self._engine.config), where=where)
        opened = Open(state=pydantic_core.from_json(canonical_json(self._state)))
        try:
            made: Any = object.__new__(cls)
            made.keyed = self._keyed
            wanted = _arguments(made.__init__, 2) if cls.__init__ is not object.__init__ else 0
            typed = getattr(cls, "config_type", None) or types.config
            given = (opened, _configured(typed, config) if wanted > 1 else None)
            made.__init__(*given[:wanted])
        except _USER_ERRORS as e:
            raise self._loaded.failed(e, "it cannot be opened") from e
        return made

    def _method(self, at: int) -> Method | None:
        transform = self._engine.transforms[at].name
        method: Method | None = getattr(self._derivation, method_name(transform), None)
        if callable(method) or at in self._engine.disabled:
            return method
        raise LambdaFailed(
            f"{self._engine.collection} has no method for transform {transform}",
            fix=f"add def {method_name(transform)}(self, read) to the class Derivation",
        )

    # --- reading ---

    def process(self, reads: Iterable[SourceRead]) -> Iterator[tuple[int, Document]]:
        """Yield what documents publish, each with the position of its read."""
        with self._loaded.active():
            if self._engine.batch:
                sources = [layout(t.read_schema) for t in self._engine.transforms]
                derived = layout(self._engine.write_schema)
                return process_rows(reads, sources, derived, self.process_batches)
            if any(map(_is_async, self._methods)):
                return self._process_async(reads)
            return self._process_plain(reads)

    def _process_plain(self, reads: Iterable[SourceRead]) -> Iterator[tuple[int, Document]]:
        wrap, methods = self._reads, self._methods
        for at, read in enumerate(reads):
            index = read.transform
            try:
                for published in _items(methods[index](wrap[index](read.document))):  # type: ignore[misc]
                    yield at, to_document(published)
            except _USER_ERRORS as e:
                raise self._failed(e, index, at) from e

    def _process_async(self, reads: Iterable[SourceRead]) -> Iterator[tuple[int, Document]]:
        numbered = enumerate(reads)
        while some := list(itertools.islice(numbered, READS_MAX)):
            documents = self._run(self._work_on(some))
            for (at, _), published in zip(some, documents, strict=True):
                for document in published:
                    yield at, document

    async def _work_on(self, reads: Sequence[tuple[int, SourceRead]]) -> list[list[Document]]:
        documents: list[list[Document]] = [[] for _ in reads]
        pending = iter(zip(reads, documents, strict=True))
        workers = [asyncio.ensure_future(self._worker(pending)) for _ in range(self._concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return documents

    async def _worker(
        self, pending: Iterator[tuple[tuple[int, SourceRead], list[Document]]]
    ) -> None:
        """Take reads until there are none. All workers share `pending`."""
        wrap, methods = self._reads, self._methods
        for (at, read), documents in pending:
            index = read.transform
            try:
                result = methods[index](wrap[index](read.document))  # type: ignore[misc]
                if hasattr(result, "__aiter__"):
                    async for published in result:
                        documents.append(to_document(published))
                    continue
                if inspect.isawaitable(result):
                    result = await result
                documents.extend(map(to_document, _items(result)))
            except _USER_ERRORS as e:
                raise self._failed(e, index, at) from e

    @property
    def _concurrency(self) -> int:
        wanted = getattr(self._derivation, "concurrency", None)
        return max(1, wanted) if wanted else 1 if self._engine.stateful else CONCURRENCY

    @property
    def takes_batches(self) -> bool:
        return self._engine.batch

    def process_batches(
        self, transform: int, batch: pa.RecordBatch, at: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield what a batch of one transform's documents publishes, in the columns of the
        derived collection. Only for the batch form; `at` is the position of its last read.
        """
        method = self._methods[transform]
        derived = layout(self._engine.write_schema)
        try:
            for published in self._called(method(batch) if method else ()):
                yield from conforming(published, derived)
        except _USER_ERRORS as e:
            raise self._failed(e, transform, at) from e

    # --- the end ---

    def finish(self) -> Finished:
        """Flush, and say how the state changed."""
        documents: list[Document] = []
        patches: Patches = ()
        with self._loaded.active():
            try:
                patches = self._flush(documents) + self._start_commit()
            except NotJson as e:
                what = f"{self._engine.collection}: its state is not JSON: {e.what}"
                raise LambdaFailed(what, where=e.where, why=e.why, fix=e.fix) from e
            except UserError:
                raise
            except _USER_ERRORS as e:
                raise self._loaded.failed(e, "the transaction cannot end") from e
        if patches and self._shards > 1:
            raise _one_shard(self._engine.collection, self._shards)
        return Finished(documents=documents, patches=patches + keyed_patches(self._keyed, MEMBER))

    def _flush(self, documents: list[Document]) -> Patches:
        patches: Patches = ()
        flush = getattr(self._derivation, "flush", None)
        before: list[Json] = []
        while flush is not None and getattr(flush, "__func__", None) is not BaseDerivation.flush:
            flushed = Flushed()
            published = self._called(flush(*_flush_arguments(flush, before, flushed)))
            answer = None
            for item in published:
                if isinstance(item, Flushed | StartedCommit | ConnectorState):
                    answer = state_of(item)
                elif self._engine.batch:
                    documents.extend(self._rows(item))
                else:
                    documents.append(to_document(item))
            answer = answer or state_of(flushed)
            patches += _wrapped(answer)
            if not flushed.more:
                break
            if self._shards > 1:
                raise _one_shard(self._engine.collection, self._shards)
            before = [answer[0]] if answer else []
        return patches

    def _rows(self, published: object) -> Iterator[Document]:
        derived = layout(self._engine.write_schema)
        for batch in conforming(published, derived):
            yield from map(json.loads, to_json(batch, derived))

    def _start_commit(self) -> Patches:
        start = getattr(self._derivation, "start_commit", None)
        if start is None:
            return ()
        answers = list(self._called(start(*(StartCommit(),)[: _arguments(start, 1)])))
        return _wrapped(state_of(answers[-1])) if answers else ()

    def reset(self) -> None:
        """Call the class's own `reset`, which may forget what the module keeps."""
        with self._loaded.active():
            try:
                list(self._called(getattr(self._derivation, "reset", tuple)()))
            except _USER_ERRORS as e:
                raise self._loaded.failed(e, "it cannot be reset") from e

    def close(self) -> None:
        """Cancel what user code left running."""
        if self._loop is None:
            return
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loaded.loops.append(self._loop)
        self._loop = None

    # --- calls ---

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        if self._loop is None:
            loops = self._loaded.loops
            self._loop = loops.pop() if loops else asyncio.new_event_loop()
        return self._loop.run_until_complete(work)

    def _called(self, result: Any) -> Iterable[Any]:  # noqa: ANN401 - what user code returned
        """All that a call published, asynchronous or not."""
        if hasattr(result, "__aiter__"):
            return self._run(_listed(result))
        if inspect.isawaitable(result):
            result = self._run(_awaited(result))
        return _items(result)

    def _failed(self, error: BaseException, transform: int, at: int | None) -> LambdaFailed:
        """The failure of a transform."""
        if isinstance(error, LambdaFailed):
            return error
        name = self._engine.transforms[transform].name
        return self._loaded.failed(error, f"transform {name} failed", at)


# --- what user code looks like ---


def _reader(model: Model) -> Callable[[Document], Any]:
    """Wrap a document as a method takes it. Names of members are as in the document."""
    validate = functools.partial(
        model.__pydantic_validator__.validate_python, by_alias=True, by_name=False
    )
    return lambda document: validate({"doc": document})


def _is_async(method: Method | None) -> bool:
    return inspect.isasyncgenfunction(method) or inspect.iscoroutinefunction(method)


def _arguments(function: Method, most: int) -> int:
    """How many positional arguments a function takes, `most` at most."""
    count = 0
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            return most
        count += parameter.kind in {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD}
    return min(count, most)


def _flush_arguments(flush: Method, before: list[Json], flushed: Flushed) -> tuple[Any, ...]:
    match _arguments(flush, 2):
        case 0:
            return ()
        case 1:
            return (Flush(statePatches=before),)
        case _:
            return before, flushed


def _configured(wanted: Any, config: Json) -> Any:  # noqa: ANN401 - the user's class
    if isinstance(wanted, type) and issubclass(wanted, pydantic.BaseModel):
        return wanted.model_validate(config)
    return pydantic.TypeAdapter(wanted).validate_python(config)


def _items(result: Any) -> Iterable[Any]:  # noqa: ANN401 - what user code returned
    """The documents of a result: none, one, or those of an iterable."""
    if result is None:
        return ()
    if isinstance(result, pydantic.BaseModel | dict | pa.RecordBatch | pa.Table):
        return (result,)  # which could be iterated as well
    items: Iterable[Any] = result
    return items


async def _listed(published: AsyncIterable[Any]) -> list[Any]:
    return [item async for item in published]


async def _awaited(work: Awaitable[_T]) -> _T:
    return await work


def _wrapped(answer: tuple[Json, bool] | None) -> Patches:
    """A change of the class's state as patches of the connector state."""
    if answer is None:
        return ()
    value, merge = answer
    checked = json.loads(canonical_json(pydantic_core.to_jsonable_python(value)))
    return tuple({MEMBER: {"state": patch}} for patch in updated(checked, merge=merge))
