"""Write the pages that are generated from code. ``make docs`` runs this; a test compares the pages with the code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from qkvault.config import schema_markdown
from qkvault.metrics import metrics_markdown

ROOT: Final = Path(__file__).resolve().parent.parent


# (page, what it must contain)
GENERATED: Final[list[tuple[str, Callable[[], str]]]] = [
    ("docs/config.md", schema_markdown),
    ("docs/metrics.md", metrics_markdown),
]


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
