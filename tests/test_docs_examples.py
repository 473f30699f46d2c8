"""The examples run: those in examples/, and the blocks of the pages that say so.

A block that begins with ```python run or ```python file, and whose first line is ``# name.py``, is a file. All files of
a page lie in one folder; those marked ``run`` are then run there, by pytest if they are called ``test_*.py``.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^```python (run|file)\n# (\S+\.py)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
LIBRARY = ROOT / "examples" / "library.py"


class Block(NamedTuple):
    mark: str
    name: str
    code: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    blocks = [Block(*found) for found in BLOCK.findall(text)]
    assert len(blocks) == len(re.findall(r"^```python \w", text, flags=re.MULTILINE)), "a marked block has no name"
    return blocks


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)], ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page, tmp_path):
    blocks = blocks_of(page)
    for block in blocks:
        (tmp_path / block.name).write_text(block.code, encoding="utf-8")
    for block in blocks:
        if block.mark == "run":
            is_test = block.name.startswith("test_")
            options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error"] if is_test else []
            done = run([sys.executable, *options, block.name], tmp_path)
            assert not is_test or re.search(r"\d+ passed", done.stdout), done.stdout


def test_the_library_example_runs_and_the_readme_shows_lines_of_it(tmp_path):
    pytest.importorskip("torch", reason="the engine works on tensors")
    assert "992 of 1000 tokens are cached" in run([sys.executable, str(LIBRARY)], tmp_path).stdout
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = page.partition("```python\n")[2].partition("```")[0].splitlines()
    lines = iter(LIBRARY.read_text(encoding="utf-8").splitlines())
    assert len(shown) > 3
    assert all(line in lines for line in shown), "not lines of the example, or in another order"


@pytest.fixture(scope="module")
def demo():
    pytest.importorskip("typer")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))  # as when it is run
        return runpy.run_path(str(ROOT / "examples" / "demo.py"))


def measured_with(demo, **changed):
    """What a demo that went well measures, except that answer 1 after the restart is ``changed``."""
    well = {"tokens": [1, 2], "text": "", "ttft_seconds": 4.0, "num_prompt_tokens": 1000}
    reused = {demo["COLD"]: 0, demo["RAM"]: 960, demo["DISK"]: 960}
    measured = []
    for way, num_reused_tokens in reused.items():
        for question in range(len(demo["QUESTIONS"])):
            answer = well | {"num_reused_tokens": num_reused_tokens, "num_disk_chunks": 4 * (way == demo["DISK"])}
            if (way, question) == (demo["DISK"], 0):
                answer |= changed
            measured.append(demo["Measured"](way, question, demo["Answer"](**answer)))
    return measured


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_the_demo_shows_what_it_says(model_path):
    """B494: a hit in RAM, and one on disk after a restart, of one question under stock vLLM; the answer is the same."""
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--quick", "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "QKV_MODELS": str(model_path.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["problems"] == []
    assert [answer["way"] for answer in told["answers"]] == ["cold", "hit in RAM", "hit on disk, restarted"]
    cold, *hits = told["median_ttft_seconds"].values()
    assert cold > 2 * max(hits)


def test_a_demo_that_went_well_has_no_problems(demo):
    assert list(demo["problems"](measured_with(demo))) == []


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"tokens": [1, 3]}, "1 answers have other tokens than cold"),
        ({"num_reused_tokens": 512}, "512 of 1000 tokens were reused, so the hit was missed"),
        ({"num_disk_chunks": 0}, "0 chunks came from disk"),
    ],
)
def test_a_demo_that_went_wrong_says_how(demo, changed, problem):
    (found,) = demo["problems"](measured_with(demo, **changed))
    assert found.endswith(problem)


def test_the_document_of_the_demo_is_what_its_note_says(demo):
    text = demo["DOCUMENT"].read_bytes()
    note = (demo["DOCUMENT"].parent / "README.md").read_text(encoding="utf-8")
    assert len(text) < 40_000
    assert f"`{demo['DOCUMENT'].name}`" in note
