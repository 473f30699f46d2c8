"""The copy bench once more, with the store in another process and by turns in this one, and what a round trip takes.

No bytes of chunks pass the socket: this process maps the pool and copies by itself. The peer is a server, too, with a
client in another process.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench import children
from bench.children import Child
from bench.geometry import Geometry, Pages, geometries
from bench.micro.copies import PROMPTS, copy_rows
from bench.micro.lookups import THIN, WAYS, Lookups, lookup_rows
from bench.micro.server import ECHO_BYTES
from bench.peers import LMCACHE_SERVER, lmcache_servers, with_peers_or_without
from bench.report import Screen
from bench.rig import Rig, own_store, pool_bytes, require_memory
from bench.samples import Case, Measure, Role, Row, Sample, Series, Target, Unit, measure
from bench.settings import Settings
from qkvault.client import StoreClient
from qkvault.config import Config
from qkvault.wire.sockets import SocketTransport

ECHO = "the same bytes, echoed by a thread of that process"
MAX_ROUND_TRIP_SECONDS = 50e-6
TIMEOUT_SECONDS = 10.0
START_SECONDS = 120.0


@contextlib.contextmanager
def other_process(ram_bytes: int) -> Iterator[tuple[StoreClient, socket.socket]]:
    """A session with a store in another process, and a connection to its echo."""
    with tempfile.TemporaryDirectory(prefix="qkvault-bench-") as folder:
        address, echo_path = f"unix://{folder}/store", f"{folder}/echo"
        command = [sys.executable, "-m", "bench.micro.server", address, echo_path, str(ram_bytes)]
        child = Child("the store's process", command)
        try:
            child.receive(START_SECONDS)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as echo:
                echo.connect(str(Path(echo_path)))
                client = StoreClient(SocketTransport(address, "bench", timeout_seconds=TIMEOUT_SECONDS))
                yield client, echo
                client.close()
        finally:
            child.close()


def run(settings: Settings, screen: Screen) -> list[Row]:
    """All rows."""
    rows: list[Row] = []
    for geometry in geometries(settings):
        one = functools.partial(_copies, screen=screen, geometry=geometry)
        rows += with_peers_or_without(settings, screen, f"socket, {geometry.name}", one)
    count = settings.sizes.prompt_tokens
    with lmcache_servers(settings, screen, THIN, count, names=(LMCACHE_SERVER,)) as peers:
        return [*rows, *_lookups(settings, screen, peers), _round_trips(settings, screen, peers)]


def _copies(settings: Settings, screen: Screen, geometry: Geometry) -> list[Row]:
    num_tokens = geometry.num_tokens(settings.sizes.copy_bytes)
    ram_bytes = pool_bytes(geometry, num_tokens, prompts=PROMPTS)
    needed = 2 * (2 * num_tokens * geometry.token_bytes + ram_bytes) + 2 * settings.sizes.copy_bytes
    require_memory(needed)
    with contextlib.ExitStack() as stack:
        peers = stack.enter_context(
            lmcache_servers(settings, screen, geometry, num_tokens, is_random=True, beside=needed)
        )
        client, _ = stack.enter_context(other_process(ram_bytes))
        store = stack.enter_context(own_store(ram_bytes))
        clients = (client, store.connect("bench"))
        rig, in_process = (
            Rig(store.config, each, Pages(geometry, num_tokens, is_random=True, seed=settings.seed), settings.seed)
            for each in clients
        )
        rows = copy_rows(settings, screen, rig, is_random=True, peers=peers, in_process=in_process)
        in_process.engine.close()
    return rows


def _lookups(settings: Settings, screen: Screen, peers: dict[str, Child]) -> list[Row]:
    count, rounds = settings.sizes.prompt_tokens, settings.sizes.short_rounds
    ram_bytes = pool_bytes(THIN, count, prompts=1.3)
    kept, *_, ids, none = names = [f"lookup, {count // 1024}k tokens, {how}" for how in WAYS]
    with other_process(ram_bytes) as (client, _):
        pages = Pages(THIN, count, is_random=False, seed=settings.seed)
        rig = Rig(Config(ram_bytes=ram_bytes, instance_id="bench"), client, pages, settings.seed)
        work = Lookups(rig, settings.seed)
        group = work.own_cases(names)
        for name, peer in peers.items():
            children.ask(peer, do="renew")
            children.ask(peer, do="store")
            group += [
                Case(ids, name, Role.PEER, functools.partial(children.timed, peer, do="lookup")),
                Case(none, name, Role.PEER, functools.partial(children.timed, peer, do="lookup_unknown")),
            ]
        with screen.task("socket, lookup", rounds + 3) as advance:
            found = measure([group], rounds=rounds, warmup=3, advance=advance)
    return lookup_rows(found, kept, ids)


def _round_trips(settings: Settings, screen: Screen, peers: dict[str, Child]) -> Row:
    """One small question, by turns with a bare echo and the peer's: a block of each, then a block of each again."""
    message, count = bytes(ECHO_BYTES), settings.sizes.pings
    ours, bare = Series(name="QKVault", role=Role.OURS), Series(name=ECHO, role=Role.LIMIT)
    ways: list[tuple[Series, Callable[[], list[float]]]]
    with other_process(64 << 20) as (client, echo), screen.task("round trips", settings.sizes.ping_blocks) as advance:

        def ping() -> None:
            echo.sendall(message)
            echo.recv(ECHO_BYTES)

        ways = [(ours, lambda: _repeated(lambda: client.poll(0), count)), (bare, lambda: _repeated(ping, count))]
        for name, peer in peers.items():
            ways.append((Series(name=name, role=Role.PEER), functools.partial(_peer_pings, peer, count)))
        for number in range(-1, settings.sizes.ping_blocks):
            for series, block in ways:
                for seconds in block():
                    if number >= 0:
                        series.add(Sample(seconds, 0.0))
            advance()
    found = [series for series, _ in ways]
    for series in found:
        series.facts["p50_us"] = round(_percentile(series.seconds, 0.5) * 1e6, 1)
        series.facts["p99_us"] = round(_percentile(series.seconds, 0.99) * 1e6, 1)
    targets = (Target(Measure.SECONDS, MAX_ROUND_TRIP_SECONDS),)
    return Row(name="round trip", unit=Unit.CALLS, amount=1, series=found, targets=targets)


def _repeated(call: Callable[[], object], count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def _peer_pings(peer: Child, count: int) -> list[float]:
    seconds = children.ask(peer, do="pings", count=count)["seconds"]
    return [float(one) for one in seconds] if isinstance(seconds, list) else []


def _percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]
