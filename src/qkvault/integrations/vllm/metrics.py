"""Our numbers on their way to vLLM's ``/metrics`` and its log: Reporter to QKVaultStats to QKVaultPromMetrics.

The names are those of ``qkvault.metrics`` with ``vllm:`` before them. What travels are differences, one flat dictionary
of numbers, so that nothing is lost or counted twice whatever is added up on the way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import Counter, Gauge

from qkvault.errors import Unavailable
from qkvault.integrations.vllm.compat import KVConnectorPromMetrics, KVConnectorStats
from qkvault.logs import RateLimited, get_logger
from qkvault.metrics import ENGINE_METRICS, QUERY_METRICS, STORE_METRICS, Metric, Values, read_stats, read_status
from qkvault.stats import MEDIA, StatsMonitor
from qkvault.wire.messages import Status

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_METRICS: Final = {metric.name: metric for metric in (*ENGINE_METRICS, *STORE_METRICS, *QUERY_METRICS)}
_STATUS_SECONDS: Final = 1.0
_limited = RateLimited(get_logger("vllm.metrics"))


def _key(name: str, labels: tuple[str, ...] = ()) -> str:
    return ".".join((name, *labels))


def _is_gauge(key: str) -> bool:
    metric = _METRICS.get(key.partition(".")[0])
    return metric is not None and metric.kind == "gauge"


def _is_of_each_rank(metric: Metric) -> bool:
    # All ranks work on the same requests and tokens: rank 0 counts those. Bytes, chunks and stages are a rank's own.
    return not metric.source.startswith("operations.") and not metric.source.endswith("_tokens")


@dataclass
class QKVaultStats(KVConnectorStats):
    """What was counted since the report before: ``NAME.LABEL...`` to a counter's difference, or a gauge's new value."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> QKVaultStats:
        """Both together, with the later of two gauges; neither is changed, since several loggers may hold it."""
        both = dict(self.data)
        for key, value in other.data.items():
            both[key] = value if _is_gauge(key) else both.get(key, 0) + value
        return QKVaultStats(both)

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log says of the last seconds."""
        found = {medium: int(self._of("found_tokens", medium)) for medium in MEDIA}
        return {
            **{f"hit_tokens_{medium}": tokens for medium, tokens in found.items() if tokens},
            "loaded_gb": round(self._of("loaded_bytes") / 1e9, 3),
            "stored_gb": round(self._of("stored_bytes") / 1e9, 3),
            "failed_loads": int(self._of("failed_loads")),
        }

    def _of(self, name: str, *labels: str) -> float:
        return float(self.data.get(_key(f"qkvault_{name}_total", labels), 0))


class Reporter:
    """What one side has counted, difference by difference. For one thread."""

    def __init__(self, stats: StatsMonitor, *, rank: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.status: Callable[[], Status] | None = None  # asked once a second at most, by a call that reports
        self.queries: Callable[[], Mapping[str, Values]] | None = None  # what is captured, by the metrics' sources
        self._stats = stats
        self._metrics = [metric for metric in ENGINE_METRICS if rank == 0 or _is_of_each_rank(metric)]
        self._clock = clock
        self._num_updates = 0  # those that are reported
        self._status_due = clock()
        self._reported: dict[str, float] = {}

    def take(self) -> QKVaultStats | None:
        """Everything since the last call; None if that is nothing, which costs two comparisons."""
        data: dict[str, float] = {}
        if self.status is not None and (now := self._clock()) >= self._status_due:
            self._status_due = now + _STATUS_SECONDS
            try:
                status = self.status()
            except Unavailable:  # whoever has work for the store says so
                pass
            else:
                for metric in STORE_METRICS:
                    self._report(metric, read_status(metric, status), data)
        if self.queries is not None:
            numbers = self.queries()
            for metric in QUERY_METRICS:
                self._report(metric, numbers.get(metric.source, {}), data)
        if (num_updates := self._stats.num_updates) != self._num_updates:
            self._num_updates = num_updates
            stats = self._stats.snapshot()
            for metric in self._metrics:
                self._report(metric, read_stats(metric, stats), data)
        return QKVaultStats(data) if data else None

    def _report(self, metric: Metric, values: Values, data: dict[str, float]) -> None:
        for labels, value in values.items():
            key = _key(metric.name, labels)
            before = self._reported.get(key)
            if metric.kind == "gauge":
                if value != before:
                    data[key] = float(value)
            elif value > (before or 0):
                data[key] = value - (before or 0)
            self._reported[key] = value


class QKVaultPromMetrics(KVConnectorPromMetrics):
    """The names in vLLM's ``/metrics``, with vLLM's labels before ours; in the process that is asked."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        *,
        with_store: bool = True,
        with_queries: bool = False,
    ) -> None:
        """Make the names known. Counters are at zero; a gauge has no value before the store was asked."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._families: dict[str, Any] = {}  # what vLLM names as its classes: Prometheus' or Ray's
        self._samples: dict[tuple[int, str], Any] = {}  # by engine and key; of those classes
        optional = (*(STORE_METRICS if with_store else ()), *(QUERY_METRICS if with_queries else ()))
        for metric in (*ENGINE_METRICS, *optional):
            is_gauge = metric.kind == "gauge"
            options = {"multiprocess_mode": "mostrecent"} if is_gauge else {}
            self._families[metric.name] = metric_types[Gauge if is_gauge else Counter](
                name=f"vllm:{metric.name}",
                documentation=metric.help,
                labelnames=[*labelnames, *metric.labels],
                **options,
            )
            if not is_gauge:
                for engine_index in per_engine_labelvalues:
                    for labels in metric.zeros():
                        self._sample(engine_index, _key(metric.name, labels))

    def observe(self, transfer_stats_data: dict[str, float], engine_idx: int = 0) -> None:
        """Add what was counted. What cannot be is left out: vLLM's output must not end for a number."""
        for key, value in transfer_stats_data.items():
            try:
                sample = self._sample(engine_idx, key)
                if _is_gauge(key):
                    sample.set(value)
                else:
                    sample.inc(value)
            except Exception as error:  # thread top: a name or label that is not ours
                _limited.warning("metric_not_counted", metric=key, error=f"{type(error).__name__}: {error}")

    def _sample(self, engine_index: int, key: str) -> Any:  # seam: vLLM's class for counters, gauges or Ray's
        sample = self._samples.get((engine_index, key))
        if sample is None:
            name, *labels = key.split(".")
            sample = self._families[name].labels(*self.per_engine_labelvalues[engine_index], *labels)
            self._samples[engine_index, key] = sample
        return sample
