"""What a scrape shows: every name from the start, the numbers of the snapshot, and nothing that moves by itself."""

from __future__ import annotations

import re
import subprocess
import sys

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from qkvault import metrics
from qkvault.errors import Unavailable
from qkvault.metrics import ENGINE_METRICS, STORE_METRICS, UP, MetricsExporter, metrics_markdown
from qkvault.stats import StatsMonitor
from qkvault.types import Outcome
from qkvault.wire.messages import Status, TierStatus

CATALOGUE = (*ENGINE_METRICS, UP, *STORE_METRICS)
RAM = TierStatus("ram", 1000, 10, 2, is_healthy=True, query_used_bytes=4, query_share_bytes=250)
DISK = TierStatus("disk", 5000, 20, 4, is_healthy=False)


def a_status(**counters) -> Status:
    """A store with RAM and disk, and these counters."""
    return Status(
        media=(RAM, DISK),
        num_leases=3,
        num_sessions=2,
        num_jobs=1,
        is_frozen=False,
        hot_cache=True,
        is_scanning=True,
        counters={name.replace("__", "."): count for name, count in counters.items()},
    )


@pytest.fixture
def monitor():
    """An engine's monitor."""
    return StatsMonitor()


@pytest.fixture
def exporter(monitor):
    """An exporter of that engine and an idle store."""
    return MetricsExporter(monitor.snapshot, a_status)


def scrape(exporter) -> dict[str, float]:
    """Sample, written as in the text format without `instance_id`, to its value."""
    found = {}
    for family in text_string_to_metric_families(exporter.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sample.labels.items() if name != "instance_id")
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def names_in(exporter) -> set[str]:
    """Names of the samples."""
    return {sample.partition("{")[0] for sample in scrape(exporter)}


def test_every_name_is_there_before_anything_happens(exporter):
    """The first scrape has every documented name, with its known labels, and counters stand at zero."""
    found = scrape(exporter)
    assert names_in(exporter) == {metric.name for metric in CATALOGUE}
    for metric in CATALOGUE:
        for labels in metric.zeros():
            written = ",".join(f"{name}={value}" for name, value in sorted(zip(metric.labels, labels, strict=True)))
            sample = f"{metric.name}{{{written}}}" if written else metric.name
            assert sample in found
            assert metric.kind == "gauge" or found[sample] == 0


def test_two_processes_show_the_same_names():
    """Every process exports every name, whatever it has done so far."""
    busy = StatsMonitor()
    busy.on_lookup_finished(busy.on_lookup_request(16), {"ram": 16})
    assert names_in(MetricsExporter(busy.snapshot, a_status)) == names_in(
        MetricsExporter(StatsMonitor().snapshot, a_status)
    )


def test_an_idle_scrape_is_constant(exporter, monitor):
    """Two scrapes without traffic between them are equal, to the byte."""
    monitor.on_lookup_finished(monitor.on_lookup_request(256), {"ram": 256})
    monitor.on_stage("to_gpu", 0.5, num_bytes=4096)
    assert exporter.render() == exporter.render()


def test_a_known_scenario_gives_exact_samples(exporter, monitor):
    """Asked, found, loaded and failed are separate series with the numbers of the scenario."""
    monitor.on_lookup_finished(monitor.on_lookup_request(1000), {"ram": 512, "disk": 256})
    retrieve = monitor.on_retrieve_request(768)
    monitor.on_retrieve_finished(
        retrieve, num_tokens=512, num_bytes=512_000, num_failed_tokens=128, num_voided_tokens=128
    )
    monitor.on_store_finished(
        monitor.on_store_request(300), num_tokens=256, num_bytes=256_000, chunks={"stored": 1, "no_room": 1}
    )
    monitor.on_stage("from_gpu", 0.5, num_bytes=256_000, num_tokens=256)
    moved = {sample: value for sample, value in scrape(exporter).items() if value and "_store_" not in sample}
    seconds = {sample for sample in moved if sample.startswith("qkvault_request_seconds_total")}
    assert {sample: value for sample, value in moved.items() if sample not in seconds} == {
        "qkvault_requests_total{operation=lookup}": 1,
        "qkvault_requests_total{operation=retrieve}": 1,
        "qkvault_requests_total{operation=store}": 1,
        "qkvault_requests_finished_total{operation=lookup}": 1,
        "qkvault_requests_finished_total{operation=retrieve}": 1,
        "qkvault_requests_finished_total{operation=store}": 1,
        "qkvault_request_tokens_total{operation=lookup}": 1000,
        "qkvault_request_tokens_total{operation=retrieve}": 768,
        "qkvault_request_tokens_total{operation=store}": 300,
        "qkvault_found_tokens_total{medium=ram}": 512,
        "qkvault_found_tokens_total{medium=disk}": 256,
        "qkvault_loaded_tokens_total": 512,
        "qkvault_loaded_bytes_total": 512_000,
        "qkvault_failed_tokens_total": 128,
        "qkvault_voided_tokens_total": 128,
        "qkvault_failed_loads_total": 1,
        "qkvault_stored_tokens_total": 256,
        "qkvault_stored_bytes_total": 256_000,
        "qkvault_chunks_total{outcome=stored}": 1,
        "qkvault_chunks_total{outcome=no_room}": 1,
        "qkvault_stage_calls_total{stage=from_gpu}": 1,
        "qkvault_stage_seconds_total{stage=from_gpu}": 0.5,
        "qkvault_stage_bytes_total{stage=from_gpu}": 256_000,
        "qkvault_stage_tokens_total{stage=from_gpu}": 256,
    }


def test_the_store_is_read_from_its_status():
    """B315: gauges come from the fields of the status, counters from its dotted names, new labels included."""
    status = a_status(
        lookups=7,
        chunks_asked=30,
        reserve__reserved=4,
        stored__disk=5,
        stored_bytes__disk=500,
        removed__ram__evicted=6,
        removed__ram__on_fire=2,
        loaded__disk=8,
        failed__disk__corrupt=1,
        failed__s3__unavailable=9,
        unheard_of=1,
    )
    found = scrape(MetricsExporter(StatsMonitor().snapshot, lambda: status))
    assert {sample: value for sample, value in found.items() if value} == {
        "qkvault_store_up": 1,
        "qkvault_store_medium_capacity_bytes{medium=ram}": 1000,
        "qkvault_store_medium_capacity_bytes{medium=disk}": 5000,
        "qkvault_store_medium_used_bytes{medium=ram}": 10,
        "qkvault_store_medium_used_bytes{medium=disk}": 20,
        "qkvault_store_medium_query_used_bytes{medium=ram}": 4,
        "qkvault_store_medium_query_share_bytes{medium=ram}": 250,
        "qkvault_store_medium_chunks{medium=ram}": 2,
        "qkvault_store_medium_chunks{medium=disk}": 4,
        "qkvault_store_medium_healthy{medium=ram}": 1,
        "qkvault_store_leases": 3,
        "qkvault_store_sessions": 2,
        "qkvault_store_jobs": 1,
        "qkvault_store_hot_cache": 1,
        "qkvault_store_scanning": 1,
        "qkvault_store_lookups_total": 7,
        "qkvault_store_asked_chunks_total": 30,
        "qkvault_store_offered_chunks_total{outcome=reserved}": 4,
        "qkvault_store_stored_chunks_total{medium=disk}": 5,
        "qkvault_store_stored_bytes_total{medium=disk}": 500,
        "qkvault_store_removed_chunks_total{medium=ram,reason=evicted}": 6,
        "qkvault_store_removed_chunks_total{medium=ram,reason=on_fire}": 2,
        "qkvault_store_loaded_chunks_total{tier=disk}": 8,
        "qkvault_store_failed_chunks_total{reason=corrupt,tier=disk}": 1,
        "qkvault_store_failed_chunks_total{reason=unavailable,tier=s3}": 9,
    }


def test_every_field_of_a_snapshot_is_exported():
    """A number that is counted is a number that can be scraped."""
    sources = {metric.source.partition(".")[0] for metric in ENGINE_METRICS}
    assert sources == set(type(StatsMonitor().snapshot()).__struct_fields__)


def test_every_field_of_the_status_is_exported():
    """What the store tells is scraped: its switches, its media and all its counters."""
    status = {metric.source.removeprefix("status.") for metric in STORE_METRICS if metric.source.startswith("status.")}
    assert status == set(Status.__struct_fields__) - {"media", "counters", "instances", "spaces"}
    media = {metric.source.removeprefix("media.") for metric in STORE_METRICS if metric.source.startswith("media.")}
    assert media == set(TierStatus.__struct_fields__) - {"name"}


def test_every_counter_of_a_real_store_is_exported():
    """Every counter that the store's own status has is one that the exporter reads."""
    status = pytest.importorskip("qkvault.store.status")
    ledger = pytest.importorskip("qkvault.store.ledger")
    known = {metric.source.removeprefix("counters.") for metric in STORE_METRICS}
    for name in status.flat_counters(ledger.Counters()):
        assert name.partition(".")[0] in known


def test_a_store_that_does_not_answer_is_down_and_keeps_its_last_numbers():
    """While the store is away `up` is 0 and its counters stand still, so that no rate jumps when it is back."""
    answers = [a_status(lookups=7)]

    def status() -> Status:
        if not answers:
            msg = "no server"
            raise Unavailable(msg)
        return answers.pop()

    exporter = MetricsExporter(StatsMonitor().snapshot, status)
    assert scrape(exporter)["qkvault_store_up"] == 1
    found = scrape(exporter)
    assert (found["qkvault_store_up"], found["qkvault_store_lookups_total"]) == (0, 7)


def test_a_store_that_never_answered_is_only_down():
    """Numbers that nobody knows are left out rather than called zero."""

    def status() -> Status:
        msg = "no server"
        raise Unavailable(msg)

    exporter = MetricsExporter(StatsMonitor().snapshot, status)
    assert names_in(exporter) == {metric.name for metric in ENGINE_METRICS} | {"qkvault_store_up"}


def test_without_a_store_only_the_engine_is_exported(monitor):
    """A client of a server that exports itself leaves the store's numbers to it."""
    assert names_in(MetricsExporter(monitor.snapshot)) == {metric.name for metric in ENGINE_METRICS}


def test_engines_of_one_process_are_told_apart(monitor):
    """Each engine has its own series under the label `instance_id`."""
    monitor.on_store_request(5)
    lines = MetricsExporter(monitor.snapshot, instance_id="second").render().decode()
    assert 'qkvault_requests_total{instance_id="second",operation="store"} 1.0' in lines


def test_exporters_do_not_meet_in_one_registry(monitor):
    """Two exporters of one process never clash, with each other or with their host."""
    from prometheus_client import REGISTRY

    one, other = MetricsExporter(monitor.snapshot), MetricsExporter(monitor.snapshot)
    assert one.registry is not other.registry
    assert not any(family.name.startswith("qkvault") for family in REGISTRY.collect())


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_a_name_is_clean(metric):
    """Names pass Prometheus' linter: base units, `_total` on counters alone, no type and no camel case in the name."""
    assert re.fullmatch(r"qkvault_[a-z][a-z0-9]*(_[a-z0-9]+)*", metric.name)
    words = metric.name.split("_")
    assert (words[-1] == "total") == (metric.kind == "counter")
    assert not set(words) & {
        "counter",
        "gauge",
        "histogram",
        "summary",
        "milliseconds",
        "ms",
        "kb",
        "mb",
        "gb",
        "minutes",
    }
    assert words[-1] not in {"sum", "count", "bucket", "created", "info"}
    for unit in {"seconds", "bytes"} & set(words):
        assert words[-1] == unit or words[-2:] == [unit, "total"]
    assert metric.help.strip().endswith(".")
    assert len(metric.help) < 100
    assert not set(metric.labels) & {"le", "quantile", "instance", "job", metrics.INSTANCE}


def test_names_are_unique():
    """One name is one thing."""
    names = [metric.name for metric in CATALOGUE]
    assert len(set(names)) == len(names)


def test_outcomes_are_those_of_the_store():
    """A chunk offered to the store ends in one of the store's outcomes."""
    metric = next(metric for metric in STORE_METRICS if metric.source == "counters.reserve")
    assert metric.labels == {"outcome": tuple(outcome.value for outcome in Outcome)}


def test_the_page_lists_every_name():
    """The generated page has one row for each metric, with kind, labels and meaning."""
    page = metrics_markdown()
    for metric in CATALOGUE:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        assert f"| `{metric.name}` | {metric.kind} | {labels} | " in page
        assert f" | {metric.help} |" in page


def test_the_catalogue_is_data():
    """The catalogue can be written out, for dashboards made from it."""
    assert msgspec.json.decode(msgspec.json.encode(CATALOGUE), type=tuple[metrics.Metric, ...]) == CATALOGUE


def test_prometheus_is_loaded_when_an_exporter_is_made():
    """Importing the catalogue does not import the client library."""
    code = (
        "import sys, qkvault.metrics as m, qkvault.stats as s\n"
        "print('prometheus_client' in sys.modules)\n"
        "m.MetricsExporter(s.StatsMonitor().snapshot)\n"
        "print('prometheus_client' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
