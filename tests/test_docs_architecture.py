"""docs/architecture.md is about this source: its tree, its import table, and the names in its flows."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "qkvault"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PATH = r"[\w/]+\.py"
HOP = re.compile(rf"`({PATH})`((?:,? (?:and )?`\w+`)*)")


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def code_block(title: str) -> str:
    return section(title).split("```")[1]


def files_in_tree() -> set[str]:
    """Paths in the tree; a bare name after a path on its line lies beside it."""
    found = set()
    for line in code_block("The tree").splitlines():
        folder = ""
        for path in re.findall(PATH, line.partition("  # ")[0]):
            folder = path.rpartition("/")[0] or folder
            found.add(path if "/" in path or not folder else f"{folder}/{path}")
    return found


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_the_tree_is_the_source():
    source = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}
    tree = files_in_tree()
    assert (sorted(source - tree), sorted(tree - source)) == ([], []), "not in the page, not in the source"


def test_the_import_table_is_the_one_that_is_tested():
    layers = runpy.run_path(str(ROOT / "tests" / "test_architecture.py"))["LAYERS"]
    assert code_block("Who imports whom").strip().splitlines() == list(layers)


def test_the_life_of_a_chunk_is_the_one_in_the_source():
    drawing = [line.strip() for line in code_block("Life of a chunk").strip().splitlines()]
    source = [line.strip() for line in (PACKAGE / "store" / "manager.py").read_text(encoding="utf-8").splitlines()]
    assert [line for line in drawing if line not in source] == []


def test_the_error_tree_is_the_one_in_the_source():
    assert code_block("Errors").strip() in (PACKAGE / "errors.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("title", ["The way of a request", "What must always hold", "Errors"])
def test_every_hop_exists(title):
    """What follows a file in backquotes, in backquotes too, is a class or function in it."""
    missing = []
    for path, names in HOP.findall(re.sub(r"\n\s+", " ", section(title))):
        if path.startswith("tests/"):
            continue
        known = names_in(PACKAGE / path) if (PACKAGE / path).is_file() else set()
        missing += [f"{path} {name}" for name in re.findall(r"\w+", names.replace("and ", "")) if name not in known]
        missing += [] if known else [path]
    assert missing == []


def test_every_hop_is_numbered():
    for flow in section("The way of a request").split("\n### ")[1:]:
        numbers = [int(number) for number in re.findall(r"^(\d+)\. ", flow, flags=re.MULTILINE)]
        assert numbers == list(range(1, len(numbers) + 1))
        assert numbers
