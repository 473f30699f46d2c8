"""MLA over several ranks: all hold the same latent, so the first one stores it, and each loads it."""

from __future__ import annotations

import random

import pytest

pytestmark = pytest.mark.vllm

BLOCK, CHUNK, WIDTH, NUM_BLOCKS = 16, 64, 48, 32


class Ranks:
    """The connectors of an engine of two ranks: the scheduler's half, and of each rank its half and its pages."""

    def __init__(self, toy, model, kind):
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.v1.kv_cache_interface import MLAAttentionSpec

        self._toy = toy
        fields = {"block_size": BLOCK, "num_kv_heads": 1, "dtype": toy.torch.float32}
        of_kind = {
            "latents": MLAAttentionSpec(**fields, head_size=WIDTH),
            "heads": toy.FullAttentionSpec(**fields, head_size=WIDTH // 2),
        }
        groups = [toy.KVCacheGroupSpec(["layer"], of_kind[kind])]
        caches = toy.KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        settings = {"qkvault.chunk_size": CHUNK, "qkvault.ram_bytes": "4MiB", "qkvault.prefault": False}
        config = toy.engine_config(model, settings)
        config.parallel_config.tensor_parallel_size = 2
        self.scheduler = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, caches)
        self.workers, self.pages, self.asked = [], [], []
        for rank in range(2):
            config.parallel_config.rank = rank
            worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, caches)
            self.pages.append(toy.torch.zeros(NUM_BLOCKS, 1, BLOCK, WIDTH))
            worker.register_kv_caches({"layer": self.pages[-1]})
            self.asked.append(self._listen(worker._worker))
            self.workers.append(worker)

    def _listen(self, side):
        """What the worker asks the store for, from now on."""
        transport, asked = side._session().client._transport, []
        call = transport.call
        transport.call = lambda request, *args: asked.append(type(request).__name__) or call(request, *args)
        return asked

    def step(self, plan):
        """Both workers carry out a plan, as vLLM has them do; returns what each reports, and what it has loaded."""
        told = []
        for worker in self.workers:
            worker.bind_connector_metadata(plan)
            worker.start_load_kv(None)
            worker.wait_for_save()
            _, loaded = worker.get_finished(set())
            told.append((worker.build_connector_worker_meta(), loaded))
        return told

    def close(self):
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()


@pytest.fixture
def ranks(toy, tiny_model):
    made = []

    def start(kind):
        made.append(Ranks(toy, tiny_model, kind))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.fixture
def prompt():
    from qkvault.keys import RequestIdentity
    from qkvault.prefix import Prefix

    tokens = random.Random(3).choices(range(97), k=3 * CHUNK)
    return lambda space: Prefix(space, RequestIdentity(), tokens, shared=False)


def save_and_load(ranks, prompt):
    """Both ranks are told to store 3 chunks out of blocks 0 to 11, then to load them into blocks 12 to 23."""
    from qkvault.integrations.vllm.ops import LoadOp, SaveOp, StepPlan
    from qkvault.prefix import load_items

    spaces, client = ranks.scheduler._spaces, ranks.scheduler._store.connect("test")
    prefix = prompt(spaces[0])
    items = prefix.save_items(0, 3 * CHUNK, range(12), BLOCK)
    saved = ranks.step(StepPlan(1, saves=[SaveOp("r", 0, tuple(items))]))
    located = prefix.find_each(client, spaces)
    sizes = {"chunk_size": CHUNK, "block_size": BLOCK}
    loads = tuple(tuple(load_items(each.ready, 0, 3 * CHUNK, range(12, 24), **sizes)) for each in located)
    op = LoadOp("r", 0, tuple(range(12, 24)), tuple(each.lease_id for each in located), loads)
    loaded = ranks.step(StepPlan(2, loads=[op]))
    client.release(*op.lease_ids)
    status = client.status()
    client.close()
    return saved, loaded, status.counters["stored.ram"]


def test_the_first_rank_stores_latents_for_all(ranks, prompt, toy):
    """B18, B19: the second one asks the store for nothing, reports no failure, and loads what the first one stored."""
    ranks = ranks("latents")
    assert len(set(ranks.scheduler._spaces)) == 1
    ranks.pages[0][:12] = toy.torch.rand(12, 1, BLOCK, WIDTH)
    ranks.pages[1][:12] = ranks.pages[0][:12]
    saved, loaded, num_stored = save_and_load(ranks, prompt)
    assert ranks.asked[0][:2] == ["Reserve", "Commit"]
    assert not {"Reserve", "Commit"} & set(ranks.asked[1])
    assert num_stored == 3
    assert [(report.unsaved, report.saved_step) for report, _ in saved] == [({}, 1), ({}, 1)]
    assert [(report.failed_loads, names) for report, names in loaded] == [({}, {"r"}), ({}, {"r"})]
    for pages in ranks.pages:
        assert toy.torch.equal(pages[12:24], ranks.pages[0][:12])


def test_each_rank_stores_its_own_heads(ranks, prompt, toy):
    """B33: and loads them, not another's."""
    ranks = ranks("heads")
    assert len(set(ranks.scheduler._spaces)) == 2
    for pages in ranks.pages:
        pages[:12] = toy.torch.rand(12, 1, BLOCK, WIDTH)
    _, loaded, num_stored = save_and_load(ranks, prompt)
    assert [asked[:2] for asked in ranks.asked] == [["Reserve", "Commit"]] * 2
    assert num_stored == 6
    assert [report.failed_loads for report, _ in loaded] == [{}, {}]
    for pages in ranks.pages:
        assert toy.torch.equal(pages[12:24], pages[:12])
    assert not toy.torch.equal(ranks.pages[0], ranks.pages[1])
