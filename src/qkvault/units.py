"""Text that people write for sizes, durations and booleans, read exactly or refused. Knows no setting."""

from __future__ import annotations

import re
from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40

# A bare "G" is missing on purpose: half of the world means 10**9 by it, the other half 2**30.
_SIZE_UNITS: Final = {
    **dict.fromkeys(("", "b"), 1),
    **dict.fromkeys(("ki", "kib"), KIB),
    **dict.fromkeys(("mi", "mib"), MIB),
    **dict.fromkeys(("gi", "gib"), GIB),
    **dict.fromkeys(("ti", "tib"), TIB),
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_DURATION_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_WORDS: Final = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
_NUMBER: Final = re.compile(r"([0-9]{1,30})(?:\.([0-9]{1,30}))?\s*([a-zA-Z]*)")  # whole, fraction, unit


def parse_size(text: str) -> int:
    """Bytes that ``text`` means: "4096", "500MB" (powers of ten), "1.5 TiB" (of two); rounded down.

    Raises ValueError.
    """
    match = _NUMBER.fullmatch(text.strip())
    unit = _SIZE_UNITS.get(match[3].lower()) if match else None
    if match is None or unit is None:
        msg = "expected bytes: a whole number, or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB"
        raise ValueError(msg)
    digits = match[2] or ""
    return int(match[1] + digits) * unit // int("1" + "0" * len(digits))


def format_size(num_bytes: int) -> str:
    """The shortest text, without a fraction, that ``parse_size`` reads as ``num_bytes``."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes and num_bytes % unit == 0:
            return f"{num_bytes // unit}{name}"
    return str(num_bytes)


def parse_duration(text: str) -> float:
    """Seconds that ``text`` means: "2.5", "500ms", "10s", "2m", "1h". Raises ValueError."""
    match = _NUMBER.fullmatch(text.strip())
    unit = _DURATION_UNITS.get(match[3].lower()) if match else None
    if match is None or unit is None:
        msg = "expected seconds, or a number with us, ms, s, m or h"
        raise ValueError(msg)
    return float(f"{match[1]}.{match[2] or 0}") * unit


def parse_int(text: str) -> int:
    """A whole number in digits, with a sign if need be. Raises ValueError."""
    if re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip()) is None:
        msg = "expected a whole number"
        raise ValueError(msg)
    return int(text)


def parse_numbers(text: str) -> tuple[int, ...]:
    """Whole numbers in rising order: "0,4-7" is 0, 4, 5, 6 and 7. Raises ValueError."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,6})\s*(?:-\s*([0-9]{1,6})\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if last < first or (numbers and first <= numbers[-1]):
            msg = "expected numbers in rising order, or ranges of them: 0,4-7"
            raise ValueError(msg)
        numbers += range(first, last + 1)
    return tuple(numbers)


def parse_bool(raw: object) -> bool:
    """A boolean, or the word for one: true, yes, on, 1, false, no, off, 0. Raises ValueError."""
    value = _WORDS.get(str(raw).strip().lower())
    if value is None:
        msg = f"expected one of {', '.join(_WORDS)}"
        raise ValueError(msg)
    return value


def approximate_size(num_bytes: int) -> str:
    """``num_bytes`` for a reader, with one decimal: "1.5 TiB"."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} B"
