"""What tasks read: bindings from the catalog, and how they are grouped."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.catalog.build import load_catalog
from penstock.errors import UserError
from penstock.journal.names import encode_value
from penstock.journal.selector import MisnamedJournal, PartitionFilter
from penstock.model.clock import CLOCK_MAX, NEVER, UNIX_EPOCH, Clock, Producer, duration, from_unix
from penstock.model.columns import columns
from penstock.model.frontier import Frontier, JournalFrontier
from penstock.model.hints import Ack, Commit, Hint
from penstock.model.producer_frontier import ProducerFrontier
from penstock.model.schema import compiled
from penstock.model.sequence import Bounds
from penstock.model.spec import (
    Catalog,
    CollectionSpec,
    Field,
    FieldValues,
    Frozen,
    Scalar,
    Selector,
)
from penstock.native.spark_types import spark_schema
from penstock.shuffle.binding import (
    BINDINGS_MAX,
    PRIORITY_MAX,
    READ_DELAY_MAX_S,
    SUFFIX_MAX,
    Binding,
    KeyKind,
    Lane,
    ad_hoc_bindings,
    columns_of,
    derivation_bindings,
    hint_index,
    key_kind,
    lanes,
    materialization_bindings,
    task_bindings,
    with_cohorts,
)
from support.strategies_frontier import hint_frontier

P1 = Producer(Producer.MULTICAST | 1)
SECOND = duration(1)


def collection(name: str, *partitions: str, key: tuple[str, ...] = ("/id",)) -> CollectionSpec:
    properties: Any = {"id": {"type": "integer"}} | {p: {"type": "string"} for p in partitions}
    schema = Frozen({"type": "object", "required": list(properties), "properties": properties})
    fields = tuple(Field(name=p, location=f"/{p}", partition=True) for p in partitions)
    return CollectionSpec(
        name=name, key=key, write_schema=schema, read_schema=schema, fields=fields
    )


ORDERS = collection("acme/orders")


def binding(
    index: int,
    of: CollectionSpec = ORDERS,
    *,
    priority: int = 0,
    read_delay: int = 0,
    cohort: int = 0,
    read_suffix: str | None = None,
    selector: Selector = Selector(),  # noqa: B008
) -> Binding:
    return Binding(
        index=index,
        collection=of,
        read_suffix=f"test/b{index}" if read_suffix is None else read_suffix,
        priority=priority,
        read_delay=read_delay,
        cohort=cohort,
        key=of.key,
        partitions=PartitionFilter.of((f.name for f in of.partitions), selector),
    )


# ---------------------------------------------------------------------------- cohorts and lanes


def paced(*paces: tuple[int, int]) -> list[Binding]:
    return [
        binding(i, priority=priority, read_delay=delay) for i, (priority, delay) in enumerate(paces)
    ]


def test_cohorts_and_lanes_of_the_published_example() -> None:
    bindings = with_cohorts(paced((0, 0), (1, 0), (0, 0), (0, 5 * SECOND)))
    assert [each.cohort for each in bindings] == [0, 1, 0, 2]
    assert lanes(bindings) == (
        Lane(priority=1, bindings=(1,)),
        Lane(priority=0, bindings=(0, 2, 3)),
    )


def test_a_task_without_bindings_has_one_lane() -> None:
    assert lanes(()) == (Lane(priority=0, bindings=()),)
    assert with_cohorts(()) == ()


PACES = st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 2)), max_size=12)


@given(PACES)
def test_a_cohort_is_equal_priority_and_delay(paces: list[tuple[int, int]]) -> None:
    bindings = with_cohorts(paced(*paces))
    assert [replace(each, cohort=0) for each in bindings] == paced(*paces)
    for a, b in combinations(bindings, 2):
        same_pace = (a.priority, a.read_delay) == (b.priority, b.read_delay)
        assert (a.cohort == b.cohort) == same_pace
    # Ascending from 0, in the order in which they are first met.
    assert list(dict.fromkeys(b.cohort for b in bindings)) == list(
        range(len({b.cohort for b in bindings}))
    )


@given(PACES, st.randoms(use_true_random=False))
def test_lanes_split_the_bindings_by_descending_priority(
    paces: list[tuple[int, int]], random: Random
) -> None:
    bindings = list(with_cohorts(paced(*paces)))
    found = lanes(bindings)
    priorities = [lane.priority for lane in found]
    assert priorities == sorted(set(priorities), reverse=True)
    by_index = {each.index: each for each in bindings}
    assert sorted(i for lane in found for i in lane.bindings) == sorted(by_index)
    for lane in found:
        assert list(lane.bindings) == sorted(lane.bindings)
        assert all(by_index[i].priority == lane.priority for i in lane.bindings)
    lane_of = {i: n for n, lane in enumerate(found) for i in lane.bindings}
    for a, b in combinations(bindings, 2):
        assert a.cohort != b.cohort or lane_of[a.index] == lane_of[b.index]
    random.shuffle(bindings)
    assert lanes(bindings) == found


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        pytest.param({"read_suffix": ""}, "this one has 0", id="no suffix"),
        pytest.param({"read_suffix": "derive/acme/"}, "after its last slash", id="no state key"),
        pytest.param({"read_suffix": "x" * (SUFFIX_MAX + 1)}, "has 513", id="a long suffix"),
        pytest.param({"index": BINDINGS_MAX}, "65536 is not the index", id="an index of 17 bits"),
        pytest.param({"index": -1}, "-1 is not the index", id="a negative index"),
        pytest.param({"priority": PRIORITY_MAX + 1}, "too large", id="a priority of 32 bits"),
        pytest.param({"priority": -PRIORITY_MAX - 1}, "too large", id="a low one"),
        pytest.param({"read_delay": -1}, "read delay", id="a negative delay"),
        pytest.param({"read_delay": duration(READ_DELAY_MAX_S) + 1}, "read delay", id="too long"),
    ],
)
def test_a_binding_that_cannot_be_read_is_refused(wrong: dict[str, object], what: str) -> None:
    with pytest.raises(UserError, match=what) as refused:
        replace(binding(3), **wrong)  # type: ignore[arg-type]
    assert refused.value.where is not None
    assert "acme/orders" in refused.value.where
    assert refused.value.fix is not None


def test_the_widest_binding_is_not_refused() -> None:
    widest = replace(
        binding(3),
        index=BINDINGS_MAX - 1,
        read_suffix="x" * SUFFIX_MAX,
        priority=PRIORITY_MAX,
        read_delay=duration(READ_DELAY_MAX_S),
    )
    assert widest.state_key == "x" * SUFFIX_MAX
    assert from_unix(4_000_000_000) + widest.read_delay < CLOCK_MAX


def test_the_state_key_is_what_follows_the_last_slash() -> None:
    assert binding(0, read_suffix="derive/acme/out/fromOrders.v3").state_key == "fromOrders.v3"
    assert binding(0, read_suffix="ad-hoc").state_key == "ad-hoc"


# ------------------------------------------------------------------------------ which journals


def values(**fields: tuple[Scalar, ...]) -> tuple[FieldValues, ...]:
    return tuple(FieldValues(field=f, values=v) for f, v in fields.items())


@pytest.mark.parametrize(
    ("fields", "selector", "suffix", "read"),
    [
        pytest.param((), Selector(), "pivot=00", True, id="no fields"),
        pytest.param(
            ("region",),
            Selector(include=values(region=("us",))),
            "region=us/pivot=00",
            True,
            id="included",
        ),
        pytest.param(
            ("region",),
            Selector(include=values(region=("us",))),
            "region=eu/pivot=00",
            False,
            id="not included",
        ),
        pytest.param(
            ("region",),
            Selector(exclude=values(region=("eu",))),
            "region=eu/pivot=00",
            False,
            id="excluded",
        ),
        pytest.param(
            ("region",),
            Selector(include=values(region=("eu", "us")), exclude=values(region=("eu",))),
            "region=eu/pivot=00",
            False,
            id="exclude wins",
        ),
        pytest.param(
            ("region",),
            Selector(include=values(region=("eu", "us")), exclude=values(region=("eu",))),
            "region=us/pivot=00",
            True,
            id="exclude spares others",
        ),
        pytest.param(
            ("region",),
            Selector(include=values(color=("red",))),
            "region=us/pivot=00",
            True,
            id="not a field",
        ),
        pytest.param(
            ("category", "region"),
            Selector(include=values(category=("alpha",)), exclude=values(region=("bad",))),
            "category=alpha/region=good/pivot=00",
            True,
            id="two fields",
        ),
        pytest.param(
            ("active",),
            Selector(include=values(active=(True,))),
            "active=%_false/pivot=00",
            False,
            id="a boolean",
        ),
    ],
)
def test_a_binding_reads_the_journals_of_its_partitions(
    fields: tuple[str, ...], selector: Selector, suffix: str, read: bool
) -> None:
    reader = binding(0, collection("acme/orders", *fields), selector=selector)
    assert reader.reads(f"acme/orders/{suffix}") == read
    assert not reader.reads(f"acme/orders-two/{suffix}")
    assert not reader.reads(f"acme/{suffix}")


@pytest.mark.parametrize(
    ("fields", "journal"),
    [
        pytest.param((), "", id="no name"),
        pytest.param((), "acme/orders/", id="nothing behind the collection"),
        pytest.param(("category", "region"), "acme/orders/category=a/pivot=00", id="one of two"),
        pytest.param(("region",), "acme/orders/region=us/extra=x/pivot=00", id="two of one"),
        pytest.param(("region",), "acme/orders/zone=us/pivot=00", id="another field"),
        pytest.param(("region",), "acme/orders/bad/pivot=00", id="not field=value"),
    ],
)
def test_a_misnamed_journal_is_an_error_rather_than_an_empty_read(
    fields: tuple[str, ...], journal: str
) -> None:
    with pytest.raises(MisnamedJournal):
        binding(0, collection("acme/orders", *fields)).reads(journal)


@given(
    st.dictionaries(st.sampled_from("abc"), st.booleans() | st.integers(0, 2) | st.text(max_size=3))
)
def test_a_journal_of_included_values_is_read(partition: dict[str, Scalar]) -> None:
    of = collection("acme/orders", *partition)
    segments = "".join(f"{f}={encode_value(v)}/" for f, v in sorted(partition.items()))
    chosen = values(**{field: (value,) for field, value in partition.items()})
    journal = f"acme/orders/{segments}pivot=80"
    assert binding(0, of, selector=Selector(include=chosen)).reads(journal)
    assert binding(0, of, selector=Selector(exclude=chosen)).reads(journal) == (not partition)


# ------------------------------------------------------------------------------------------ hints

TWO = collection("acme/orders-two")
PIVOT, TWO_PIVOT = "acme/orders/pivot=00", "acme/orders-two/pivot=00"
ACK = Ack(commit=Commit(PIVOT, P1, Clock(100)), hints=(Commit(TWO_PIVOT, P1, Clock(100)),))


def hint(journal: str, reader: int, clock: int = 100) -> Hint:
    return Hint(journal=journal, binding=reader, producer=P1, clock=Clock(clock))


def test_hints_stay_in_their_cohort() -> None:
    bindings = with_cohorts(
        [binding(0), binding(1, read_delay=SECOND), binding(2, TWO), binding(3)]
    )
    assert [each.cohort for each in bindings] == [0, 1, 0, 0]
    index = hint_index(bindings)
    assert list(index.extract(ACK, binding=0, cohort=0, exists=lambda _: True)) == [
        hint(TWO_PIVOT, 2),
        hint(PIVOT, 3),
    ]
    assert list(index.extract(ACK, binding=1, cohort=1, exists=lambda _: True)) == []


def test_bindings_of_a_cohort_need_not_be_neighbours_to_share_a_journal() -> None:
    bindings = with_cohorts([binding(0), binding(1, priority=1), binding(2)])
    found = hint_index(bindings).extract(ACK, binding=0, cohort=0, exists=lambda _: True)
    assert list(found) == [hint(PIVOT, 2)]


def test_a_deleted_journal_is_not_waited_for() -> None:
    bindings = with_cohorts([binding(0), binding(1, TWO)])
    there = hint_index(bindings).extract(ACK, binding=0, cohort=0, exists=lambda _: True)
    assert list(there) == [hint(TWO_PIVOT, 1)]
    gone = hint_index(bindings).extract(ACK, binding=0, cohort=0, exists={PIVOT}.__contains__)
    assert list(gone) == []


def test_a_partition_that_is_not_read_is_not_waited_for() -> None:
    parted = collection("acme/parted", "region")
    eu = Selector(include=values(region=("eu",)))
    index = hint_index(with_cohorts([binding(0), binding(1, parted, selector=eu)]))
    journals = [f"acme/parted/region={region}/pivot=00" for region in ("eu", "us")]
    ack = Ack(commit=ACK.commit, hints=tuple(Commit(j, P1, Clock(100)) for j in journals))
    found = index.extract(ack, binding=0, cohort=0, exists=lambda _: True)
    assert list(found) == [hint(journals[0], 1)]


def test_a_journal_that_several_bindings_read_is_in_the_order_of_bindings() -> None:
    """Bindings 0 and 2 have read it; the self hint of 0 is for 1, which has not."""
    bindings = with_cohorts([binding(0), binding(1), binding(2, priority=1)])
    found = hint_index(bindings).extract(
        Ack(commit=ACK.commit), binding=0, cohort=0, exists=lambda _: True
    )
    entry = ProducerFrontier(producer=P1, last_commit=Clock(100), offset=-3)
    read = Frontier.gather(
        JournalFrontier(journal=PIVOT, binding=i, producers=(entry,)) for i in (2, 0)
    )
    both = read.reduce(hint_frontier(found))
    assert [(each.journal, each.binding) for each in both] == [(PIVOT, 0), (PIVOT, 1), (PIVOT, 2)]
    assert both.unresolved_hints == 1


# ----------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        pytest.param(("/id", "/region"), KeyKind.SOURCE, id="the collection's"),
        pytest.param(("/region", "/id"), KeyKind.POINTERS, id="the collection's, turned round"),
        pytest.param(("/id",), KeyKind.POINTERS, id="a part of it"),
        pytest.param(("/region",), KeyKind.PARTITIONS, id="a partition field"),
        pytest.param(("/zone", "/region"), KeyKind.PARTITIONS, id="all partition fields"),
        pytest.param(("/zone", "/other"), KeyKind.POINTERS, id="a partition field and another"),
    ],
)
def test_what_is_known_of_a_shuffle_key(key: tuple[str, ...], kind: KeyKind) -> None:
    assert key_kind(collection("acme/c", "region", "zone", key=("/id", "/region")), key) is kind


def test_a_key_of_partition_fields_that_is_the_collections_is_its_source_key() -> None:
    assert key_kind(collection("acme/c", "region", key=("/region",)), ["/region"]) is KeyKind.SOURCE


# -------------------------------------------------------------------------------------- the catalog

CATALOG = """
collections:
  acme/orders:
    key: [/id]
    schema: &order
      type: object
      required: [id, region, customer]
      additionalProperties: false
      properties:
        id: {type: integer}
        region: {type: string}
        customer: {type: string}
        note: {type: [string, "null"]}
        total: {type: number}
    projections:
      region: {location: /region, partition: true}
      who: /customer
  acme/open:
    key: [/id]
    schema:
      type: object
      required: [id]
      properties: {id: {type: integer}}
  acme/spend:
    key: [/customer]
    schema:
      type: object
      required: [customer]
      properties: {customer: {type: string}, total: {type: number, reduce: {strategy: sum}}}
      reduce: {strategy: merge}
    derive:
      using:
        sqlite: {migrations: ["create table t (customer text primary key);"]}
      transforms:
        - name: fromOrders
          source:
            name: acme/orders
            partitions: {include: {region: [eu]}}
            notBefore: 2026-01-31T08:00:00+01:00
            notAfter: 2026-02-01T00:00:00.25Z
          shuffle: {key: [/customer]}
          readDelay: 1m 5s
          priority: 2
          backfill: 3
          lambda: select $customer, $total;
        - {name: off, source: acme/orders, shuffle: any, disable: true, lambda: select $customer;}
        - {name: byRegion, source: acme/orders, shuffle: {key: [/region]}, lambda: select $customer}
        - {name: spread, source: acme/orders, shuffle: any, lambda: select $customer;}
  acme/mapped:
    key: [/id]
    schema: *order
    derive:
      using: {spark: {}}
      transforms:
        - name: own.Key
          source: acme/orders
          lambda: select id, region, customer from source
materializations:
  acme/views:
    endpoint: {local: {command: [cat], config: {}}}
    bindings:
      - source: acme/orders
        resource: {table: orders, schema: public, delta_updates: true}
        priority: 1
        backfill: 1
        fields: {recommended: false, require: {total: {}}, exclude: [note]}
      - {source: acme/open, resource: {table: "a,b/c"}, disable: true}
      - {source: acme/open, resource: {table: "a,b/c"}}
      - {source: acme/orders, resource: {table: spend}, fields: {groupBy: [who]}}
      - {source: acme/orders, resource: {table: regions}, fields: {groupBy: [region]}}
      - {source: acme/orders, resource: {}, fields: {groupBy: [id]}}
captures:
  acme/in:
    endpoint: {ingest: {}}
    bindings: [{resource: {name: orders}, target: acme/orders}]
"""


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    path: Path = tmp_path_factory.mktemp("catalog") / "catalog.yaml"
    path.write_text(CATALOG)
    return load_catalog([path], environ=None)


def of(catalog: Catalog, name: str) -> CollectionSpec:
    found = catalog.collection(name)
    assert found is not None
    return found


def test_a_materialization_shuffles_by_the_keys_of_its_rows(catalog: Catalog) -> None:
    bindings = task_bindings(catalog, "acme/views")
    assert bindings == materialization_bindings(catalog, catalog.materializations[0])
    assert [(b.index, b.read_suffix, b.key, b.key_kind) for b in bindings] == [
        (0, "materialize/acme/views/public,orders.v1", ("/id",), KeyKind.SOURCE),
        (2, "materialize/acme/views/a%2Cb%2Fc.v0", ("/id",), KeyKind.SOURCE),
        (3, "materialize/acme/views/spend.v0", ("/customer",), KeyKind.POINTERS),
        (4, "materialize/acme/views/regions.v0", ("/region",), KeyKind.PARTITIONS),
        (5, "materialize/acme/views/acme%2Forders.v0", ("/id",), KeyKind.SOURCE),
    ]
    assert [(b.priority, b.cohort) for b in bindings] == [(1, 0), (0, 1), (0, 1), (0, 1), (0, 1)]
    for each in bindings:
        assert each.read_delay == 0
        assert not each.filter_r_clocks
        assert each.columns is None, "the connector may store the document, or reductions need it"
        assert each.bounds == Bounds()
    assert lanes(bindings) == (
        Lane(priority=1, bindings=(0,)),
        Lane(priority=0, bindings=(2, 3, 4, 5)),
    )


def test_the_connector_names_the_resources_of_a_materialization(catalog: Catalog) -> None:
    spec = replace(catalog.materializations[0], bindings=catalog.materializations[0].bindings[:3])

    def path(resource: Any) -> tuple[str, str]:  # noqa: ANN401 - any JSON value
        return "main", resource["table"].upper()

    (first, second) = materialization_bindings(catalog, spec, path=path)
    assert first.state_key == "main,ORDERS.v1"
    assert second.state_key == "main,A%2CB%2FC.v0"


def test_resources_of_one_name_are_refused(catalog: Catalog) -> None:
    with pytest.raises(UserError, match=r'bindings 2 and 3 are both called "t\.v0"') as refused:
        materialization_bindings(catalog, catalog.materializations[0], path=lambda _: ["t"])
    assert refused.value.where == "materialization acme/views"
    assert refused.value.fix is not None


def test_transforms_say_how_they_are_read(catalog: Catalog) -> None:
    bindings = task_bindings(catalog, "acme/spend")
    assert bindings == derivation_bindings(catalog, of(catalog, "acme/spend"))
    orders, regions, spread = bindings
    assert [b.index for b in bindings] == [0, 2, 3], "disabled transforms keep their place"
    assert [b.cohort for b in bindings] == [0, 1, 1]
    assert [b.columns for b in bindings] == [None] * 3

    assert orders.read_suffix == "derive/acme/spend/fromOrders.v3"
    assert (orders.key, orders.key_kind) == (("/customer",), KeyKind.POINTERS)
    assert (orders.priority, orders.read_delay) == (2, 65 * SECOND)
    assert orders.bounds == Bounds(
        not_before=from_unix(1_769_842_800), not_after=from_unix(1_769_904_000, 250_000_000)
    )
    assert orders.reads("acme/orders/region=eu/pivot=00")
    assert not orders.reads("acme/orders/region=us/pivot=00")

    assert (regions.key, regions.key_kind) == (("/region",), KeyKind.PARTITIONS)
    assert regions.reads("acme/orders/region=us/pivot=00")
    assert regions.bounds == Bounds(not_before=UNIX_EPOCH, not_after=CLOCK_MAX)
    assert (spread.key, spread.key_kind) == (("/id",), KeyKind.SOURCE)


def test_only_read_only_transforms_are_split_by_r_clock(catalog: Catalog) -> None:
    """A transform that changes state has to be seen by every shard of its key group."""
    orders, regions, spread = task_bindings(catalog, "acme/spend")
    assert [b.filter_r_clocks for b in (orders, regions, spread)] == [False, False, True]
    (stateless,) = task_bindings(catalog, "acme/mapped")
    assert stateless.filter_r_clocks
    assert stateless.key_kind is KeyKind.SOURCE
    assert stateless.state_key == "own.Key.v0"


def test_an_endless_read_delay_is_refused(catalog: Catalog) -> None:
    spend = of(catalog, "acme/spend")
    assert spend.derivation is not None
    first = replace(spend.derivation.transforms[0], read_delay_s=10**30)
    derivation = replace(spend.derivation, transforms=(first,))
    with pytest.raises(UserError, match="read delay") as refused:
        derivation_bindings(catalog, replace(spend, derivation=derivation))
    assert "derive/acme/spend/fromOrders.v3" in str(refused.value.where)


def test_a_collection_by_name_is_an_ad_hoc_read(catalog: Catalog) -> None:
    (whole,) = task_bindings(catalog, "acme/orders")
    assert (whole,) == ad_hoc_bindings(of(catalog, "acme/orders"))
    assert whole.read_suffix == whole.state_key == "ad-hoc"
    assert (whole.key, whole.key_kind) == (("/id",), KeyKind.SOURCE)
    assert (whole.index, whole.cohort, whole.columns) == (0, 0, None)
    assert whole.reads("acme/orders/region=us/pivot=00")


def test_an_ad_hoc_read_chooses_partitions_times_and_columns(catalog: Catalog) -> None:
    (chosen,) = ad_hoc_bindings(
        of(catalog, "acme/orders"),
        Selector(exclude=values(region=("us",))),
        "2026-01-31T07:00:00Z",
        "2026-02-01T00:00:00Z",
        columns=["total"],
    )
    assert not chosen.reads("acme/orders/region=us/pivot=00")
    assert chosen.reads("acme/orders/region=eu/pivot=00")
    assert chosen.bounds == Bounds(
        not_before=from_unix(1_769_842_800), not_after=from_unix(1_769_904_000)
    )
    assert chosen.columns == ("id", "total"), "the key is needed to route documents"


@pytest.mark.parametrize(
    ("wrong", "what", "fix"),
    [
        pytest.param(
            {"selector": Selector(include=values(regoin=("eu",)))},
            '"regoin" is not a partition',
            "did you mean region",
            id="not a partition",
        ),
        pytest.param({"not_before": "soon"}, '"soon" is not a time', "RFC 3339", id="not a time"),
        pytest.param(
            {"not_after": "2026-01-01T00:00:00"}, "is not a time with a zone", "Z", id="no zone"
        ),
        pytest.param(
            {"not_before": "2026-01-02T00:00:00Z", "not_after": "2026-01-01T00:00:00Z"},
            "is earlier than",
            "exchange",
            id="the wrong way round",
        ),
        pytest.param({"columns": ["totl"]}, "no column totl", "total", id="not a column"),
    ],
)
def test_an_ad_hoc_read_that_cannot_be_meant(
    catalog: Catalog, wrong: dict[str, object], what: str, fix: str
) -> None:
    with pytest.raises(UserError, match=what) as refused:
        ad_hoc_bindings(of(catalog, "acme/orders"), **wrong)  # type: ignore[arg-type]
    assert refused.value.where == "an ad-hoc read of acme/orders"
    assert fix in str(refused.value.fix)


@pytest.mark.parametrize(
    ("text", "clock"),
    [
        pytest.param("1970-01-01T00:00:00Z", UNIX_EPOCH, id="the epoch"),
        pytest.param("1970-01-01T01:00:00+01:00", UNIX_EPOCH, id="the epoch elsewhere"),
        pytest.param("1969-12-31T23:59:59.5Z", from_unix(-1, 500_000_000), id="before the epoch"),
        pytest.param("0001-01-01T00:00:00+23:00", NEVER, id="before all clocks"),
        pytest.param("9999-12-31T23:59:59-23:00", CLOCK_MAX, id="after all clocks"),
    ],
)
def test_times_become_clocks(catalog: Catalog, text: str, clock: Clock) -> None:
    (bound,) = ad_hoc_bindings(of(catalog, "acme/orders"), not_before=text)
    assert bound.bounds.not_before == clock


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        pytest.param("acme/veiws", "no task or collection", "acme/views", id="a task, nearly"),
        pytest.param("acme/order", "no task or collection", "acme/orders", id="a collection"),
        pytest.param("zzz", "no task or collection", "acme/mapped", id="nothing like it"),
        pytest.param("acme/in", "is a capture", "materialization", id="a capture"),
    ],
)
def test_an_unknown_task_is_refused(catalog: Catalog, name: str, what: str, fix: str) -> None:
    with pytest.raises(UserError, match=what) as refused:
        task_bindings(catalog, name)
    assert fix in str(refused.value.fix)


def test_nothing_at_all_is_known() -> None:
    with pytest.raises(UserError, match="no task or collection acme/orders") as refused:
        task_bindings(Catalog(), "acme/orders")
    assert refused.value.fix == "known: none"


def test_a_source_that_is_gone_is_named_with_its_binding(catalog: Catalog) -> None:
    without = replace(
        catalog, collections=tuple(c for c in catalog.collections if c.name != "acme/open")
    )
    with pytest.raises(UserError, match="no collection acme/open") as refused:
        task_bindings(without, "acme/views")
    assert refused.value.where == "materialization acme/views, binding 2"


# -------------------------------------------------------------------------------------- columns


@pytest.mark.parametrize(
    ("name", "locations", "found"),
    [
        pytest.param("acme/orders", ["/id"], ("id",), id="a member"),
        pytest.param("acme/orders", ["/total", "/id"], ("id", "total"), id="in their order"),
        pytest.param("acme/orders", ["/customer/x"], ("customer",), id="inside of a member"),
        pytest.param("acme/orders", ["/note"], ("note", "_n"), id="null is not missing"),
        pytest.param("acme/orders", ["/other"], (), id="what no document has"),
        pytest.param("acme/open", ["/other/x"], ("_x",), id="an extra member"),
        pytest.param("acme/orders", ["/id", ""], None, id="the document"),
        pytest.param("acme/orders", [], (), id="nothing"),
    ],
)
def test_columns_hold_locations(
    catalog: Catalog, name: str, locations: list[str], found: tuple[str, ...] | None
) -> None:
    assert columns_of(of(catalog, name), locations) == found


@pytest.mark.parametrize("name", ["acme/orders", "acme/open", "acme/spend"])
def test_columns_are_called_as_they_are_stored(catalog: Catalog, name: str) -> None:
    spec = of(catalog, name)
    stored = spark_schema(columns(compiled(spec.read_schema.text).shape)).names
    (everything,) = ad_hoc_bindings(spec, columns=stored)
    assert everything.columns == tuple(stored)
