"""A router on the other end of the wire: it knows at every time what the store has, whenever it came and whatever it
missed. It speaks plain ZeroMQ and decodes with vLLM's own classes.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest

from qkvault import publisher as publishing
from qkvault.address import is_local_endpoint
from qkvault.config import Config, load
from qkvault.embedded import EmbeddedStore
from qkvault.errors import ConfigError
from qkvault.events import block_hash_of
from qkvault.image import Header, check_of, header_bytes_for, sketch_of, write_header
from qkvault.keys import MediaSpan, RequestIdentity
from qkvault.prefix import Prefix
from qkvault.publisher import Publisher
from qkvault.server.server import Server
from qkvault.testing.spaces import described
from qkvault.types import ChunkState, NewChunk
from qkvault.wire import messages as m

zmq = pytest.importorskip("zmq", reason="pyzmq is of the extra `server`")
pytestmark = pytest.mark.vllm

# An interpreter with the package ai-dynamo-runtime, which is not among our dependencies: `make test` makes one.
DYNAMO = Path(__file__).resolve().parent.parent / ".cache" / "dynamo"
DYNAMO_PYTHON = os.environ.get(
    "QKV_DYNAMO_PYTHON", str(DYNAMO / "bin" / "python" if (DYNAMO / ".stamp").exists() else "")
)
CHUNK, BLOCK, TOKEN_PAYLOAD_BYTES, WAIT_SECONDS = 32, 16, 64, 20.0
DESCRIBED = described(dtype="float16", block_size=BLOCK, chunk_size=CHUNK)
SPACE = DESCRIBED.space
ANYWHERE = "tcp://127.0.0.1:*"


class Tenant:
    """Stores and finds prompts, as a worker and a scheduler do. A letter is 16 tokens."""

    def __init__(self, store, space=SPACE, identity=None):
        self.client = store.connect("tenant")
        self.space = space
        self.identity = identity or RequestIdentity()
        self.description = msgspec.structs.replace(DESCRIBED, space=space).encode()

    def items(self, word):
        tokens = ids_of(word)
        return Prefix(self.space, self.identity, tokens).save_items(0, len(tokens), range(len(word)), BLOCK)

    def save(self, word):
        items, head_bytes = self.items(word), header_bytes_for(CHUNK, len(self.description))
        sizes = [item.num_tokens * TOKEN_PAYLOAD_BYTES for item in items]
        chunks = [
            NewChunk(item.key, item.parent, sketch_of(item.tokens), item.num_tokens, head_bytes + size)
            for item, size in zip(items, sizes, strict=True)
        ]
        reserved = self.client.reserve(chunks)
        for item, chunk, size, offset in zip(items, chunks, sizes, reserved.offsets, strict=True):
            if offset >= 0:
                header = Header(item.key, item.parent, item.tokens, self.description, head_bytes, size, 0, item.flags)
                write_header(self.client.pool.view(offset, chunk.image_bytes), header)
        self.client.commit(reserved.lease_id)

    def find(self, word):
        whole = [item for item in self.items(word) if item.num_tokens == CHUNK]
        if not whole:
            return 0
        keys, checks = b"".join(item.key for item in whole), b"".join(check_of(item.tokens) for item in whole)
        return self.client.find(whole[0].parent, keys, checks, lambda _: b"").lease_id

    def hash_of(self, word):
        return block_hash_of(self.items(word)[-1].key)


def ids_of(word):
    return [1000 * ord(letter) + n for letter in word for n in range(BLOCK)]


class Router:
    """What a router does: follows the sequence, asks for what it has missed, keeps what is where."""

    def __init__(self, publisher, topic=b""):
        from vllm.distributed.kv_events import KVEventBatch

        self.decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.context = zmq.Context()
        self.news = self.context.socket(zmq.SUB)
        self.news.connect(publisher.endpoint)
        self.news.subscribe(topic)
        self.past = self.context.socket(zmq.DEALER)
        self.past.connect(publisher.replay_endpoint)
        self.next = 0
        self.view = {}  # (hash, medium) to the event that told of it
        self.topics = {}  # hash to the topic that told of it
        self.num_clears = 0

    def close(self):
        self.context.destroy(linger=0)

    def replay(self, start=None):
        """Ask for all since ``start``, and apply it. Returns the sequence numbers that came."""
        self.past.send_multipart([b"", (self.next if start is None else start).to_bytes(8, "big")])
        seen = []
        while True:
            assert self.past.poll(WAIT_SECONDS * 1000), "no end of the replay"
            _, topic, sequence, payload = self.past.recv_multipart()
            number = int.from_bytes(sequence, "big", signed=True)
            if number == -1:
                return seen
            seen.append(number)
            self.apply(topic, number, payload)

    def listen(self, timeout_ms=20):
        """Apply what has come; ask for what is missing."""
        while self.news.poll(timeout_ms):
            topic, sequence, payload = self.news.recv_multipart()
            number = int.from_bytes(sequence, "big")
            if number > self.next:
                self.replay()
            self.apply(topic, number, payload)

    def apply(self, topic, number, payload):
        if number < self.next:
            return
        self.next = number + 1
        batch = self.decoder.decode(payload)
        assert batch.data_parallel_rank == 0
        for event in batch.events:
            match type(event).__name__:
                case "BlockStored":
                    (name,) = event.block_hashes
                    self.view[name, event.medium] = event
                    self.topics[name] = topic
                case "BlockRemoved":
                    for name in event.block_hashes:
                        self.view.pop((name, event.medium), None)
                case "AllBlocksCleared":
                    self.num_clears += 1
                    self.view = {key: event for key, event in self.view.items() if self.topics[key[0]] != topic}

    def learns(self, what):
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            self.listen()
            if self.view.keys() == what():
                return
            assert time.monotonic() < deadline, f"{len(self.view)} told of, {len(what())} there"


def contents(driver):
    """What is where, by the store's index."""
    with driver._lock:
        entries = list(driver.manager.index)
        here = {(block_hash_of(entry.key), "CPU") for entry in entries if entry.state is ChunkState.READY}
        return here | {(block_hash_of(entry.key), "STORAGE") for entry in entries if entry.tiers}


@pytest.fixture
def config(tmp_path):
    return Config(
        ram_bytes=24 * 8192,
        prefault=False,
        chunk_size=CHUNK,
        disk_path=str(tmp_path / "disk"),
        disk_bytes=40 * 8192,
        disk_workers=1,
        events_endpoint=ANYWHERE,
        events_replay_endpoint=ANYWHERE,
    )


@pytest.fixture
def silent(config):
    return msgspec.structs.replace(config, events_endpoint="", events_replay_endpoint="")


@contextmanager
def published(store, **kwargs):
    with closing(Publisher(store.driver, ANYWHERE, ANYWHERE, **kwargs)) as publisher:
        yield publisher


def act_at_random(rng, tenants, leases, num_acts):
    for _ in range(num_acts):
        tenant = rng.choice(tenants)
        word = "".join(rng.choice("abc") for _ in range(rng.randint(1, 9)))
        what = rng.random()
        if what < 0.6:
            tenant.save(word)
        elif what < 0.8 and (lease_id := tenant.find(word)):
            leases.append((tenant, lease_id))
        elif what < 0.98 and leases:
            holder, lease_id = leases.pop(rng.randrange(len(leases)))
            holder.client.release(lease_id)
        elif what > 0.98:
            tenant.client.clear(lower_tiers=rng.random() < 0.3)


@pytest.mark.parametrize("seed", range(3))
def test_a_router_knows_what_the_store_has(config, seed):
    """B234: after stores, evictions, loads and clears in any order; also one that joins late, and asks for the past."""
    rng, leases = random.Random(seed), []
    with closing(EmbeddedStore(config)) as store, closing(Router(store._publisher)) as router:
        tenants = [Tenant(store), Tenant(store, identity=RequestIdentity(cache_salt="s"))]
        for _ in range(8):
            act_at_random(rng, tenants, leases, 25)
            assert store.driver.drain(WAIT_SECONDS)
            router.learns(lambda: contents(store.driver))
        assert {medium for _, medium in router.view} <= {"CPU", "STORAGE"}
        with closing(Router(store._publisher)) as late:
            assert late.replay(0)[0] == store._publisher._first
            assert late.view == router.view
            act_at_random(rng, tenants, leases, 25)
            assert store.driver.drain(WAIT_SECONDS)
            for each in (router, late):
                each.learns(lambda: contents(store.driver))
        assert router.num_clears == 1  # at the start


def test_a_burst_that_is_too_much_is_told_anew(config):
    """B233: events that nobody took in time are void; the router learns what is there now."""
    rng, leases = random.Random(1), []
    with closing(EmbeddedStore(config)) as store, closing(Router(store._publisher)) as router:
        store.driver.manager.ledger.feed.max_waiting = 8
        for _ in range(3):
            act_at_random(rng, [Tenant(store)], leases, 200)
            assert store.driver.drain(WAIT_SECONDS)
            router.learns(lambda: contents(store.driver))
        assert router.num_clears > 1


def test_who_asks_for_what_is_gone_is_told_anew(silent):
    """B235: the past is bounded; one who needs more than that hears all there is, on the stream."""
    with closing(EmbeddedStore(silent)) as store, published(store, buffer_steps=3) as publisher:
        with closing(Router(publisher)) as router:
            tenant = Tenant(store)
            for word in "abcdefghij":
                tenant.save(word)
                assert store.driver.drain(WAIT_SECONDS)
                router.learns(lambda: contents(store.driver))
        with closing(Router(publisher)) as late:
            assert len(late.replay(0)) <= 3
            late.learns(lambda: contents(store.driver))
            assert late.num_clears == 1


def test_the_past_is_bounded_in_bytes(silent):
    """B235: and the last batch is always there."""
    with closing(EmbeddedStore(silent)) as store, published(store, buffer_bytes=1) as publisher:
        Tenant(store).save("aabb")
        with closing(Router(publisher)) as router:
            assert store.driver.drain(WAIT_SECONDS)
            router.learns(lambda: contents(store.driver))
            assert len(publisher._sent) == 1


def test_tokens_tell_where_a_block_belongs(config):
    """B236: tokens, their number and the block before; for the tail too, in RAM and on disk."""
    with closing(EmbeddedStore(config)) as store, closing(Router(store._publisher)) as router:
        tenant = Tenant(store)
        tenant.save("aabbc")
        assert store.driver.drain(WAIT_SECONDS)
        router.learns(lambda: contents(store.driver))
        assert len(router.view) == 6
        for medium in ("CPU", "STORAGE"):
            assert_chain(router, tenant, "aabbc", medium)


def assert_chain(router, tenant, word, medium):
    parent = None
    for start in range(0, len(word), 2):
        event = router.view[tenant.hash_of(word[: start + 2]), medium]
        tokens = ids_of(word[start : start + 2])
        assert (event.parent_block_hash, event.token_ids, event.block_size) == (parent, tokens, len(tokens))
        (parent,) = event.block_hashes


@pytest.mark.parametrize("attach", ["while it is scanned", "after it was scanned"])
def test_what_is_on_disk_from_before_is_told_with_its_tokens(config, silent, attach):
    """B236: after a restart, as far as the files say."""
    with closing(EmbeddedStore(silent)) as store:
        Tenant(store).save("aabbc")
        assert store.driver.drain(WAIT_SECONDS)
    with closing(EmbeddedStore(config if attach.startswith("while") else silent)) as store:
        if store._publisher is None:
            assert store.driver.drain(WAIT_SECONDS)
            store._publisher = Publisher(store.driver, ANYWHERE, ANYWHERE)
        with closing(Router(store._publisher)) as router:
            assert store.driver.drain(WAIT_SECONDS)
            router.replay(0)
            router.learns(lambda: contents(store.driver))
            assert len(router.view) == 3
            assert_chain(router, Tenant(store), "aabbc", "STORAGE")


def test_tokens_of_others_are_nobodys_business(config):
    """B232: with a salt, an adapter or tags, and from a picture on, a block has a hash and nothing else."""
    picture = MediaSpan(digest=b"cat", start=CHUNK + 3, length=5)
    identities = [RequestIdentity(cache_salt="s"), RequestIdentity(adapter="a"), RequestIdentity(tags=(("t", "v"),))]
    with closing(EmbeddedStore(config)) as store, closing(Router(store._publisher)) as router:
        with_picture = Tenant(store, identity=RequestIdentity(media=(picture,)))
        for tenant in (with_picture, *(Tenant(store, identity=identity) for identity in identities)):
            tenant.save("aabbcc")
        assert store.driver.drain(WAIT_SECONDS)
        router.learns(lambda: contents(store.driver))
        secret = {name for name, event in router.view.items() if (event.token_ids, event.block_size) == ([], 0)}
        plain = {(with_picture.hash_of("aa"), medium) for medium in ("CPU", "STORAGE")}
        assert len(router.view) == 2 * 4 * 3
        assert secret == router.view.keys() - plain
        assert {event.parent_block_hash for event in router.view.values()} == {None}


def test_evicted_from_ram_is_still_in_storage(config):
    """B231: RAM to disk, out of RAM, up again; and a tail that has grown is replaced in both."""
    with closing(EmbeddedStore(config)) as store, closing(Router(store._publisher)) as router:
        tenant = Tenant(store)

        def media_of(word):
            assert store.driver.drain(WAIT_SECONDS)
            router.learns(lambda: contents(store.driver))
            return {medium for name, medium in router.view if name == tenant.hash_of(word)}

        tenant.save("aabbc")
        assert media_of("aabbc") == {"CPU", "STORAGE"}
        tenant.client.clear(lower_tiers=False)
        assert media_of("aabb") == {"STORAGE"}
        tenant.client.release(tenant.find("aabb"))
        assert media_of("aabb") == {"CPU", "STORAGE"}
        tenant.save("aabbcd")
        assert media_of("aabbcd") == {"CPU", "STORAGE"}
        assert media_of("aabbc") == set()
        tenant.client.clear()
        assert media_of("aa") == set()


def test_models_can_have_topics_of_their_own(silent):
    """B237: one sequence for all, and each topic begins with a clean slate."""
    other = msgspec.structs.replace(SPACE, model_name="org/other")
    with closing(EmbeddedStore(silent)) as store, published(store, topic="kv@here@{model}") as publisher:
        tenants = [Tenant(store), Tenant(store, other)]
        for tenant in tenants:
            tenant.save("aa")
        assert store.driver.drain(WAIT_SECONDS)
        with closing(Router(publisher, b"kv@")) as both:
            both.replay(0)
            both.learns(lambda: contents(store.driver))
        assert sorted(publisher._topics) == [b"kv@here@m", b"kv@here@org/other"]


def test_silence_shows_what_was_missed(silent, monkeypatch):
    """B235: a router that joins when nothing happens learns all from the next empty batch."""
    monkeypatch.setattr(publishing, "_QUIET_SECONDS", 0.3)
    with closing(EmbeddedStore(silent)) as store, published(store) as publisher:
        Tenant(store).save("aabb")
        assert store.driver.drain(WAIT_SECONDS)
        time.sleep(0.2)
        with closing(Router(publisher)) as router:
            router.learns(lambda: contents(store.driver))


def test_at_the_end_all_is_gone(config):
    """B237: a store that goes says so."""
    store = EmbeddedStore(config)
    with closing(Router(store._publisher)) as router:
        Tenant(store).save("aabb")
        assert store.driver.drain(WAIT_SECONDS)
        router.learns(lambda: contents(store.driver))
        store.close()
        router.learns(set)
        store.close()


def test_a_store_that_came_back_is_not_taken_for_the_one_that_died(config, monkeypatch):
    """B237: who died without a word, and is there again at the same endpoint, goes on with higher numbers."""
    with closing(EmbeddedStore(config)) as store:
        publisher = store._publisher
        router = Router(publisher)
        for word in ("aabb", "ccdd"):
            Tenant(store).save(word)
            assert store.driver.drain(WAIT_SECONDS)
            router.learns(lambda: contents(store.driver))
        monkeypatch.setattr(publisher, "_send", lambda *_: None)
    ends = {"events_endpoint": publisher.endpoint, "events_replay_endpoint": publisher.replay_endpoint}
    fresh = msgspec.structs.replace(config, disk_path=f"{config.disk_path}2", **ends)
    with closing(router), closing(EmbeddedStore(fresh)) as store:
        assert len(router.view) == 8
        Tenant(store).save("xx")
        time.sleep(0.5)  # the router is connected again
        Tenant(store).save("yy")
        assert store.driver.drain(WAIT_SECONDS)
        router.learns(lambda: contents(store.driver))
        assert len(router.view) == 4


def test_nonsense_is_not_answered(config):
    """B238: nor does it keep others from their answers."""
    with closing(EmbeddedStore(config)) as store, closing(Router(store._publisher)) as router:
        for frames in ([b""], [b"", b"short"], [b"", b"", bytes(8), bytes(8)], [b"x" * 100_000]):
            router.past.send_multipart(frames)
        assert router.replay(0)[0] == store._publisher._first
        assert router.replay(2**64 - 1) == []
        router.past.send(bytes(8))  # without the empty frame
        assert router.past.poll(WAIT_SECONDS * 1000)
        assert router.past.recv_multipart()[1] == store._publisher._first.to_bytes(8, "big")


def test_who_does_not_listen_holds_nobody_up(silent, monkeypatch):
    """B238: a subscriber that never reads misses batches; the store, and another one, do not notice."""
    monkeypatch.setattr(publishing, "_MIN_QUEUED", 2)
    monkeypatch.setattr(publishing, "_BATCH_BYTES", 1 << 26)  # the buffer's: two batches may wait
    rng, leases = random.Random(2), []
    with (
        closing(EmbeddedStore(silent)) as store,
        published(store) as publisher,
        closing(Router(publisher)) as deaf,
        closing(Router(publisher)) as router,
    ):
        deaf.news.rcvhwm = 1
        act_at_random(rng, [Tenant(store)], leases, 500)
        assert store.driver.drain(WAIT_SECONDS)
        router.learns(lambda: contents(store.driver))


def test_a_store_whose_calls_fail_is_told_anew_later(silent, monkeypatch):
    """B238: whatever goes wrong in between, in the end the router is right."""
    with closing(EmbeddedStore(silent)) as store, published(store) as publisher, closing(Router(publisher)) as router:
        take, failures = store.driver.take_events, [2]

        def fails(*args, **kwargs):
            events = take(*args, **kwargs)
            if events and failures[0]:
                failures[0] -= 1
                msg = "broken"
                raise RuntimeError(msg)
            return events

        monkeypatch.setattr(publishing, "_RESTART_SECONDS", 0.0)
        monkeypatch.setattr(store.driver, "take_events", fails)
        Tenant(store).save("aabb")
        assert store.driver.drain(WAIT_SECONDS)
        router.learns(lambda: contents(store.driver))
        assert not failures[0]


@pytest.mark.parametrize("field", ["events_endpoint", "events_replay_endpoint"])
@pytest.mark.parametrize("endpoint", ["taken", "nonsense", "tcp://192.0.2.1:1"])
def test_an_endpoint_that_cannot_be_is_refused_at_start(config, field, endpoint):
    """B239: with nothing left behind."""
    with zmq.Context() as context:
        socket = context.socket(zmq.PUB)
        socket.bind(ANYWHERE)
        taken = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        wrong = msgspec.structs.replace(config, insecure=True, **{field: taken if endpoint == "taken" else endpoint})
        with pytest.raises(ConfigError, match="events cannot be published"):
            EmbeddedStore(wrong)
        socket.close(linger=0)


@pytest.mark.parametrize("field", ["events_endpoint", "events_replay_endpoint"])
def test_a_second_store_took_the_file_of_the_first_and_both_seemed_to_publish(config, tmp_path, field):
    """B532: it is refused, the first one publishes as before; the file goes with it, and a third may come."""
    file = tmp_path / "socket"
    at_file = msgspec.structs.replace(config, **{field: f"ipc://{file}"})
    second = msgspec.structs.replace(at_file, disk_path=f"{config.disk_path}2")
    for store in map(EmbeddedStore, (at_file, second)):
        with closing(store):
            assert file.stat().st_mode & 0o777 == 0o600
            with pytest.raises(ConfigError, match=f"events .* 'ipc://{file}': another process answers at {file}"):
                EmbeddedStore(
                    msgspec.structs.replace(config, disk_path=f"{config.disk_path}3", **{field: f"ipc://{file}"})
                )
            with closing(Router(store._publisher)) as router:
                Tenant(store).save("aabb")
                router.replay(0)
                router.learns(lambda store=store: contents(store.driver))
        assert not file.exists()


def test_a_file_that_nobody_answers_at_is_taken_over(config, tmp_path):
    """B532: as a process that was killed leaves it."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "socket"))
    at_file = msgspec.structs.replace(config, events_replay_endpoint=f"ipc://{tmp_path}/socket")
    with closing(EmbeddedStore(at_file)) as store, closing(Router(store._publisher)) as router:
        assert router.replay(0)


def test_a_file_that_was_no_socket_was_replaced(config, tmp_path):
    """B532: it is left alone."""
    (tmp_path / "socket").write_text("mine")
    at_file = msgspec.structs.replace(config, events_endpoint=f"ipc://{tmp_path}/socket")
    with pytest.raises(ConfigError, match="is not a socket"):
        EmbeddedStore(at_file)
    assert (tmp_path / "socket").read_text() == "mine"


@pytest.mark.parametrize("path", ["events", "*", "", "/" + 107 * "x"])
def test_where_no_file_can_be_found_again_nothing_is_published(config, path):
    """B532: relative to some folder, or too long."""
    with pytest.raises(ConfigError, match=r"'ipc://.*: expected (unix:///absolute/path of at most 107 bytes|tcp://)"):
        EmbeddedStore(msgspec.structs.replace(config, events_endpoint=f"ipc://{path}"))


def test_an_abstract_name_has_no_file(config, silent):
    """B532: the system itself gives it to one only."""
    name = f"ipc://@qkvault-{os.getpid()}"
    with closing(EmbeddedStore(silent)) as store, closing(Publisher(store.driver, name, ANYWHERE)) as publisher:
        with pytest.raises(ConfigError, match="Address already in use"):
            Publisher(store.driver, name)
        with closing(Router(publisher)) as router:
            assert router.replay(0)


@pytest.mark.parametrize("field", ["events_endpoint", "events_replay_endpoint"])
@pytest.mark.parametrize(
    "endpoint", ["tcp://0.0.0.0:0", "tcp://*:5557", "tcp://[::]:0", "tcp://eth0:1", "ws://127.0.0.1:1"]
)
def test_tokens_are_not_told_to_other_machines(config, field, endpoint):
    """B387: unless it is said that they may be."""
    with pytest.raises(ConfigError, match=f"{field}=.*set insecure if all of that network may know"):
        EmbeddedStore(msgspec.structs.replace(config, **{field: endpoint}))


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:*", "tcp://localhost:*", "tcp://[::1]:5557", "ipc:///a/b", "", "x"]
)
def test_an_endpoint_of_this_machine_is_local(endpoint):
    """B387: what is no endpoint at all is for ZeroMQ to refuse."""
    assert is_local_endpoint(endpoint)


def test_whoever_is_told_to_publishes_to_other_machines(config):
    """B387."""
    open_to_all = msgspec.structs.replace(config, insecure=True, events_endpoint="tcp://0.0.0.0:*")
    with closing(EmbeddedStore(open_to_all)) as store:
        assert store._publisher.endpoint.startswith("tcp://0.0.0.0:")


def test_without_an_endpoint_nothing_is_imported_or_kept(silent):
    """B239: who does not ask pays nothing."""
    with closing(EmbeddedStore(silent)) as store:
        Tenant(store).save("aabb")
        assert store._publisher is None
        assert len(store.driver.manager.ledger.feed) == 0
        assert isinstance(store.connect("x").status(), m.Status)


class Dynamo:
    """Dynamo's standalone indexer, in a process of its own, listening to one store."""

    def __init__(self, publisher, log):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [DYNAMO_PYTHON, "-m", "dynamo.indexer", "--port", str(self.port)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self.publisher = publisher
        try:
            self.register()
        except BaseException:
            self.close()
            raise

    def register(self):
        self.until(lambda: self.ask("/workers") == [])
        self.ask(
            "/register",
            instance_id=7,
            endpoint=self.publisher.endpoint,
            replay_endpoint=self.publisher.replay_endpoint,
            model_name="m",
            block_size=CHUNK,
        )

    def close(self):
        self.process.terminate()
        self.process.wait(WAIT_SECONDS)

    def ask(self, path, **body):
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=5) as answer:
            return json.load(answer)

    def counts(self, word):
        """Tokens of ``word`` in a device's memory, in RAM, and in RAM or below."""
        found = self.ask("/query", token_ids=ids_of(word), model_name="m")["instances"].get("7", {})
        return tuple(found.get(place, 0) for place in ("gpu", "cpu", "disk"))

    def until(self, holds):
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                if holds():
                    return
            except urllib.error.URLError:
                pass  # it is still starting
            assert time.monotonic() < deadline, "it did not come about"
            time.sleep(0.05)

    def learns(self, **wanted):
        self.until(lambda: all(self.counts(word) == counts for word, counts in wanted.items()))


@pytest.mark.skipif(not DYNAMO_PYTHON, reason="no ai-dynamo-runtime: `make test` installs it, or QKV_DYNAMO_PYTHON")
def test_dynamo_counts_what_the_store_has(config, tmp_path, monkeypatch):
    """B234: stored before it listened, evicted, loaded, replaced, salted, cleared, lost, and after a restart."""
    monkeypatch.setattr(publishing, "_QUIET_SECONDS", 0.5)
    with (tmp_path / "log").open("w") as log, closing(EmbeddedStore(config)) as store:
        tenant, other = Tenant(store), Tenant(store, identity=RequestIdentity(cache_salt="s"))
        tenant.save("aabb")
        assert store.driver.drain(WAIT_SECONDS)
        time.sleep(0.2)
        with closing(Dynamo(store._publisher, log)) as dynamo:
            dynamo.learns(aabb=(0, 64, 64), xx=(0, 0, 0))
            tenant.save("aabbcc")
            other.save("xxyy")
            dynamo.learns(aabbccdd=(0, 96, 96), xxyy=(0, 0, 0))
            assert store.driver.drain(WAIT_SECONDS)
            tenant.client.clear(lower_tiers=False)
            dynamo.learns(aabbccdd=(0, 0, 96))
            tenant.client.release(tenant.find("aabb"))
            dynamo.learns(aabbccdd=(0, 64, 96))
            for n in range(30):
                tenant.save("ef" + chr(ord("g") + n) * 2)
            assert store.driver.drain(WAIT_SECONDS)
            here = contents(store.driver)
            counts = [
                sum(32 for end in (2, 4, 6) if (tenant.hash_of("aabbcc"[:end]), medium) in here)
                for medium in ("CPU", "STORAGE")
            ]
            assert counts[0] < 64
            dynamo.learns(aabbcc=(0, counts[0], max(counts)))
            tenant.client.clear()
            dynamo.learns(aabbcc=(0, 0, 0), efgg=(0, 0, 0))
            store.driver.manager.ledger.feed.max_waiting = 1
            for word in ("aabb", "ccdd", "eeff"):
                tenant.save(word)
            tenant.client.clear()
            assert store.driver.drain(WAIT_SECONDS)  # what is to go is gone
            tenant.save("ccddee")
            assert store.driver.drain(WAIT_SECONDS)
            dynamo.learns(aabb=(0, 0, 0), eeff=(0, 0, 0), ccddee=(0, 96, 96))
            assert dynamo.ask("/dump")["m:default"]["block_size"] == CHUNK
            dynamo.publisher.close()
            dynamo.learns(ccddee=(0, 0, 0))
    with (
        (tmp_path / "log").open("a") as log,
        closing(EmbeddedStore(config)) as store,
        closing(Dynamo(store._publisher, log)) as dynamo,
    ):
        dynamo.learns(ccddee=(0, 0, 96))
    assert "panicked" not in (tmp_path / "log").read_text()


def test_a_server_publishes_too(config, tmp_path):
    """B234: `qkvault serve` with an endpoint; its publisher ends with it."""
    settings = {name: getattr(config, name) for name in ("ram_bytes", "chunk_size", "prefault")}
    settings |= {"events_endpoint": ANYWHERE, "events_replay_endpoint": ANYWHERE, "listen": f"unix://{tmp_path}/sock"}
    with closing(Server(load(env={}, cli=settings))) as server, closing(Router(server._publisher)) as router:
        Tenant(server).save("aabb")
        router.learns(lambda: contents(server.driver))
        assert len(router.view) == 2
        server.close()
        router.learns(set)
