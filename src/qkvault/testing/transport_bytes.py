"""What every transport promises of bytes and of time, as tests: what is read is what was committed, and nothing else.

Subclassed as ``transport_contract`` says. Time is a FakeClock, so that leases end and instances fall silent at once.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from qkvault.client import StoreClient
from qkvault.image import key_in
from qkvault.store.driver import StoreDriver, Traits
from qkvault.testing.clock import FakeClock
from qkvault.testing.store_model import ROOT, ModelChunk, checks_of, keys_of, tokens_of
from qkvault.testing.transport_contract import (
    WAIT_SECONDS,
    Connect,
    Served,
    find,
    make_driver,
    prompt,
    read,
    reserve,
    save,
    until,
)
from qkvault.types import KEY_BYTES
from qkvault.wire import messages as m

_LEASE_SECONDS: Final = 1000.0
_REAP_SECONDS: Final = 30.0
_GRACE_SECONDS: Final = 300.0
_HUGE_BYTES: Final = 64 << 20


def _instance(name: str) -> m.Instance:
    return m.Instance(name, "worker", "model", worker_id=1, world_size=2, pid=4711, spaces=(b"a space",))


class TransportBytesContract(Served):
    """Bytes, leases and instances."""

    @pytest.fixture
    def clock(self) -> FakeClock:
        return FakeClock()

    @pytest.fixture
    def driver(self, clock: FakeClock) -> Iterator[StoreDriver]:
        """The store at the other end, without tiers."""
        traits = Traits(reap_timeout_seconds=_REAP_SECONDS, registration_grace_seconds=_GRACE_SECONDS)
        with closing(make_driver(lease_seconds=_LEASE_SECONDS, clock=clock, traits=traits)) as driver:
            yield driver
            driver.check()

    def test_what_is_committed_too_late_is_never_read(
        self, connect: Connect, driver: StoreDriver, clock: FakeClock
    ) -> None:
        """B240: its lease has run out: nothing is published, nothing raises, and the slots are free again, unnamed."""
        late, other = connect(), connect()
        reserved = reserve(late, "aabb")
        clock.advance(_LEASE_SECONDS + 1)
        until(lambda: other.status().num_leases == 0)
        assert other.status().media[0].used_bytes > 0
        assert late.commit(reserved.lease_id) == 0
        assert find(other, "aabb").lease_id == 0
        assert other.status().media[0].used_bytes == 0
        assert [key_in(driver.pool.view(offset, 4096)) for offset in reserved.offsets] == [bytes(KEY_BYTES)] * 2
        other.check()
        assert save(late, "aabb") == 2
        assert read(other, find(other, "aabb"), "aabb") == 64

    def test_what_is_not_named_is_not_committed(self, connect: Connect) -> None:
        """B241: a commit with keys publishes those, in whichever order they are named, and frees the rest."""
        one, other = connect(), connect()
        reserved = reserve(one, "aabbccdd")
        first, second, third, _ = (chunk.key for chunk in prompt("aabbccdd"))
        assert one.commit(reserved.lease_id, [third, first, second]) == 3
        assert read(other, find(other, "aabbccdd"), "aabbccdd") == 96
        assert other.status().media[0].num_chunks == 3
        assert one.commit(reserve(one, "xx").lease_id, []) == 0
        assert one.commit(reserve(one, "xx").lease_id, [first]) == 0
        assert find(other, "xx").lease_id == 0
        assert other.status().media[0].num_chunks == 3

    def test_a_slot_that_nobody_wrote_is_not_committed(self, connect: Connect) -> None:
        """B242: neither a fresh one, nor one that has held the same chunk before."""
        one, other = connect(), connect()
        chunks = [chunk.new() for chunk in prompt("aabb")]
        assert one.commit(one.reserve(chunks).lease_id) == 0
        before = reserve(one, "aabb")
        assert one.commit(before.lease_id) == 2
        other.clear()
        again = one.reserve(chunks)
        assert again.offsets == before.offsets
        assert one.commit(again.lease_id) == 0
        assert find(other, "aabb").lease_id == 0

    def test_what_was_evicted_meanwhile_has_no_header(self, connect: Connect) -> None:
        """B134: whoever fetches under a lease that ran out finds no key, also where it has seen the chunk before."""
        one, other = connect(), connect()
        save(one, "aabb")
        located = find(other, "aabb")
        refs = list(located.ready)
        assert read(other, located, "aabb") == 64
        other.release(located.lease_id)
        one.clear()
        other.fetch(refs)
        assert [key_in(other.pool.view(ref.offset, ref.image_bytes)) for ref in refs] == [bytes(KEY_BYTES)] * 2
        other.fetch([])
        other.check()

    def test_clients_that_store_at_a_time_read_one_another(self, connect: Connect) -> None:
        """B243: each of two stores and reads what both store, again and again, and sees whole chunks only."""
        words = ["aabb", "aacc", "xxyyz"]
        wrong: list[Exception | AssertionError] = []

        def work(client: StoreClient) -> None:
            try:
                for _ in range(20):
                    for word in words:
                        save(client, word)
                        located = find(client, word)
                        read(client, located, word)
                        client.release(located.lease_id)
            except (Exception, AssertionError) as error:  # thread top: told by the test's own thread
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(connect(),)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        assert wrong == []
        assert connect().status().media[0].num_chunks == 6

    def test_a_huge_chunk_goes_both_ways(self, tmp_path: Path) -> None:
        """B244: 64 MB in one piece arrive as they were sent, and others are answered."""
        tokens = tokens_of(range(32))
        chunk = ModelChunk(prompt("aa")[0].key, ROOT, tokens, os.urandom(_HUGE_BYTES))
        with (
            closing(make_driver(pool_bytes=_HUGE_BYTES + (1 << 20))) as driver,
            self.serve(driver, tmp_path) as make,
            closing(StoreClient(make())) as one,
            closing(StoreClient(make())) as other,
        ):
            reserved = one.reserve([chunk.new()])
            chunk.write(one.pool.view(reserved.offsets[0], chunk.new().image_bytes))
            assert one.commit(reserved.lease_id) == 1
            located = other.find(ROOT, chunk.key, chunk.check, lambda _: b"")
            other.fetch(list(located.ready))
            assert chunk.is_in(other.pool.view(located.ready[0].offset, located.ready[0].image_bytes))
            driver.check()

    def test_several_questions_are_answered_in_order(self, client: StoreClient) -> None:
        """B245: each as if it had been asked alone."""
        for word in ("aabb", "xx"):
            save(client, word)
        questions = [
            m.Lookup(ROOT, keys_of(prompt(word)), checks_of(prompt(word))) for word in ("aabb", "zz", "xx", "aabbcc")
        ]
        replies = client.several([*questions, m.Match(0, ROOT, prompt("aa")[0].tokens), m.Poll(12345)])
        assert [len(reply.ready) for reply in replies] == [2, 0, 1, 2, 1, 0]
        assert client.several([m.Poll(reply.lease_id) for reply in replies[:1]])[0].ready.num_tokens == 64
        client.release(*(reply.lease_id for reply in replies))
        assert client.several([]) == ()
        assert client.status().num_leases == 0

    def test_who_registers_is_in_the_status(self, connect: Connect) -> None:
        """B246: until it goes, with what it holds; registering again changes what is told."""
        one, other = connect(), connect()
        assert not one.ping()
        one.register(_instance("first"))
        one.register(_instance("second"))
        assert one.ping()
        assert not other.ping()
        reserve(one, "aa")
        (told,) = other.status().instances
        assert (told.instance, told.num_leases) == (_instance("second"), 1)
        one.close()
        until(lambda: other.status().instances == ())

    def test_who_falls_silent_is_taken_off_the_register(self, connect: Connect, clock: FakeClock) -> None:
        """B247: after the reap timeout if it has pinged, after the larger grace if it never has; and is told so."""
        pinged, quiet, observer = connect(), connect(), connect()
        for client, name in ((pinged, "pinged"), (quiet, "quiet")):
            client.register(_instance(name))
        assert pinged.ping()

        def registered() -> list[str]:
            return [told.instance.instance_id for told in observer.status().instances]

        clock.advance(_REAP_SECONDS - 1)
        assert pinged.ping()
        clock.advance(_REAP_SECONDS - 1)
        time.sleep(0.3)  # the store has looked since
        assert registered() == ["pinged", "quiet"]
        clock.advance(2)
        until(lambda: registered() == ["quiet"])
        assert not pinged.ping()
        pinged.register(_instance("again"))
        assert sorted(registered()) == ["again", "quiet"]
        clock.advance(_GRACE_SECONDS)
        until(lambda: "quiet" not in registered())
        assert save(quiet, "aa") == 1

    def test_who_is_taken_off_the_register_keeps_what_it_holds(self, connect: Connect, clock: FakeClock) -> None:
        """B248: leases end with their own time and with their session, not with the register."""
        one, observer = connect(), connect()
        one.register(_instance("one"))
        assert one.ping()
        save(one, "aa")
        located = find(one, "aa")
        clock.advance(_REAP_SECONDS + 1)
        until(lambda: observer.status().instances == ())
        assert one.poll(located.lease_id).ready == located.ready
        assert observer.status().num_leases == 1
