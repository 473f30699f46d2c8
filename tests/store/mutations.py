"""Does the suite see what must never happen? Breaks a copy of the source in one way at a time and runs the tests on it.

Not part of the suite: ``python tests/store/mutations.py [name ...]``. A mutation that no test fails on is a gap. The
last column tells whether the random operations of ``test_model`` see it by themselves.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = "tests/store/test_model.py"
SUITE = ["tests/store", "tests/wire", "tests/policies", "tests/tiers", "tests/test_client.py", "tests/test_embedded.py"]
CORE, INDEX, MANAGER, ROOM = "store/core.py", "store/index.py", "store/manager.py", "store/room.py"
LEAVING = "store/leaving.py"
RESIDENTS, TIERING, SESSIONS = "store/residents.py", "store/tiering.py", "store/sessions.py"
TIER_JOBS = "store/tier_jobs.py"
CONNECTION, LISTEN, REMOTE, SOCKETS = "wire/connection.py", "wire/listen.py", "wire/remote.py", "wire/sockets.py"

TIMEOUT_SECONDS = 600  # the suite takes a third of it on two cores

# name: file, what stands there (once), what stands there instead
MUTATIONS = {
    "reserve makes READY": (
        MANAGER,
        "        lease.entries.append(entry)\n        return Outcome.RESERVED\n",
        "        lease.entries.append(entry)\n        self._publish([entry])\n        return Outcome.RESERVED\n",
    ),
    "lookup does not compare checks": (MANAGER, "alike = run[: packed.num_alike(checks)]", "alike = run"),
    "lookup skips the parent": (INDEX, "entry.parent is None or entry.parent is not parent", "entry.parent is None"),
    "a run trusts the last key": (INDEX, "if num_known and node is not root:", "if num_known and node is None:"),
    "a run that passes the root is one": (INDEX, "if num_known and node is not root:", "if len(run) < num_known:"),
    "a load skips the payload's check sum": ("tiers/disk.py", "            verify_payload(piece.image, header)\n", ""),
    "eviction ignores leases": (ROOM, "return entry.pins > 0", "return entry.state is not ChunkState.READY"),
    "abort publishes": (
        MANAGER,
        "        for entry in lease.entries:\n            self._abort_entry(entry)\n",
        "        for entry in lease.entries:\n            entry.pins -= 1\n            self._publish([entry])\n",
    ),
    "match skips the comparison of tokens": (
        CORE,
        "if wanted[start : start + _GRAIN_BYTES] != held[start : start + _GRAIN_BYTES]:",
        "if not held:",
    ),
    "the tokens of a partial match are not compared": (
        CORE,
        "Partial(num_tokens, tokens[: num_tokens * TOKEN_BYTES])",
        "Partial(num_tokens, None)",
    ),
    "the head is evicted first": (
        RESIDENTS,
        "next((c for c in children if self._is_here(c) and c.key not in self.entries), None)",
        "None",
    ),
    "a lease counts as ready while its chunks are loaded": (CORE, "        lease.is_ready &= not absent\n", ""),
    "a failed load is not voided": (
        CORE,
        "            self._cut(lease, at)  # its load failed: nothing after it can be used\n",
        "            pass\n",
    ),
    "a chunk that is gone stays in the index": (
        TIERING,
        'elif reason not in ("", UNAVAILABLE) and entry.tiers & book.bit:',
        "elif not reason:",
    ),
    "slots of a late writer are freed": (
        MANAGER,
        "slots.append((entry.offset, entry.kind))\n                self._abort_entry(entry, keep_slot=True)\n",
        "self._abort_entry(entry)\n",
    ),
    "a slot is given with its old header": (
        ROOM,
        "        wipe_header(self.pool.view(offset, entry.image_bytes))\n",
        "",
    ),
    "a slot is left with its header": (ROOM, "        wipe_header(self.pool.view(offset, PREFIX_BYTES))\n", ""),
    "a slot leaves quarantine with the header of a late writer": (
        CORE,
        "            self.room.free(offset, kind)\n",
        "            self.room.residents.bytes_of[kind] -= self.room.pool.free(offset)\n",
    ),
    "a slot that nobody wrote is published": (MANAGER, " or key_in(self.room.image(entry)) != entry.key", ""),
    "commit publishes what was not named": (MANAGER, "or not is_named or key_in", "or key_in"),
    "commit ignores a clear": (MANAGER, "            if entry.doom or not is_named", "            if not is_named"),
    "a scan brings back what was cleared": (LEAVING, "            self.forgotten.add_all(spaces)\n", ""),
    "a scan brings back what was forgotten": (CORE, "        self.forgotten.add(each)\n", ""),
    "a scan brings back what hangs on what was forgotten": (
        MANAGER,
        "            self._inherit(chunk.key, chunk.parent)\n            entry",
        "            entry",
    ),
    "what a scan found below what was forgotten stays": (
        CORE,
        "            self._forget_all([child for child in entry.children if child.state is ChunkState.ABSENT])\n",
        "            pass\n",
    ),
    "shorter tails are kept": (CORE, "self._doom(sibling, SUPERSEDED)", "pass"),
    "a shorter tail leaves a tier before the longer one is there": (
        LEAVING,
        "if reason == SUPERSEDED:",
        "if not reason:",
    ),
    "a shorter tail never leaves a tier": (
        MANAGER,
        "            self._supersede_all(done)  # when",
        "            # when",
    ),
    "what is superseded is not cleared": (
        LEAVING,
        "reason if entry.doom in _PERHAPS else entry.doom",
        "reason if not entry.doom else entry.doom",
    ),
    "what comes while the old is being removed is missed for good": (
        TIERING,
        "            book.deleting[entry.key] = True\n        else:\n",
        "            pass\n        else:\n",
    ),
    "what failed is never written again": (
        TIERING,
        "            self._miss(book, entry)\n            book.rest()\n",
        "            book.rest()\n",
    ),
    "a tier that fails has no rest": (
        TIERING,
        "            self._miss(book, entry)\n            book.rest()\n",
        "            self._miss(book, entry)\n",
    ),
    "what came while a tier was down is never written": (
        TIERING,
        "            for entry in lacking:\n                self._miss(book, entry)\n",
        "            for entry in lacking:\n",
    ),
    "a chunk is written where nobody would find it": (TIERING, "elif not book.holds_parent(entry):", "elif not book:"),
    "what hangs on a chunk that a tier got late is forgotten": (
        TIERING,
        "book.missed.add_first(child for child in entry.children if is_wanted(child, book.holds))",
        "pass",
    ),
    "a tier that is read-only is given what it missed": (
        "store/book.py",
        " and self.is_healthy and self.can_store and",
        " and self.is_healthy and",
    ),
    "what is present is not written to a tier that lacks it": (MANAGER, "            self.tiering.miss(known)\n", ""),
    "a tier that has lost all keeps its book": (
        TIERING,
        "book.num_losses, book.is_emptied = tier.num_losses, True",
        "book.num_losses = tier.num_losses",
    ),
    "what was stored before a loss counts after it": (
        TIERING,
        "is_done = not reason and not pending.is_void",
        "is_done = not reason",
    ),
    "what has left RAM is missed": (TIERING, "        room.on_taken(self._left_ram)\n", ""),
    "a directory that was made anew is the old one": (
        "tiers/disk_files.py",
        "return not os.path.samestat(os.fstat(before), os.fstat(folder))",
        "return False",
    ),
    "a full disk stops the start": (
        "tiers/disk_files.py",
        "        if error.errno not in CANNOT_WRITE:\n            raise\n        probe_read",
        "        if error.errno:\n            raise\n        probe_read",
    ),
    "a tier has no cap": (
        TIER_JOBS,
        "excess_bytes(kind, num_bytes) <= 0:\n",
        "excess_bytes(kind, num_bytes) is not None:\n",
    ),
    "KV gives nothing back": (RESIDENTS, "min(borrowed_bytes, wanted_bytes - choice.freed_bytes)", "0"),
    "KV gives back what it has not borrowed": (
        RESIDENTS,
        "min(borrowed_bytes, wanted_bytes - choice.freed_bytes)",
        "wanted_bytes - choice.freed_bytes",
    ),
    "KV gives back before queries make room": (
        RESIDENTS,
        "            if choice.take(kind, self.policies[kind], own_bytes) < own_bytes:\n                return []\n",
        "",
    ),
    "queries do not replace queries where KV is held": (
        RESIDENTS,
        "        choice.take(kind, self.policies[kind], wanted_bytes - choice.freed_bytes)\n",
        "        if kind is _KV:\n            choice.take(kind, self.policies[kind], wanted_bytes)\n",
    ),
    "queries leave for KV": (
        RESIDENTS,
        "        return list(choice.entries.values()) if",
        (
            "        choice.take(_QUERY, self.policies[_QUERY], wanted_bytes - choice.freed_bytes)\n"
            "        return list(choice.entries.values()) if"
        ),
    ),
    "chunks leave in vain": (RESIDENTS, " if choice.freed_bytes >= excess_bytes else []", ""),
    "KV that hangs on a query leaves with it": (RESIDENTS, " or entry.kind is not kind", ""),
    "queries have no share": (
        RESIDENTS,
        "            over_bytes = max(over_bytes, self.bytes_of[kind] - self.query_bytes)\n",
        "            pass\n",
    ),
    "a share is full only when it is passed": (
        RESIDENTS,
        "self.bytes_of[kind] - self.query_bytes)",
        "self.bytes_of[kind] - self.query_bytes - num_bytes)",
    ),
    "a slot that is held is moved": (ROOM, "or entry.offset != offset or entry.pins:", "or entry.offset != offset:"),
    "a slot is moved by a header that is not its own": (
        ROOM,
        "or entry.offset != offset or entry.pins",
        "or entry.pins",
    ),
    "a slot that has moved leaves its header": (ROOM, "            wipe_header(old)", "            pass"),
    "more leave before slots are moved": (ROOM, "self.pool.gather(num_bytes, is_movable, move)", "None"),
    "a late writer's slots count as KV": (
        MANAGER,
        "slots.append((entry.offset, entry.kind))",
        "slots.append((entry.offset, type(entry.kind).KV))",
    ),
    "all that a client reserves is KV": (MANAGER, "chunk.image_bytes, kind)\n", "chunk.image_bytes, CacheKind.KV)\n"),
    "all that a scan finds is KV": (TIERING, "kind_in(chunk.space))", "CacheKind.KV)"),
    "a scan takes a copy of another kind": (
        TIERING,
        "known.shape == shape",
        "known.shape[:2] == shape[:2]",
    ),
    "what tiers have lost is stored as another kind": (
        CORE,
        "entry.shape == shape and self",
        "entry.shape[:2] == shape[:2] and self",
    ),
    "forget leaves what hangs on a chunk": (CORE, "                walk += entry.children\n", "                pass\n"),
    "forget leaves the tail": (
        CORE,
        "for child in children if is_one_chain",
        "for child in () if is_one_chain",
    ),
    "forget takes more than the tail": (
        CORE,
        "if is_one_chain(child.sketch, sketch)]",
        "if child.sketch and sketch]",
    ),
    "forget stops at a hole": (
        CORE,
        "for key in reversed(each) if (entry",
        "for key in reversed(each) if self.index.get(each[0]) and (entry",
    ),
    "forget leaves tiers alone": (LEAVING, "        self.tiering.delete(entry, reason)\n", ""),
    "what is read is not forgotten": (
        CORE,
        'going = [entry for entry in found if entry.is_somewhere and entry.doom in ("", SUPERSEDED)]',
        "going = [entry for entry in found if entry.is_somewhere and not entry.pins]",
    ),
    "what is cleared comes back when it is superseded": (
        LEAVING,
        "reason if entry.doom in _PERHAPS else entry.doom",
        "reason",
    ),
    "what a chain is extended by leaves in the turn of its head": (
        MANAGER,
        "        self._extend_all(published)\n",
        "",
    ),
    "what is cleared is found until its turn": (
        LEAVING,
        '                entry.doom = "cleared"\n',
        "                pass\n",
    ),
    "what is evicted before its turn stays doomed": (
        LEAVING,
        "if entry.doom and not entry.pins and not entry.is_somewhere:",
        "if not entry:",
    ),
    "a disk that hangs holds up every lookup": (
        "store/scan.py",
        "if not wanted or is_late or",
        "if not wanted or",
    ),
    "what is doomed is found": (
        CORE,
        "if entry.doom or entry.state is ChunkState.WRITING:",
        "if entry.state is ChunkState.WRITING:",
    ),
    "a lookup does not look for what is doomed": (CORE, "if self.num_doomed == 0 else list(range(len(run)))", ""),
    "forget counts what has gone already": (
        CORE,
        'going = [entry for entry in found if entry.is_somewhere and entry.doom in ("", SUPERSEDED)]',
        "going = [entry for entry in found if entry.is_somewhere]",
    ),
    "match asks every medium": (
        "client.py",
        "m.Match(located.lease_id, parent, tokens, media)",
        "m.Match(located.lease_id, parent, tokens)",
    ),
    "match extends a lease that lost its end": (
        MANAGER,
        "            if not lease.ends_with(parent):\n",
        "            if False:\n",
    ),
    "a chunk loses its parent to its own store": (
        CORE,
        "held = [entry] if entry.parent is None else [entry, entry.parent]",
        "held = [entry]",
    ),
    "an entry is not pinned while it gets its slot": (
        CORE,
        "held = [entry] if entry.parent is None else [entry, entry.parent]",
        "held = []",
    ),
    "frozen stores": (MANAGER, "        if self.is_frozen:\n            return Outcome.FROZEN\n", ""),
    "the hot cache cannot be switched off": (LEAVING, "elif not self.hot_cache:", "elif not self.room:"),
    "a session that ends keeps its reads": (
        MANAGER,
        "            else:\n                self.release(session_id, lease.lease_id)\n        for owner",
        "        for owner",
    ),
    "a session that ends keeps its quarantine": (
        MANAGER,
        "[key for key in self.quarantine if key[0] == session_id]",
        "[]",
    ),
    "a download is not under a lease": (CORE, "        self._pin_all(lease, here, None)\n", ""),
    "a download whose lease ran out is whole": (
        "store/driver.py",
        "return m.Done() if is_live else",
        "return m.Done() if lease_id >= 0 else",
    ),
    "data is accepted without a write lease": (
        CORE,
        "        if lease is None or not lease.is_write:\n            return None\n        named",
        "        if lease is None:\n            return None\n        named",
    ),
    "data of another size is accepted": (
        CONNECTION,
        "if slots and sum(map(len, slots)) != head.data_bytes:",
        "if head is None:",
    ),
    "a hello is not required": (
        CONNECTION,
        '            return m.Failed("unauthorized", "the first message has to be Hello")\n',
        "            self.session_id, self._is_ending = 1, False\n            return m.Done()\n",
    ),
    "a token is not compared": (
        CONNECTION,
        "if token and not hmac.compare_digest(request.token.encode(), token.encode()):",
        "if False:",
    ),
    "a client that dies keeps its session": (
        CONNECTION,
        "            self._door.handler.close_session(self.session_id)\n",
        "            pass\n",
    ),
    "a late answer is the next one's": (
        SOCKETS,
        "        self._is_usable = False  # unless all",
        "        # unless all",
    ),
    "each byte has a deadline of its own": (
        SOCKETS,
        "left_seconds = min(self._deadline - time.monotonic(), self._silence_seconds)",
        "left_seconds = self._timeout_seconds",
    ),
    "silence may last as long as a load": (SOCKETS, "deadline, self._timeout_seconds", "deadline, 600.0"),
    "the answer to data is waited for no longer than another": (
        SOCKETS,
        "                self._stream.bear_silence()\n",
        "                pass\n",
    ),
    "another life of the store is not noticed": (SOCKETS, "if self.epoch not in (None, head.epoch):", "if False:"),
    "waiting for one's turn does not count": (
        SOCKETS,
        "        self._allow(seconds, deadline)\n",
        "        self._allow(seconds)\n",
    ),
    "what nobody takes is waited for for a minute": (
        SOCKETS,
        "        if not poll.poll(math.ceil(self._left_seconds() * 1000)):\n",
        "        if not poll.poll(60_000):\n",
    ),
    "a fetch has no deadline of its caller's": (
        REMOTE,
        "        if timeout_seconds is None:\n",
        "        if refs:\n",
    ),
    "a slot from afar keeps its old header": (
        REMOTE,
        "wipe_header(self.pool.take(offset, chunk.image_bytes))",
        "self.pool.take(offset, chunk.image_bytes)",
    ),
    "a download may begin before another has ended": (
        CONNECTION,
        "return self._is_uploading or self.returns_seconds",
        "return self.returns_seconds",
    ),
    "replies that nobody reads fill memory": (
        CONNECTION,
        " or self._owned_bytes > _MAX_OUT_BYTES",
        "",
    ),
    "requests behind a full outbox are forgotten": (CONNECTION, "(was_full and self._take(_NOTHING))", "False"),
    "one client's download keeps the others waiting": (
        CONNECTION,
        "outbox, left_bytes = self._outbox, _TURN_BYTES",
        "outbox, left_bytes = self._outbox, 1 << 60",
    ),
    "strangers may be as many as they like": (
        "wire/server.py",
        "if now <= deadline and len",
        "if now <= deadline or len",
    ),
    "a reply that is too long ends the connection": (
        CONNECTION,
        "        except ProtocolError as error:  # too long: not the fault of who asked\n",
        "        except ZeroDivisionError as error:\n",
    ),
    "a commit from afar sends all": (
        REMOTE,
        "named = slots.keys() if request.keys is None else set(request.keys)",
        "named = slots.keys()",
    ),
    "a fetch shows what was evicted": (
        REMOTE,
        "                else:\n                    wipe_header(view)\n",
        "",
    ),
    "memory of what is being written is given back": (
        REMOTE,
        "if granule not in held]",
        "if granule >= 0]",
    ),
    "a fetch goes over what is being written": (
        REMOTE,
        "        if any(offset < end and ref.offset",
        "        if any(offset > end and ref.offset",
    ),
    "what may not be promised hides what may": (
        INDEX,
        "grains < best[1]) or not is_wanted(child):",
        "grains < best[1]) or not child.is_usable:",
    ),
    "a fetch shows what is not whole": (
        REMOTE,
        "        if not isinstance(end, m.Done):\n",
        "        if False:\n",
    ),
    "whoever has pinged is judged by the grace": (
        SESSIONS,
        "self.reap_timeout_seconds if session.has_pinged else self.registration_grace_seconds",
        "self.registration_grace_seconds",
    ),
    "whoever never pinged is judged at once": (
        SESSIONS,
        "self.reap_timeout_seconds if session.has_pinged else self.registration_grace_seconds",
        "self.reap_timeout_seconds",
    ),
    "half a frame is waited for for ever": (
        CONNECTION,
        "        return bool(self._outbox or self._inbox or self._filling or self._skip_bytes)\n",
        "        return bool(self._outbox)\n",
    ),
    "who never reads is waited for for ever": (
        CONNECTION,
        "        return bool(self._outbox or self._inbox or self._filling or self._skip_bytes)\n",
        "        return bool(self._inbox or self._filling or self._skip_bytes)\n",
    ),
    "a byte earns all of our patience": (
        CONNECTION,
        "        earned_seconds = num_bytes / _SLOWEST_BYTES_PER_SECOND\n",
        "        earned_seconds = 10.0\n",
    ),
    "what a client moves earns it nothing": (
        CONNECTION,
        "        earned_seconds = num_bytes / _SLOWEST_BYTES_PER_SECOND\n",
        "        earned_seconds = 0.0\n",
    ),
    "many requests are one turn": (
        CONNECTION,
        "                self.returns_seconds = 0.0\n",
        "                pass\n",
    ),
    "anybody may connect": (LISTEN, "            Path(path).chmod(0o600)", "            Path(path).chmod(0o666)"),
    "strangers are served": (LISTEN, "elif _peer_uid(accepted) not in (os.getuid(), 0):", "elif False:"),
}


def copy_tree(folder: Path) -> None:
    for name in ("src", "tests", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "test_mutations.py"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    with (folder / "tests" / "conftest.py").open("a") as conftest:  # the first failure is enough: no time to shrink it
        conftest.write(
            "\nfrom hypothesis import Phase\n"
            'settings.register_profile("default", settings.get_profile("default"), phases=[Phase.generate])\n'
            'settings.load_profile("default")\n'
        )


def first_failure(folder: Path, *tests: str) -> str:
    """The first test that fails, or nothing."""
    command = [sys.executable, "-m", "pytest", "-v", "-x", "-p", "no:randomly", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, "-o", "faulthandler_timeout=0", *tests],
            cwd=folder, env=os.environ | {"PYTHONPATH": str(folder / "src")},
            capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        begun = re.findall(rb"^tests/(\S+::\S+)", error.stdout or b"", re.MULTILINE)
        return f"{begun[-1].decode()} does not end" if begun else "does not begin"
    if done.returncode == 0:
        return ""
    found = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", done.stdout, re.MULTILINE)
    return found[1] if found else f"it does not run: {done.stdout[-300:]} {done.stderr[-300:]}"


def main() -> None:
    sys.stdout.write("| mutation | first test that fails | random operations |\n|---|---|---|\n")
    for name in sys.argv[1:] or MUTATIONS:
        path, before, after = MUTATIONS[name]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            copy_tree(folder)
            source = folder / "src" / "qkvault" / path
            text = source.read_text()
            assert text.count(before) == 1, f"{name}: {path} has changed"
            source.write_text(text.replace(before, after))
            nearest = sorted(SUITE, key=lambda tests: Path(tests).name != Path(path).parent.name)
            failure = first_failure(folder, *nearest, "--deselect", f"{MODEL}::TestStore::runTest")
            is_seen = bool(first_failure(folder, MODEL))
        sys.stdout.write(f"| {name} | {failure or '**none**'} | {'seen' if is_seen else 'not seen'} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
