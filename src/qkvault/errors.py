"""The error tree of QKVault.

QKVaultError
├─ ConfigError         a setting is unknown, missing or impossible; raised at start only
├─ LayoutMismatch      a peer, a file or an engine has another layout
├─ ProtocolError       malformed message or another protocol version
├─ Unavailable         a server or tier cannot be reached; integrations treat it as a miss
│   ├─ DeadlineExceeded
│   └─ Unwelcome    something answers, and does not take this client as it is set
├─ Refused             a store takes no such order from this client; asking again changes nothing
└─ InvariantError      a bug of ours

A miss is a value, never an exception; so is a full pool (``Outcome.NO_ROOM``).
``ValueError`` is for wrong arguments of public calls; one is ``UnknownMedium``.
"""

from __future__ import annotations


class QKVaultError(Exception):
    """Root of all errors that this package raises on purpose."""


class ConfigError(QKVaultError):
    """A setting is unknown, missing or impossible. Raised at start only."""


class LayoutMismatch(QKVaultError):
    """Bytes were laid out for another geometry than the one asked for."""


class ProtocolError(QKVaultError):
    """A message is malformed or of another protocol version."""


class Unavailable(QKVaultError):
    """A server or tier cannot be reached. Integrations treat this as a miss."""


class DeadlineExceeded(Unavailable):
    """An answer did not come in time."""


class Unwelcome(Unavailable):
    """Something answers, and does not take this client as it is set. It says what to set."""


class Refused(QKVaultError):
    """A store takes no such order from this client. It says what to set; asking again changes nothing."""


class UnknownMedium(ValueError):
    """A lookup is confined to a medium that the store does not have."""


class InvariantError(QKVaultError):
    """State that must always hold does not. This is a bug of ours."""
