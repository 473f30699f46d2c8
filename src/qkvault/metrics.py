"""Everything that can be scraped, as one table of data, and the exporter that fills it in.

Counts tokens of an engine (``stats``) and chunks of the store behind it (``Status``). Nothing is counted here: a scrape
reads, so that two scrapes without traffic between them are equal. Prometheus is imported when an exporter is made.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from qkvault.errors import Unavailable
from qkvault.stats import CHUNK_OUTCOMES, MEDIA, OPERATIONS, STAGES, Stats
from qkvault.tiers.base import SCAN_FAULTS
from qkvault.types import Outcome
from qkvault.wire.messages import Status

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

Labels = tuple[str, ...]
Values = Mapping[Labels, float]  # values of the labels, in the metric's order, to the number

INSTANCE: Final = "instance_id"
TIERS: Final = ("disk",)
REMOVAL_REASONS: Final = ("evicted", "cleared", "forgotten", "superseded", "cooled", "absent", "corrupt")
FAILURE_REASONS: Final = ("absent", "corrupt", "refused", "unavailable")
DROP_REASONS: Final = (  # of queries; a test holds them against qkvault.capture, a layer above
    "not_computed", "ring_full", "bad_blocks", "row_missing", "layer_missing", "ended", "no_room", "not_stored",
)  # fmt: skip


class Metric(msgspec.Struct, frozen=True):
    """One name. ``source`` says which number it is: of a snapshot of ``Stats``, or of the store's ``Status``.

    ``labels`` maps a label, besides ``instance_id``, to the values that are there from the first scrape; others may
    follow.
    """

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    source: str
    labels: dict[str, Labels] = {}

    def zeros(self) -> dict[Labels, float]:
        """What the metric says before anything has happened."""
        return dict.fromkeys(itertools.product(*self.labels.values()), 0.0)


def _of_operations(name: str, help_text: str, field: str) -> Metric:
    return Metric(f"qkvault_{name}_total", "counter", help_text, f"operations.{field}", {"operation": OPERATIONS})


def _of_stages(field: str, help_text: str) -> Metric:
    return Metric(f"qkvault_stage_{field}_total", "counter", help_text, f"stages.{field}", {"stage": STAGES})


def _of_stats(field: str, help_text: str, **labels: Labels) -> Metric:
    return Metric(f"qkvault_{field}_total", "counter", help_text, field, labels)


def _of_store(name: str, help_text: str, counter: str, **labels: Labels) -> Metric:
    return Metric(f"qkvault_store_{name}_total", "counter", help_text, f"counters.{counter}", labels)


def _of_media(field: str, help_text: str) -> Metric:
    name = field.removeprefix("num_").removeprefix("is_")
    return Metric(f"qkvault_store_medium_{name}", "gauge", help_text, f"media.{field}", {"medium": ("ram",)})


def _of_status(field: str, help_text: str) -> Metric:
    name = field.removeprefix("num_").removeprefix("is_")
    return Metric(f"qkvault_store_{name}", "gauge", help_text, f"status.{field}")


def _of_queries(source: str, help_text: str, **labels: Labels) -> Metric:
    return Metric(f"qkvault_query_{source}_total", "counter", help_text, source, labels)


def _of_ring(source: str, help_text: str) -> Metric:
    return Metric(f"qkvault_query_{source}", "gauge", help_text, source)


ENGINE_METRICS: Final = (
    _of_operations("requests", "Requests begun.", "requests"),
    _of_operations("requests_finished", "Requests ended.", "finished"),
    _of_operations("request_seconds", "Time between the begin and the end of requests.", "seconds"),
    _of_operations("request_tokens", "Tokens that requests asked for.", "tokens"),
    _of_stats("found_tokens", "Tokens that lookups found; not yet loaded.", medium=MEDIA),
    _of_stats("loaded_tokens", "Tokens that retrieves delivered."),
    _of_stats("loaded_bytes", "Bytes that retrieves delivered."),
    _of_stats("failed_tokens", "Tokens that were found and could not be loaded."),
    _of_stats("voided_tokens", "Tokens of no use, since tokens before them could not be loaded."),
    _of_stats("failed_loads", "Retrieves that delivered less than they were asked for."),
    _of_stats("stored_tokens", "Tokens that were stored."),
    _of_stats("stored_bytes", "Bytes that were stored."),
    _of_stats("chunks", "Chunks that were to be stored, by what became of them.", outcome=CHUNK_OUTCOMES),
    _of_stages("calls", "Calls of a stage."),
    _of_stages("failures", "Calls of a stage that failed."),
    _of_stages("seconds", "Time spent in a stage."),
    _of_stages("tokens", "Tokens that a stage handled."),
    _of_stages("bytes", "Bytes that a stage moved."),
    _of_stats("rejected_updates", "Updates of these metrics that made no sense: a bug if not 0."),
)

STORE_METRICS: Final = (
    _of_media("capacity_bytes", "Size of the medium."),
    _of_media("used_bytes", "Bytes in use."),
    _of_media("num_chunks", "Chunks that can be read."),
    _of_media("is_healthy", "1 while the medium can be used."),
    _of_media("query_used_bytes", "Bytes in use by queries."),
    _of_media("query_share_bytes", "How many these may be."),
    _of_status("num_leases", "Leases that clients hold."),
    _of_status("num_sessions", "Clients that are connected."),
    _of_status("num_jobs", "Jobs of lower tiers under way."),
    _of_status("is_frozen", "1 while nothing is stored or evicted."),
    _of_status("hot_cache", "1 while RAM is used as a cache."),
    _of_status("is_scanning", "1 while tiers still tell what they hold."),
    _of_store("lookups", "Lookups of prompts.", "lookups"),
    _of_store("asked_chunks", "Chunks that lookups asked for.", "chunks_asked"),
    _of_store("found_chunks", "Chunks that lookups found.", "chunks_found"),
    _of_store("promoted_chunks", "Chunks that lookups had fetched from a lower tier.", "chunks_promoted"),
    _of_store("collisions", "Chunks under the key of other tokens: misses.", "collisions"),
    _of_store("expired_leases", "Leases whose client fell silent.", "leases_expired"),
    _of_store(
        "offered_chunks", "Chunks that clients wanted to write.", "reserve", outcome=tuple(o.value for o in Outcome)
    ),
    _of_store("stored_chunks", "Chunks that became readable in a medium.", "stored", medium=MEDIA),
    _of_store("stored_bytes", "Bytes that became readable in a medium.", "stored_bytes", medium=MEDIA),
    _of_store("removed_chunks", "Chunks that left a medium.", "removed", medium=MEDIA, reason=REMOVAL_REASONS),
    _of_store("loaded_chunks", "Chunks that came up from a tier.", "loaded", tier=TIERS),
    _of_store("loaded_bytes", "Bytes that came up from a tier.", "loaded_bytes", tier=TIERS),
    _of_store("failed_chunks", "Chunks that a tier failed on.", "failed", tier=TIERS, reason=FAILURE_REASONS),
    _of_store(
        "scan_removed_files",
        "Files that a scan has removed: no whole chunks of ours.",
        "scan_removed",
        tier=TIERS,
        reason=SCAN_FAULTS,
    ),
)

QUERY_METRICS: Final = (
    _of_queries("chunks", "Chunks of queries, by what became of them.", outcome=("captured", "stored", "present")),
    _of_queries("dropped_chunks", "Chunks whose queries are not stored.", reason=DROP_REASONS),
    _of_queries("faults", "Steps, or parts of one, that were not captured because of a fault: a bug if not 0."),
    _of_ring("ring_bytes", "Size of the ring that queries are collected in."),
    _of_ring("ring_blocks", "Blocks of the ring."),
    _of_ring("ring_free_blocks", "Blocks of the ring that are free."),
)

UP: Final = Metric(
    "qkvault_store_up", "gauge", "1 if the store answered; if not, the others are what it last said.", ""
)


def read_stats(metric: Metric, stats: Stats) -> Values:
    """The numbers of one of ENGINE_METRICS."""
    table, _, field = metric.source.partition(".")
    value = getattr(stats, table)
    if not isinstance(value, Mapping):
        return {(): value}
    return {(name,): getattr(item, field) if field else item for name, item in value.items()}


def read_status(metric: Metric, status: Status) -> Values:
    """The numbers of one of STORE_METRICS."""
    table, _, field = metric.source.partition(".")
    if table == "media":
        return {(medium.name,): getattr(medium, field) for medium in status.media}
    if table == "status":
        return {(): getattr(status, field)}
    found = metric.zeros()
    for name, count in status.counters.items():
        counter, *labels = name.split(".")
        if counter == field and len(labels) == len(metric.labels):
            found[tuple(labels)] = count
    return found


class MetricsExporter:
    """A Prometheus collector with a registry of its own, so that it never meets the names of its host.

    ``stats`` is a ``StatsMonitor.snapshot``; ``status`` asks the store and may raise Unavailable. Without ``status``
    the metrics of the store are left out: somebody else exports them. Without ``stats`` those of an engine are: a
    server has none.
    """

    def __init__(
        self,
        stats: Callable[[], Stats] | None,
        status: Callable[[], Status] | None = None,
        *,
        instance_id: str = "default",
    ) -> None:
        from prometheus_client import CollectorRegistry

        self._stats, self._status, self._instance_id = stats, status, instance_id
        self._last_status: Status | None = None
        self.registry: CollectorRegistry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Every metric with its numbers as of now: what a registry calls for a scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        numbers = self._read()
        for metric in (*ENGINE_METRICS, UP, *STORE_METRICS):
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=(INSTANCE, *metric.labels))
            for labels, value in numbers.get(metric.name, {}).items():
                family.add_metric((self._instance_id, *labels), value)
            if family.samples:
                yield family

    def _read(self) -> dict[str, Values]:
        """Metric name to its numbers. While the store does not answer: what it last said."""
        found: dict[str, Values] = {}
        if self._stats is not None:
            stats = self._stats()
            found = {metric.name: read_stats(metric, stats) for metric in ENGINE_METRICS}
        if self._status is not None:
            try:
                self._last_status = self._status()
                found[UP.name] = {(): 1.0}
            except Unavailable:
                found[UP.name] = {(): 0.0}
        if (status := self._last_status) is not None:
            found |= {metric.name: read_status(metric, status) for metric in STORE_METRICS}
        return found

    def render(self) -> bytes:
        """The scrape as text, in Prometheus' format 0.0.4."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry)


def metrics_markdown() -> str:
    """The page docs/metrics.md."""
    tables = {"engine": ENGINE_METRICS, "queries": QUERY_METRICS, "store": (UP, *STORE_METRICS)}
    return _PAGE.format(**{name: _table(metrics) for name, metrics in tables.items()})


def _table(metrics: tuple[Metric, ...]) -> str:
    rows = []
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        source = f"`{metric.source.removeprefix('counters.')}`" if metric.source else ""
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {source} | {metric.help} |")
    return "\n".join(rows)


_PAGE: Final = """\
# Metrics

Generated from `qkvault/metrics.py` by `make docs`.

Every name is there, at zero, from the first scrape, and counters only rise. Every sample has the label `instance_id`.

vLLM's own `/metrics` has the same numbers as `vllm:qkvault_...`, with vLLM's labels `model_name` and `engine` in place
of `instance_id`: see [Under vLLM](vllm.md#metrics-and-logs).

## The engine: tokens

Asked, found, loaded and failed are counted apart. A lookup *asks* (`qkvault_request_tokens_total` of operation
`lookup`) and *finds*; a retrieve *loads* what was found, or fails. The share of tokens that nobody had to compute is

    rate(qkvault_loaded_tokens_total[5m])
      / ignoring(operation) rate(qkvault_request_tokens_total{{operation="lookup"}}[5m])

and the rate of a stage in bytes a second is

    rate(qkvault_stage_bytes_total[5m]) / rate(qkvault_stage_seconds_total[5m])

Stage `process_tokens` is hashing, `get` waiting for what comes up from a tier or is sent by a server, `put` making room
and publishing, `from_gpu` and `to_gpu` copies. Several requests may wait at the same time.

"Number" is the field of `StatsMonitor.snapshot()`.

| name | kind | labels | number | meaning |
|---|---|---|---|---|
{engine}

## Captured queries: chunks

In vLLM's `/metrics`, while queries are captured.

| name | kind | labels | number | meaning |
|---|---|---|---|---|
{queries}

## The store: chunks

"Number" is the counter's name in the store's status, or the field of it.

| name | kind | labels | number | meaning |
|---|---|---|---|---|
{store}
"""
