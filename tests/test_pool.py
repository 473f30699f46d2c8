"""The pool: no byte has two owners, nothing is lost or cut to pieces over time, and nothing is left behind."""

from __future__ import annotations

import errno
import gc
import itertools
import mmap
import os
import random
import subprocess
import sys
import time
from collections import deque
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkvault import pool as pool_module
from qkvault.errors import ConfigError, InvariantError
from qkvault.image import ALIGNMENT_BYTES, align_up
from qkvault.memory import available_memory, cgroup_memory, huge_page_bytes, meminfo, transparent_mode
from qkvault.pool import AttachedPool, Pool

MIB = 1 << 20
NAME = "qkvault-test"


def is_mapped() -> bool:
    return f"memfd:{NAME}" in Path("/proc/self/maps").read_text()


def make_pool(capacity_bytes: int = MIB) -> Pool:
    return Pool(capacity_bytes, prefault=False)


# The allocator


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40 * ALIGNMENT_BYTES)), max_size=120), st.randoms())
@settings(max_examples=60)
def test_slots_never_overlap_and_all_of_the_pool_comes_back(operations, chance):
    pool = make_pool(100 * ALIGNMENT_BYTES)
    live: dict[int, int] = {}
    for is_free, num_bytes in operations:
        if is_free and live:
            offset = chance.choice(list(live))
            pool.free(offset)
            del live[offset]
        elif (offset := pool.allocate(num_bytes)) is not None:
            live[offset] = num_bytes
        spans = sorted(live.items())
        assert all(at + size <= start for (at, size), (start, _) in itertools.pairwise(spans))
        assert all(start % ALIGNMENT_BYTES == 0 and start + size <= pool.capacity_bytes for start, size in spans)
        assert pool.slots.keys() == live.keys()
        pool.check()
    for offset in live:
        pool.free(offset)
    assert (pool._bin_sizes, pool.used_bytes) == ([pool.capacity_bytes], 0)
    pool.check()
    pool.close()


@given(st.lists(st.tuples(st.sampled_from("afg"), st.integers(1, 30 * ALIGNMENT_BYTES)), max_size=120), st.randoms())
@settings(max_examples=200)
def test_slots_that_are_moved_together_keep_their_bytes(operations, chance):
    """B385: what may not move stays, what moves is whole, and less is copied than was asked for."""
    pool = make_pool(60 * ALIGNMENT_BYTES)
    live: dict[int, bytes] = {}  # offset to what was written there
    moved: dict[int, int] = {}

    def is_movable(offset):
        return offset not in fixed

    def move(offset, new_offset, num_bytes):
        pool.view(new_offset, num_bytes)[:] = pool.view(offset, num_bytes)
        pool.view(offset, num_bytes)[:] = bytes(num_bytes)
        moved[offset] = num_bytes
        live[new_offset] = live.pop(offset)

    fixed: set[int] = set()
    for number, (act, num_bytes) in enumerate(operations):
        if act == "f" and live:
            offset = chance.choice(list(live))
            pool.free(offset)
            del live[offset]
            continue
        fixed = {offset for offset in live if chance.random() < 0.3}
        moved.clear()
        had = max(pool._bin_sizes, default=0)
        offset = pool.allocate(num_bytes) if act == "a" else pool.gather(num_bytes, is_movable, move)
        assert not fixed & moved.keys()
        assert sum(moved.values()) < align_up(num_bytes)
        assert offset is not None or not moved
        assert offset is not None or had < align_up(num_bytes)
        if offset is not None:
            live[offset] = number.to_bytes(2, "little") * (align_up(num_bytes) // 2)
            pool.view(offset, len(live[offset]))[:] = live[offset]
        assert all(bytes(pool.view(at, len(written))) == written for at, written in live.items())
        assert pool.slots == {at: len(written) for at, written in live.items()}
        pool.check()
    pool.close()


def test_of_all_windows_the_one_with_the_fewest_bytes_is_emptied():
    """B385."""
    pool = make_pool(12 * ALIGNMENT_BYTES)
    whole = [pool.allocate(ALIGNMENT_BYTES) for _ in range(12)]
    for slot in sorted(whole)[0:12:3]:  # free: 0, 3, 6, 9, 10
        pool.free(slot)
    pool.free(10 * ALIGNMENT_BYTES)
    moves = []
    offset = pool.gather(3 * ALIGNMENT_BYTES, lambda _: True, lambda *move: moves.append(move))
    assert offset == 9 * ALIGNMENT_BYTES
    assert [(old, size) for old, _, size in moves] == [(11 * ALIGNMENT_BYTES, ALIGNMENT_BYTES)]
    pool.close()


def test_a_slot_is_freed_once():
    """After a second free raised, all slots that fit are still distinct."""
    pool = make_pool(16 * ALIGNMENT_BYTES)
    offset = pool.allocate(ALIGNMENT_BYTES)
    pool.free(offset)
    with pytest.raises(InvariantError, match="freed twice"):
        pool.free(offset)
    with pytest.raises(InvariantError, match="never allocated"):
        pool.free(12345)
    offsets = [pool.allocate(ALIGNMENT_BYTES) for _ in range(16)]
    assert len(set(offsets)) == 16
    assert pool.allocate(1) is None
    pool.close()


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_a_slot_has_bytes(num_bytes):
    pool = make_pool()
    with pytest.raises(ValueError, match="slot"):
        pool.allocate(num_bytes)
    pool.close()


def test_whole_chunks_and_tails_grow_towards_each_other():
    pool = make_pool()
    large = pool.allocate(100_000)
    small = pool.allocate(10_000)
    assert large == 0
    assert small + 3 * ALIGNMENT_BYTES == pool.capacity_bytes
    pool.close()


def churn(pool: Pool, live: deque[int], chance: random.Random, rounds: int) -> list[float]:
    """Allocate ``rounds`` chunks, freeing the oldest where there is no room. Returns how full the pool then was."""
    chunk_bytes = 61 * ALIGNMENT_BYTES
    fullness = []
    for _ in range(rounds):
        num_bytes = chunk_bytes if chance.random() < 0.7 else chance.randrange(1, chunk_bytes)
        while (offset := pool.allocate(num_bytes)) is None:
            fullness.append(pool.used_bytes / pool.capacity_bytes)
            pool.free(live.popleft())
        live.append(offset)
    return fullness


def test_fifty_thousand_operations_near_full_do_not_fragment_the_pool():
    """Freeing the oldest keeps nine tenths in use to the end, and clearing gives one region of full capacity."""
    pool = make_pool(1000 * 61 * ALIGNMENT_BYTES)
    live: deque[int] = deque()
    chance = random.Random(7)
    churn(pool, live, chance, 2_000)
    early = churn(pool, live, chance, 5_000)
    churn(pool, live, chance, 13_000)
    late = churn(pool, live, chance, 5_000)
    pool.check()
    assert np.mean(late) >= 0.9
    assert np.mean(late) >= np.mean(early) - 0.02
    while live:
        pool.free(live.popleft())
    assert (pool._bin_sizes, pool.used_bytes) == ([pool.capacity_bytes], 0)
    pool.close()


# Memory


@given(st.integers(1, 40 * MIB))
@settings(max_examples=20)
def test_any_size_starts_and_is_rounded_down_to_whole_pages(capacity_bytes):
    if capacity_bytes < ALIGNMENT_BYTES:
        with pytest.raises(ConfigError, match="too small"):
            make_pool(capacity_bytes)
        return
    pool = make_pool(capacity_bytes)
    assert pool.capacity_bytes == capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    assert pool.allocate(pool.capacity_bytes) == 0
    pool.close()


@pytest.mark.parametrize("prefault", [True, False])
@pytest.mark.parametrize("name", [None, NAME])
@pytest.mark.parametrize("size", ["an exbibyte", "three times what there is"])
def test_a_pool_larger_than_memory_is_refused_at_once_with_the_size_it_needs(name, prefault, size):
    """B334: also one whose pages would be taken one by one."""
    num_bytes = 1 << 60 if size == "an exbibyte" else available_memory()[0] * 3 // 4096 * 4096
    begin = time.monotonic()
    with pytest.raises(ConfigError, match=rf"needs {num_bytes} bytes of memory.*make it smaller"):
        Pool(num_bytes, name=name, prefault=prefault)
    assert time.monotonic() - begin < 1
    assert not is_mapped()


def test_a_size_that_no_address_holds_is_refused():
    with pytest.raises(ConfigError, match="make it smaller"):
        make_pool(1 << 80)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("cgroup", "files", "memory"),
    [
        ("0::/\n", {}, None),
        ("0::/\n", {"memory.max": "max"}, None),
        ("0::/\n", {"memory.max": "4096"}, (4096, 4096)),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "8192", "memory.max": "max"}, (8192, 8192)),
        ("0::/a/b\n", {"a/b/memory.max": "4096", "a/memory.max": "8192"}, (4096, 4096)),
        ("0::/elsewhere\n", {"memory.max": "4096"}, (4096, 4096)),
        ("5:cpu,cpuacct:/\n4:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "4096"}, (4096, 4096)),
        ("4:memory:/a\n", {"memory/memory.limit_in_bytes": "4096"}, (4096, 4096)),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("0::/a\n", {"a/memory.max": "9000", "a/memory.current": "5000\n"}, (4000, 9000)),
        (
            "0::/a\n",
            {"a/memory.max": "9000", "a/memory.current": "5000", "a/memory.stat": "anon 1\ninactive_file 3000\n"},
            (7000, 9000),
        ),
        (
            "0::/a/b\n",
            {
                "a/b/memory.max": "9000",
                "a/b/memory.current": "10",
                "a/memory.max": "90000",
                "a/memory.current": "89000",
            },
            (1000, 90000),
        ),
        (
            "4:memory:/a\n",
            {
                "memory/a/memory.limit_in_bytes": "9000",
                "memory/a/memory.usage_in_bytes": "9100",
                "memory/a/memory.stat": "inactive_file 7\ntotal_inactive_file 50",
            },
            (0, 9000),
        ),
    ],
)
def test_the_group_that_leaves_the_least_counts(tmp_path, cgroup, files, memory):
    """B334: both versions, the groups above too, as far as they can be seen; what is in use is not to be had."""
    write(tmp_path / "proc/self/cgroup", cgroup)
    for name, text in files.items():
        write(tmp_path / f"sys/fs/cgroup/{name}", text)
    assert cgroup_memory(tmp_path) == memory


def test_a_machine_without_control_groups_has_no_limit(tmp_path):
    """What cannot be read is no limit."""
    assert cgroup_memory(tmp_path) is None


def test_a_container_s_limit_counts_as_memory(tmp_path, monkeypatch):
    write(tmp_path / "proc/self/cgroup", "0::/a.service\n")
    write(tmp_path / "sys/fs/cgroup/a.service/memory.max", f"{8 * MIB}\n")
    monkeypatch.setattr("qkvault.memory._ROOT", tmp_path)
    with pytest.raises(ConfigError, match=f"{8 * MIB} are available in this control group"):
        Pool(9 * MIB)
    Pool(7 * MIB).close()
    write(tmp_path / "sys/fs/cgroup/a.service/memory.current", f"{2 * MIB}")
    with pytest.raises(ConfigError, match=f"{6 * MIB} are available in this control group"):
        Pool(7 * MIB)


@pytest.mark.parametrize("name", [None, NAME])
def test_prefault_takes_all_memory_at_the_start(name):
    num_bytes = pool_module.STEP_BYTES + MIB
    pool = Pool(num_bytes, name=name)
    before = faults()
    np.frombuffer(pool.memory, np.uint8)[:: mmap.PAGESIZE] = 1
    assert faults() - before < 200
    pool.close()


def faults() -> int:
    """Minor page faults of this process so far."""
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[7])


class OldKernel(mmap.mmap):
    """A mapping that does not know how to populate itself."""

    def madvise(self, *_):
        raise OSError(errno.EINVAL, "Invalid argument")


def test_an_older_kernel_prefaults_by_touching(monkeypatch):
    monkeypatch.setattr(pool_module.mmap, "mmap", OldKernel)
    pool = Pool(4 * MIB, name=NAME)
    attached = AttachedPool(os.dup(pool.descriptor), pool.capacity_bytes)
    assert not any(attached.memory)
    attached.close()
    pool.close()


class FullMachine(mmap.mmap):
    """A mapping that finds no page."""

    def madvise(self, advice, *_):
        if advice != mmap.MADV_HUGEPAGE:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_a_machine_that_runs_full_while_prefaulting_is_an_error_and_nothing_stays(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(pool_module.mmap, "mmap", FullMachine)
        with pytest.raises(ConfigError, match="Cannot allocate memory"):
            Pool(MIB, name=NAME)
    gc.collect()
    assert not is_mapped()


# Huge pages


@pytest.mark.parametrize(
    ("pool_bytes", "free", "mapped", "page_bytes"),
    [
        (8 * MIB, 4, 0, 2 * MIB),
        (8 * MIB, 3, 0, 0),  # not enough
        (8 * MIB, 6, 3, 0),  # some of them are others'
        (9 * MIB - 4096, 4, 0, 0),  # a page too few, and much would be lost
        (33 * MIB, 16, 0, 2 * MIB),  # little would be
        (MIB, 4, 0, 0),
    ],
)
def test_a_pool_is_made_of_huge_pages_if_enough_of_them_are_free(pool_bytes, free, mapped, page_bytes):
    """B483: as the kernel tells: what is reserved, free, and mapped by nobody."""
    memory = {"Hugepagesize": 2 * MIB, "HugePages_Free": free, "HugePages_Rsvd": mapped}
    assert huge_page_bytes(pool_bytes, memory) == page_bytes
    assert huge_page_bytes(pool_bytes, {}) == 0


def test_a_shared_pool_takes_huge_pages_that_are_reserved(reserve_huge_pages):
    """B483: whole ones, so that it is a little smaller; who attaches sees the same bytes; all are given back."""
    page_bytes = reserve_huge_pages(16)
    free = meminfo()["HugePages_Free"]
    pool = Pool(16 * page_bytes + 3 * MIB // 2, name=NAME, prefault=False)
    assert (pool.pages, pool.capacity_bytes) == ("reserved", 16 * page_bytes)
    assert meminfo()["HugePages_Free"] == free - 16
    with pytest.raises(PermissionError):
        os.ftruncate(pool.descriptor, page_bytes)
    attached = AttachedPool(os.dup(pool.descriptor), pool.capacity_bytes)
    offset = pool.allocate(8192)
    pool.view(offset, 8192)[:] = attached.view(pool.capacity_bytes - 4096, 4096).tobytes() + b"x" * 4096
    assert attached.view(offset, 8192).tobytes() == bytes(4096) + b"x" * 4096
    pool.free(offset)
    pool.check()
    pool.close()
    assert attached.view(offset + 4096, 1).tobytes() == bytes(1)
    attached.close()
    assert not is_mapped()
    assert meminfo()["HugePages_Free"] == free


@pytest.mark.parametrize("name", [None, NAME])
def test_a_pool_that_gets_no_huge_pages_is_made_of_others(monkeypatch, name):
    """B483: also when they are gone by the time that it asks for them."""
    monkeypatch.setattr(pool_module, "meminfo", lambda: {"Hugepagesize": 2 * MIB, "HugePages_Free": 1 << 30})
    num_bytes = 16 * MIB + 4096
    pool = Pool(num_bytes, name=name, prefault=False)
    assert pool.pages in ("small", "transparent")
    assert pool.capacity_bytes == num_bytes
    pool.close()
    assert not is_mapped()


@pytest.mark.parametrize(
    ("shared", "modes", "pages"),
    [
        (True, "always within_size advise [never] deny force", "small"),
        (True, "always within_size [advise] never deny force", "transparent"),
        (False, "always [madvise] never", "transparent"),
        (False, "", "small"),
    ],
)
def test_a_pool_tells_what_pages_the_kernel_gives(tmp_path, monkeypatch, shared, modes, pages):
    """B483: private and shared memory have a mode each."""
    file = "shmem_enabled" if shared else "enabled"
    write(tmp_path / "sys/kernel/mm/transparent_hugepage" / file, modes)
    monkeypatch.setattr(pool_module, "transparent_mode", partial(transparent_mode, root=tmp_path))
    pool = Pool(4096, name=NAME if shared else None, prefault=False)
    assert pool.pages == pages
    pool.close()


# Sharing


def test_another_process_sees_the_same_bytes():
    pool = Pool(MIB, name=NAME)
    pool.view(8192, 5)[:] = b"hello"
    script = """
import sys
from qkvault.pool import AttachedPool
pool = AttachedPool(int(sys.argv[1]), int(sys.argv[2]))
assert bytes(pool.view(8192, 5)) == b"hello"
pool.view(4096, 5)[:] = b"there"
pool.close()
"""
    arguments = [sys.executable, "-c", script, str(pool.descriptor), str(pool.capacity_bytes)]
    subprocess.run(arguments, pass_fds=[pool.descriptor], check=True, timeout=60)
    assert bytes(pool.view(4096, 5)) == b"there"
    pool.close()


def test_only_the_owner_may_open_a_shared_pool():
    pool = Pool(MIB, name=NAME)
    assert os.fstat(pool.descriptor).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(pool.descriptor)
    pool.close()


@pytest.mark.parametrize("size", [0, 3 * MIB])
def test_whoever_maps_the_pool_cannot_change_its_size(size):
    """B386: a page that goes kills whoever touches it."""
    pool = Pool(2 * MIB, name=NAME, prefault=False)
    descriptor = os.dup(pool.descriptor)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, size)
    os.close(descriptor)
    pool.view(2 * MIB - 1, 1)[:] = b"x"
    pool.close()


def test_a_private_pool_has_no_descriptor():
    pool = make_pool()
    with pytest.raises(ValueError, match="no descriptor"):
        _ = pool.descriptor
    pool.close()


def test_attaching_more_than_there_is_fails_and_closes_the_descriptor():
    pool = Pool(MIB, name=NAME)
    descriptor = os.dup(pool.descriptor)
    with pytest.raises(ConfigError, match=f"holds {MIB} bytes"):
        AttachedPool(descriptor, 2 * MIB)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    pool.close()


def test_close_leaves_no_memory_behind_and_may_be_repeated():
    pool = Pool(MIB, name=NAME)
    attached = AttachedPool(os.dup(pool.descriptor), MIB)
    assert is_mapped()
    for one in (pool, attached, pool, attached):
        one.close()
    assert not is_mapped()


def test_a_forked_child_that_closes_the_pool_leaves_it_its_bytes():
    """B521: it has but a copy: the store lives on."""
    pool = Pool(MIB, name=NAME)
    pool.view(4096, 2)[:] = b"ok"
    child = os.fork()
    if not child:
        pool.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert pool.view(4096, 2) == b"ok"
    pool.close()


@pytest.mark.parametrize("is_huge", [False, True])
def test_who_maps_a_pool_that_is_closed_keeps_none_of_its_memory(is_huge, request):
    """B521: an engine that has nothing to do; the next server finds the memory free."""
    if is_huge:
        request.getfixturevalue("reserve_huge_pages")(8)
    pool = Pool(8 * MIB, name=NAME)
    with closing(AttachedPool(os.dup(pool.descriptor), pool.capacity_bytes)) as attached:
        descriptor = os.dup(pool.descriptor)
        attached.view(MIB, 4096)[:] = b"x" * 4096
        assert os.fstat(descriptor).st_blocks > 0
        pool.close()
        pool.close()
        assert os.fstat(descriptor).st_blocks == 0
        assert not any(attached.view(MIB, 4096))
        os.close(descriptor)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", [None, NAME])
def test_a_view_that_is_still_held_outlives_the_pool(name, whole):
    """The array can be read after close(), and the memory goes with it. What was shared is empty by then."""
    pool = Pool(MIB, name=name, prefault=False)
    array = np.frombuffer(pool.memory if whole else pool.view(4096, 10), np.uint8)
    pool.view(4096, 2)[:] = b"ok"
    pool.close()
    at = 4096 if whole else 0
    assert bytes(array[at : at + 2]) == (b"ok" if name is None else bytes(2))
    del array, pool
    gc.collect()
    assert not is_mapped()
