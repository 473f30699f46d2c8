"""Write the pages that are generated from code. ``make docs`` runs this; a test compares the pages with the code."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from qkvault.config_page import schema_markdown
from qkvault.metrics import metrics_markdown
from qkvault.wire.page import wire_markdown

ROOT: Final = Path(__file__).resolve().parent.parent


_BEHAVIOURS: Final = ROOT / "docs" / "behaviours.md"
_CITATION: Final = re.compile(r"\bB ?(\d+)(?:-(\d+))?\b")
_ROW: Final = re.compile(r"\| B(\d+) \| (.*?) \| .*")


def proofs() -> dict[int, list[str]]:
    """Behaviour number to the ids of the tests that cite it, in order; those of contract suites come last."""
    found: dict[int, list[str]] = defaultdict(list)
    suites = sorted((ROOT / "src" / "qkvault" / "testing").glob("*.py"))
    for path in [*sorted((ROOT / "tests").rglob("test_*.py")), *suites]:
        for name, docstring in _tests_of(ast.parse(path.read_text(encoding="utf-8"))):
            for first, last in _CITATION.findall(docstring):
                for number in range(int(first), int(last or first) + 1):
                    found[number].append(f"`{path.relative_to(ROOT)}::{name}`")
    return found


def _tests_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.name, ast.get_docstring(node) or ""
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name.startswith("test_"):
                    yield f"{node.name}::{method.name}", ast.get_docstring(method) or ""


def behaviours_page() -> str:
    """docs/behaviours.md with its last column filled: the tests whose docstrings cite a behaviour, as ``B20``."""
    cited = proofs()
    lines = []
    for line in _BEHAVIOURS.read_text(encoding="utf-8").splitlines():
        row = _ROW.fullmatch(line)
        if row:
            tests = ", ".join(dict.fromkeys(cited[int(row[1])]))
            lines.append(f"| B{row[1]} | {row[2]} | {tests} |")
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


# (page, what it must contain)
GENERATED: Final[list[tuple[str, Callable[[], str]]]] = [
    ("docs/config.md", schema_markdown),
    ("docs/metrics.md", metrics_markdown),
    ("docs/wire.md", wire_markdown),
    ("docs/behaviours.md", behaviours_page),
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
