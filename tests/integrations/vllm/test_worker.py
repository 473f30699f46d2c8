"""The worker's half: devices that copy behind its back, kernels with blocks of their own, plans that come twice."""

from __future__ import annotations

import pytest

from qkvault.errors import LayoutMismatch

pytestmark = pytest.mark.vllm


def test_what_a_device_has_copied_is_published_though_nothing_is_loaded(toy_engine, prompts):
    """A save on a device is committed when its copy is done, at the latest in the idle step after the last request."""
    engine = toy_engine(on_device=True)
    engine.ask(prompts(300))
    assert engine.status().counters["stored.ram"] == 5
    assert engine.worker._worker._transfer.settle()
    engine.assert_clean()


def test_a_request_runs_when_the_device_has_copied_its_blocks(toy_engine, prompts):
    """A load that is still under way when its step ends is told later, and its lease lives until then."""
    engine = toy_engine(on_device=True)
    prompt = prompts(300)
    engine.ask(prompt)
    engine.forget_own_prefixes()
    request = engine.add("r", prompt)
    engine.step()
    assert engine.loads_of("r")
    assert engine.status().num_leases == 1
    assert request.status.name == "WAITING_FOR_REMOTE_KVS"
    engine.run()
    engine.assert_texts()
    engine.assert_clean()


def test_a_slot_that_changes_hands_during_a_devices_copy_is_a_failed_load(toy_engine, prompts):
    """What a device copied while the slot went to somebody else is not used."""
    engine = toy_engine(on_device=True)
    prompt = prompts(300)
    engine.ask(prompt)
    engine.forget_own_prefixes()
    engine.add("r", prompt)
    engine.step()
    engine.damage(engine.loads_of("r")[0], 3)
    engine.run()
    assert engine.worker.stats.snapshot().failed_tokens == 64
    engine.assert_texts()
    engine.assert_clean()


def test_an_abort_while_a_device_copies_frees_the_blocks_when_it_is_done(toy_engine, prompts):
    """The end of a load is told once, whether or not its request still lives."""
    engine = toy_engine(on_device=True)
    prompt = prompts(300)
    engine.ask(prompt)
    engine.forget_own_prefixes()
    engine.add("r", prompt)
    engine.step()
    engine.abort("r")
    assert "r" in engine.scheduler.requests
    engine.run()
    engine.assert_clean()


def test_shutdown_publishes_what_was_begun(toy_engine, prompts, tmp_path):
    """Copies that a device has begun are finished and stored when the worker ends."""
    engine = toy_engine(on_device=True)
    engine.add("r", prompts(96), max_tokens=1)
    engine.step()
    assert engine.status().counters["stored.ram"] == 0
    engine.worker.shutdown()
    assert engine.status().counters["stored.ram"] == 2
    engine.run()


def test_a_part_of_a_save_that_fails_leaves_those_before_it(toy_engine, prompts):
    """B410: numbers tell what was stored and what was not; what is left is stored at the next try."""
    engine = toy_engine(max_num_batched_tokens=512)
    engine.ask(prompts(20))  # opens the session
    worker = engine.worker._worker
    worker._transfer._num_in_part = 1
    copy, copies = worker._paged.batched_from_gpu, []

    def fail_at_the_third(runs):
        copies.append(len(runs))
        if len(copies) == 3:
            raise RuntimeError
        return copy(runs)

    worker._paged.batched_from_gpu = fail_at_the_third
    before = dict(worker._stats.snapshot().chunks)
    engine.add("r", prompts(256), max_tokens=80)
    engine.step()
    after = worker._stats.snapshot().chunks
    assert {name: n - before[name] for name, n in after.items() if n != before[name]} == {"stored": 2, "failed": 2}
    assert engine.status().counters["stored.ram"] == before["stored"] + 2
    engine.run()
    assert engine.num_cached(list(engine.requests["r"].all_token_ids)) >= 256
    engine.assert_clean()


@pytest.mark.parametrize("options", [{}, {"runner": 2}, {"num_drafts": 3}, {"on_device": True}], ids=str)
def test_a_step_is_one_reserve_and_one_commit(toy_engine, prompts, options):
    """B12, B466: for all that its requests compute, and one more before it for what those have left that have ended."""
    engine = toy_engine(max_num_batched_tokens=512, num_blocks=256, **options)
    engine.ask(prompts(20))  # opens the session
    transport, asked = engine.worker._worker._transfer.client._transport, []
    call = transport.call
    transport.call = lambda request, *args: asked.append(type(request).__name__) or call(request, *args)
    for number in range(24):  # they end when they like, and others begin in the same step
        stops = {"stop_token_ids": list(range(3, 10))}
        engine.add(f"r{number}", prompts(100 + 10 * number), max_tokens=200, sampling=stops)
    seen = set()
    while engine.scheduler.has_requests():
        del asked[:]
        engine.step()
        plan = engine.plans[-1]
        num_stores = bool(plan.saves) + bool(plan.finals)
        assert asked.count("Reserve") == num_stores
        if not options.get("on_device"):
            assert asked.count("Commit") == num_stores
        seen.add((len(plan.saves), len(plan.finals)))
    assert any(saves > 1 for saves, _ in seen)
    assert any(saves and finals for saves, finals in seen)
    engine.assert_texts()
    engine.assert_clean()


def test_a_step_of_many_bytes_goes_in_parts(toy_engine, prompts):
    """B466: each with its reserve and its commit, of all requests together."""
    engine = toy_engine(max_num_batched_tokens=512)
    engine.ask(prompts(20))
    transfer = engine.worker._worker._transfer
    transfer._num_in_part = 3
    transport, asked = transfer.client._transport, []
    call = transport.call
    transport.call = lambda request, *args: asked.append(type(request).__name__) or call(request, *args)
    for name in ("one", "other"):
        engine.add(name, prompts(256), max_tokens=8)
    engine.step()
    assert [name for name in asked if name in ("Reserve", "Commit")] == ["Reserve", "Commit"] * 3
    engine.run()
    engine.assert_clean()


def test_a_plan_is_carried_out_once(toy_engine, prompts):
    """Hooks of one step that vLLM calls again do nothing."""
    engine = toy_engine()
    prompt = prompts(200)
    engine.ask(prompt)
    engine.forget_own_prefixes()
    worker = engine.worker
    load, save = worker.start_load_kv, worker.wait_for_save
    worker.start_load_kv = lambda context, **kwargs: [load(context, **kwargs) for _ in range(3)]
    worker.wait_for_save = lambda: [save() for _ in range(3)]
    engine.ask(prompt, max_tokens=80)
    assert worker.stats.snapshot().operations["retrieve"].requests == 1
    counters = engine.status().counters
    assert counters["reserve.present"] == 0
    engine.assert_clean()


def test_hooks_without_a_plan_do_nothing(toy_engine):
    """Before registration, and in steps without metadata, the worker's hooks are calm."""
    engine = toy_engine()
    engine.worker.clear_connector_metadata()
    engine.worker.start_load_kv(None)
    engine.worker.wait_for_save()
    engine.worker.wait_for_layer_load("layer")
    engine.worker.save_kv_layer("layer", engine.pages, None)
    engine.worker._worker = None
    engine.worker.start_load_kv(None)
    engine.worker.wait_for_save()
    assert engine.worker.get_finished(set()) == (None, None)


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_kernels_may_cut_each_block_into_several(toy_engine, prompts, ratio, on_device):
    """Blocks of the scheduler and blocks of the attention kernels may differ in size; hits are the same."""
    engine = toy_engine(kernel_ratio=ratio, on_device=on_device)
    assert engine.worker._worker._paged.block_size == 16
    assert engine.worker._worker._paged.layout.block_size == 16 // ratio
    prompt = prompts(300)
    engine.ask(prompt)
    engine.forget_own_prefixes()
    engine.ask(prompt)
    assert len(engine.loads_of("ask-1")[0].block_ids) == 18
    engine.assert_clean()


def test_pages_that_lie_otherwise_are_refused(toy_engine):
    """Tensors that are missing, or do not hold the blocks of vLLM's configuration, stop the start with a message."""
    engine = toy_engine()
    with pytest.raises(LayoutMismatch, match="no pages for layer"):
        engine.worker.register_kv_caches({"another": engine.pages})
    with pytest.raises(LayoutMismatch, match="63 pages for 64 blocks"):
        engine.worker.register_kv_caches({"layer": engine.pages[:63]})
    with pytest.raises(LayoutMismatch):
        engine.worker.register_kv_caches({"layer": engine.pages[..., :20]})
    engine.config.compilation_config.static_forward_context["layer"] = type("Layer", (), {"isa": "amx"})()
    with pytest.raises(LayoutMismatch, match="amx"):
        engine.worker.register_kv_caches({"layer": engine.pages})


def test_two_engines_of_one_name_share_a_store(toy_engine, prompts):
    """Engines of one process that name the same instance have one cache; the last one to go closes it."""
    settings = {"qkvault.instance_id": "shared"}
    one, other = toy_engine(settings=settings), toy_engine(settings=settings)
    assert one.store is other.store
    prompt = prompts(200)
    one.ask(prompt)
    other.ask(prompt)
    assert len(other.loads_of("ask-0")[0].block_ids) == 12
    one.close()
    other.forget_own_prefixes()
    other.ask(prompt)
    other.assert_clean()


def test_an_engine_id_of_any_form_names_an_instance():
    """What vLLM calls an engine, however long or odd, gives a name of its own that a socket can have."""
    from qkvault.integrations.vllm.connector import _instance_id

    names = ["a" * 40, "a" * 100, "a" * 99 + "_dp0", "a" * 99 + "_dp1", "host:80/x", "0f1e"]
    ids = [_instance_id(name) for name in names]
    assert len(set(ids)) == len(names)
    assert all(len(name) <= 64 and "/" not in name and ":" not in name for name in ids)
    assert ids[-1] == "vllm-0f1e"
