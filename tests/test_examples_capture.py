"""What the examples about captured queries show: under stock vLLM as programs, and their parts by themselves."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the examples work on tensors")

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "capture_queries.ipynb"
# Runs the cells of a notebook as one program, and counts the pictures that they show.
RUN_CELLS = """
import ast, json, sys
names, num_images = {}, 0
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, cell["id"], "exec"), names)
        value = eval(compile(ast.Expression(last.value), cell["id"], "eval"), names) if last else None
        num_images += type(value).__name__ == "Image"
print(num_images, "pictures")
"""


@pytest.fixture
def examples(monkeypatch) -> SimpleNamespace:
    """The modules of the folder, which is no package."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    names = ("engine_life", "capture_steps", "capture_shown", "capture_compare", "capture_passages")
    yield SimpleNamespace(**{name.removeprefix("capture_"): importlib.import_module(name) for name in names})
    for name in names:
        sys.modules.pop(name)


def run(model_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "QKV_MODELS": str(model_path.parent)}
    return subprocess.run(
        [sys.executable, *command], cwd=EXAMPLES, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def told(model_path, tmp_path_factory) -> dict:
    """What the example tells in its quick form."""
    pytest.importorskip("vllm")
    picture = tmp_path_factory.mktemp("picture") / "attention.png"
    done = run(model_path, "capture_queries.py", "--quick", "--json", "--picture", str(picture))
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
class TestExample:
    def test_queries_of_prompt_and_answer_are_read_by_token_ids(self, told):
        """B380: of all tokens that are stored, without a hole, and a hit gives the same answer."""
        assert told["problems"] == []
        assert told["num_query_tokens"] >= told["answers"]["whole"]["num_prompt_tokens"]
        assert told["answers"]["hit"]["text"] == told["answers"]["whole"]["text"]
        assert any("the will" in part["text"] for part in told["sentences"])

    def test_vllm_hits_the_edited_prefix_as_far_as_it_was_kept(self, told):
        """B381: stock vLLM computes only what is behind it."""
        edited, whole = told["answers"]["edited"], told["answers"]["whole"]
        assert edited["num_reused_tokens"] == told["num_kept_tokens"] < 0.52 * told["num_body_tokens"]
        assert edited["num_prompt_tokens"] - edited["num_reused_tokens"] < 64
        assert whole["num_reused_tokens"] == 0

    def test_the_half_by_score_is_closer_than_random_halves(self, told):
        """B382: exact divergence, equal counts, first tokens kept in both."""
        means = told["mean_divergence_nats"]
        assert 0 < means["by score"] < means["at random"]
        (one,) = told["compared"]
        assert one["same_tokens"][""] == 1.0  # transformers says what vLLM has said, given K and V from the store

    def test_the_picture_is_one(self, told):
        from PIL import Image

        with Image.open(told["picture"]) as image:
            assert image.size[0] == 1400
            assert len(image.convert("L").getcolors(256)) > 50


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_the_notebook_runs(model_path):
    """B383: each cell in order, as one program."""
    pytest.importorskip("vllm")
    done = run(model_path, "-c", RUN_CELLS, str(NOTEBOOK))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 pictures" in done.stdout


def test_the_notebook_has_no_outputs():
    """B383."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def prompt_of(examples, text: str, start: int, stop: int):
    """A prompt whose tokens are the words of ``text``, those of the document being [start, stop)."""
    characters, at = [], 0
    for word in text.split():
        begin = text.index(word, at)
        characters.append((begin, at := begin + len(word)))
    return examples.steps.Prompt(text, list(range(len(characters))), characters, start, stop)


def test_a_word_or_sentence_has_the_mean_attention_of_its_tokens(examples):
    prompt = prompt_of(examples, "system One two three. Four five six. question", 1, 7)
    weights = torch.tensor([1.0, 2, 3, 4, 4, 4]).expand(2, 3, 6)
    sentences = examples.shown.sentences_of(prompt, weights, kept=[1, 2])
    assert [part.text for part in sentences] == ["One two three.", "Four five six."]
    assert [part.importance for part in sentences] == pytest.approx([2 / 3, 4 / 3])
    # Behind the body, which is whole blocks, everything stays: here the body is empty.
    assert prompt.body == 0
    assert [part.kept for part in sentences] == [1.0, 1.0]
    words = examples.shown.words_of(prompt, weights)
    assert [part.text for part in words] == ["One", "two", "three.", "Four", "five", "six."]


def test_every_passage_is_there_and_has_questions(examples):
    note = (EXAMPLES / "data" / "README.md").read_text(encoding="utf-8")
    for passage in examples.passages.PASSAGES:
        assert 1000 < len(passage.text()) < 8000
        assert len(passage.questions) == 3
        assert passage.path.name in note


def test_all_ways_of_dropping_keep_the_same_number_and_the_first_tokens(examples):
    """B382."""
    prompt = prompt_of(examples, " ".join(f"w{at}" for at in range(400)), 10, 390)
    read = SimpleNamespace(prompt=prompt)
    count = examples.steps.num_kept(prompt, 0.5)
    assert prompt.body == 384
    assert count == 192  # 10 and half of 374, in whole blocks
    for kept in (examples.compare.kept_at_random(read, count, 1), examples.compare.kept_latest(read, count)):
        assert len(set(kept)) == count
        assert kept == sorted(kept)
        assert kept[:10] == list(range(10))
        assert kept[-32:] == list(range(352, 384))


def test_a_half_by_score_that_is_no_closer_is_a_problem(examples):
    compare = examples.compare

    def one(by_score: float):
        divergences = {compare.SCORE: [by_score], compare.RANDOM: [0.2, 0.4], compare.LATEST: [0.5]}
        return compare.Compared("p", "q", 64, 32, divergences, dict.fromkeys(["", *divergences], 1.0))

    assert list(compare.problems_of([one(0.1)])) == []
    (problem,) = compare.problems_of([one(0.1), one(0.9)])
    assert problem.startswith("half by score is no closer (0.500 nats)")
    assert compare.num_closer([one(0.1), one(0.9)]) == 1
