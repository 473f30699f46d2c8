"""Leases: who may read or write which chunks, until when. A lease belongs to a session and ends with it."""

from __future__ import annotations

from dataclasses import dataclass, field

from qkvault.store.index import Entry
from qkvault.types import Medium


@dataclass(slots=True)
class Partial:
    """How the last chunk of a lease is held: its first ``num_tokens`` tokens, once they are those that were wanted."""

    num_tokens: int
    wanted: bytes | None  # tokens (bytes) that its own have still to be compared with


@dataclass(slots=True)
class Lease:
    """A named right on chunks: to read them (pinned) or to write them (reserved)."""

    lease_id: int
    session_id: int
    is_write: bool
    deadline: float  # on the clock that ``now`` is of
    entries: list[Entry] = field(default_factory=list)
    media: list[Medium] = field(default_factory=list)  # of a read lease: where each was when it was looked up
    partial: Partial | None = None  # None: the last chunk is held whole
    is_ready: bool = True  # of a read lease: all were seen to be READY, and stay so as long as they are held

    def num_tokens_of(self, at: int) -> int:
        """How many of the leading tokens of chunk ``at`` the holder may use."""
        if self.partial is not None and at == len(self.entries) - 1:
            return self.partial.num_tokens
        return self.entries[at].num_tokens

    def ends_with(self, key: bytes) -> bool:
        """Whether its last chunk is ``key``, held whole."""
        if not self.entries or self.entries[-1].key != key:
            return False
        last = self.partial
        return last is None or (last.wanted is None and last.num_tokens == self.entries[-1].num_tokens)

    def cut(self, start: int) -> list[Entry]:
        """Let go of what is held from chunk ``start`` on. Returns it; its pins are the caller's business."""
        dropped = self.entries[start:]
        del self.entries[start:], self.media[start:]
        if dropped:
            self.partial = None
        return dropped


class LeaseTable:
    """All live leases, by id and by session."""

    def __init__(self, lease_seconds: float) -> None:
        """``lease_seconds`` is how long a lease lives without a sign of its holder."""
        self.lease_seconds = lease_seconds
        self._leases: dict[int, Lease] = {}
        self._sessions: dict[int, set[int]] = {}
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._leases)

    def open(self, session_id: int, *, is_write: bool, now: float) -> Lease:
        """A new, empty lease."""
        lease = Lease(self._next_id, session_id, is_write, now + self.lease_seconds)
        self._next_id += 1
        self._leases[lease.lease_id] = lease
        self._sessions.setdefault(session_id, set()).add(lease.lease_id)
        return lease

    def get(self, lease_id: int, session_id: int) -> Lease | None:
        """The lease, if it is live and ``session_id``'s own."""
        lease = self._leases.get(lease_id)
        return lease if lease is not None and lease.session_id == session_id else None

    def renew(self, lease: Lease, now: float) -> None:
        """The holder gave a sign of life."""
        lease.deadline = now + self.lease_seconds

    def close(self, lease: Lease) -> None:
        """Forget ``lease``. What it held is the caller's business."""
        del self._leases[lease.lease_id]
        of_session = self._sessions[lease.session_id]
        of_session.discard(lease.lease_id)
        if not of_session:
            del self._sessions[lease.session_id]

    def of_session(self, session_id: int) -> list[Lease]:
        return [self._leases[lease_id] for lease_id in sorted(self._sessions.get(session_id, ()))]

    def overdue(self, now: float) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.deadline < now]

    def all(self) -> list[Lease]:
        return list(self._leases.values())
