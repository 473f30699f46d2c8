"""The only loop of the store: carries jobs to tiers and results back, expires leases, and answers clients.

Everything that touches the manager holds one lock for microseconds; bytes move outside it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

from qkvault.errors import InvariantError, UnknownMedium
from qkvault.events import StoreEvent
from qkvault.logs import RateLimited, get_logger
from qkvault.pool import Pool
from qkvault.store.feed import PAGE
from qkvault.store.manager import StorageManager
from qkvault.store.scan import Scan
from qkvault.store.sessions import Session, Sessions
from qkvault.store.status import status_of
from qkvault.tiers.base import JobResult, Tier
from qkvault.types import Outcome
from qkvault.wire import messages as m
from qkvault.wire.transport import Early, Handler

_TICK_SECONDS: Final = 0.25  # how often leases are expired and the health of tiers is looked at
_SLICE_SECONDS: Final = 0.0005  # left to others between two slices of a clear
_MAX_CHECKED: Final = 20_000  # chunks: more hold up other clients for more than a tenth of a second
_SAMPLE_SECONDS: Final = 1.0  # that a start waits for what spaces the tiers hold
_CONFINABLE: Final = (m.Lookup, m.Match, m.Inspect, m.Several)  # may say which media they mean
_log = get_logger("store")
_limited = RateLimited(_log)


class Traits(NamedTuple):
    """What a store tells of itself, and how patient it is with registered instances that fall silent."""

    features: tuple[str, ...] = ()
    chunk_size: int = 0
    hash_algorithm: str = ""
    version: str = ""
    reap_timeout_seconds: float = 120.0
    registration_grace_seconds: float = 3600.0


_PLAIN: Final = Traits()


class StoreDriver(Handler):
    """A running store: a manager, its tiers, one thread for their results, one while they are scanned."""

    def __init__(
        self,
        manager: StorageManager,
        tiers: Sequence[Tier] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        traits: Traits = _PLAIN,
    ) -> None:
        """Start. ``tiers`` are those of the manager's books, in that order; the driver closes them.

        Blocks until it is known what spaces the tiers hold: some milliseconds, a second at most.
        """
        self.manager = manager
        self.tiers = list(tiers)
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._wake = threading.Event()
        self._is_closing = False
        self._traits = traits
        self._sessions = Sessions(
            reap_timeout_seconds=traits.reap_timeout_seconds,
            registration_grace_seconds=traits.registration_grace_seconds,
        )
        for tier in self.tiers:
            tier.notify(self._wake.set)
        self._thread = threading.Thread(target=self._run, name="qkvault-store", daemon=True)
        self._scan = Scan(manager, self.tiers, self._changed, self._after_change, on_spaces=self._sessions.found)
        self._thread.start()
        self._scan.wait_sampled(_SAMPLE_SECONDS)

    @property
    def pool(self) -> Pool:
        return self.manager.room.pool

    @property
    def threads(self) -> list[threading.Thread]:
        """Those that have to be alive."""
        return [self._thread] if self._scan.is_over else [self._thread, self._scan.thread]

    def open_session(self, client: str) -> int:
        with self._lock:
            return self._sessions.open(client, self._clock())

    def close_session(self, session_id: int) -> None:
        with self._lock:
            if self._sessions.close(session_id) and not self._is_closing:
                self.manager.end_session(session_id)
                self._after_change()

    def prepare(self, request: m.AnyRequest) -> Early | None:
        """While tiers are scanned: what they tell of the keys that ``request`` asks for. Does not block."""
        if self._scan.is_over:
            return None
        asked = [each.keys for each in _parts_of(request) if isinstance(each, m.Lookup | m.Inspect | m.Forget)]
        return self._scan.find_early(b"".join(asked))

    def call(self, session_id: int, request: m.AnyRequest) -> m.AnyReply:
        """Answer one request with what is known. Never raises: what goes wrong is a ``Failed``."""
        with self._lock:
            session = self._sessions.hear(session_id, self._clock())
            if self._is_closing or session is None:
                return m.Failed("closed", "the session has ended")
            try:
                if isinstance(request, _CONFINABLE) and (media := _media_of(request)):
                    self.manager.tiering.require_media(media)
                reply = self._answer(session_id, session, request)
            except InvariantError as error:
                reply = m.Failed("invariant", str(error))
            except UnknownMedium as error:
                reply = m.Failed("argument", str(error))
            except ValueError as error:
                reply = m.Failed("protocol", str(error))
            except Exception as error:  # thread top: one client's request must not take the store down
                _log.exception("request_failed", request=type(request).__name__)
                reply = m.Failed("internal", f"{type(error).__name__}: {error}")
            self._after_change()
        if isinstance(reply, m.Reserved) and Outcome.NO_ROOM in reply.outcomes:
            num_chunks = reply.outcomes.count(Outcome.NO_ROOM)
            _limited.warning("no_room", chunks=num_chunks, why="nothing that is idle can leave")
        return reply

    def slots_of(self, session_id: int, lease_id: int, keys: Sequence[bytes] | None) -> list[memoryview] | None:
        with self._lock:
            self._sessions.hear(session_id, self._clock())
            return self.manager.slots_of(session_id, lease_id, keys)

    def open_download(self, session_id: int, keys: bytes) -> tuple[int, list[memoryview]]:
        with self._lock:
            self._sessions.hear(session_id, self._clock())
            return self.manager.open_download(session_id, keys, self._clock())

    def close_download(self, session_id: int, lease_id: int) -> m.AnyReply:
        with self._lock:
            is_live = not lease_id or self.manager.leases.get(lease_id, session_id) is not None
            self.manager.release(session_id, lease_id)
            self._after_change()
        return m.Done() if is_live else m.Failed("expired", "the lease ran out before all was sent")

    def wait_change(self, timeout_seconds: float) -> None:
        """Sleep until a tier job ends, or ``timeout_seconds``. One that ended just before the call is not seen."""
        with self._changed:
            if not self._is_closing:
                self._changed.wait(timeout_seconds)

    def take_events(self, limit: int = PAGE, *, start_over: bool = False) -> list[StoreEvent]:
        """As ``Feed.take``, from any thread. There is one feed: what one caller takes no other sees."""
        with self._lock:
            return self.manager.take_events(limit, start_over=start_over)

    def drain(self, timeout_seconds: float) -> bool:
        """Block until the store is idle: everything committed is in its tiers. False if the time was up first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._has_no_jobs() and self._scan.is_over, timeout_seconds)

    def check(self) -> None:
        """Raise InvariantError unless all that must always hold does."""
        with self._lock:
            self.manager.check()

    def close(self, *, drain_seconds: float = 10.0, purge: bool = False) -> int:
        """Finish what was begun (at most ``drain_seconds``), stop the threads, close tiers and pool. Idempotent.

        ``purge`` empties the tiers. A scan that is under way is given up, and left behind if it hangs for seconds.
        Returns, and logs, how many chunks of RAM a tier should have and was not given in that time, or could not take,
        and how many it should not have any more and still has; 0 with ``purge``.
        """
        with self._changed:
            is_over = self._is_closing or self._changed.wait_for(self._has_no_jobs, drain_seconds)
            if self._is_closing:
                return 0
            self._is_closing = self._scan.is_given_up = True
            self._changed.notify_all()
        self._wake.set()
        self._scan.close()
        self._thread.join()
        for tier in self.tiers:
            try:
                if purge:
                    tier.drain(drain_seconds)
                    tier.purge()
                tier.close()
            except Exception:  # thread top: whatever a tier does, the others and the memory are given back
                _log.exception("tier_close_failed", tier=tier.name)
        with self._lock:
            self._take_results()
            num_lost = 0 if purge else len(self.manager.tiering.unwritten(is_over=is_over))
            books = () if purge else self.manager.tiering.books
            unremoved = [self.manager.tiering.unremoved(book) for book in books]
        num_left = sum(map(_num_held, self.tiers, unremoved))
        names = ",".join(tier.name for tier in self.tiers)
        if num_lost:
            _log.warning("chunks_not_written", chunks=num_lost, tiers=names)
        if num_left:
            _log.warning("chunks_not_removed", chunks=num_left, tiers=names, hint="a restart finds them: clear again")
        self.pool.close()
        return num_lost + num_left

    def _has_no_jobs(self) -> bool:
        tiering = self.manager.tiering
        is_behind = tiering.is_behind and not self.manager.is_frozen
        return tiering.num_pending == 0 and not self.manager.due and not is_behind

    def _after_change(self) -> None:
        # Holding the lock. Tiers take jobs without blocking.
        if self.manager.due:
            self._wake.set()
        for number, job in self.manager.take_jobs():
            try:
                self.tiers[number].submit(job)
            except Exception:  # thread top: a job that nobody took has failed, lest its slots stay pinned
                _log.exception("job_refused", tier=self.tiers[number].name)
                self.manager.on_job_done(JobResult(job.job_id, (), ()))

    def _run(self) -> None:
        while not self._is_closing:
            if self.manager.due:
                time.sleep(_SLICE_SECONDS)
            else:
                self._wake.wait(_TICK_SECONDS)
            self._wake.clear()
            try:
                self._step()
            except Exception:  # thread top: a fault here must not stop the loop that ends leases
                _log.exception("store_step_failed")

    def _step(self) -> None:
        with self._changed:
            self.manager.expire(self._clock())
            for instance in self._sessions.reap(self._clock()):
                _log.warning("instance_silent", instance=instance.instance_id, role=instance.role, pid=instance.pid)
            self._take_results()
            self.manager.work_off()
            if self.manager.catch_up(self._clock()):
                self._wake.set()  # others may have the lock in between
            self._after_change()
            self._changed.notify_all()

    def _take_results(self) -> None:
        for book, tier in zip(self.manager.tiering.books, self.tiers, strict=True):
            try:
                self.manager.tiering.hear(book, tier)
                for result in tier.poll():
                    self.manager.on_job_done(result)
            except Exception:  # thread top: one tier's fault is not the others'
                book.is_healthy = False
                _log.exception("tier_poll_failed", tier=tier.name)

    def _answer(self, session_id: int, session: Session, request: m.AnyRequest) -> m.AnyReply:
        manager, now = self.manager, self._clock()
        match request:
            case m.Lookup(root=root, keys=keys, checks=checks, tail=tail):
                return manager.lookup(session_id, root, keys, checks, now, tail=tail, search_range=request.search_range)
            case m.Match(lease_id=lease_id, parent=parent, tokens=tokens):
                return manager.match(session_id, lease_id, parent, tokens, now, search_range=request.search_range)
            case m.Poll(lease_id=lease_id):
                return manager.poll(session_id, lease_id, now)
            case m.Several(requests=requests):
                replies = [self._answer(session_id, session, each) for each in requests]
                return m.Each(tuple(reply for reply in replies if isinstance(reply, m.Located)))
            case m.Release(lease_ids=lease_ids):
                for lease_id in lease_ids:
                    manager.release(session_id, lease_id)
                return m.Done()
            case m.Reserve(chunks=chunks, kind=kind):
                return manager.reserve(session_id, chunks, now, kind=kind)
            case m.Commit(lease_id=lease_id, keys=named):
                return m.Done(manager.commit(session_id, lease_id, named))
            case m.Abort(lease_id=lease_id):
                manager.abort(session_id, lease_id)
                return m.Done()
            case _:
                return self._administer(session, request)

    def _administer(self, session: Session, request: m.AnyRequest) -> m.AnyReply:
        match request:
            case m.Hello(protocol_version=version):
                return _welcome(version, self.manager, self._traits)
            case m.Ping():
                session.has_pinged = True
                return m.Done(int(session.instance is not None))
            case m.Register(instance=instance):
                self._sessions.register(session, instance)
                return m.Done()
            case m.Inspect(root=root, keys=keys, checks=checks, tail=tail):
                return self.manager.inspect(root, keys, checks, tail=tail, search_range=request.search_range)
            case m.Clear(lower_tiers=lower_tiers, spaces=spaces):
                return m.Done(self.manager.clear(lower_tiers=lower_tiers, spaces=spaces))
            case m.Forget(parent=parent, keys=keys, tail=tail):
                return m.Done(self.manager.forget(parent, keys, tail))
            case m.Check():
                return _check(self.manager)
            case m.Switch() | m.GetStatus():
                return self._switch(request)
            case _:
                return m.Failed("protocol", f"{type(request).__name__} is for connections")

    def _switch(self, request: m.Switch | m.GetStatus) -> m.Status:
        if isinstance(request, m.Switch):
            if request.frozen is not None:
                self.manager.is_frozen = request.frozen
            if request.hot_cache is not None:
                self.manager.set_hot_cache(enabled=request.hot_cache)
        leases = self.manager.leases
        return status_of(
            self.manager,
            num_sessions=len(self._sessions),
            is_scanning=not self._scan.is_over,
            instances=self._sessions.instances(self._clock(), lambda session_id: len(leases.of_session(session_id))),
            spaces=self._sessions.spaces,
            tiers=self.tiers,
        )


def _num_held(tier: Tier, keys: Collection[bytes]) -> int:
    # Of a tier that has closed: all that it does not deny to have.
    try:
        return sum(tier.contains(key) is not False for key in keys)
    except Exception:  # thread top: a tier that cannot tell may have all of them
        _log.exception("tier_not_asked", tier=tier.name)
        return len(keys)


def _check(manager: StorageManager) -> m.AnyReply:
    if (num_chunks := len(manager.index)) > _MAX_CHECKED:
        return m.Failed("busy", f"{num_chunks} chunks: to check more than {_MAX_CHECKED} would hold up all others")
    manager.check()
    return m.Done()


def _welcome(version: int, manager: StorageManager, traits: Traits) -> m.AnyReply:
    if version != m.PROTOCOL_VERSION:
        return m.Failed("protocol", f"this store speaks protocol {m.PROTOCOL_VERSION}, not {version}")
    return m.Welcome(
        m.PROTOCOL_VERSION,
        manager.room.pool.capacity_bytes,
        traits.features,
        traits.chunk_size,
        traits.hash_algorithm,
        traits.version,
        manager.leases.lease_seconds,
    )


def _media_of(request: m.AnyRequest) -> list[str]:
    # The media that lookups are confined to.
    asked = [each.search_range for each in _parts_of(request) if isinstance(each, m.Lookup | m.Match | m.Inspect)]
    return [name for names in asked for name in names or ()]


def _parts_of(request: m.AnyRequest) -> Sequence[m.AnyRequest]:
    return request.requests if isinstance(request, m.Several) else (request,)
