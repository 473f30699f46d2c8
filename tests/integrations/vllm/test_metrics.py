"""What both sides count arrives in vLLM's metrics: once, right, and whatever happens to it on the way."""

from __future__ import annotations

import pickle
from contextlib import closing

import pytest

pytestmark = pytest.mark.vllm

LABELS = ["model_name", "engine"]


@pytest.fixture
def scrape():
    """vLLM's own chain behind the scheduler: its messages, its loggers, its registry, read by name and our labels."""
    from prometheus_client import REGISTRY
    from vllm.v1.metrics import loggers
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    class Scrape:
        def follow(self, engine):
            """Hear of every step of ``engine`` from now on; returns vLLM's logger of lines too."""
            self.prometheus = loggers.PrometheusStatLogger(engine.config)
            self.lines = loggers.LoggingStatLogger(engine.config)
            self.num_reports = 0
            update = engine.scheduler.update_from_output

            def heard(*args):
                outputs = update(*args)
                for one in outputs.values():
                    if one.scheduler_stats is not None:
                        message = MsgpackEncoder().encode(one.scheduler_stats)
                        stats = MsgpackDecoder(SchedulerStats).decode(message)
                        self.num_reports += stats.kv_connector_stats is not None
                        for logger in (self.lines, self.prometheus):
                            logger.record(stats, None)
                return outputs

            engine.scheduler.update_from_output = heard
            return self

        def __getitem__(self, name):
            """Labels of ours to the number; the number alone where there are none."""
            name = f"vllm:qkvault_{name}"
            found = {
                tuple(value for label, value in sample.labels.items() if label not in LABELS): sample.value
                for family in REGISTRY.collect()
                for sample in family.samples
                if sample.name == name
            }
            return found.get((), found)

    unregister_vllm_metrics()  # those that an engine in this process has left
    yield Scrape()
    unregister_vllm_metrics()


@pytest.mark.parametrize("options", [{"runner": 1}, {"runner": 2, "asynchronous": True, "is_late": True}])
def test_the_numbers_of_both_sides_are_in_vllms_metrics(toy_engine, prompts, scrape, options):
    """B280: what was asked, found, loaded and stored is there after the step that did it, and once."""
    engine = toy_engine(**options)
    scrape.follow(engine)
    assert scrape["loaded_tokens_total"] == 0
    assert scrape["found_tokens_total"] == {("ram",): 0, ("disk",): 0, ("remote",): 0}
    prompt = prompts(300)
    engine.ask(prompt)
    engine.forget_own_prefixes()
    engine.ask(prompt)
    found, loaded = engine.connector.stats.snapshot(), engine.worker.stats.snapshot()
    assert scrape["found_tokens_total"]["ram",] == scrape["loaded_tokens_total"] == 288
    assert scrape["loaded_bytes_total"] == loaded.loaded_bytes == 288 * 128
    assert scrape["stored_tokens_total"] == loaded.stored_tokens == 288
    assert scrape["request_tokens_total"]["lookup",] == found.operations["lookup"].tokens == 600
    assert loaded.operations["store"].finished == 4
    assert scrape["requests_finished_total"] == {("lookup",): 2, ("store",): 4, ("retrieve",): 1}
    assert scrape["chunks_total"]["stored",] == loaded.chunks["stored"]
    assert scrape["stage_seconds_total"]["from_gpu",] == pytest.approx(loaded.stages["from_gpu"].seconds)
    assert (scrape["failed_loads_total"], scrape["rejected_updates_total"]) == (0, 0)


@pytest.mark.parametrize("options", [{"runner": 1}, {"runner": 2, "asynchronous": True, "is_late": True}])
def test_every_stage_counts(toy_engine, prompts, scrape, tmp_path, options):
    """B464: hashing of each token once, and the time in which a request waits for its chunks to come up."""
    engine = toy_engine(settings={"qkvault.disk_path": str(tmp_path / "disk")}, **options)
    scrape.follow(engine)
    prompt = prompts(300)
    engine.ask(prompt, max_tokens=60)
    assert scrape["stage_tokens_total"]["process_tokens",] >= 300 + 20
    assert scrape["stage_calls_total"]["process_tokens",] < 6, "not with each step"
    assert scrape["stage_calls_total"]["get",] == 0, "nothing is waited for"
    engine.move_to_disk()
    engine.forget_own_prefixes()
    engine.ask(prompt)
    found = engine.connector.stats.snapshot()
    assert found.found_tokens["disk"] == 288
    assert scrape["stage_calls_total"]["get",] == 1
    assert scrape["stage_tokens_total"]["get",] >= 288
    assert scrape["stage_bytes_total"]["get",] > 288 * 128
    assert scrape["stage_seconds_total"]["get",] == found.stages["get"].seconds > 0
    for name in ("calls", "seconds"):
        assert min(scrape[f"stage_{name}_total"].values()) > 0


def test_a_wait_that_ends_at_its_deadline_counts(toy_engine, prompts, tmp_path):
    """B464: with what has come up by then; a request that asks again counts once."""
    from qkvault.testing.wrappers import FaultyTier

    engine = toy_engine(settings={"qkvault.disk_path": str(tmp_path / "disk")})
    prompt = prompts(300)
    engine.ask(prompt)
    engine.move_to_disk()
    engine.forget_own_prefixes()
    now = [0.0]
    engine.connector._scheduler._clock = lambda: now[0]
    tier = engine.wrap_disk(FaultyTier)
    tier.is_mute = True
    engine.add("r", prompt)
    for _ in range(5):
        engine.step()
    now[0] = 10.0
    engine.run()
    tier.release()
    assert engine.store.driver.drain(10)
    get = engine.connector.stats.snapshot().stages["get"]
    assert (get.calls, get.tokens, get.bytes) == (1, 0, 0)
    assert get.seconds > 0
    engine.assert_texts()


@pytest.fixture
def remote():
    """The address of a server whose memory is not shared."""
    from qkvault.config import load
    from qkvault.server.server import Server

    settings = {"listen": "tcp://127.0.0.1:0", "ram_bytes": 16 << 20, "prefault": False, "chunk_size": 64}
    with closing(Server(load(env={}, cli=settings))) as server:
        yield server.addresses[0]


def test_what_a_server_sends_is_counted(toy_engine, prompts, remote):
    """B464: the time that a worker waits for it, its bytes and tokens; what is not there counts as failed."""
    from qkvault.errors import Unavailable

    engine = toy_engine(settings={"qkvault.address": remote})
    prompt = prompts(300)
    engine.ask(prompt)
    engine.forget_own_prefixes()
    engine.ask(prompt)
    get = engine.worker.stats.snapshot().stages["get"]
    assert (get.calls, get.failures, get.tokens) == (1, 0, 288)
    assert get.bytes > 288 * 128
    assert get.seconds > 0

    def gone(refs, timeout_seconds):
        msg = "gone"
        raise Unavailable(msg)

    engine.worker._worker._transfer.client._transport.fetch = gone
    engine.forget_own_prefixes()
    engine.ask(prompt)
    get = engine.worker.stats.snapshot().stages["get"]
    assert (get.calls, get.failures, get.tokens) == (2, 1, 288)


def test_every_name_of_the_table_is_there(toy_engine, prompts, scrape):
    """B280: each with vLLM's labels and its own; gauges since the first step."""
    from prometheus_client import REGISTRY

    from qkvault.metrics import ENGINE_METRICS, STORE_METRICS

    engine = toy_engine()
    scrape.follow(engine)
    engine.ask(prompts(100))
    found = {sample.name: sample.labels for family in REGISTRY.collect() for sample in family.samples}
    for metric in (*ENGINE_METRICS, *STORE_METRICS):
        assert list(found[f"vllm:{metric.name}"]) == LABELS + list(metric.labels), metric.name


@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
def test_the_numbers_of_queries_are_there_while_they_are_captured(toy_engine, toy_queries, prompts, scrape, is_on):
    """B111, B360: what became of chunks, and how full the ring is; without capture not even the names are there."""
    from prometheus_client import REGISTRY

    from qkvault.metrics import QUERY_METRICS

    engine = toy_engine(
        settings={"qkvault.transfer_intermediate_tensors": is_on, "qkvault.q_ring_blocks": 7},
        layers=toy_queries.Layers, max_num_batched_tokens=64,
    )  # fmt: skip
    scrape.follow(engine)
    engine.ask(prompts(210), 1)
    engine.ask(prompts(40), 2)
    names = {sample.name for family in REGISTRY.collect() for sample in family.samples}
    assert {f"vllm:{metric.name}" in names for metric in QUERY_METRICS} == {is_on}
    if is_on:
        counters = toy_queries.capture_of(engine).adapter.counters
        assert scrape["query_chunks_total"] == {("captured",): 5, ("stored",): 5, ("present",): 0}
        assert scrape["query_dropped_chunks_total"]["ring_full",] == counters.dropped["ring_full"] == 0
        assert scrape["query_faults_total"] == 0
        assert (scrape["query_ring_blocks"], scrape["query_ring_free_blocks"]) == (7, 7)
        assert scrape["query_ring_bytes"] == (7 * 16 + 1) * 4 * 32 * 4


def test_the_store_is_asked_once_a_second(toy_engine, prompts, scrape):
    """B280: what it holds and what left it is read between steps, not with each."""
    engine = toy_engine()
    scrape.follow(engine)
    reporter, asked = engine.connector._reporter, []
    now, status = [reporter._clock()], reporter.status
    reporter._clock = lambda: now[0]
    reporter.status = lambda: asked.append(now[0]) or status()
    engine.ask(prompts(1000))
    assert len(asked) == 1
    assert scrape["store_medium_capacity_bytes"]["ram",] == 4 << 20
    now[0] += 1.5
    engine.ask(prompts(30))
    assert len(asked) == 2
    assert scrape["store_stored_chunks_total"]["ram",] >= 15
    assert scrape["store_medium_chunks"]["ram",] == 17
    assert engine.connector.reset_cache()
    now[0] += 1.5
    engine.ask(prompts(30))
    assert scrape["store_removed_chunks_total"]["ram", "cleared"] >= 15
    assert scrape["store_medium_chunks"]["ram",] == 1


def test_a_failed_load_is_counted(toy_engine, prompts, scrape):
    """B280: so that an alarm can hang on it."""
    engine = toy_engine()
    scrape.follow(engine)
    prompt = prompts(300)
    engine.ask(prompt)
    engine.forget_own_prefixes()
    engine.on_plan = lambda plan: [engine.damage(op, 1) for op in plan.loads]
    engine.ask(prompt)
    assert scrape["failed_loads_total"] == 1
    assert scrape["loaded_tokens_total"] == 64
    assert scrape["failed_tokens_total"] == 64
    assert scrape["voided_tokens_total"] == 160


def test_a_step_without_news_reports_nothing(toy_engine, prompts, scrape):
    """B282: most steps only compute a token, and send no number."""
    engine = toy_engine()
    scrape.follow(engine)
    engine.ask(prompts(40), max_tokens=100)
    assert len(engine.plans) > 100
    assert scrape.num_reports < 10


def test_switched_off_nothing_is_reported_or_named(toy_engine, prompts, scrape):
    """B282: the setting is read by every process."""
    from prometheus_client import REGISTRY

    engine = toy_engine(settings={"qkvault.metrics": False})
    scrape.follow(engine)
    engine.ask(prompts(300))
    assert scrape.num_reports == 0
    assert (engine.connector._reporter, engine.worker._reporter) == (None, None)
    assert not [family.name for family in REGISTRY.collect() if "qkvault" in family.name]


def test_the_store_of_a_server_is_the_servers_to_export(toy, tiny_model, scrape):
    """B280: engines that share a server would count it once each."""
    from prometheus_client import Counter, Gauge, Histogram

    from qkvault.integrations.vllm.connector import QKVaultConnector

    config = toy.engine_config(tiny_model, {"qkvault.address": "unix:///nowhere/store.sock"})
    types = {kind: kind for kind in (Counter, Gauge, Histogram)}
    assert QKVaultConnector.build_prom_metrics(config, types, LABELS, {0: ["m", "0"]}) is not None
    assert scrape["stored_tokens_total"] == 0
    assert scrape["store_lookups_total"] == {}


def test_vllms_log_has_a_line_of_them(toy_engine, prompts, scrape):
    """Hits by medium, what was moved, and what failed."""
    engine = toy_engine()
    scrape.follow(engine)
    prompt = prompts(300)
    engine.ask(prompt)
    engine.forget_own_prefixes()
    engine.ask(prompt)
    said = []
    scrape.lines.kv_connector_logging.log(lambda text, *args: said.append(text % args))
    assert said == ["KV Transfer metrics: hit_tokens_ram=288, loaded_gb=0.0, stored_gb=0.0, failed_loads=0"]
    scrape.lines.kv_connector_logging.log(lambda text, *args: said.append(text % args))
    assert len(said) == 1


@pytest.fixture
def ranks():
    """Two workers that have done the same: retrieved 64 tokens and stored 32."""
    from qkvault.integrations.vllm.metrics import Reporter
    from qkvault.stats import StatsMonitor

    reporters = []
    for rank in range(2):
        stats = StatsMonitor()
        retrieve, store = stats.on_retrieve_request(64), stats.on_store_request(32)
        stats.on_retrieve_finished(retrieve, num_tokens=48, num_bytes=480, num_failed_tokens=16)
        stats.on_store_finished(store, num_tokens=32, num_bytes=320, chunks={"stored": 1})
        stats.on_stage("put", 0.25, num_bytes=320, num_tokens=32)
        reporters.append(Reporter(stats, rank=rank))
    return reporters


def test_ranks_are_added_up_by_vllm(ranks):
    """B281: in vLLM's aggregator, after pickle: tokens and requests once, bytes, chunks and stages of both."""
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    outputs = []
    for reporter in ranks:
        output = ModelRunnerOutput([], {}, [])
        output.kv_connector_output = KVConnectorOutput(kv_connector_stats=reporter.take())
        outputs.append(pickle.loads(pickle.dumps(output)))
    both = KVOutputAggregator(2).aggregate(outputs).kv_connector_output.kv_connector_stats.data
    assert both["qkvault_loaded_tokens_total"] == 48
    assert both["qkvault_failed_tokens_total"] == 16
    assert both["qkvault_stored_tokens_total"] == 32
    assert both["qkvault_requests_finished_total.retrieve"] == 1
    assert both["qkvault_loaded_bytes_total"] == 960
    assert both["qkvault_stored_bytes_total"] == 640
    assert both["qkvault_chunks_total.stored"] == 2
    assert both["qkvault_stage_calls_total.put"] == 2
    assert both["qkvault_failed_loads_total"] == 2
    assert [reporter.take() for reporter in ranks] == [None, None]


def test_reports_are_differences(ranks):
    """B280: a report holds what is new in it, and adding all of them up gives the totals."""
    reporter = ranks[0]
    first = reporter.take()
    reporter._stats.on_stage("put", 0.5, num_bytes=20)
    second = reporter.take()
    assert second.data == {
        "qkvault_stage_calls_total.put": 1, "qkvault_stage_seconds_total.put": 0.5, "qkvault_stage_bytes_total.put": 20,
    }  # fmt: skip
    before = dict(first.data), dict(second.data)
    both = first.aggregate(second)
    assert (first.data, second.data) == before, "two of vLLM's loggers may hold them"
    assert both.data["qkvault_stage_bytes_total.put"] == 340
    assert not both.is_empty()
    both.reset()
    assert both.is_empty()


def test_of_two_gauges_the_later_counts():
    """A gauge is a state, and adds up to nothing."""
    from qkvault.integrations.vllm.connector import QKVaultConnector

    one, two = (
        QKVaultConnector.build_kv_connector_stats({"qkvault_store_leases": leases, "qkvault_store_lookups_total": 1})
        for leases in (5.0, 3.0)
    )
    assert one.aggregate(two).data == {"qkvault_store_leases": 3.0, "qkvault_store_lookups_total": 2}
    assert QKVaultConnector.build_kv_connector_stats().is_empty()


def test_what_cannot_be_counted_is_left_out(toy_engine, scrape):
    """B284: a name or label that nobody knows, or a difference below zero, costs its own number only."""
    scrape.follow(toy_engine())
    scrape.prometheus.kv_connector_prom.observe(
        {
            "qkvault_nonsense_total": 1,
            "qkvault_loaded_tokens_total.ram": 1,
            "qkvault_stored_tokens_total": -1,
            "qkvault_loaded_tokens_total": 7,
        }
    )
    assert scrape["loaded_tokens_total"] == 7
    assert scrape["stored_tokens_total"] == 0


def test_a_store_that_is_away_is_not_asked_again_at_once(toy_engine, prompts, scrape):
    """B284: the other numbers go on."""
    from qkvault.errors import Unavailable

    def away():
        msg = "gone"
        raise Unavailable(msg)

    engine = toy_engine()
    scrape.follow(engine)
    engine.connector._reporter.status = away
    engine.ask(prompts(300))
    assert scrape["stored_tokens_total"] == 288
    assert scrape["store_medium_used_bytes"] == {}


def test_settings_that_are_wrong_leave_vllms_metrics_alone(toy, tiny_model, monkeypatch):
    """B284: the process that serves metrics does not fail for them; the engine's own says what is wrong."""
    from qkvault.integrations.vllm.connector import QKVaultConnector

    config = toy.engine_config(tiny_model, {"qkvault.metrics": "perhaps"})
    assert QKVaultConnector.build_prom_metrics(config, {}, LABELS, {0: ["m", "0"]}) is None
