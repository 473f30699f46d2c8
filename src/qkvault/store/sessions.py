"""Sessions: who is connected, as what, and when each was heard of last. Time is an argument."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from qkvault.spaces import space_id_of
from qkvault.wire.messages import Instance, InstanceStatus

_MAX_SPACES: Final = 256  # descriptions that are remembered, of a few hundred bytes each
_MAX_SPACE_BYTES: Final = 1 << 12


@dataclass(slots=True)
class Session:
    """One client. ``instance`` says which process of which engine it is, if it is one."""

    client: str
    heard_at: float  # its last request
    has_pinged: bool = False
    instance: Instance | None = None


class Sessions:
    """All connected clients by session id.

    What a client holds ends with its session, and a session ends with its connection: nobody is judged by silence. The
    register of instances is for people, who want to know which engines are there and work: one that has fallen silent
    is taken off it, and registers again when it is told so (row 104).
    """

    def __init__(self, *, reap_timeout_seconds: float, registration_grace_seconds: float) -> None:
        """Instances that have pinged are judged by the first time, those that never have by the second, larger one."""
        self.reap_timeout_seconds = reap_timeout_seconds
        self.registration_grace_seconds = registration_grace_seconds
        self._sessions: dict[int, Session] = {}
        self._next_id = 1
        self._spaces: dict[bytes, None] = {}  # in the order in which they were last described

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, client: str, now: float) -> int:
        """A new session's id."""
        session_id = self._next_id
        self._next_id += 1
        self._sessions[session_id] = Session(client, now)
        return session_id

    def close(self, session_id: int) -> bool:
        """Forget a session. False if there was none."""
        return self._sessions.pop(session_id, None) is not None

    def hear(self, session_id: int, now: float) -> Session | None:
        """The session, which has just asked something."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.heard_at = now
        return session

    def register(self, session: Session, instance: Instance) -> None:
        """``session`` is that instance from now on. What it says of its spaces is remembered when it has gone.

        What cannot be read, of another version or no description at all, is not.
        """
        session.instance = instance
        readable = [space for space in instance.spaces if space_id_of(space) is not None]
        for space in readable:
            self._spaces.pop(space, None)
        self._remember([*self._spaces, *readable])

    def found(self, spaces: Iterable[bytes]) -> None:
        """Tiers hold chunks of ``spaces`` from before: they count as described before all others."""
        self._remember([*spaces, *self._spaces])

    @property
    def spaces(self) -> tuple[bytes, ...]:
        """What instances and tiers have described so far: the latest last, of very many the oldest forgotten."""
        return tuple(self._spaces)

    def _remember(self, spaces: Iterable[bytes]) -> None:
        kept = dict.fromkeys(space for space in spaces if len(space) <= _MAX_SPACE_BYTES)
        self._spaces = dict.fromkeys(list(kept)[-_MAX_SPACES:])

    def reap(self, now: float) -> list[Instance]:
        """Take instances off the register that have been silent for too long. Returns them."""
        reaped = []
        for session in self._sessions.values():
            allowed = self.reap_timeout_seconds if session.has_pinged else self.registration_grace_seconds
            if session.instance is not None and now - session.heard_at > allowed:
                reaped.append(session.instance)
                session.instance = None
        return reaped

    def instances(self, now: float, num_leases: Callable[[int], int]) -> tuple[InstanceStatus, ...]:
        """All that are registered; ``num_leases(session_id)`` tells how many leases each holds."""
        return tuple(
            InstanceStatus(session.instance, round(now - session.heard_at, 3), num_leases(session_id))
            for session_id, session in self._sessions.items()
            if session.instance is not None
        )
