"""The numbers a hot path keeps are the numbers Prometheus reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from penstock.servicekit.metrics import Histogram, Registry, exponential


def parsed(registry: Registry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(registry.render().decode())
        for sample in family.samples
    }


def test_render_is_prometheus_text_of_every_child() -> None:
    registry = Registry("p_")
    registry.counters("rpc", "calls", ("op", "result")).labels("cas", "ok").add(3)
    registry.gauge("up", "is it").set(1)
    histogram = registry.histogram("took_seconds", "how long", exponential(0.1, 2, 3))
    histogram.observe(0.15, times=4)
    histogram.observe(9)
    values = parsed(registry)
    assert values["p_rpc_total", (("op", "cas"), ("result", "ok"))] == 3
    assert values["p_up", ()] == 1
    assert values["p_took_seconds_bucket", (("le", "0.1"),)] == 0
    assert values["p_took_seconds_bucket", (("le", "0.2"),)] == 4
    assert values["p_took_seconds_bucket", (("le", "+Inf"),)] == 5
    assert values["p_took_seconds_count", ()] == 5
    assert values["p_took_seconds_sum", ()] == pytest.approx(9.6)


def test_gauges_that_are_asked_for_are_updated_before_they_are_read() -> None:
    registry = Registry("p_")
    gauge = registry.gauge("idle", "asked")
    registry.before_collect(lambda: gauge.set(7))
    assert parsed(registry)["p_idle", ()] == 7


def test_a_child_is_kept_and_wrong_labels_are_refused() -> None:
    family = Registry("p_").counters("n", "n", ("op",))
    assert family.labels("a") is family.labels("a")
    with pytest.raises(ValueError, match="labels"):
        family.labels("a", "b")


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5))))
def test_observing_n_times_is_observing_once_n_times(values: list[tuple[float, int]]) -> None:
    batched, single = Histogram((0.5, 1, 5)), Histogram((0.5, 1, 5))
    for value, times in values:
        batched.observe(value, times)
        for _ in range(times):
            single.observe(value)
    assert batched.counts == single.counts
    assert batched.count == single.count
    assert batched.sum == pytest.approx(single.sum)
