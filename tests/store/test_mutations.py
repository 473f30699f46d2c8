"""The list of mutations does not rot: each still finds, once, what it changes."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

LIST = runpy.run_path(str(Path(__file__).parent / "mutations.py"))


@pytest.mark.parametrize("name", LIST["MUTATIONS"])
def test_a_mutation_applies(name):
    """What it replaces stands once in its file, and what it makes of it is still Python."""
    path, before, after = LIST["MUTATIONS"][name]
    text = (LIST["ROOT"] / "src" / "qkvault" / path).read_text()
    assert text.count(before) == 1
    assert before != after
    ast.parse(text.replace(before, after))
