"""Telling systemd, or whatever else started us, how far we are."""

from __future__ import annotations

import contextlib
import os
import socket


def notify(state: str) -> None:
    """Send ``READY=1``, ``STOPPING=1`` or the like to the socket that ``NOTIFY_SOCKET`` names; without it, nothing."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if path.startswith("@"):  # of the abstract namespace
        path = "\0" + path[1:]
    if path:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as plain:
            plain.setblocking(False)
            plain.sendto(state.encode(), path)
