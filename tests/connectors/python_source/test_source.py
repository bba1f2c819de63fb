"""Functions and classes of users, each in a process of its own."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from connectors.python_source.reading import Reading
from penstock.connectors.python_source.process import WorkerProcess
from penstock.errors import UserError
from penstock.runtime.connector.capture import GIVEN_BYTES_MAX, CaptureSequence, Idle
from penstock.runtime.connector.common import ConnectorError

pytestmark = pytest.mark.timeout(180)


def reading(tmp_path: Path, text: str, **more: object) -> Reading:
    return Reading(tmp_path, textwrap.dedent(text), **more)  # type: ignore[arg-type]


PAGES = """
    from penstock.capture import State

    def read(config, state):
        after = state.get("after", 0)
        while after < config["pages"]:
            yield "orders", [{"id": after * 10 + n} for n in range(3)]
            yield "items", {"id": after}
            after += 1
            yield State({"after": after})
"""


def test_rows_and_the_state_after_them_are_one_sequence(tmp_path: Path) -> None:
    found = reading(tmp_path, PAGES, config={"pages": 2}).run()
    assert [sequence.given_documents for sequence in found.sequences] == [4, 4]
    assert found.ids() == [0, 1, 2, 10, 11, 12]
    assert found.ids("items") == [0, 1]
    assert found.state == {
        "state": [{"after": 2}],
        "streams": {"orders": "orders.v0", "items": "items.v0"},
    }


def test_it_goes_on_from_the_state_that_was_committed(tmp_path: Path) -> None:
    found = reading(tmp_path, PAGES, config={"pages": 3}).run(sequences_max=1)
    assert found.ids("items") == [0]
    assert found.run().ids("items") == [0, 1, 2], "what was not committed came again, and once"


def test_a_raised_backfill_reads_from_the_beginning(tmp_path: Path) -> None:
    found = reading(tmp_path, PAGES, config={"pages": 1}).run()
    assert found.run().ids("items") == [0]
    found.version = 1
    assert found.run().ids("items") == [0, 0]
    assert found.run().ids("items") == [0, 0]


def test_rows_without_a_state_are_committed_and_come_again(tmp_path: Path) -> None:
    found = reading(tmp_path, "def read(config, state):\n    yield 'orders', {'id': 1}\n")
    assert found.run().run().ids() == [1, 1]
    assert found.state == {
        "state": [{}],
        "streams": {"orders": "orders.v0", "items": "items.v0"},
    }


def test_states_are_merged_if_they_say_so_and_keep_what_is_null(tmp_path: Path) -> None:
    text = """
        from penstock.capture import State

        def read(config, state):
            yield State({"a": {"x": 1, "y": None}})
            yield State({"b": [None]}, merge=True)
            yield State({"a": None}, merge=True)
    """
    found = reading(tmp_path, text).run()
    values = [sequence.patches[0]["state"] for sequence in found.sequences]  # type: ignore[call-overload,index]
    assert values == [
        [{"a": {"x": 1, "y": None}}],
        [{"a": {"x": 1, "y": None}, "b": [None]}],
        [{"b": [None]}],
    ]


def test_values_become_json(tmp_path: Path) -> None:
    text = """
        import datetime, decimal, uuid

        def read(config, state):
            yield "orders", {
                "id": 1,
                "at": datetime.datetime(2026, 11, 17, 12, tzinfo=datetime.timezone.utc),
                "day": datetime.date(2026, 11, 17),
                "price": decimal.Decimal("9.50"),
                "big": 2**70,
                "uuid": uuid.UUID(int=1),
                "raw": b"abc",
            }
    """
    ((_, row),) = reading(tmp_path, text).run().documents
    assert row == {
        "id": 1,
        "at": "2026-11-17T12:00:00Z",
        "day": "2026-11-17",
        "price": 9.5,
        "big": 2**70,
        "uuid": "00000000-0000-0000-0000-000000000001",
        "raw": "YWJj",
    }


def test_arrow_tables_and_batches(tmp_path: Path) -> None:
    text = """
        import pyarrow as pa
        from penstock.capture import State

        def read(config, state):
            table = pa.table({"id": list(range(40_000)), "name": ["x"] * 40_000})
            yield "orders", table
            yield "items", table.slice(0, 2).to_batches()[0]
            yield State({"done": True})
    """
    found = reading(tmp_path, text).run()
    assert found.ids() == list(range(40_000))
    assert found.ids("items") == [0, 1]
    assert len(found.sequences) == 1


def test_schemas_come_with_their_sequence(tmp_path: Path) -> None:
    text = """
        from penstock.capture import Schema, State

        def read(config, state):
            yield Schema("items", {"type": "object"})
            yield "items", {"id": 1}
            yield State({})
    """
    (sequence,) = reading(tmp_path, text).run().sequences
    assert sequence.schemas == {1: {"type": "object"}}


CLASS = """
    from penstock.capture import Resource, State

    class Capture:
        def __init__(self, config):
            self.config = config

        def check(self):
            if self.config.get("broken"):
                raise ConnectionError("no route")

        def discover(self):
            return [Resource(stream="orders", schema={"type": "object"}, key=["/id"], note="hm")]

        def read(self, state):
            yield "orders", {"id": self.config["id"]}
            yield State({"seen": state.get("seen", 0) + 1})
"""


def test_a_class(tmp_path: Path) -> None:
    found = reading(tmp_path, CLASS, config={"id": 7})
    assert found.run().run().ids() == [7, 7]
    assert isinstance(found.state, dict)
    assert found.state["state"] == [{"seen": 2}]
    source = found.source()
    source.check()
    (discovered,) = source.discover()
    assert (discovered.name, discovered.resource) == ("orders", {"stream": "orders"})
    assert (discovered.key, discovered.note) == (("/id",), "hm")
    with pytest.raises(ConnectorError, match="ConnectionError: no route") as raised:
        reading(tmp_path, CLASS, config={"broken": True}).source().check()
    assert raised.value.transient


def test_a_module_without_discover_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no function discover"):
        reading(tmp_path, PAGES).source().discover()


def test_secrets_are_resolved_and_only_for_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORDERS_SECRET", "hunter-two-and-a-half")
    text = """
        def read(config, state):
            raise ValueError(f"refused: {config['password']}")
            yield
    """
    found = reading(tmp_path, text, config={"password": "${env:ORDERS_SECRET}"})
    with pytest.raises(ConnectorError) as raised:
        found.run()
    assert "hunter" not in str(raised.value)
    assert "refused: <redacted>" in str(raised.value)


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("text", "what", "where"),
    [
        pytest.param(
            "def read(config, state):\n    yield 'orders', {'id': 1}\n    1 / 0\n",
            "ZeroDivisionError: division by zero",
            "orders.py, line 3, in read",
            id="an exception",
        ),
        pytest.param(
            "import json\ndef read(config, state):\n    json.loads('{')\n    yield\n",
            "JSONDecodeError",
            "orders.py, line 3, in read",
            id="in a library, called from the module",
        ),
        pytest.param("def read(:\n", "SyntaxError", "orders.py, line 1", id="syntax"),
        pytest.param(
            "import nowhere\n", "ModuleNotFoundError", "orders.py, line 1", id="an import"
        ),
        pytest.param("x = 1\n", "has no function read", "acme/in", id="no read"),
        pytest.param("class Capture:\n  pass\n", "has no function read", "acme/in", id="no method"),
        pytest.param(
            "class Capture:\n  def __init__(self): pass\n",
            "Capture cannot be called with 1 argument",
            "acme/in",
            id="no config",
        ),
        pytest.param("def read(config): yield 1\n", "with 2 arguments", "acme/in", id="arguments"),
        pytest.param(
            "def read(config, state): return [1]\n", "returns no generator", "acme/in", id="a list"
        ),
        pytest.param(
            "async def read(config, state):\n    yield 1\n", "read is async", "acme/in", id="async"
        ),
        pytest.param(
            "def read(config, state):\n    yield 1\n",
            "read yielded a int",
            "orders.py, line 2, in read",
            id="a number",
        ),
        pytest.param(
            "def read(config, state):\n    yield 'orders', [1]\n",
            "a row of 'orders' is a int",
            "orders.py, line 2, in read",
            id="a row that is a number",
        ),
        pytest.param(
            "def read(config, state):\n    yield 'orders', {'id': object()}\n",
            "cannot be written as JSON",
            "orders.py, line 2, in read",
            id="a value that is no JSON",
        ),
        pytest.param(
            "from penstock.capture import State\ndef read(config, state):\n    yield State([1])\n",
            "State has a list",
            "orders.py, line 3, in read",
            id="a state that is a list",
        ),
        pytest.param(
            "import os\ndef read(config, state):\n    os._exit(3)\n    yield\n",
            "the process of the module died",
            "acme/in",
            id="an exit",
        ),
        pytest.param(
            "import sys\ndef read(config, state):\n    sys.exit('enough')\n    yield\n",
            "SystemExit: enough",
            "line 3",
            id="an exit that can be caught",
        ),
    ],
)
def test_errors_say_what_and_where(tmp_path: Path, text: str, what: str, where: str) -> None:
    with pytest.raises(ConnectorError) as raised:
        Reading(tmp_path, text).run()
    assert what in raised.value.what
    assert where in (raised.value.where or "")
    assert not raised.value.transient


@pytest.mark.parametrize(
    ("statement", "transient"),
    [
        ("raise ConnectionResetError('gone')", True),
        ("raise TimeoutError('slow')", True),
        ("open('/nowhere/at/all')", False),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", True),
    ],
)
def test_errors_that_may_pass_are_marked(tmp_path: Path, statement: str, transient: bool) -> None:
    text = f"def read(config, state):\n    {statement}\n    yield\n"
    with pytest.raises(ConnectorError) as raised:
        Reading(tmp_path, text).run()
    assert raised.value.transient is transient


def test_rows_before_an_error_are_not_committed(tmp_path: Path) -> None:
    text = """
        from penstock.capture import State

        def read(config, state):
            yield "orders", {"id": 1}
            yield State({"after": 1})
            yield "orders", {"id": 2}
            raise ValueError("no")
    """
    found = reading(tmp_path, text)
    with pytest.raises(ConnectorError):
        found.run()
    assert found.ids() == [1]


def test_what_it_prints_is_logged_and_disturbs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = """
        import os, sys

        def read(config, state):
            print("to standard output")
            print("to standard error", file=sys.stderr)
            os.write(1, b"by its descriptor\\n")
            yield "orders", {"id": 1}
    """
    with caplog.at_level(logging.INFO):
        assert reading(tmp_path, text).run().ids() == [1]
    for said in ("to standard output", "to standard error", "by its descriptor"):
        assert f"acme/in: {said}" in caplog.text


def test_streams_without_a_binding_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "def read(config, state):\n    yield 'other', {'id': 1}\n    yield 'orders', {'id': 2}\n"
    found = Reading(tmp_path, text).run()
    assert (found.ids(), found.ids("other")) == ([2], [])
    assert "rows of stream other are left out" in caplog.text


# ------------------------------------------------------------------------------- the process itself


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def gone(pid: int) -> bool:
    until = time.monotonic() + 20
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not alive(pid)


SLEEPS = """
    import os, subprocess, time

    def read(config, state):
        child = subprocess.Popen(["sleep", "600"])
        try:
            yield "orders", [{"id": os.getpid()}, {"id": child.pid}]
            from penstock.capture import State
            yield State({})
            time.sleep(600)
        finally:
            open(config["note"], "w").write("cleaned up")
"""


def test_a_function_that_sleeps_can_be_stopped_and_cleans_up(tmp_path: Path) -> None:
    note = tmp_path / "note"
    found = reading(tmp_path, SLEEPS, config={"note": str(note)})
    session = found.open()
    polled = session.poll(30)
    while not isinstance(polled, CaptureSequence):
        polled = session.poll(30)
    found.commit(polled)
    results: list[object] = []
    poll = threading.Thread(target=lambda: results.append(session.poll(600)))
    poll.start()
    session.close()
    poll.join(30)
    assert results == [Idle.PENDING]
    assert all(gone(pid) for pid in found.ids()), "the process, and what it has started"
    assert note.read_text() == "cleaned up"


def test_a_function_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    text = """
        import os, signal, time

        def read(config, state):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            yield "orders", {"id": os.getpid()}
            from penstock.capture import State
            yield State({})
            time.sleep(600)
    """
    found = reading(tmp_path, text).run(sequences_max=1)
    (pid,) = found.ids()
    assert gone(pid)


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = textwrap.dedent(
        f"""
        import sys, time
        from pathlib import Path
        from connectors.python_source.reading import Reading
        text = "import os, time\\ndef read(config, state):\\n"
        text += "    open(config['pid'], 'w').write(str(os.getpid()))\\n    time.sleep(600)\\n"
        text += "    yield\\n"
        Reading(Path({str(tmp_path)!r}), text, config={{"pid": sys.argv[1]}}).open()
        time.sleep(600)
        """
    )
    file = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", code, str(file)]) as parent:
        until = time.monotonic() + 60
        while not (file.exists() and file.read_text()):
            assert time.monotonic() < until
            time.sleep(0.02)
        parent.send_signal(signal.SIGKILL)
    assert gone(int(file.read_text()))


def test_an_interrupt_ends_a_check(tmp_path: Path) -> None:
    text = "import time\ndef check(config): time.sleep(600)\ndef read(config, state): yield 1\n"
    source = Reading(tmp_path, text).source()
    raised: list[BaseException] = []

    def check() -> None:
        try:
            source.check()
        except ConnectorError as error:
            raised.append(error)

    thread = threading.Thread(target=check)
    thread.start()
    while thread.is_alive():
        source.interrupt()
        thread.join(0.1)
    assert "was interrupted" in str(raised[0])


# --------------------------------------------------------------------------------------- many rows

MANY = """
    from penstock.capture import State

    def read(config, state):
        for first in range(0, config["rows"], 10_000):
            yield "orders", ({"id": n, "text": "x" * 60} for n in range(first, first + 10_000))
            if config["states"]:
                yield State({"after": first})
        yield State({"after": config["rows"]})
"""


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("states", [True, False], ids=["with states", "in one sequence"])
def test_memory_stays_flat_over_a_million_rows(tmp_path: Path, states: bool) -> None:
    found = reading(tmp_path, MANY, config={"rows": 1_000_000, "states": states})
    reading(tmp_path, MANY, config={"rows": 50_000, "states": states}).run()  # what is loaded once
    before = most = resident_bytes()
    session = found.open()
    rows = files = 0
    try:
        while (polled := session.poll(1.0)) is not Idle.END:
            most = max(most, resident_bytes())
            if isinstance(polled, CaptureSequence):
                rows += polled.given_documents
                for read in polled.reads:
                    rows += sum(count - 1 for count in read.rows_max or ())
                    files += 1
                session.acknowledge(1)
    finally:
        session.close()
    assert rows == 1_000_000
    assert files == (0 if states else 1)
    assert most - before < 64 << 20, f"{most - before} bytes more, for 80 MB of rows"


def test_a_large_sequence_is_read_from_a_file_in_order(tmp_path: Path) -> None:
    found = reading(tmp_path, MANY, config={"rows": 300_000, "states": False})
    session = found.open()
    try:
        polled = session.poll(60)
        while not isinstance(polled, CaptureSequence):
            polled = session.poll(60)
        (read,) = polled.reads
        assert read.bytes > GIVEN_BYTES_MAX
        assert len(read.rows_max or ()) > 1
        found.commit(polled)
        (path,) = Path(read.path).parent.iterdir()  # type: ignore[attr-defined]
        session.acknowledge(1)
        assert not path.exists(), "what is committed is not kept"
    finally:
        session.close()
    assert found.ids() == list(range(300_000))
    assert not path.parent.exists()


def test_files_of_a_process_that_was_killed_are_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    name = f"penstock-python-{os.getuid()}.preview-dead"
    (tmp_path / name).mkdir()
    (tmp_path / name / "1.rows").write_text("left behind")
    (tmp_path / f"{name}.lock").touch()
    first = reading(tmp_path, PAGES, config={"pages": 1}).open()
    try:
        assert not (tmp_path / name).exists()
        second = reading(tmp_path, PAGES, config={"pages": 1}).open()
        second.close()
        alive = [found for found in tmp_path.iterdir() if found.name.startswith("penstock-python")]
        assert len(alive) == 2, "the directory of the first, and its lock"
    finally:
        first.close()


def test_a_function_that_is_faster_waits(tmp_path: Path) -> None:
    text = """
        from penstock.capture import State

        def read(config, state):
            for n in range(1000):
                yield "orders", [{"id": n, "text": "x" * 1000} for _ in range(100)]
                open(config["note"], "w").write(str(n))
                yield State({"after": n})
    """
    note = tmp_path / "note"
    session = reading(tmp_path, text, config={"note": str(note)}).open()
    try:
        assert isinstance(session.poll(60), CaptureSequence | Idle)
        time.sleep(1.0)
        assert int(note.read_text() or 0) < 20, "the pipe is full"
    finally:
        session.close()


def test_a_process_can_be_closed_twice(tmp_path: Path) -> None:
    request = {
        "do": "check", "module": "def read(c, s): yield", "dlt": None, "file": "x.py",
        "config": {}, "state": {},
    }  # fmt: skip
    worker = WorkerProcess(request, task="acme/in", where="capture acme/in")
    worker.close()
    worker.close()
