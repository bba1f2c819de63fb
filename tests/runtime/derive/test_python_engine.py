"""Python derivations: generations of the interface, order, state, failures."""

from __future__ import annotations

import pickle
import textwrap
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import UserError
from penstock.runtime.derive.engine import LambdaFailed, SourceRead
from penstock.runtime.patches import apply_patches
from runtime.derive.python_catalogs import Task, engine, ints, opened, reads

HEAD = "from patterns.stateful import IDerivation, Document, Request, Response, ConnectorState\n"


def module(body: str, head: str = HEAD) -> str:
    return head + textwrap.dedent(body)


FIRST = module(
    """
    from collections.abc import AsyncIterator
    from pydantic import BaseModel, Field

    class State(BaseModel):
        class KeyState(BaseModel):
            count: int = 0
            sum: int = 0
        keys: dict[str, KeyState] = Field(default_factory=dict)

    class Derivation(IDerivation):
        def __init__(self, open: Request.Open):
            super().__init__(open)
            self.state = State(**open.state)
            self.touched = State()

        async def from_ints(self, read: Request.ReadFromInts) -> AsyncIterator[Document]:
            ks = self.state.keys.setdefault(read.doc.Key, State.KeyState())
            ks.count += 1
            ks.sum += read.doc.Int
            self.touched.keys[read.doc.Key] = ks
            yield Document(Key=read.doc.Key, Count=ks.count, Sum=ks.sum)

        def start_commit(self, _: Request.StartCommit) -> Response.StartedCommit:
            updated = self.touched.model_dump()
            return Response.StartedCommit(
                state=Response.StartedCommit.State(updated=updated, merge_patch=True))

        async def reset(self):
            self.state = State()
    """
)
LISTS = module(
    """
    class Derivation(IDerivation):
        def __init__(self, open):
            self.sums = dict(open.state)

        def from_ints(self, read):
            key = read.doc.Key
            count, sum_ = self.sums.get(key, (0, 0))
            self.sums[key] = [count + 1, sum_ + read.doc.Int]
            return [Document(Key=key, Count=count + 1, Sum=sum_ + read.doc.Int)]

        def start_commit(self, start_commit):
            return Response.StartedCommit(
                state=Response.ConnectorState(updated=self.sums, merge_patch=False))
    """
)
NEWEST = module(
    """
    class Derivation(IDerivation):
        def __init__(self, open: Request.Open, config):
            super().__init__(open, config)
            self.sums, self.step = dict(open.state), config.step

        async def from_ints(self, read: Request.ReadFromInts):
            key = read.doc.Key
            count, sum_ = self.sums.get(key, (0, 0))
            self.sums[key] = [count + self.step, sum_ + read.doc.Int]
            yield Document(Key=key, Count=count + self.step, Sum=sum_ + read.doc.Int)

        async def flush(self, state_patches: list, flushed: Response.Flushed):
            flushed.state = ConnectorState(updated=self.sums, merge_patch=True)
            if False:
                yield
    """
)


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(FIRST, id="start_commit merges a patch"),
        pytest.param(LISTS, id="methods return lists, and the state is replaced"),
        pytest.param(NEWEST, id="flush sets flushed.state, and there is a config"),
    ],
)
def test_sums_continue_over_transactions(code: str) -> None:
    task = Task(pickle.loads(pickle.dumps(engine(code, config={"step": 1}))))  # noqa: S301
    assert task.engine.stateful
    first = task.transaction(ints(("a", 1), ("b", 10), ("a", 2)))
    assert first == [
        {"Key": "a", "Count": 1, "Sum": 1},
        {"Key": "b", "Count": 1, "Sum": 10},
        {"Key": "a", "Count": 2, "Sum": 3},
    ]
    assert task.transaction(ints(("a", 4))) == [{"Key": "a", "Count": 3, "Sum": 7}]
    assert set(task.state) == {"python"}


@pytest.mark.parametrize(("merge", "want"), [(True, {"a": 1, "b": 2}), (False, {"b": 2})])
def test_state_is_merged_or_replaced(merge: bool, want: dict[str, int]) -> None:
    code = module(
        f"""
        class Derivation(IDerivation):
            def __init__(self, open): self.updated = {{}}
            def from_ints(self, read): self.updated[read.doc.Key] = read.doc.Int
            def start_commit(self):
                state = ConnectorState(updated=self.updated, merge_patch={merge})
                return Response.StartedCommit(state=state)
        """
    )
    task = Task(engine(code), {"other": 1})
    task.transaction(ints(("a", 1)))
    task.transaction(ints(("b", 2)))
    assert task.state == {"other": 1, "python": {"state": want}}


@pytest.mark.parametrize(
    ("body", "stateful"),
    [
        ("def from_ints(self, read): return self.helper(read)", False),
        ("def flush(self): return []", True),
        ("def __init__(self, open): pass", True),
        ("def from_ints(self, read): self.seen = 1", True),
        ("def from_ints(this, read): this.keyed[1] = 1", True),
        ("def from_ints(self, read):\n        global N\n        N = 1", True),
    ],
)
def test_what_makes_a_class_stateful(body: str, stateful: bool) -> None:
    assert engine(f"class Derivation(IDerivation):\n    {body}\n").stateful is stateful


def test_members_keep_their_names_from_read_to_document() -> None:
    source = {"type": "object", "properties": {"a-b": {"type": "integer"}}}
    code = module(
        "class Derivation(IDerivation):\n    def from_ints(self, read): return [read.doc]\n"
    )
    document = {"a-b": 1, "a_b": "another"}
    assert Task(engine(code, source=source)).transaction(reads(document)) == [document]
    assert Task(engine(code, source=source)).transaction(reads({"a_b": "x"})) == [{"a_b": "x"}]


def test_a_transaction_that_is_not_committed_changes_nothing() -> None:
    task = Task(engine(FIRST))
    task.transaction(ints(("a", 1)))
    lost = opened(task.engine, task.state)
    list(lost.process(ints(("a", 100))))
    lost.finish()
    lost.close()
    assert task.transaction(ints(("a", 2))) == [{"Key": "a", "Count": 2, "Sum": 3}]


@pytest.mark.parametrize(
    ("method", "want"),
    [
        ("def from_ints(self, read): return None", []),
        ("def from_ints(self, read): return Document(Key='k')", [{"Key": "k"}]),
        ("def from_ints(self, read): return {'Key': 'k', 'x': [1]}", [{"Key": "k", "x": [1]}]),
        (
            "def from_ints(self, read): yield Document(Key='k', Note=None)",
            [{"Key": "k", "Note": None}],
        ),
        ("async def from_ints(self, read): return [Document(Key='k')]", [{"Key": "k"}]),
        ("async def from_ints(self, read): return None", []),
        ("async def from_ints(self, read):\n  yield Document(Key=read.doc.Key)", [{"Key": "a"}]),
        (
            "def from_ints(self, read):\n  d = Document(Key='k'); d.Sum = 3; return [d]",
            [{"Key": "k", "Sum": 3}],
        ),
        (
            "def from_ints(self, read): return (Document(Key=k) for k in 'xy')",
            [{"Key": "x"}, {"Key": "y"}],
        ),
        (
            "def from_ints(self, read): return [read.doc]",
            [{"Key": "a", "Int": 1, "_meta": {"uuid": "u1"}}],
        ),
    ],
)
def test_what_a_method_may_return(method: str, want: list[Any]) -> None:
    body = textwrap.indent(method, "    ")
    assert (
        Task(engine(f"{HEAD}class Derivation(IDerivation):\n{body}\n")).transaction(ints(("a", 1)))
        == want
    )


SLOW = """
import asyncio

ACTIVE = MOST = 0

class Derivation(IDerivation):
{attribute}
    async def from_ints(self, read):
        global ACTIVE, MOST
        ACTIVE += 1
        MOST = max(MOST, ACTIVE)
        await asyncio.sleep(0.03 if read.doc.Int == 0 else 0)
        ACTIVE -= 1
        yield Document(Key=read.doc.Key, Sum=read.doc.Int, Count=MOST)
"""


@pytest.mark.parametrize(("wanted", "most"), [(4, 4), (1, 1)])
def test_a_slow_first_document_keeps_its_place(wanted: int, most: int) -> None:
    code = HEAD + SLOW.format(attribute=f"    concurrency = {wanted}")
    processor = opened(engine(code))
    published = list(processor.process(ints(*(("a", i) for i in range(1200)))))
    processor.close()
    assert [at for at, _ in published] == list(range(1200))
    assert [d["Sum"] for _, d in published] == list(range(1200))
    assert max(int(str(d["Count"])) for _, d in published) == most


def test_reads_overlap_only_in_a_class_without_state() -> None:
    without = """
    import asyncio
    active = []

    class Derivation(IDerivation):
        async def from_ints(self, read):
            active.append(read.doc.Int)
            await asyncio.sleep(0)
            yield Document(Key="n", Count=len(active))
            active.remove(read.doc.Int)
    """
    made = engine(module(without))
    assert not made.stateful
    assert (
        max(d["Count"] for d in Task(made).transaction(ints(*(("a", i) for i in range(50))))) == 16
    )
    kept = engine(module(without + "\n        def __init__(self, open): self.x = 1\n"))
    assert kept.stateful
    assert (
        max(d["Count"] for d in Task(kept).transaction(ints(*(("a", i) for i in range(50))))) == 1
    )


def test_tasks_of_the_users_own_are_awaited_in_flush() -> None:
    code = module(
        """
        import asyncio

        class Derivation(IDerivation):
            def __init__(self, open):
                self.pending = []

            async def look_up(self, doc):
                await asyncio.sleep(0.001)
                return Document(Key=doc.Key, Sum=doc.Int)

            async def from_ints(self, read):
                self.pending.append(asyncio.create_task(self.look_up(read.doc)))
                if len(self.pending) > 2:
                    yield await self.pending.pop(0)

            async def flush(self):
                for task in self.pending:
                    yield await task
        """
    )
    task = Task(engine(code))
    for _ in range(2):
        published = task.transaction(ints(*(("a", i) for i in range(5))))
        assert [d["Sum"] for d in published] == [0, 1, 2, 3, 4]
    assert task.state == {}


def test_what_the_module_keeps_outlives_the_event_loop_of_a_transaction() -> None:
    code = module(
        """
        import asyncio
        LIMIT = asyncio.Semaphore(1)

        class Derivation(IDerivation):
            async def from_ints(self, read):
                async with LIMIT:
                    await asyncio.sleep(0)
                yield Document(Key=read.doc.Key)
        """
    )
    task = Task(engine(code))
    for _ in range(2):
        assert len(task.transaction(ints(("a", 1), ("b", 2), ("c", 3)))) == 3


def test_tasks_left_running_are_cancelled() -> None:
    code = module(
        """
        import asyncio
        cancelled = []

        async def forever():
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                cancelled.append(1)
                raise

        class Derivation(IDerivation):
            async def from_ints(self, read):
                self.left = asyncio.create_task(forever())
                await asyncio.sleep(0)
                yield Document(Key="k", Count=len(cancelled))
        """
    )
    task = Task(engine(code))
    assert [task.transaction(ints(("a", 1)))[0]["Count"] for _ in range(2)] == [0, 1]


def test_flush_may_ask_for_another_call() -> None:
    code = module(
        """
        class Derivation(IDerivation):
            def from_ints(self, read):
                return []

            def flush(self, state_patches, flushed):
                flushed.state = ConnectorState(updated={"n": len(state_patches)}, merge_patch=True)
                flushed.more = not state_patches
                yield Document(Key="end", Count=len(state_patches))
        """
    )
    task = Task(engine(code))
    assert [d["Count"] for d in task.transaction(())] == [0, 1]
    assert task.state == {"python": {"state": {"n": 1}}}


# --- shards ---


def test_one_state_for_all_documents_has_one_shard() -> None:
    with pytest.raises(UserError, match="cannot have 3 shards") as refused:
        opened(engine(FIRST), shards=3)
    assert "self.keyed" in str(refused.value)


KEYED = module(
    """
    class Derivation(IDerivation):
        def from_ints(self, read):
            of_key = self.keyed.setdefault(read.doc.Key, {"sum": 0, "none": None})
            of_key["sum"] += read.doc.Int
            if of_key["sum"] == 0:
                del self.keyed[read.doc.Key]
            yield Document(Key=read.doc.Key, Sum=of_key["sum"])
    """
)


def test_state_by_key_is_shared_by_shards() -> None:
    made = engine(KEYED)
    assert made.stateful
    assert not made.keeps_state
    state: Any = {}
    for some in ([("a", 1), ("b", 2)], [("a", 3), ("b", -2)]):
        patches: list[Any] = []
        for shard, pair in enumerate(some):
            processor = opened(made, state, shard=shard, shards=2)
            list(processor.process(ints(pair)))
            patches += processor.finish().patches
            processor.close()
        state = apply_patches(state, patches)
    assert state == {"python": {"keyed": {'"a"': '{"none":null,"sum":4}'}}}


def test_state_that_nothing_changed_is_not_written_again() -> None:
    task = Task(engine(KEYED))
    task.transaction(ints(("a", 1)))
    processor = opened(task.engine, task.state)
    list(processor.process(ints(("a", 0))))
    assert processor.finish().patches == ()


# --- failures ---


def failure(code: str, some: list[SourceRead] | None = None, **more: Any) -> LambdaFailed:  # noqa: ANN401
    task = Task(engine(code, **more))
    with pytest.raises(LambdaFailed) as caught:
        task.transaction(ints(("a", 1), ("b", 0)) if some is None else some)
    return caught.value


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_an_exception_names_transform_line_and_document(kind: str) -> None:
    code = f"""{HEAD}
def halve(n):
    return 1 // n

class Derivation(IDerivation):
    {kind} from_ints(self, read):
        yield Document(Key=read.doc.Key, Sum=halve(read.doc.Int))
"""
    failed = failure(code)
    assert failed.what == "patterns/stateful: transform fromInts failed"
    assert failed.where == "line 4 of the module: return 1 // n"
    assert failed.why == "ZeroDivisionError: integer division or modulo by zero"
    assert failed.read == 1


def test_the_first_failure_ends_reads_that_wait() -> None:
    code = module(
        """
        import asyncio

        class Derivation(IDerivation):
            concurrency = 4
            async def from_ints(self, read):
                await asyncio.sleep(3600 if read.doc.Int else 0)
                raise SystemExit("stop")
                yield
        """
    )
    failed = failure(code)
    assert (failed.why, failed.read) == ("SystemExit: stop", 1)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("Document(Key='k', Sum='many')", "Document is not valid: Sum/"),
        ("Document(Sum=1)", "Document is not valid: Key: Field required"),
        ("17", "TypeError: published an int, not a Document"),
    ],
)
def test_a_document_that_cannot_be_made_is_a_failure_at_its_line(line: str, why: str) -> None:
    failed = failure(
        f"{HEAD}class Derivation(IDerivation):\n  def from_ints(self, read):\n    yield {line}\n"
    )
    assert failed.why is not None
    assert failed.why.startswith(why)
    assert failed.read == 0
    if "Document(" in line:
        assert failed.where == f"line 4 of the module: yield {line}"


def test_a_missing_package_says_how_to_install_it() -> None:
    failed = failure("import numpi_of_nobody.linalg\nclass Derivation: pass\n")
    assert failed.what == "patterns/stateful imports numpi_of_nobody, which is not installed"
    assert failed.where == "line 1 of the module: import numpi_of_nobody.linalg"
    assert failed.fix is not None
    assert "add numpi_of_nobody to dependencies" in failed.fix
    assert "penstock run --install" in failed.fix


def test_types_of_another_name_are_explained() -> None:
    failed = failure("from patterns.statefull import Document\n")
    assert failed.fix == "the types of patterns/stateful are in the module patterns.stateful"


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("x = 1\n", "has no class Derivation"),
        ("class Derivation: pass\n", "has no method for transform fromInts"),
        ("raise ValueError('no')\n", "the module cannot be loaded"),
        (
            "class Derivation:\n  def __init__(self, open): raise ValueError('no')\n",
            "cannot be opened",
        ),
        ("def f(:\n", "the module cannot be loaded"),
    ],
)
def test_code_that_cannot_be_opened(code: str, what: str) -> None:
    assert what in failure(code).what


def test_state_that_is_not_json_is_a_failure() -> None:
    code = LISTS.replace("updated=self.sums", "updated={'n': float('nan')}")
    assert "its state is not JSON: nan" in failure(code).what


def test_a_config_that_does_not_fit_its_schema_is_a_failure() -> None:
    schema = {"type": "object", "required": ["step"], "properties": {"step": {"type": "integer"}}}
    failed = failure(NEWEST, config={"step": "x"}, config_schema=schema)
    assert "EndpointConfig is not valid: step" in str(failed)


def test_a_class_may_name_its_own_config() -> None:
    code = module(
        """
        import pydantic

        class Config(pydantic.BaseModel):
            step: int = 5

        class Derivation(IDerivation[Config]):
            def __init__(self, open: Request.Open[Config], config: Config):
                self.config = config

            def from_ints(self, read):
                yield Document(Key="k", Count=self.config.step)
        """
    )
    assert Task(engine(code)).transaction(ints(("a", 1))) == [{"Key": "k", "Count": 5}]


def test_secrets_of_the_config_are_resolved_in_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    code = NEWEST.replace("config.step", "len(config.token)")
    made = engine(code, config={"token": "${env:STEP_TOKEN}"})
    assert "xyz" not in repr(made)
    monkeypatch.setenv("STEP_TOKEN", "xyz")
    assert Task(made).transaction(ints(("a", 1)))[0]["Count"] == 3


def test_print_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    code = module(
        "class Derivation(IDerivation):\n  def from_ints(self, read): print('saw', read.doc.Key)\n"
    )
    Task(engine(code)).transaction(ints(("a", 1)))
    assert capsys.readouterr() == ("", "saw a\n")


def test_reset_calls_the_users_own() -> None:
    code = module(
        """
        seen = []
        class Derivation(IDerivation):
            def from_ints(self, read):
                seen.append(1)
                return [Document(Key="k", Count=len(seen))]
            async def reset(self):
                seen.clear()
        """
    )
    task = Task(engine(code))
    assert task.transaction(ints(("a", 1), ("b", 2)))[-1]["Count"] == 2
    processor = opened(task.engine)
    processor.reset()
    processor.close()
    assert task.transaction(ints(("a", 1)))[-1]["Count"] == 1


def test_a_number_that_json_lacks_is_kept_for_validation_to_refuse() -> None:
    code = module(
        """
        class Derivation(IDerivation):
            def from_ints(self, read):
                yield Document(Key="k", more=float("nan"))
        """
    )
    ((_, document),) = opened(engine(code)).process(ints(("a", 1)))
    assert repr(document["more"]) == "nan"


# --- projects, several derivations ---


def project(word: str) -> tuple[tuple[str, str], ...]:
    return (
        ("enrich/pyproject.toml", "[project]\nname = 'enrich'\ndependencies = ['numpy']\n"),
        ("enrich/src/enrich/__init__.py", "from .derivation import Derivation\n"),
        (
            "enrich/src/enrich/derivation.py",
            module(
                """
                class Derivation(IDerivation):
                    def from_ints(self, read):
                        from enrich.words.word import WORD
                        yield Document(Key=WORD, Sum=10 // read.doc.Int)
                """
            ),
        ),
        ("enrich/src/enrich/words/__init__.py", ""),
        ("enrich/src/enrich/words/word.py", f"WORD = {word!r}\n"),
    )


def test_projects_of_one_name_do_not_disturb_each_other() -> None:
    tasks = [Task(engine(None, files=project(word))) for word in ("one", "two", "three")]
    for _ in range(2):
        for task, word in zip(tasks, ("one", "two", "three"), strict=True):
            assert task.transaction(ints(("a", 5))) == [{"Key": word, "Sum": 2}]


def test_a_failure_in_a_project_names_the_file() -> None:
    failed = failure(None, files=project("one"))  # type: ignore[arg-type]
    assert failed.where is not None
    assert failed.where.startswith("line 6 of enrich/src/enrich/derivation.py: yield Document(")


def test_collections_may_be_called_as_installed_packages() -> None:
    code = HEAD.replace("patterns.stateful", "json.to_tals")
    code += "import json\nclass Derivation(IDerivation):\n  def from_ints(self, read):\n"
    code += "    yield Document(Key=json.dumps([1]))\n"
    task = Task(engine(code, name="json/to-tals"))
    assert task.transaction(ints(("a", 1))) == [{"Key": "[1]"}]


def test_several_transforms_run_in_the_order_of_reads() -> None:
    code = module(
        """
        class Derivation(IDerivation):
            def from_ints(self, read: Request.ReadFromInts):
                yield Document(Key="sync", Sum=read.doc.Int)

            async def more_ints(self, read: Request.ReadMoreInts):
                yield Document(Key="async", Sum=read.doc.Int)
        """
    )
    made = engine(code, transforms=("fromInts", "more-ints"))
    some = [SourceRead(transform=i % 2, document={"Key": "a", "Int": i}) for i in range(5)]
    want = [("sync", 0), ("async", 1), ("sync", 2), ("async", 3), ("sync", 4)]
    assert [(d["Key"], d["Sum"]) for d in Task(made).transaction(some)] == want


# --- batches ---

BATCH = module(
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    class Derivation(IDerivation):
        def from_ints(self, batch):
            doubled = pc.multiply(batch.column("Int"), 2).cast(pa.int32())
            yield pa.record_batch({"Sum": doubled, "Key": batch.column("Key")})
    """
)


def test_batches_are_conformed_to_the_collection() -> None:
    made = engine(BATCH, batch=True)
    processor = opened(made)
    from penstock.journal.schemas import layout
    from penstock.native.arrow import to_arrow, to_json

    source = to_arrow(
        [{"Key": "a", "Int": 1}, {"Key": "b", "Int": 2}], layout(made.transforms[0].read_schema)
    )
    (batch,) = processor.process_batches(0, source)
    derived = layout(made.write_schema)
    assert to_json(batch, derived) == ['{"Key":"a","Sum":2}', '{"Key":"b","Sum":4}']


def test_the_batch_form_runs_on_documents_as_well() -> None:
    task = Task(engine(BATCH, batch=True))
    assert task.transaction(ints(("a", 1), ("b", 2))) == [
        {"Key": "a", "Sum": 2},
        {"Key": "b", "Sum": 4},
    ]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"Sum": doubled', '"Summ": doubled', "did you mean Sum?"),
        ('"Sum": doubled', '"Sum": batch.column("Key")', "cannot become int64"),
        ("yield pa.record_batch(", "yield dict(", "published a dict, not a pyarrow.RecordBatch"),
    ],
)
def test_batches_that_do_not_fit_are_failures(old: str, new: str, why: str) -> None:
    failed = failure(BATCH.replace(old, new), batch=True)
    assert failed.why is not None
    assert why in failed.why
    assert failed.read == 1


def test_tables_are_batches_too() -> None:
    code = BATCH.replace("yield pa.record_batch(", "return pa.table(")
    assert isinstance(pa.table({}), pa.Table)
    assert len(Task(engine(code, batch=True)).transaction(ints(("a", 1)))) == 1
