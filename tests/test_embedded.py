"""The store inside a process: shared by name, closed by its last user, and there again after a restart."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import closing

import msgspec
import pytest

from qkvault import embedded
from qkvault.client import StoreClient
from qkvault.config import Config
from qkvault.errors import ConfigError
from qkvault.testing.store_model import QUERY_ROOT, chunks_of, tokens_of
from qkvault.testing.transport_contract import WAIT_SECONDS, find, read, save
from qkvault.types import TRANSFER_QUERY, CacheKind
from qkvault.wire.sockets import SocketTransport


@pytest.fixture
def config():
    return Config(instance_id="test", ram_bytes=1 << 20, prefault=False)


@pytest.fixture
def on_disk(config, tmp_path):
    return msgspec.structs.replace(config, disk_path=str(tmp_path / "disk"), disk_bytes=1 << 24)


class TestSharing:
    def test_the_same_name_is_the_same_store(self, config):
        """It closes with its last user, and the next one gets a new store."""
        one, other = embedded.acquire(config), embedded.acquire(config)
        assert one is other
        client = one.connect("test")
        save(client, "aa")
        embedded.release(one)
        assert embedded.find("test") is other
        assert read(client, find(client, "aa"), "aa") == 32
        embedded.release(other)
        assert embedded.find("test") is None
        again = embedded.acquire(config)
        assert again is not one
        assert find(again.connect("test"), "aa").lease_id == 0
        embedded.release(again)

    def test_another_name_is_another_store(self, config):
        one, other = embedded.acquire(config), embedded.acquire(msgspec.structs.replace(config, instance_id="other"))
        save(one.connect("test"), "aa")
        assert find(other.connect("test"), "aa").lease_id == 0
        embedded.release(one)
        embedded.release(other)

    @pytest.mark.parametrize("change", [{"ram_bytes": 1 << 21}, {"cache_policy": "lfu"}, {"lease_seconds": 99.0}])
    def test_another_configuration_is_refused(self, config, change):
        """The store that runs goes on, with as many users as before."""
        store = embedded.acquire(config)
        with pytest.raises(ConfigError, match="another configuration"):
            embedded.acquire(msgspec.structs.replace(config, **change))
        embedded.release(store)
        assert embedded.find("test") is None

    def test_a_store_that_others_are_to_reach_is_made_so(self, config):
        """Memory that is private cannot be shared later."""
        store = embedded.acquire(config)
        with pytest.raises(ConfigError, match="another configuration"):
            embedded.acquire(config, shared=True)
        embedded.release(store)
        shared = embedded.acquire(config, shared=True)
        assert embedded.acquire(config) is shared
        embedded.release(shared)
        embedded.release(shared)

    def test_released_once_too_often_is_no_harm(self, config):
        """Least of all to the successor of the same name."""
        store = embedded.acquire(config)
        embedded.release(store)
        successor = embedded.acquire(config)
        embedded.release(store)
        assert embedded.find("test") is successor
        assert successor.connect("test").status().num_sessions == 1
        embedded.release(successor)

    def test_who_acquires_while_the_last_user_leaves_gets_a_store_that_works(self, on_disk):
        """One directory has one owner at a time."""
        wrong = []

        def come_and_go():
            for _ in range(5):
                try:
                    store = embedded.acquire(on_disk)
                    store.connect("test").status()
                    embedded.release(store)
                except Exception as error:
                    wrong.append(error)

        threads = [threading.Thread(target=come_and_go) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert embedded.find("test") is None


class TestStarting:
    @pytest.mark.parametrize("change", [{"cache_policy": "my.policies:None"}, {"ram_bytes": 1 << 62}])
    def test_what_cannot_be_built_leaves_nothing(self, on_disk, change):
        """No directory's lock, no thread, no memory: the next start works."""
        with pytest.raises(ConfigError):
            embedded.acquire(msgspec.structs.replace(on_disk, **change))
        assert embedded.find("test") is None
        embedded.release(embedded.acquire(on_disk))

    def test_a_directory_in_use_is_refused(self, on_disk):
        store = embedded.acquire(on_disk)
        with pytest.raises(ConfigError):
            embedded.acquire(msgspec.structs.replace(on_disk, instance_id="other"))
        embedded.release(store)

    def test_it_starts_as_the_settings_say(self, config):
        """Frozen, without a hot cache, with another policy."""
        settings = {"start_frozen": True, "hot_cache": False, "cache_policy": "mru"}
        with closing(embedded.EmbeddedStore(msgspec.structs.replace(config, **settings))) as store:
            status = store.connect("test").status()
            assert (status.is_frozen, status.hot_cache) == (True, False)
            assert type(store.driver.manager.room.residents.policies[CacheKind.KV]).__name__ == "MruPolicy"


def save_queries(client, word):
    """Store the queries of a word, a chunk of two letters in 8 KiB each. Returns how many chunks were stored."""
    tokens = tokens_of(1000 * ord(letter) + n for letter in word for n in range(16))
    made = chunks_of(tokens, 32, root=QUERY_ROOT)
    reserved = client.reserve([chunk.new() for chunk in made], CacheKind.QUERY)
    for chunk, offset in zip(made, reserved.offsets, strict=True):
        if offset >= 0:
            chunk.write(client.pool.view(offset, chunk.new().image_bytes))
    return client.commit(reserved.lease_id) if reserved.lease_id else 0


class TestQueries:
    @pytest.mark.parametrize(
        ("setting", "shares"), [(None, [1 << 18, 1 << 22]), (1 << 17, [1 << 17, 1 << 21]), (0, [0, 0])]
    )
    def test_a_share_of_ram_and_of_disk_is_for_queries(self, on_disk, setting, shares):
        """B315: what they take and what they may is in the status."""
        with closing(embedded.EmbeddedStore(msgspec.structs.replace(on_disk, query_bytes=setting))) as store:
            client = store.connect("test")
            save(client, "aabb")
            num_stored = save_queries(client, "aabb")
            assert store.driver.drain(WAIT_SECONDS)
            media = client.status().media
            assert [medium.query_share_bytes for medium in media] == shares
            assert [medium.query_used_bytes for medium in media] == [num_stored * 8192] * 2
            assert [medium.used_bytes for medium in media] == [(2 + num_stored) * 8192] * 2
            assert num_stored == (0 if setting == 0 else 2)

    def test_queries_on_disk_are_queries_after_a_restart(self, on_disk):
        """B313: they count to the share, and those beyond it are removed, the oldest first."""
        with closing(embedded.EmbeddedStore(on_disk)) as store:
            save_queries(store.connect("test"), "aabbcc")
            save(store.connect("test"), "xx")
        for query_bytes, num_left in ((None, 3), (1 << 10, 2), (0, 0)):
            with closing(embedded.EmbeddedStore(msgspec.structs.replace(on_disk, query_bytes=query_bytes))) as store:
                assert store.driver.drain(WAIT_SECONDS)
                disk = store.connect("test").status().media[1]
                assert (disk.query_used_bytes, disk.num_chunks) == (num_left * 8192, num_left + 1)
                store.driver.check()

    @pytest.mark.parametrize(("setting", "is_there"), [(None, True), (1 << 17, True), (0, False)])
    def test_a_store_says_whether_it_takes_queries(self, config, tmp_path, setting, is_there):
        """B316: to whoever connects, like all else that he may want to know."""
        config = msgspec.structs.replace(config, query_bytes=setting)
        with closing(embedded.EmbeddedStore(config, shared=True)) as store:
            store.serve(f"unix://{tmp_path}/s")
            with closing(SocketTransport(f"unix://{tmp_path}/s", "test", timeout_seconds=20.0)) as transport:
                assert (TRANSFER_QUERY in transport.welcome.features) is is_there
                assert {"kv", "ram"} <= set(transport.welcome.features)
                assert transport.welcome.chunk_size == config.chunk_size


class TestServing:
    def test_another_process_reaches_it_by_its_name(self, config, monkeypatch, tmp_path):
        """The address follows from the instance, and only its user may go there."""
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        address = embedded.socket_address("test")
        store = embedded.acquire(config, shared=True)
        store.serve(address)
        save(store.connect("here"), "aabb")
        code = (
            "import sys; from qkvault.client import StoreClient; from qkvault.wire.sockets import SocketTransport\n"
            "from qkvault import embedded\n"
            "from qkvault.testing.transport_contract import find, read\n"
            "client = StoreClient(SocketTransport(embedded.socket_address('test'), 'there', timeout_seconds=20.0))\n"
            "print(read(client, find(client, 'aabb'), 'aabb'))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == "64\n"
        embedded.release(store)
        assert list((tmp_path / address.rsplit("/", 2)[1]).iterdir()) == []

    def test_it_is_served_once(self, config, tmp_path):
        """At one address; the first one goes on."""
        store = embedded.acquire(config, shared=True)
        store.serve(f"unix://{tmp_path}/s")
        with pytest.raises(ConfigError, match="served already"):
            store.serve(f"unix://{tmp_path}/t")
        with closing(StoreClient(SocketTransport(f"unix://{tmp_path}/s", "test", timeout_seconds=20.0))) as client:
            client.check()
        embedded.release(store)

    def test_private_memory_is_not_served(self, config, tmp_path):
        store = embedded.acquire(config)
        with pytest.raises(ConfigError, match="shared pool"):
            store.serve(f"unix://{tmp_path}/s")
        embedded.release(store)

    def test_each_life_of_a_store_has_an_epoch(self, config, tmp_path):
        """A client that connects again sees that the store was restarted."""
        epochs = []
        for _ in range(2):
            with closing(embedded.EmbeddedStore(config, shared=True)) as store:
                store.serve(f"unix://{tmp_path}/s")
                with closing(SocketTransport(f"unix://{tmp_path}/s", "test", timeout_seconds=20.0)) as transport:
                    epochs.append(transport.epoch)
        assert epochs[0] < epochs[1]

    @pytest.mark.parametrize("place", ["writable", "link", "file"])
    def test_a_folder_that_others_can_write_to_is_refused(self, monkeypatch, tmp_path, place):
        """Somebody could have put a socket of his own there."""
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        folder = tmp_path / embedded.socket_address("test").rsplit("/", 2)[1]
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        if place == "writable":
            folder.chmod(0o777)
        else:
            folder.rmdir()
            if place == "link":
                folder.symlink_to(tmp_path)
            else:
                folder.touch()
        with pytest.raises(ConfigError):
            embedded.socket_address("test")


# Stores prompts, waits until the disk has them, says so, and then ends in the way it is told to.
WRITER = """
import signal, sys, time
import msgspec
from qkvault import embedded
from qkvault.config import Config
from qkvault.testing.transport_contract import save

store = embedded.acquire(msgspec.json.decode(sys.argv[1], type=Config), shared=True)
client = store.connect("writer")
print(save(client, "aabbc"), save(client, "xxyy"), flush=True)
assert store.driver.drain(60)
print("drained", flush=True)
if sys.argv[2] == "wait":
    save(client, "zz" * 20)
    time.sleep(600)
embedded.release(store)
"""


def write(config, how):
    command = [sys.executable, "-c", WRITER, msgspec.json.encode(config).decode(), how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


class TestRestart:
    def test_what_was_stored_is_found_by_the_next_process(self, on_disk):
        """B126: whole chunks and tails, with the bytes that were written."""
        with write(on_disk, "exit") as writer:
            assert writer.communicate(timeout=120)[0] == "3 2\ndrained\n"
        assert writer.returncode == 0
        with closing(embedded.EmbeddedStore(on_disk)) as store:
            assert store.driver.drain(WAIT_SECONDS)
            client = store.connect("reader")
            for word, num_tokens in (("aabbc", 80), ("xxyy", 64), ("aabbx", 64), ("zz", 0)):
                located = client.wait(find(client, word), WAIT_SECONDS, time.monotonic)
                assert read(client, located, word) == num_tokens
            client.check()

    def test_what_was_stored_survives_a_kill(self, on_disk):
        """B126: what the disk had is found, what it was being given is whole or not there, and nothing else remains."""
        with write(on_disk, "wait") as writer:
            assert writer.stdout.readline() == "3 2\n"
            assert writer.stdout.readline() == "drained\n"
            writer.send_signal(signal.SIGKILL)
        with closing(embedded.EmbeddedStore(on_disk)) as store:
            assert store.driver.drain(WAIT_SECONDS)
            client = store.connect("reader")
            for word, num_tokens in (("aabbc", 80), ("xxyy", 64)):
                located = client.wait(find(client, word), WAIT_SECONDS, time.monotonic)
                assert read(client, located, word) == num_tokens
            located = client.wait(find(client, "zz" * 20), WAIT_SECONDS, time.monotonic)
            assert read(client, located, "zz" * 20) % 32 == 0
            client.check()

    def test_what_is_not_to_be_kept_is_removed_at_exit(self, on_disk, tmp_path):
        """The directory is empty, and the next store starts without chunks."""
        transient = msgspec.structs.replace(on_disk, disk_keep=False)
        with closing(embedded.EmbeddedStore(transient)) as store:
            save(store.connect("test"), "aabb")
            assert store.driver.drain(WAIT_SECONDS)
            assert any(path.is_file() and path.stat().st_size >= 8192 for path in (tmp_path / "disk").rglob("*"))
        assert not [path for path in (tmp_path / "disk").rglob("*") if path.is_file()]
        with closing(embedded.EmbeddedStore(transient)) as store:
            assert store.driver.drain(WAIT_SECONDS)
            assert find(store.connect("test"), "aabb").lease_id == 0
