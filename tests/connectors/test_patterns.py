"""Connectors whose endpoint has no transaction for the whole: the rules they live by."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.model.clock import Clock
from penstock.model.json_order import Json
from penstock.model.spec import Endpoint
from penstock.runtime.connector.materialize import FencedEndpoint, Materialization, Pattern
from penstock.runtime.patches import apply_patches
from penstock.testing.sink_harness import Bind, Document, SinkRun, build_sink, expected
from support.endpoints import Direct, Files, Table

SCHEMA: Document = {
    "type": "object",
    "required": ["k"],
    "properties": {
        "k": {"type": "integer"},
        "n": {"type": "integer", "reduce": {"strategy": "sum"}},
    },
    "reduce": {"strategy": "merge"},
}
ONE, TWO = Bind(schema=SCHEMA, table="one"), Bind(schema=SCHEMA, table="two")


def start(
    directory: Path,
    kind: type[Files | Direct],
    *binds: Bind,
    epoch: int = 1,
    state: Json = None,
    last: SinkRun | None = None,
) -> SinkRun:
    def connect(endpoint: Endpoint, where: str) -> Materialization:
        return kind(endpoint.config.value, where=where)

    what = build_sink(directory, binds, connect, config={"path": str(directory / "views")})
    before = None if last is None else last.built
    return SinkRun.start(what, epoch=epoch, state=state, last=before)


def shown(directory: Path, table: str = "one") -> dict[int, int]:
    return {row["k"]: row["n"] for row in Table(directory / "views" / f"{table}.db").rows()}


def staged_files(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "views" / "staged").glob("*"))


# -------------------------------------------------------------------------------- pattern APPLY


def test_rows_appear_with_the_acknowledgement_and_are_forgotten_then(tmp_path: Path) -> None:
    run = start(tmp_path, Files, ONE)
    assert run.built.connector.pattern is Pattern.APPLY
    assert run.session.checkpoint is None
    assert run.session.acknowledge(()) == ()
    patches = run.commit(run.stage([{"k": 1, "n": 1}]))
    assert shown(tmp_path) == {}
    forgotten = run.session.acknowledge(patches)
    assert shown(tmp_path) == {1: 1}
    assert apply_patches({}, [*patches, *forgotten]) == {"units": {}}
    assert staged_files(tmp_path) == []


def test_staged_names_are_unique_and_named_in_the_patch(tmp_path: Path) -> None:
    """Rows that no patch names are not applied, and are swept."""
    run = start(tmp_path, Files, ONE)
    lost, won = run.stage([{"k": 1, "n": 100}]), run.stage([{"k": 1, "n": 1}])
    assert lost[0].at != won[0].at
    patches = run.commit(won)
    assert won[0].at in json.dumps(patches)
    assert lost[0].at not in json.dumps(patches)
    again = start(tmp_path, Files, ONE, epoch=2, state=apply_patches({}, patches))
    assert staged_files(tmp_path) == [won[0].at]
    again.session.acknowledge(())
    assert shown(tmp_path) == {1: 1}


def test_a_unit_is_applied_once_however_often_it_is_acknowledged(tmp_path: Path) -> None:
    """The patch that forgets a unit may be lost; the guard is what counts."""
    run = start(tmp_path, Files, ONE)
    patches = run.commit(run.stage([{"k": 1, "n": 1}]))
    state = apply_patches({}, patches)
    run.session.acknowledge(patches)
    for epoch in (2, 3):
        again = start(tmp_path, Files, ONE, epoch=epoch, state=state)
        assert again.session.acknowledge(()) != ()
        assert shown(tmp_path) == {1: 1}


def test_an_old_unit_after_a_newer_one_changes_nothing(tmp_path: Path) -> None:
    """A zombie that wakes up late finds the guard beyond its unit."""
    zombie = start(tmp_path, Files, ONE)
    old = zombie.commit(zombie.stage([{"k": 1, "n": 1}]))
    new = start(tmp_path, Files, ONE, epoch=2, state=apply_patches({}, old))
    new.clock = zombie.clock
    new.session.acknowledge(())
    new.session.acknowledge(new.commit(new.stage([{"k": 1, "n": 1}])))
    assert shown(tmp_path) == {1: 2}
    zombie.session.acknowledge(old)
    assert shown(tmp_path) == {1: 2}


def test_a_repeat_finishes_only_what_was_missing(tmp_path: Path) -> None:
    """Two targets, of which the second could not be written to at first."""
    run = start(tmp_path, Files, ONE, TWO)
    patches = run.commit(run.stage([{"k": 1, "n": 1}], [{"k": 2, "n": 2}]))
    blocker = tmp_path / "views" / "two.db"
    blocker.unlink()
    blocker.mkdir()
    with pytest.raises(Exception, match="unable to open"):
        run.session.acknowledge(patches)
    assert shown(tmp_path, "one") == {1: 1}
    blocker.rmdir()
    again = start(tmp_path, Files, ONE, TWO, epoch=2, state=apply_patches({}, patches))
    again.session.acknowledge(())
    assert (shown(tmp_path, "one"), shown(tmp_path, "two")) == ({1: 1}, {2: 2})


def test_rows_staged_before_a_backfill_do_not_come_back(tmp_path: Path) -> None:
    run = start(tmp_path, Files, ONE)
    patches = run.commit(run.stage([{"k": 1, "n": 1}]))
    fresh = Bind(schema=SCHEMA, table="one", backfill=1)
    again = start(
        tmp_path, Files, fresh, epoch=2, state=apply_patches({}, patches), last=run
    )  # fmt: skip
    again.session.acknowledge(())
    assert shown(tmp_path) == {}


def test_units_of_a_removed_target_are_applied_when_it_returns(
    tmp_path: Path,
) -> None:
    run = start(tmp_path, Files, ONE, TWO)
    state: Json = {}
    state = apply_patches(state, run.commit(run.stage([{"k": 1, "n": 1}], [{"k": 2, "n": 2}])))
    alone = start(tmp_path, Files, ONE, epoch=2, state=state)
    alone.clock = run.clock
    state = apply_patches(state, alone.session.acknowledge(()))
    assert (shown(tmp_path, "one"), shown(tmp_path, "two")) == ({1: 1}, {})
    patches = alone.commit(alone.stage([{"k": 1, "n": 1}]))
    state = apply_patches(state, [*patches, *alone.session.acknowledge(patches)])
    assert len(staged_files(tmp_path)) == 1, "it is kept"

    again = start(tmp_path, Files, TWO, ONE, epoch=3, state=state)
    state = apply_patches(state, again.session.acknowledge(()))
    assert (shown(tmp_path, "one"), shown(tmp_path, "two")) == ({1: 2}, {2: 2})
    assert (state, staged_files(tmp_path)) == ({"units": {}}, [])


def test_a_target_that_returns_is_emptied_for_a_backfill(
    tmp_path: Path,
) -> None:
    run = start(tmp_path, Files, ONE, TWO)
    patches = run.commit(run.stage([{"k": 1, "n": 1}], [{"k": 2, "n": 2}]))
    state = apply_patches({}, [*patches, *run.session.acknowledge(patches)])
    staged = run.commit(run.stage([{"k": 1, "n": 1}], [{"k": 2, "n": 2}]))
    state = apply_patches(state, staged)
    alone = start(tmp_path, Files, ONE, epoch=2, state=state, last=run)
    state = apply_patches(state, alone.session.acknowledge(()))
    fresh = Bind(schema=SCHEMA, table="two", backfill=1)
    again = start(tmp_path, Files, ONE, fresh, epoch=3, state=state, last=alone)
    state = apply_patches(state, again.session.acknowledge(()))
    assert (shown(tmp_path, "one"), shown(tmp_path, "two")) == ({1: 2}, {})
    assert (state, staged_files(tmp_path)) == ({"units": {}}, []), "what is out of date is dropped"


def test_a_session_that_is_over_does_not_empty_a_table(tmp_path: Path) -> None:
    old, new = ONE, Bind(schema=SCHEMA, table="one", backfill=1)
    start(tmp_path, Files, new, epoch=2)
    with pytest.raises(FencedEndpoint):
        start(tmp_path, Files, old, epoch=1)


def test_units_add_up_to_what_the_model_says(tmp_path: Path) -> None:
    run = start(tmp_path, Files, ONE)
    documents: list[Document] = []
    for at in range(6):
        some: list[Document] = [{"k": k, "n": at + k} for k in range(at % 3 + 1)]
        documents += some
        run.session.acknowledge(run.commit(run.stage(some)))
    assert _by_key(shown(tmp_path)) == _sums(documents)


# ------------------------------------------------------------------------------- pattern DIRECT


def test_rows_are_visible_as_they_are_stored(tmp_path: Path) -> None:
    run = start(tmp_path, Direct, ONE)
    assert run.built.connector.pattern is Pattern.DIRECT
    staged = run.stage([{"k": 1, "n": 1}])
    assert shown(tmp_path) == {1: 1}
    assert [each.rows for each in staged] == [1]
    assert run.commit(staged) == ()
    assert run.session.acknowledge(()) == ()


def test_the_same_documents_stored_again_are_there_once(tmp_path: Path) -> None:
    """A replay stores exactly the same rows, so a last-write-wins schema is not affected."""
    schema = {key: value for key, value in SCHEMA.items() if key != "reduce"}
    schema["properties"] = {"k": {"type": "integer"}, "n": {"type": "integer"}}
    run = start(tmp_path, Direct, Bind(schema=schema, table="one"))
    for _ in range(2):
        run.stage([{"k": 1, "n": 7}, {"k": 2, "n": 8}])
    assert shown(tmp_path) == {1: 7, 2: 8}


def test_the_same_sums_stored_again_count_twice(tmp_path: Path) -> None:
    """This is why a build warns of such schemas."""
    run = start(tmp_path, Direct, ONE)
    for _ in range(2):
        run.stage([{"k": 1, "n": 7}])
    assert shown(tmp_path) == {1: 14}


@pytest.mark.parametrize("kind", [Files, Direct])
def test_delta_updates_append(tmp_path: Path, kind: type[Files | Direct]) -> None:
    run = start(tmp_path, kind, Bind(schema=SCHEMA, table="one", resource={"delta_updates": True}))
    for numbers in ((-1, 3, 2), (6, -7, -1)):
        patches = run.commit(run.stage([{"k": 1, "n": n} for n in numbers]))
        run.session.acknowledge(patches)
    rows = Table(tmp_path / "views" / "one.db").rows()
    assert [row["n"] for row in rows] == [4, -2]


def test_a_guard_moves_with_the_rows_it_guards(tmp_path: Path) -> None:
    table = Table(tmp_path / "t.db")
    table.prepare("t.v0", 1)

    def fail(_: Any) -> None:  # noqa: ANN401 - a connection
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError):
        table.apply("t.v0", Clock(5), fail)
    assert table.apply("t.v0", Clock(5), lambda _: None)
    assert not table.apply("t.v0", Clock(5), fail)
    assert not table.apply("t.v0", Clock(4), fail)
    assert not table.apply("t.v1", Clock(6), fail), "it was not filled under that state key"


def _by_key(rows: dict[int, int]) -> dict[str, int]:
    return {f"[{k}]": n for k, n in rows.items()}


def _sums(documents: Sequence[Document]) -> dict[str, int]:
    return {key: state["n"] for key, state in expected(ONE, documents).items()}


# ------------------------------------------------------------------------------------- previews


@pytest.mark.parametrize("kind", [Files, Direct])
def test_a_preview_is_separate_and_leaves_nothing(
    tmp_path: Path, kind: type[Files | Direct]
) -> None:
    connector = kind({"path": str(tmp_path / "views")}, where="x")
    with connector.preview([("one",)]) as preview:
        what = build_sink(
            tmp_path, [ONE], lambda *_: preview, config={"path": str(tmp_path / "views")}
        )
        run = SinkRun.start(what, epoch=1)
        run.session.acknowledge(run.commit(run.stage([{"k": 1, "n": 1}])))
        run.close()
        assert list(tmp_path.glob("*preview*"))
        assert not (tmp_path / "views").exists()
    assert not list(tmp_path.glob("*preview*"))
