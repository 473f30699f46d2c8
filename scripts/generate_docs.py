"""Write the pages that are generated from code. ``make docs`` runs this; a test compares the pages with the code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent


def printed_by(module: str, *arguments: str) -> str:
    """What ``python -m module arguments`` prints."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout


# (page, what it must contain), for example ("docs/config.md", lambda: printed_by("qkvault.config", "--markdown"))
GENERATED: Final[list[tuple[str, Callable[[], str]]]] = []


def main() -> None:
    """Write each page that differs, and say which."""
    for name, generate in GENERATED:
        page, text = ROOT / name, generate()
        is_fresh = page.exists() and page.read_text(encoding="utf-8") == text
        if not is_fresh:
            page.write_text(text, encoding="utf-8")
        print(f"{name}: {'unchanged' if is_fresh else 'written'}")


if __name__ == "__main__":
    main()
