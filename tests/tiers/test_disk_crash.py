"""A writer that is killed at any moment leaves whole chunks, or none.

By hand, with more rounds than the suite has time for: ``python tests/tiers/test_disk_crash.py 200``.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from qkvault.testing.tier_contract import Slots, TierDesk
from qkvault.tiers.disk import DiskTier
from qkvault.tiers.disk_check import check_directory

SIZES = [100, 5000, 70_000, 300_000, 1_000_000] * 3
MAX_SECONDS = 0.05  # a writer's round takes about 10 ms

# Forks a writer for each line it reads, so that rounds do not pay for the start of an interpreter.
WRITERS = f"""
import os, sys
from qkvault.testing.tier_contract import Slots, TierDesk
from qkvault.tiers.disk import DiskTier

slots = Slots()
pieces = [slots.image(n, payload_bytes) for n, payload_bytes in enumerate({SIZES})]
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        desk = TierDesk(DiskTier(sys.argv[1], 1 << 30))
        desk.store(*pieces[:5])  # so that something is there however slow the machine is
        print(os.getpid(), flush=True)
        while True:
            desk.store(*pieces, delete_first=[piece.key for piece in pieces[::4]])
    os.waitpid(pid, 0)
    print("dead", flush=True)
"""


def kill_and_reopen(rounds: int, root: Path, seed: int) -> int:
    """Kill a writer ``rounds`` times; returns how many chunks were found, all of them whole."""
    rng = random.Random(seed)
    num_found = 0
    command = [sys.executable, "-c", WRITERS, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as writers:
        for _ in range(rounds):
            writers.stdin.write("go\n")
            pid = int(writers.stdout.readline())
            time.sleep(rng.random() * MAX_SECONDS)
            os.kill(pid, signal.SIGKILL)
            assert writers.stdout.readline() == "dead\n"
            assert check_directory(root).corrupt == 0
            num_found += reopen(root)
        writers.stdin.close()
    return num_found


def reopen(root: Path) -> int:
    """Each chunk that is found is loaded, and has the bytes that were stored; nothing else is left in the directory."""
    slots = Slots()
    with closing(DiskTier(root, 1 << 30)) as tier:
        desk = TierDesk(tier)
        images = {piece.key: piece.image for piece in (slots.image(n, size) for n, size in enumerate(SIZES))}
        found = desk.scan()
        for chunk in found:
            target = slots.blank(chunk.key, chunk.image_bytes)
            assert desk.load(target).done
            assert target.image[4096:] == images[chunk.key][4096:]
        report = check_directory(root)
        assert (report.is_clean, report.whole, report.temporary, report.foreign) == (True, len(found), 0, 0)
    assert check_directory(root).is_clean
    slots.pool.close()
    return len(found)


def test_a_killed_writer_leaves_whole_chunks_or_none(tmp_path):
    """B491: and after the restart that follows a check finds the directory clean."""
    assert kill_and_reopen(20, tmp_path / "tier", seed=1) > 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        num_rounds = int(sys.argv[1])
        num_whole = kill_and_reopen(num_rounds, Path(folder) / "tier", seed=2)
        sys.stdout.write(f"{num_rounds} rounds, {num_whole} whole chunks\n")
