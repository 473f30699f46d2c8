"""The pages tell the truth: links lead somewhere, cited tests exist, generated pages are what the code generates."""

from __future__ import annotations

import ast
import functools
import re
import runpy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GENERATED = runpy.run_path(str(ROOT / "scripts" / "generate_docs.py"))["GENERATED"]


def pages_of(root: Path) -> list[Path]:
    return sorted([*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("examples/**/*.md")])


def links_of(page: Path) -> list[str]:
    """Relative link targets, without anchors; code blocks do not link."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [target.partition("#")[0] for target in targets if not re.match(r"[a-z]+:|#", target)]


def dead_links(root: Path) -> Iterator[str]:
    for page in pages_of(root):
        for target in links_of(page):
            if not (page.parent / target).exists():
                yield f"{page.relative_to(root)}: nothing at {target}"


def pages_not_listed(root: Path) -> Iterator[str]:
    index = root / "docs" / "index.md"
    listed = {(index.parent / target).resolve() for target in links_of(index)}
    for page in sorted(index.parent.rglob("*.md")):
        if page != index and page.resolve() not in listed:
            yield f"docs/index.md does not list {page.relative_to(root)}"


def behaviour_problems(root: Path) -> Iterator[str]:
    """Rows of docs/behaviours.md are numbered, each number once and in order, and cite tests that exist and run."""
    text = (root / "docs" / "behaviours.md").read_text(encoding="utf-8")
    numbers = [int(number) for number in re.findall(r"^\|\s*B(\d+)\s*\|", text, flags=re.MULTILINE)]
    if numbers != sorted(set(numbers)):
        yield f"rows are not numbered in order: {numbers}"
    methods = methods_by_class(root)
    for number, told, cited in re.findall(r"^\| B(\d+) \| (.*?) \| (.*?) ?\|$", text, flags=re.MULTILINE):
        if not cited.strip() and not re.search(r"\([^)]*\b(planned|not built)\b", told):
            yield f"B{number} has no proof, and does not say that it is planned or not built"
    for file, name in re.findall(r"((?:tests|src)/[\w/]+\.py)::([\w:]+)", text):
        if not is_test(root / file, name.split("::"), methods):
            yield f"no test {file}::{name}"
        elif file.startswith("src/") and not is_run(root, name.partition("::")[0]):
            yield f"no test runs {file}::{name}"


def methods_by_class(root: Path) -> dict[str, set[str]]:
    """Class name to its methods and (by name) its bases, in the tests and in the contract suites they inherit."""
    found: dict[str, set[str]] = {}
    for path in [*root.glob("tests/**/*.py"), *root.glob("src/qkvault/testing/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                names = {item.name for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))}
                found[node.name] = names | {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    return found


def is_test(path: Path, names: Sequence[str], methods: dict[str, set[str]]) -> bool:
    if not path.is_file():
        return False
    return names[0] in names_in(path) and (len(names) == 1 or inherits(names[0], names[-1], methods))


@functools.cache
def names_in(path: Path) -> set[str]:
    """What is defined at its top."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}


def is_run(root: Path, suite: str) -> bool:
    """Whether a class of the tests is made from that contract suite."""
    made = re.compile(rf"^class Test\w+\(.*\b{suite}\b.*\):", flags=re.MULTILINE)
    return any(made.search(path.read_text(encoding="utf-8")) for path in root.glob("tests/**/test_*.py"))


def inherits(class_name: str, method: str, methods: dict[str, set[str]]) -> bool:
    own = methods.get(class_name, set())
    return method in own or any(inherits(base, method, methods) for base in own & methods.keys() - {class_name})


def stale_pages(root: Path, generated: Sequence[tuple[str, Callable[[], str]]]) -> Iterator[str]:
    for name, generate in generated:
        page = root / name
        if not page.is_file() or page.read_text(encoding="utf-8") != generate():
            yield f"{name} is not what the code generates: run `make docs`"


def variables_not_told(root: Path) -> Iterator[str]:
    """Whoever runs the tests can set what they read: its names begin alike, and CONTRIBUTING.md has them."""
    told = set(re.findall(r"`(QKV_\w+?)[=`]", (root / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    for path in sorted(root.glob("tests/**/*.py")):
        for name in re.findall(r"environ\.get\([\"'](\w+)[\"']", path.read_text(encoding="utf-8")):
            if name not in told:
                yield f"{path.relative_to(root)} reads {name}"


def test_links_lead_somewhere():
    assert list(dead_links(ROOT)) == []


def test_the_index_lists_every_page():
    assert list(pages_not_listed(ROOT)) == []


@pytest.mark.skipif(not (ROOT / "docs" / "behaviours.md").exists(), reason="no docs/behaviours.md")
def test_behaviours_cite_tests_that_exist():
    assert list(behaviour_problems(ROOT)) == []


def test_generated_pages_are_fresh():
    assert list(stale_pages(ROOT, GENERATED)) == []


def test_what_tests_read_has_one_name_that_is_told():
    """One fuzzer was made longer by QKV_FUZZ_SECONDS and another by FUZZ_SECONDS."""
    assert list(variables_not_told(ROOT)) == []


@pytest.fixture
def site(tmp_path):
    """A small repository in which every check has something to find, and something to leave alone."""
    files = {
        "README.md": "[docs](docs/index.md#top) [gone](docs/gone.md) [web](https://example.org)\n```\n[x](y.md)\n```\n",
        "docs/index.md": "[listed](listed.md)",
        "docs/listed.md": "",
        "docs/forgotten.md": "",
        "docs/behaviours.md": (
            "| B1 | is | `tests/test_a.py::test_f[x]`, `tests/test_a.py::TestDisk::test_load` |\n"
            "| B1 | is not | `tests/test_a.py::test_g`, `tests/test_a.py::TestDisk::test_h`, `tests/no.py::test_f` |\n"
            "| B2 | one day (all of it planned) |  |\n| B3 | was planned |  |\n| B4 | is said | |\n"
            "| B5 | is | `src/qkvault/testing/c.py::Contract::test_load`, `src/qkvault/testing/c.py::Other::test_f` |\n"
        ),
        "CONTRIBUTING.md": "`QKV_LONG=600` makes it long",
        "tests/test_b.py": "x = environ.get({!r}), environ.get({!r})".format("QKV_LONG", "LONG"),
        "tests/test_a.py": "from c import Contract\ndef test_f(): ...\nclass TestDisk(Contract): ...\n",
        "src/qkvault/testing/c.py": (
            "class Contract:\n    def test_load(self): ...\nclass Other:\n    def test_f(self): ...\n"
        ),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_dead_link_is_seen(site):
    assert list(dead_links(site)) == ["README.md: nothing at docs/gone.md"]


def test_a_page_that_is_not_listed_is_seen(site):
    assert [line.rpartition("/")[2] for line in pages_not_listed(site)] == ["behaviours.md", "forgotten.md"]


def test_a_wrong_number_or_citation_is_seen(site):
    assert list(behaviour_problems(site)) == [
        "rows are not numbered in order: [1, 1, 2, 3, 4, 5]",
        "B3 has no proof, and does not say that it is planned or not built",
        "B4 has no proof, and does not say that it is planned or not built",
        "no test tests/test_a.py::test_g",
        "no test tests/test_a.py::TestDisk::test_h",
        "no test tests/no.py::test_f",
        "no test runs src/qkvault/testing/c.py::Other::test_f",
    ]


def test_a_variable_that_is_not_told_is_seen(site):
    assert list(variables_not_told(site)) == ["tests/test_b.py reads LONG"]


def test_a_stale_page_is_seen(site):
    pages = [("docs/listed.md", str), ("docs/forgotten.md", lambda: "new"), ("docs/config.md", str)]
    assert [line.split()[0] for line in stale_pages(site, pages)] == ["docs/forgotten.md", "docs/config.md"]
