"""A vLLM without a model: its real scheduler, its real connector code of both model runners, and both halves of ours.

The model is a hash. The KV of a token is the digest of all tokens up to it, and the next token is made of the last
digest; so every page can be compared with what it must hold, and a forward over anything else is noticed.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from qkvault import paged
from qkvault.image import wipe_header
from qkvault.integrations.vllm import worker as worker_half
from qkvault.integrations.vllm.ops import LoadOp, StepPlan
from qkvault.keys import RequestIdentity
from qkvault.prefix import Prefix

BLOCK = 16  # tokens
CHUNK = 64
HEAD = 16  # so that K and V of a token are the 32 bytes of a digest, one float each
VOCABULARY = 97
POISON = 500  # what the model says when its pages are wrong; no prompt and no true text holds it


def digests(tokens: Sequence[int], state: bytes = b"") -> list[bytes]:
    """The KV of each token."""
    found = []
    for token in tokens:
        state = hashlib.blake2b(state + token.to_bytes(4, "little"), digest_size=2 * HEAD).digest()
        found.append(state)
    return found


def next_token(digest: bytes) -> int:
    return 3 + int.from_bytes(digest[:4], "little") % (VOCABULARY - 3)


class Memory:
    """What the worker knows of one request: its tokens, and the KV that each of them must have."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.kv: list[bytes] = []
        self.rows = np.zeros((2048, 2 * HEAD), np.float32)  # the KV as the pages hold it
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        self.lay(len(self.tokens), tokens)
        self.tokens += tokens
        self.kv += digests(tokens, self.kv[-1] if self.kv else b"")

    def lay(self, start: int, tokens: Sequence[int]) -> list[bytes]:
        """Put the KV of ``tokens`` into the rows behind ``start`` of the known ones."""
        found = digests(tokens, self.kv[start - 1] if start else b"")
        if found:
            self.rows[start : start + len(found)] = np.frombuffer(b"".join(found), np.uint8).reshape(-1, 2 * HEAD)
        return found


def text_of(prompt: Sequence[int], max_tokens: int, stop: Sequence[int] = ()) -> list[int]:
    """What the model says after ``prompt``."""
    state = digests(prompt)[-1]
    text: list[int] = []
    while len(text) < max_tokens:
        text.append(next_token(state))
        if text[-1] in stop:
            break
        state = digests(text[-1:], state)[0]
    return text


def engine_config(model: str, settings: dict[str, Any], **options: Any) -> Any:
    """vLLM's configuration of an engine with our connector."""
    transfer = {
        "kv_connector": "QKVaultConnector",
        "kv_connector_module_path": "qkvault.integrations.vllm.connector",
        "kv_role": options.pop("kv_role", "kv_both"),
        "kv_load_failure_policy": options.pop("policy", "fail"),
        "kv_connector_extra_config": settings,
    }
    config = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        kv_transfer_config=transfer,
        disable_log_stats=False,
        **{"block_size": BLOCK, **options},
    ).create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


class Stream:
    """Copies of a device that works behind the host's back: done in order, when a forward needs them or later."""

    type = "cpu"  # to all but the worker's half, whose marks are put on it

    def __init__(self, paged: Any) -> None:
        self.waiting: deque[Callable[[], object]] = deque()
        self.num_done = self.num_begun = 0
        self.paged, self.from_pages, self.to_pages = paged, paged.batched_from_gpu, paged.batched_to_gpu
        paged.batched_from_gpu, paged.batched_to_gpu = self.save, self.load

    def begin(self, copy: Callable[[], object]) -> Event:
        self.waiting.append(copy)
        self.num_begun += 1
        return Event(self, self.num_begun)

    def finish(self, number: int | None = None) -> None:
        while self.waiting and self.num_done < (number or self.num_begun):
            self.waiting.popleft()()
            self.num_done += 1

    def save(self, runs: Sequence[Any]) -> Event:
        """The pages are read in their turn, before later forwards; the slots are filled some time after that."""
        copies = [run._replace(payload=memoryview(bytearray(len(run.payload)))) for run in runs]
        self.finish()
        self.from_pages(copies)

        def arrive() -> None:
            for run, copy in zip(runs, copies, strict=True):
                run.payload[:] = copy.payload

        return self.begin(arrive)

    def load(self, runs: Sequence[Any], source: Any) -> Event:
        return self.begin(lambda: self.to_pages(runs, source))


def mark(device: Any) -> Any:
    return device.begin(lambda: None) if isinstance(device, Stream) else paged.mark(device)


worker_half.mark = mark


class Event:
    """Has happened when everything before it on its stream is done: by the third look at the latest."""

    def __init__(self, stream: Stream, number: int) -> None:
        self.stream, self.number, self.num_looks = stream, number, 0

    def query(self) -> bool:
        self.num_looks += 1
        if self.num_looks >= 3:
            self.synchronize()
        return self.stream.num_done >= self.number

    def synchronize(self) -> None:
        self.stream.finish(self.number)


class Step:
    """One step as the scheduler planned it, and what the worker needs to know of that moment."""

    def __init__(self, scheduler: Any) -> None:
        self.output = output = scheduler.schedule()
        self.result: ModelRunnerOutput | None = None
        self.tables = {
            name: list(scheduler.kv_cache_manager.get_block_ids(name)[0]) for name in output.num_scheduled_tokens
        }
        begun = [new.req_id for new in output.scheduled_new_reqs] + sorted(output.scheduled_cached_reqs.resumed_req_ids)
        self.fresh = {name: list(scheduler.requests[name].all_token_ids) for name in begun}


class ToyEngine:
    """One engine. ``step`` does what an engine core does; ``violations`` lists forwards over wrong pages."""

    def __init__(
        self,
        model: str,
        *,
        num_blocks: int = 64,
        runner: int = 1,
        asynchronous: bool = False,
        is_late: bool = False,
        num_drafts: int = 0,
        kernel_ratio: int = 1,
        on_device: bool = False,
        num_layers: int = 1,
        layers: type | None = None,
        settings: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if num_drafts:
            options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": num_drafts}
        options = {"max_num_batched_tokens": 96, "max_num_seqs": 8, **options}
        ours = {"qkvault.chunk_size": CHUNK, "qkvault.ram_bytes": "4MiB", "qkvault.prefault": False}
        self.config = engine_config(model, ours | (settings or {}), **options)
        self.config.scheduler_config.async_scheduling = asynchronous
        self.config.cache_config.num_gpu_blocks = num_blocks
        self.runner, self.asynchronous, self.num_drafts = runner, asynchronous, num_drafts
        self.is_late = is_late  # the worker begins a step when the next one is planned
        block_size = self.config.cache_config.block_size
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=HEAD, dtype=torch.float32)
        names = ["layer", *(f"layer.{number}" for number in range(1, num_layers))]
        groups = [KVCacheGroupSpec(names, spec)]
        self.kv_cache_config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.pages = torch.zeros(num_blocks, 1, BLOCK, 2 * HEAD)
        self.flat = self.pages.view(num_blocks * BLOCK, 2 * HEAD).numpy()
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        scheduler_class = AsyncScheduler if asynchronous else Scheduler
        self.scheduler = scheduler_class(
            vllm_config=self.config,
            kv_cache_config=self.kv_cache_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK,
            log_stats=True,
        )
        self.scheduler.use_v2_model_runner = runner == 2
        self.connector = self.scheduler.connector
        self.worker = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, self.kv_cache_config)
        each = [self.pages, *(torch.zeros_like(self.pages) for _ in names[1:])]  # only the first one is looked at
        shape = num_blocks * kernel_ratio, 1, BLOCK // kernel_ratio, 2 * HEAD
        kv_caches = {name: pages.view(shape) for name, pages in zip(names, each, strict=True)}
        self.layers = layers(self.config, names) if layers is not None else None
        with self._agent():
            if runner == 2:
                self.active = ActiveKVConnector(self.config, kv_caches)
            else:
                self.worker.register_kv_caches(kv_caches)
        self.stream: Stream | None = None
        if on_device:
            self.stream = Stream(self.worker._worker._paged)
            self.worker._worker._paged.device = self.stream
        self.on_plan: Callable[[StepPlan], None] = lambda _: None
        self.requests: dict[str, Request] = {}
        self.texts: dict[str, list[int]] = {}
        self.endings: dict[str, str] = {}
        self.violations: list[tuple[str, int]] = []
        self.plans: list[StepPlan] = []
        self.identity = RequestIdentity()
        self._memory: dict[str, Memory] = {}
        self._running: deque[Step] = deque()

    # -- what a client does

    def add(self, name: str, prompt: Sequence[int], max_tokens: int = 4, **params: Any) -> Request:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False, **params.pop("sampling", {}))
        sampling.update_from_generation_config({}, None)
        request = Request(name, list(prompt), sampling, None, block_hasher=self.hasher, **params)
        self.requests[name], self.texts[name] = request, []
        self.scheduler.add_request(request)
        return request

    def abort(self, *names: str) -> None:
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        self.endings.update(dict.fromkeys(names, "aborted"))

    def step(self) -> None:
        if self.scheduler.has_requests():
            step = Step(self.scheduler)
            self.plans.append(step.output.kv_connector_metadata)
            self._running.append(step)
            if not self.is_late:
                self._execute(step)
            if self.asynchronous and len(self._running) < 2 and step.output.total_num_scheduled_tokens:
                return
        if self._running:
            self.update()

    def update(self) -> None:
        """Let the scheduler hear of the oldest step that it has not heard of."""
        step = self._running.popleft()
        if step.result is None:
            self._execute(step)
        output, result = step.output, step.result
        if result.kv_connector_output is not None:
            assert not result.kv_connector_output.finished_sending
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                self.texts[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    self.endings[one.request_id] = str(one.finish_reason)

    def run(self, max_steps: int = 2000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not (self.scheduler.has_requests() or self._running):
                return
            self.step()
        msg = f"still busy after {max_steps} steps: {self.scheduler.requests}"
        raise AssertionError(msg)

    def ask(self, prompt: Sequence[int], max_tokens: int = 4, **params: Any) -> Request:
        """One request from its arrival to its end; its text must be the true one."""
        name = f"ask-{len(self.requests)}"
        request = self.add(name, prompt, max_tokens, **params)
        self.run()
        assert self.texts[name] == text_of(prompt, max_tokens, params.get("sampling", {}).get("stop_token_ids", ()))
        return request

    # -- what a test looks at

    @property
    def store(self) -> Any:
        return self.connector._store

    def status(self) -> Any:
        return self.store.connect("test").status()

    def num_cached(self, tokens: Sequence[int]) -> int:
        """How many leading tokens of ``tokens`` the store has in RAM."""
        client = self.store.connect("test")
        found = Prefix(self.connector._spaces[0], RequestIdentity(), tokens, shared=False).find(client)
        client.close()
        return found.ready.num_tokens

    def loads_of(self, name: str) -> list[LoadOp]:
        """The loads that were planned for a request."""
        return [op for plan in self.plans for op in plan.loads if op.request_id == name]

    def forget_own_prefixes(self) -> None:
        """Empty vLLM's own prefix cache: hits come from us alone."""
        assert self.scheduler.reset_prefix_cache()

    def move_to_disk(self) -> None:
        """Leave everything that is stored on disk only."""
        assert self.store.driver.drain(10)
        client = self.store.connect("test")
        client.clear(lower_tiers=False)
        client.close()

    def wrap_disk(self, wrap: Callable[[Any], Any]) -> Any:
        """Put what ``wrap`` makes of it in the place of the disk tier."""
        driver = self.store.driver
        tier = driver.tiers[0] = wrap(driver.tiers[0])
        tier.notify(driver._wake.set)
        return tier

    def damage(self, op: LoadOp, *which: int) -> None:
        """Make chunks unreadable between their promise and their load."""
        for number in which:
            ref = op.items_of(0)[number].ref
            wipe_header(self.store.driver.pool.view(ref.offset, ref.image_bytes))

    def assert_clean(self) -> None:
        """Nobody holds anything any more, and every forward had the right pages."""
        assert self.violations == []
        client = self.store.connect("test")
        client.check()
        assert client.status().num_leases == 0
        client.close()
        side = self.connector._scheduler
        assert (side._tracked, side._arriving, side._loads, side._finals) == ({}, {}, [], [])
        assert self.scheduler.requests == {}
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.kv_cache_config.num_blocks - 1

    def assert_texts(self) -> None:
        """Every request that was not aborted said what the model says, and others the beginning of it."""
        for name, request in self.requests.items():
            params = request.sampling_params
            wanted = text_of(request.prompt_token_ids, params.max_tokens, params.stop_token_ids or ())
            said = self.texts[name]
            assert said == wanted[: len(said)], name
            if self.endings[name] != "aborted":
                assert len(said) == len(wanted), name

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()

    # -- what a worker does

    def _execute(self, step: Step) -> None:
        output = step.output
        self.on_plan(output.kv_connector_metadata)
        output.kv_connector_metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))
        with self._agent():
            result = self._execute_v2(step) if self.runner == 2 else self._execute_v1(step)
        step.result = pickle.loads(pickle.dumps(result))

    def _execute_v1(self, step: Step) -> ModelRunnerOutput:
        output, mixin = step.output, KVConnectorModelRunnerMixin
        self.worker.handle_preemptions(output.kv_connector_metadata)
        if not output.total_num_scheduled_tokens:
            return mixin.kv_connector_no_forward(output, self.config)
        is_deferred = self.num_drafts > 0
        with (
            set_forward_context(None, self.config),
            mixin.maybe_get_kv_connector_output(output, defer_finalize=is_deferred) as connector_output,
        ):
            result = self._forward(step)
        if is_deferred:
            mixin.finalize_kv_connector()
        result.kv_connector_output = connector_output
        return result

    def _execute_v2(self, step: Step) -> ModelRunnerOutput:
        output = step.output
        if not output.total_num_scheduled_tokens:
            return self.active.no_forward(output)
        names = list(output.num_scheduled_tokens)
        batch = SimpleNamespace(idx_mapping=None, req_ids=names, num_tokens=output.total_num_scheduled_tokens)
        self.active.pre_forward(output, batch, {})
        result = self._forward(step)
        self.active.finish_forward()
        result.kv_connector_output = self.active.post_forward(output.finished_req_ids)
        return result

    def _forward(self, step: Step) -> ModelRunnerOutput:
        if self.stream is not None:
            self.stream.finish()
        output = step.output
        self._memory |= {name: Memory(tokens) for name, tokens in step.fresh.items()}
        before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        names = list(output.num_scheduled_tokens)
        sampled, rows = [], []
        for name in names:
            drafts = [token for token in output.scheduled_spec_decode_tokens.get(name, ()) if token >= 0]
            span = before[name], output.num_scheduled_tokens[name]
            rows += self._rows(name, step.tables[name], span, drafts)
            sampled.append(self._compute(name, step.tables[name], span, drafts))
        if self.layers is not None:
            self.layers.run(self.worker, rows)
        if self.num_drafts:
            self._propose(names, sampled)
        return ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled)

    def _rows(self, name: str, table: list[int], span: tuple[int, int], drafts: list[int]) -> list[tuple[int, bytes]]:
        """KV slot and digest of each token that a request computes."""
        if self.layers is None:
            return []
        memory, (start, count) = self._memory[name], span
        known = memory.kv + digests(drafts, memory.kv[-1])
        return [
            (table[at // BLOCK] * BLOCK + at % BLOCK, known[at] if at < len(known) else b"unknown")
            for at in range(start, start + count)
        ]

    def _compute(self, name: str, table: list[int], span: tuple[int, int], drafts: list[int]) -> list[int]:
        memory, (start, count) = self._memory[name], span
        num_known = len(memory.tokens)
        of_drafts = memory.lay(num_known, drafts)
        slots = (np.array(table)[:, None] * BLOCK + np.arange(BLOCK)).ravel()
        is_right = np.array_equal(self.flat[slots[:start]], memory.rows[:start])
        if not is_right:
            self.violations.append((name, start))
        end = min(start + count, num_known + len(drafts))
        self.flat[slots[start:end]] = memory.rows[start:end] if is_right else -1.0
        if start + count < num_known:
            return []  # a part of a prompt
        if not is_right:
            return [POISON]
        said = [next_token(memory.kv[-1])]
        for draft, kv in zip(drafts, of_drafts, strict=True):
            if draft != said[-1]:
                break
            said.append(next_token(kv))
        memory.extend(said)
        return said

    def _propose(self, names: list[str], sampled: list[list[int]]) -> None:
        drafts = []
        for name, said in zip(names, sampled, strict=True):
            memory = self._memory[name]
            wrong = len(memory.tokens) % (self.num_drafts + 1)  # right up to here: 0, 1, ... or all of them
            state, of_request = memory.kv[-1], []
            for at in range(self.num_drafts if said else 0):
                true = next_token(state)
                of_request.append(true if at < wrong else 3 + (true - 2) % (VOCABULARY - 3))
                state = digests(of_request[-1:], state)[0]
            drafts.append(of_request)
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    @contextmanager
    def _agent(self) -> Iterator[None]:
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        try:
            yield
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = None
