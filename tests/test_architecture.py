"""The rules of the source tree: who imports whom, how large things are, what needs a reason beside it.

A rule takes the modules of a tree and yields its violations. Each is held against ``src/qkvault`` and, so that it is
known to bite, against a small tree that breaks it.
"""

from __future__ import annotations

import ast
import graphlib
import io
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"

# Lowest first: a module imports from its own line and the lines above it. The longest name that fits counts.
LAYERS = (
    "types errors",
    "units address config_names config_sources config config_page registry",
    "events logs keys tokens layout spaces image policies",
    "memory pool logical paged",
    "tiers codecs wire",
    "store",
    "store.scan store.driver",
    "client connecting link autostart reports server publisher metrics stats embedded wire.inproc",
    "transfer prefix loading engine builder sdk capture blend",
    "integrations",
    "cli __main__",
)
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names.split()}
CLIENT_NEVER_IMPORTS = ("store", "tiers", "server")  # the in-process transport does
TESTING_MAX_LEVEL = LEVELS["client"]

TORCH_ALLOWED = (
    "logical paged transfer prefix loading engine builder sdk capture blend integrations "
    "cli testing codecs layout tokens".split()
)  # What would make the store more than a state machine.
STORE_FORBIDDEN = frozenset(
    "asyncio concurrent datetime logging multiprocessing qkvault.logs selectors socket threading time torch".split()
)
# Optional, or slow to import: taken when chosen, inside a function or in a module that is itself loaded when chosen.
HEAVY = frozenset(
    "blake3 boto3 fastapi hiredis mooncake nixl obstore opentelemetry redis rich safetensors sglang starlette torch "
    "transformers typer uvicorn valkey vllm zmq zstandard".split()
)
HEAVY_AT_TOP = {
    "logical": "torch",
    "paged": "torch",
    "transfer": "torch",
    "engine": "torch",
    "sdk": "torch",
    "capture": "torch",
    "blend": "torch",
    "codecs.zstd": "zstandard",
    "publisher": "zmq",
    "tiers.mooncake": "mooncake",
    "tiers.object_store": "obstore",
    "tiers.redis": "redis valkey",
    "server.app": "starlette",
    "server.http": "uvicorn",
    "integrations.vllm": "torch vllm",
    "integrations.transformers": "torch transformers",
    "integrations.sglang": "torch sglang",
    "cli": "rich typer",
}

MAX_FILE, MAX_CLASS, MAX_FUNCTION, MAX_TOTAL = 400, 300, 60, 22_020  # lines; docstrings count
MAX_POSITIONAL = 5  # parameters, not counting self; the rest is keyword-only
COMMENT_SHARE = (0.02, 0.08)
COMMENT_SHARE_FROM = 1_500  # lines of the tree; below, the share says nothing

PUBLIC = frozenset(
    "CacheEngine CacheEngineBuilder CacheEngineKey CacheKind ChunkedTokenDatabase Config StatsMonitor "
    "__version__".split()
)


@dataclass(frozen=True)
class Module:
    """One file. ``name`` is dotted, below the package: ``store.driver``; the package itself is ``""``."""

    name: str
    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def comments(self) -> dict[int, str]:
        """Line number to comment."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True)
class Import:
    target: str  # dotted, absolute
    line: int
    at_top: bool  # runs when the module is imported
    for_types: bool  # under TYPE_CHECKING

    @property
    def ours(self) -> str | None:
        """The name below the package, or None for what is not ours."""
        package, _, name = self.target.partition(".")
        return name if package == "qkvault" else None


def modules_of(src: Path) -> list[Module]:
    package = src / "qkvault"
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module(name, str(path.relative_to(src)), path.read_text(encoding="utf-8")))
    return found


def imports_of(module: Module, names: frozenset[str]) -> Iterator[Import]:
    """All imports of a module, those inside functions too. ``names`` tells submodules from attributes."""

    def visit(node: ast.AST, *, at_top: bool, for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, at_top, for_types)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = full.startswith("qkvault.") and full.removeprefix("qkvault.") in names
                yield Import(full if is_module else node.module or "", node.lineno, at_top, for_types)
        else:
            in_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            guarded = node.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) else []
            for child in ast.iter_child_nodes(node):
                yield from visit(child, at_top=at_top and not in_function, for_types=for_types or child in guarded)

    return visit(module.tree, at_top=True, for_types=False)


def all_imports(modules: Sequence[Module]) -> Iterator[tuple[Module, Import]]:
    names = frozenset(module.name for module in modules)
    for module in modules:
        for imported in imports_of(module, names):
            yield module, imported


def is_within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def longest_prefix(name: str, table: Iterable[str]) -> str | None:
    return max((entry for entry in table if is_within(name, entry)), key=len, default=None)


# Who imports whom


def every_module_has_a_layer(modules: Sequence[Module]) -> Iterator[str]:
    for module in modules:
        if module.name and not is_within(module.name, "testing") and longest_prefix(module.name, LEVELS) is None:
            yield f"{module}: no line of LAYERS names it"


def imports_go_down(modules: Sequence[Module]) -> Iterator[str]:
    for module, imported in all_imports(modules):
        if imported.ours and (problem := direction_problem(module.name, imported.ours, imported)):
            yield f"{module}:{imported.line}: {module.name or 'qkvault'} imports {imported.ours}: {problem}"


def direction_problem(source: str, target: str, imported: Import) -> str | None:
    if is_within(target, "integrations") and not is_within(source, "integrations"):
        is_fine = is_within(source, "cli") and not imported.at_top
        return None if is_fine else "only cli does, inside a function"
    if is_within(target, "testing"):
        return None if is_within(source, "testing") else "testing is for tests"
    if is_within(source, "integrations") and is_within(target, "integrations"):
        engines = {name.split(".")[1] for name in (source, target) if "." in name}
        return "integrations never import one another" if len(engines) > 1 else None
    if is_within(source, "client") and is_within(target, *CLIENT_NEVER_IMPORTS):
        return "client speaks the protocol only"
    level = LEVELS.get(longest_prefix(target, LEVELS) or "", 0)
    if source == "":
        return "the package loads its names lazily" if imported.at_top and not imported.for_types and level else None
    source_level = TESTING_MAX_LEVEL if is_within(source, "testing") else LEVELS.get(longest_prefix(source, LEVELS), 0)
    return "a higher layer" if level > source_level else None


def imports_have_no_cycle(modules: Sequence[Module]) -> Iterator[str]:
    graph: dict[str, set[str]] = {module.name: set() for module in modules}
    for module, imported in all_imports(modules):
        if imported.ours in graph and not imported.for_types:
            graph[module.name].add(imported.ours)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        yield "imports form a cycle: " + " -> ".join(reversed(error.args[1]))


def layers_keep_out_what_is_not_theirs(modules: Sequence[Module]) -> Iterator[str]:
    for module, imported in all_imports(modules):
        names = {imported.target.split(".")[0], imported.target}
        in_store = is_within(module.name, "store") and not is_within(module.name, "store.scan", "store.driver")
        if in_store and (wrong := names & STORE_FORBIDDEN):
            yield f"{module}:{imported.line}: the store is a state machine, without {max(wrong)}"
        elif "torch" in names and not is_within(module.name, *TORCH_ALLOWED):
            yield f"{module}:{imported.line}: torch does not belong in {module.name or 'the package'}"


def heavy_imports_wait_until_chosen(modules: Sequence[Module]) -> Iterator[str]:
    for module, imported in all_imports(modules):
        allowed = HEAVY_AT_TOP.get(longest_prefix(module.name, HEAVY_AT_TOP) or "", "").split()
        name = imported.target.split(".")[0]
        if name in HEAVY and imported.at_top and not imported.for_types and name not in allowed:
            yield f"{module}:{imported.line}: import {name} inside the function that needs it"


# How large things are


def sizes_stay_in_budget(modules: Sequence[Module]) -> Iterator[str]:
    for module in modules:
        if len(module.lines) > MAX_FILE:
            yield f"{module}: a file of {len(module.lines)} lines, at most {MAX_FILE}"
        for node in ast.walk(module.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                limit = MAX_CLASS if isinstance(node, ast.ClassDef) else MAX_FUNCTION
                if num_lines > limit:
                    yield f"{module}:{node.lineno}: {node.name} has {num_lines} lines, at most {limit}"
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                parameters = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
                num_positional = len(parameters) - (parameters[:1] in (["self"], ["cls"]))
                if num_positional > MAX_POSITIONAL:
                    yield f"{module}:{node.lineno}: {node.name} has {num_positional} positional parameters"
    total = sum(len(module.lines) for module in modules)
    if total > MAX_TOTAL:
        yield f"the tree has {total} lines, at most {MAX_TOTAL}"


def comments_are_few_and_there(modules: Sequence[Module]) -> Iterator[str]:
    total = sum(len(module.lines) for module in modules)
    share = sum(len(module.comments) for module in modules) / max(total, 1)
    low, high = COMMENT_SHARE
    if total > COMMENT_SHARE_FROM and not low <= share <= high:
        yield f"{share:.1%} of the lines have a comment, expected {low:.0%} to {high:.0%}"


# What needs a reason


def a_broad_except_names_its_thread(modules: Sequence[Module]) -> Iterator[str]:
    """Only at the top of a thread; one that cleans up and raises again is not meant."""
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ExceptHandler) and is_broad(node):
                raises_again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
                comment = module.comments.get(node.lineno, "")
                if not raises_again and not re.search(r"# thread top: \S", comment):
                    yield f"{module}:{node.lineno}: a broad except without '# thread top: reason'"


def is_broad(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        kind is None or (isinstance(kind, ast.Name) and kind.id in {"Exception", "BaseException"}) for kind in caught
    )


def untyped_passing_has_a_reason(modules: Sequence[Module]) -> Iterator[str]:
    for module in modules:
        for node in ast.walk(module.tree):
            is_any = (isinstance(node, ast.Name) and node.id == "Any") or (
                isinstance(node, ast.Attribute) and node.attr == "Any"
            )
            if is_any and not re.search(r"# (?!noqa|type:)\S", module.comments.get(node.lineno, "")):
                yield f"{module}:{node.lineno}: Any without a reason on its line"
        for holder in ast.walk(module.tree):
            if isinstance(holder, (ast.Module, ast.ClassDef)):
                yield from public_kwargs_without_seam(module, holder)


def public_kwargs_without_seam(module: Module, holder: ast.Module | ast.ClassDef) -> Iterator[str]:
    for node in holder.body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.args.kwarg is None:
            continue
        is_private = node.name.startswith("_") and not node.name.endswith("__")
        signature = range(node.lineno, max(node.body[0].lineno, node.lineno + 1))
        if not is_private and not any(re.search(r"# seam: \S", module.comments.get(at, "")) for at in signature):
            yield f"{module}:{node.lineno}: {node.name} takes **{node.args.kwarg.arg} without '# seam: reason'"


def a_suppression_has_a_reason(modules: Sequence[Module]) -> Iterator[str]:
    for module in modules:
        for line, comment in module.comments.items():
            if re.search(r"type:\s*ignore", comment) and not re.search(r"# type: ignore\[[\w, -]+\]  # \S", comment):
                yield f"{module}:{line}: write '# type: ignore[code]  # reason'"
            if re.search(r"noqa", comment) and not re.search(r"# noqa: [A-Z0-9, ]+  # \S", comment):
                yield f"{module}:{line}: write '# noqa: CODE  # reason'"
            if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", comment) and not re.search(r"TODO\(#\d+\)", comment):
                yield f"{module}:{line}: write TODO(#issue), or do it"


def nothing_is_pickled(modules: Sequence[Module]) -> Iterator[str]:
    for module, imported in all_imports(modules):
        if (name := imported.target.split(".")[0]) in {"cloudpickle", "dill", "marshal", "pickle", "shelve"}:
            yield f"{module}:{imported.line}: {name} runs what it reads"


RULES = (
    every_module_has_a_layer,
    imports_go_down,
    imports_have_no_cycle,
    layers_keep_out_what_is_not_theirs,
    heavy_imports_wait_until_chosen,
    sizes_stay_in_budget,
    comments_are_few_and_there,
    a_broad_except_names_its_thread,
    untyped_passing_has_a_reason,
    a_suppression_has_a_reason,
    nothing_is_pickled,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_keeps(rule):
    violations = list(rule(modules_of(SRC)))
    assert not violations, "\n".join(violations)


def write_tree(src: Path, files: dict[str, str]) -> list[Module]:
    for name, text in files.items():
        path = src / "qkvault" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return modules_of(src)


PARAMETERS = ", ".join("abcdef")
BROKEN = [
    (every_module_has_a_layer, {"helpers.py": ""}, "no line of LAYERS names it"),
    (imports_go_down, {"types.py": "import qkvault.errors, qkvault.pool", "pool.py": ""}, "types imports pool"),
    (imports_go_down, {"pool.py": "def f():\n    from qkvault import engine", "engine.py": ""}, "pool imports engine"),
    (imports_go_down, {"store/index.py": "import qkvault.store.driver", "store/driver.py": ""}, "a higher layer"),
    (imports_go_down, {"client.py": "import qkvault.tiers.disk"}, "client speaks the protocol only"),
    (imports_go_down, {"engine.py": "def f():\n    import qkvault.integrations.vllm"}, "only cli does"),
    (imports_go_down, {"cli/app.py": "import qkvault.integrations.vllm"}, "inside a function"),
    (
        imports_go_down,
        {"integrations/vllm/worker.py": "import qkvault.integrations.sglang"},
        "never import one another",
    ),
    (imports_go_down, {"engine.py": "import qkvault.testing"}, "testing is for tests"),
    (imports_go_down, {"testing/fakes.py": "import qkvault.engine"}, "a higher layer"),
    (imports_go_down, {"__init__.py": "import qkvault.engine"}, "loads its names lazily"),
    (
        imports_have_no_cycle,
        {"tokens.py": "import qkvault.layout", "layout.py": "def f():\n    import qkvault.tokens"},
        "tokens -> layout",
    ),
    (layers_keep_out_what_is_not_theirs, {"store/index.py": "from time import monotonic"}, "without time"),
    (layers_keep_out_what_is_not_theirs, {"store/index.py": "import qkvault.logs", "logs.py": ""}, "qkvault.logs"),
    (layers_keep_out_what_is_not_theirs, {"store/driver.py": "import torch"}, "torch does not belong"),
    (layers_keep_out_what_is_not_theirs, {"tiers/disk.py": "def f():\n    import torch.nn"}, "torch does not belong"),
    (heavy_imports_wait_until_chosen, {"wire/tcp.py": "from zmq import Context"}, "import zmq inside the function"),
    (heavy_imports_wait_until_chosen, {"layout.py": "import torch"}, "import torch inside the function"),
    (sizes_stay_in_budget, {"types.py": "x = 1\n" * 401}, "a file of 401 lines"),
    (sizes_stay_in_budget, {"types.py": "def f():\n" + "    x = 1\n" * 60}, "f has 61 lines"),
    (sizes_stay_in_budget, {"types.py": "class C:\n" + "    x = 1\n" * 300}, "C has 301 lines"),
    (sizes_stay_in_budget, {"types.py": f"def f({PARAMETERS}): ..."}, "f has 6 positional parameters"),
    (sizes_stay_in_budget, {f"tiers/t{n}.py": "x = 1\n" * 400 for n in range(56)}, "the tree has 22400 lines"),
    (comments_are_few_and_there, {f"tiers/t{n}.py": "x = 1\n" * 400 for n in range(4)}, "0.0% of the lines"),
    (comments_are_few_and_there, {f"tiers/t{n}.py": "x = 1  # one\n" * 400 for n in range(4)}, "100.0% of the lines"),
    (a_broad_except_names_its_thread, {"pool.py": "try:\n    f()\nexcept Exception:\n    pass"}, "a broad except"),
    (a_broad_except_names_its_thread, {"pool.py": "try:\n    f()\nexcept:  # thread top:\n    pass"}, "a broad except"),
    (untyped_passing_has_a_reason, {"pool.py": "x: Any = 1"}, "Any without a reason"),
    (untyped_passing_has_a_reason, {"pool.py": "x: typing.Any = 1  # noqa: X1"}, "Any without a reason"),
    (untyped_passing_has_a_reason, {"pool.py": "class C:\n    def __init__(self, **kw): ..."}, "__init__ takes **kw"),
    (a_suppression_has_a_reason, {"pool.py": "x = y  # type: ignore[attr-defined]"}, "# type: ignore[code]"),
    (a_suppression_has_a_reason, {"pool.py": "x = y  # noqa: S108"}, "# noqa: CODE"),
    (a_suppression_has_a_reason, {"pool.py": "x = y  # TODO: later"}, "TODO(#issue)"),
    (nothing_is_pickled, {"wire/codec.py": "def f():\n    from pickle import loads"}, "pickle runs what it reads"),
]


@pytest.mark.parametrize(("rule", "files", "violation"), BROKEN)
def test_a_rule_sees(rule, files, violation, tmp_path):
    found = list(rule(write_tree(tmp_path, files)))
    assert any(violation in line for line in found), found


KEPT = {
    "__init__.py": "if TYPE_CHECKING:\n    from qkvault.engine import CacheEngine",
    "pool.py": "try:\n    f()\nexcept BaseException:\n    clean_up()\n    raise",
    "store/driver.py": "import threading\nimport time\nfrom qkvault.store import index",
    "store/index.py": "try:\n    f()\nexcept Exception:  # thread top: logged with its job\n    pass",
    "engine.py": "import torch\nfrom typing import Any\nx: Any = 1  # what the engine passes",
    "cli/app.py": "import typer\ndef f():\n    import qkvault.integrations.vllm",
    "integrations/vllm/worker.py": (
        "import vllm\nfrom qkvault.integrations.vllm import layouts\n"
        "def f(self, a, b, c, d, e, *, g,\n      **kwargs):  # seam: vLLM passes what it likes\n    return g\n"
        "x = y  # type: ignore[attr-defined]  # vLLM is untyped\nz = y  # noqa: S108  # not a file\n# TODO(#7): more\n"
    ),
    "integrations/vllm/layouts.py": "",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_lets_pass(rule, tmp_path):
    assert list(rule(write_tree(tmp_path, KEPT))) == []


# What an import costs


def heavy_modules_after(src: Path, names: Sequence[str]) -> set[str]:
    """Which of HEAVY a fresh interpreter has loaded after importing ``names``, through whatever they import."""
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint(*sys.modules)"
    command = [sys.executable, "-c", code, *names]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(src)}
    )
    assert done.returncode == 0, done.stderr
    return HEAVY & {name.split(".")[0] for name in done.stdout.split()}


def test_what_does_not_ask_for_torch_or_a_service_loads_none():
    below = [
        module.name
        for module in modules_of(SRC)
        if LEVELS.get(longest_prefix(module.name, LEVELS) or "", 0) <= LEVELS["client"]
        and not is_within(module.name, "testing", *HEAVY_AT_TOP)
    ]
    assert heavy_modules_after(SRC, [f"qkvault.{name}".rstrip(".") for name in below]) == set()


def test_an_import_through_another_module_is_seen(tmp_path):
    write_tree(tmp_path, {"__init__.py": "", "pool.py": "import innocent"})
    (tmp_path / "innocent.py").write_text("import torch")
    (tmp_path / "torch.py").write_text("")
    assert heavy_modules_after(tmp_path, ["qkvault.pool"]) == {"torch"}


def test_the_public_names_are_those():
    """A name that comes or goes is a change that users see: it goes into the changelog too."""
    import qkvault

    assert frozenset(qkvault.__all__) == PUBLIC


def test_every_public_name_is_there():
    pytest.importorskip("torch", reason="some of them stand on torch")
    import qkvault

    assert [name for name in sorted(PUBLIC) if not hasattr(qkvault, name)] == []
