"""Whole tests: their steps, how they fail, how they are shaken, and how results are reported."""

from __future__ import annotations

import xml.etree.ElementTree as Xml
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from catalog.small_engine import Transform, built, worlds
from penstock.catalog.testing.report import as_json, as_junit
from penstock.catalog.testing.run import Outcome, Variant, run_test, variants
from penstock.model.json_order import Json
from penstock.model.spec import Catalog, CatalogTest, Frozen, Step
from penstock.runtime.derive.engine import Document

LEDGER = """
collections:
  bank/requests:
    key: [/id]
    schema: &request
      type: object
      required: [id, account, amount]
      properties:
        id: {type: integer}
        account: {type: string}
        amount: {type: integer}
        approved: {type: boolean}
  bank/ledger:
    key: [/id]
    schema: *request
    derive:
      using: {sqlite: {}}
      transforms:
        - {name: request, source: bank/requests, shuffle: {key: [/account]}, lambda: select 1 json}
        - {name: own, source: bank/ledger, shuffle: {key: [/account]}, lambda: select 1 json}
  bank/balances:
    key: [/account]
    schema:
      type: object
      required: [account]
      reduce: {strategy: merge}
      properties:
        account: {type: string}
        balance: {type: integer, reduce: {strategy: sum}}
    derive:
      using: {sqlite: {}}
      transforms:
        - {name: approved, source: bank/ledger, shuffle: {key: [/account]}, lambda: select 1 json}
tests:
  bank/tests/overdraft:
    - ingest:
        collection: bank/requests
        documents:
          - {id: 1, account: a, amount: 10}
          - {id: 2, account: a, amount: -7}
          - {id: 3, account: a, amount: -7}
          - {id: 4, account: b, amount: -1}
    - verify:
        description: nothing is approved beyond the balance
        collection: bank/ledger
        documents:
          - {id: 1, approved: true}
          - {id: 2, approved: true}
          - {id: 3, approved: false}
          - {id: 4, approved: false}
    - verify: {collection: bank/balances, documents: [{account: a, balance: 3}]}
  bank/tests/described:
    description: the other grammar
    steps:
      - ingest:
          description: one request
          collection: bank/requests
          documents: [{id: 1, account: a, amount: 10}]
      - verify:
          collection: {name: bank/balances}
          documents: [{account: a, balance: 11}]
"""


def request(document: Any, state: dict[str, Any]) -> Iterable[Document]:  # noqa: ANN401
    account, amount = document["account"], document["amount"]
    approved = state.get(account, 0) + amount >= 0
    if approved:
        state[account] = state.get(account, 0) + amount
    kept = {name: document[name] for name in ("id", "account", "amount")}
    yield {**kept, "approved": approved}


def own(document: Any, state: dict[str, Any]) -> Iterable[Document]:  # noqa: ANN401
    if document["approved"]:
        state.setdefault("seen", []).append(document["id"])
    return ()


def approved(document: Any, _: dict[str, Any]) -> Iterable[Document]:  # noqa: ANN401
    if document["approved"]:
        yield {"account": document["account"], "balance": document["amount"]}


ENGINES: dict[str, list[Transform]] = {"bank/ledger": [request, own], "bank/balances": [approved]}


def named(catalog: Catalog, name: str) -> CatalogTest:
    return next(test for test in catalog.tests if test.name == name)


def run(catalog: Catalog, name: str, tmp_path: Path, *, shake: bool = False) -> Outcome:
    ways = variants(catalog) if shake else ()
    return run_test(catalog, named(catalog, name), worlds(catalog, tmp_path, ENGINES), shake=ways)


def test_a_ledger_that_reads_itself_passes_and_can_be_shaken(tmp_path: Path) -> None:
    outcome = run(built(tmp_path, LEDGER), "bank/tests/overdraft", tmp_path, shake=True)
    assert outcome.failure is None, "\n".join(outcome.failure.lines())
    assert outcome.runs == 18
    assert not list(tmp_path.glob("state-*")), "no state is left behind"


def test_a_failure_names_the_step_and_shows_a_diff(tmp_path: Path) -> None:
    outcome = run(built(tmp_path, LEDGER), "bank/tests/described", tmp_path, shake=True)
    assert outcome.runs == 1, "a test that fails is not shaken"
    assert outcome.failure is not None
    line = 1 + LEDGER[: LEDGER.index("- verify:\n          collection: {name")].count("\n")
    assert outcome.failure.lines() == [
        f"{tmp_path}/catalog.yaml:{line}: verify bank/balances",
        "--- expected: 1 document",
        "+++ actual: 1 document",
        '@@ key ["a"] @@',
        ' /account: "a"',
        "-/balance: 11",
        "+/balance: 10",
    ]


def test_an_error_of_a_derivation_is_the_failure_of_its_step(tmp_path: Path) -> None:
    def divide(document: Any, _: dict[str, Any]) -> Iterable[Document]:  # noqa: ANN401
        yield {**document, "approved": 1 // (document["amount"] - 10)}

    catalog = built(tmp_path, LEDGER)
    engines: dict[str, list[Transform]] = {**ENGINES, "bank/ledger": [divide, own]}
    test = named(catalog, "bank/tests/described")
    outcome = run_test(catalog, test, worlds(catalog, tmp_path, engines))
    assert outcome.failure is not None
    assert outcome.failure.number == 0
    assert outcome.failure.lines()[0].endswith(": ingest bank/requests: one request")
    assert outcome.failure.lines()[1:3] == [
        "the lambda raised: integer division or modulo by zero",
        "  where line 1, document [1] of bank/requests",
    ]


COUNTS = """
collections:
  acme/events:
    key: [/id]
    schema: {type: object, required: [id], properties: {id: {type: integer}, of: {type: string}}}
  acme/counts:
    key: [/of]
    schema:
      type: object
      required: [of]
      reduce: {strategy: merge}
      properties:
        of: {type: string}
        n: {type: integer, reduce: {strategy: sum}}
        least: {type: integer, reduce: {strategy: minimize}}
        ids: {type: array, items: {type: integer}, reduce: {strategy: append}}
    derive:
      using: {sqlite: {}}
      transforms:
        - {name: count, source: acme/events, lambda: select 1 json}
  acme/sums:
    key: [/all]
    schema:
      type: object
      required: [all]
      reduce: {strategy: merge}
      properties:
        all: {type: boolean}
        n: {type: integer, reduce: {strategy: sum}}
        documents: {type: integer, reduce: {strategy: sum}}
    derive:
      using: {sqlite: {}}
      transforms:
        - {name: sum, source: acme/counts, lambda: select 1 json}
"""


def count(document: Any, _: dict[str, Any]) -> Iterable[Document]:  # noqa: ANN401
    yield {"of": document["of"], "n": 1, "least": document["id"], "ids": [document["id"]]}


def total(document: Any, _: dict[str, Any]) -> Iterable[Document]:  # noqa: ANN401
    yield {"all": True, "n": document["n"]}


def count_documents(document: Any, _: dict[str, Any]) -> Iterable[Document]:  # noqa: ANN401
    yield {"all": True, "n": document["n"], "documents": 1}


def of_events(kinds: str, *verified: str) -> CatalogTest:
    """Ingests an event of each kind, and takes whatever becomes of them for right."""
    events = Frozen([{"id": i, "of": kind} for i, kind in enumerate(kinds)])
    steps = [Step(action="ingest", collection="acme/events", documents=events, origin="test:1")]
    contents: dict[str, list[Json]] = {
        "acme/counts": [{"of": kind} for kind in sorted(set(kinds))],
        "acme/sums": [{}] if kinds else [],
    }
    steps += (
        Step(action="verify", collection=name, documents=Frozen(expected), origin="test:2")
        for name, expected in contents.items()
        if name in verified
    )
    return CatalogTest(name="acme/tests/counts", steps=tuple(steps))


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    return built(tmp_path_factory.mktemp("counts"), COUNTS)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.text("abc", max_size=8), st.data())
def test_splits_do_not_show_where_reductions_are_associative(
    tmp_path: Path, counts: Catalog, kinds: str, data: st.DataObject
) -> None:
    ways = data.draw(st.lists(st.sampled_from(variants(counts)), max_size=3, unique=True))
    engines: dict[str, list[Transform]] = {"acme/counts": [count], "acme/sums": [total]}
    test = of_events(kinds, "acme/counts", "acme/sums")
    run_in = worlds(counts, tmp_path, engines, stateful=False)
    outcome = run_test(counts, test, run_in, shake=ways)
    assert outcome.failure is None, "\n".join(outcome.failure.lines())


def test_what_depends_on_transactions_is_found_by_shaking(tmp_path: Path) -> None:
    catalog = built(tmp_path, COUNTS)
    engines: dict[str, list[Transform]] = {"acme/counts": [count], "acme/sums": [count_documents]}
    test = of_events("aab", "acme/sums")
    run_in = worlds(catalog, tmp_path, engines)
    assert run_test(catalog, test, run_in).failure is None
    ways: list[Variant] = []
    outcome = run_test(catalog, test, run_in, shake=variants(catalog), on_run=ways.append)
    assert outcome.failure is not None
    assert ways[-1] == outcome.failure.variant
    assert outcome.failure.lines() == [
        "test:2: verify acme/sums",
        "differs with documents one by one, 1 shard, from documents all at once, 1 shard",
        "--- documents all at once, 1 shard: 1 document",
        "+++ documents one by one, 1 shard: 1 document",
        "@@ key [true] @@",
        " /all: true",
        "-/documents: 2",
        "+/documents: 3",
        " /n: 3",
    ]


def test_state_beyond_the_shuffle_key_is_found_by_shaking(tmp_path: Path) -> None:
    """A counter of all documents, in the state of a shard, depends on the number of shards."""

    def running(document: Any, state: dict[str, Any]) -> Iterable[Document]:  # noqa: ANN401
        state["all"] = state.get("all", 0) + 1
        yield {"of": document["of"], "n": state["all"]}

    catalog = built(tmp_path, COUNTS)
    engines: dict[str, list[Transform]] = {"acme/counts": [running], "acme/sums": [total]}
    outcome = run_test(
        catalog,
        of_events("abcdef", "acme/sums"),
        worlds(catalog, tmp_path, engines),
        shake=variants(catalog),
    )
    assert outcome.failure is not None
    assert outcome.failure.variant.shards == 2
    assert outcome.failure.variant.split.largest is None


LAST = """
collections:
  acme/events:
    key: [/id]
    schema: {type: object, required: [id], properties: {id: {type: integer}, of: {type: string}}}
  acme/counts:
    key: [KEY]
    schema:
      type: object
      required: [of, id]
      properties: {of: {type: string}, id: {type: integer}}
    derive:
      using: {sqlite: {}}
      transforms:
        - {name: copy, source: acme/events, lambda: select 1 as json}
  acme/sums:
    key: [/all]
    schema:
      type: object
      required: [all]
      reduce: {strategy: merge}
      properties:
        all: {type: boolean}
        ids: {type: array, items: {type: integer}, reduce: {strategy: append}}
    derive:
      using: {sqlite: {}}
      transforms:
        - {name: list, source: acme/counts, lambda: select 1 as json}
"""


@pytest.mark.parametrize(
    ("key", "stateful", "verified", "found"),
    [
        pytest.param("/of", True, "acme/counts", True, id="a key from several shards"),
        pytest.param("/of", False, "acme/counts", False, id="a key, without state"),
        pytest.param("/id", True, "acme/sums", True, id="keys of several shards"),
        pytest.param("/id", False, "acme/sums", True, id="several keys, without state"),
    ],
)
def test_an_order_that_no_deployment_keeps_is_found_by_shaking(
    tmp_path: Path, key: str, verified: str, *, stateful: bool, found: bool
) -> None:
    """Shards publish at the same time. Without state, documents of one key keep their order."""

    def copy(document: Any, _: dict[str, Any]) -> Iterable[Document]:  # noqa: ANN401
        yield {"of": document["of"], "id": -document["id"]}

    def listed(document: Any, _: dict[str, Any]) -> Iterable[Document]:  # noqa: ANN401
        yield {"all": True, "ids": [document["id"]]}

    catalog = built(tmp_path, LAST.replace("KEY", key))
    engines: dict[str, list[Transform]] = {"acme/counts": [copy], "acme/sums": [listed]}
    run_in = worlds(catalog, tmp_path, engines, stateful=stateful)
    test = of_events("aaaaaa", verified)
    outcome = run_test(catalog, test, run_in, shake=variants(catalog))
    assert (outcome.failure is not None) == found
    assert outcome.failure is None or outcome.failure.variant.shards > 1


def test_shards_are_varied_only_where_documents_are_processed_one_by_one(tmp_path: Path) -> None:
    assert {each.shards for each in variants(built(tmp_path, COUNTS))} == {1, 2, 3}
    plain = COUNTS[: COUNTS.index("  acme/counts")]
    assert [str(each) for each in variants(built(tmp_path, plain))] == [
        "documents one by one, 1 shard",
        "documents in pairs, 1 shard",
        "documents at random, seed 1, 1 shard",
        "documents at random, seed 2, 1 shard",
        "documents at random, seed 3, 1 shard",
    ]


def test_a_verify_step_waits_for_delayed_reads(tmp_path: Path) -> None:
    """Of its own derivation, and of those before it; an ingest step does not."""
    text = COUNTS.replace("name: count, ", "name: count, readDelay: 24h, ")
    text = text.replace("name: sum, ", "name: sum, readDelay: 1h, ")
    catalog = built(tmp_path, text)
    engines: dict[str, list[Transform]] = {"acme/counts": [count], "acme/sums": [total]}
    test = of_events("aab", "acme/counts", "acme/sums")
    outcome = run_test(catalog, test, worlds(catalog, tmp_path, engines))
    assert outcome.failure is None, "\n".join(outcome.failure.lines())


# --- reports ---


def outcomes(tmp_path: Path) -> list[Outcome]:
    """One of each: passed, failed, and an error."""

    def refuse(document: Any, _: dict[str, Any]) -> Iterable[Document]:  # noqa: ANN401
        yield {"id": f"not an integer, {document['id']}"}

    catalog = built(tmp_path, LEDGER)
    passed = run(catalog, "bank/tests/overdraft", tmp_path)
    failed = run(catalog, "bank/tests/described", tmp_path)
    engines: dict[str, list[Transform]] = {**ENGINES, "bank/ledger": [refuse, own]}
    test = named(catalog, "bank/tests/described")
    return [passed, failed, run_test(catalog, test, worlds(catalog, tmp_path, engines))]


def test_junit_is_xml_whatever_the_documents_hold(tmp_path: Path) -> None:
    some = outcomes(tmp_path)
    assert some[2].failure is not None
    step = replace(some[2].failure.step, description="a \x00 \x1b[1m \ud800 ]]> & <b> é")
    some[2] = replace(some[2], failure=replace(some[2].failure, step=step))
    root = Xml.fromstring(as_junit(some))  # noqa: S314 - it is ours
    assert root.tag == "testsuites"
    (suite,) = root
    assert {name: suite.attrib[name] for name in ("tests", "failures", "errors")} == {
        "tests": "3",
        "failures": "1",
        "errors": "1",
    }
    assert [(case.attrib["classname"], case.attrib["name"]) for case in suite] == [
        ("bank/tests", "overdraft"),
        ("bank/tests", "described"),
        ("bank/tests", "described"),
    ]
    passed, failed, erred = suite
    assert len(passed) == 0
    assert some[1].failure is not None
    assert [(each.tag, each.text) for each in failed] == [
        ("failure", "\n".join(some[1].failure.lines()))
    ]
    (error,) = erred
    assert error.tag == "error"
    assert "a \ufffd \ufffd[1m \ufffd ]]> & <b> é\n" in str(error.text)
    assert all(float(each.attrib["time"]) >= 0 for each in suite.iter() if "time" in each.attrib)


def test_json_has_every_difference(tmp_path: Path) -> None:
    found: Any = as_json(outcomes(tmp_path))
    assert found["ok"] is False
    assert found["summary"] == {"tests": 3, "passed": 1, "failed": 2}
    assert found["tests"][0]["failure"] is None
    failure = found["tests"][1]["failure"]
    assert failure["step"] == 1
    assert failure["action"] == "verify"
    assert failure["collection"] == "bank/balances"
    assert failure["differences"] == [
        {"key": ["a"], "pointer": "/balance", "expected": 11, "actual": 10}
    ]
    assert found["tests"][2]["failure"]["differences"] == []
    assert "does not fit the schema" in found["tests"][2]["failure"]["message"]
