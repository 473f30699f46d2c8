"""The command line as a whole: it starts fast, ends with one line and a code, and the package's names are lazy."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib import metadata

import pytest
from typer.testing import CliRunner

import qkvault
from qkvault.cli.app import app
from qkvault.cli.output import print_json

runner = CliRunner()

# Loaded only by the command that needs it. (pydantic is not ours to keep out: some versions of typer load it.)
NOT_FOR_HELP = {"torch", "numpy", "yaml", "rich", "prometheus_client", "psutil", "msgspec"}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The real thing, in a process of its own."""
    command = [sys.executable, "-m", "qkvault", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)


def test_help_lists_the_commands():
    """`python -m qkvault --help` works and names every command."""
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for command in ("check", "config", "doctor", "version"):
        assert f"  {command} " in done.stdout


def test_without_a_command_help_is_shown():
    """Who types the name alone is told what there is."""
    done = run()
    assert "Commands:" in done.stdout + done.stderr
    assert done.returncode == 2


@pytest.mark.parametrize("arguments", [["--help"], ["check", "--help"], ["config", "show", "--help"], ["version"]])
def test_help_and_version_load_nothing_heavy(arguments):
    """Help is quick because what it does not need is not imported."""
    code = (
        "import sys\n"
        "from qkvault.cli.app import main\n"
        "try:\n    main()\n"
        "finally:\n    print(*set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert NOT_FOR_HELP & set(done.stderr.split()) == set()


def test_version_is_the_packages():
    """The version comes from the installed package."""
    result = runner.invoke(app, ["version", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"qkvault": qkvault.__version__, "python": platform.python_version()}
    text = runner.invoke(app, ["version"]).stdout
    assert text == f"qkvault {qkvault.__version__} (Python {platform.python_version()})\n"


def test_a_wrong_setting_is_one_line_and_code_2():
    """An error of the user's is one clear line on stderr, without a traceback, and exit code 2."""
    done = run("config", "show", QKVAULT_CHUNK_SISE="64")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "qkvault: unknown setting 'QKVAULT_CHUNK_SISE' (env QKVAULT_CHUNK_SISE): did you mean 'QKVAULT_CHUNK_SIZE'?\n"
    )


def test_what_is_no_number_in_json_is_never_written():
    """B542: `Infinity` is for Python alone."""
    with pytest.raises(ValueError, match="JSON"):
        print_json({"seconds": float("inf")})


@pytest.mark.parametrize("command", ["config show", "check /proc/self/fd", "lookup -"])
@pytest.mark.parametrize("closed", ["<&-", ">&-", ">/dev/full", "| head -c 1"])
def test_no_command_ends_with_a_traceback_when_it_cannot_write_or_read(tmp_path, command, closed):
    """B543: what ends it is one line at most, and a code."""
    script = f"{sys.executable} -m qkvault {command} {closed}; exit ${{PIPESTATUS[0]}}"
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", script], input="", capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode in {0, 1, 2}
    assert done.stderr.count("\n") <= 1
    assert done.stderr == "" or done.stderr.startswith("qkvault: ")


def test_a_name_that_is_no_text_can_be_printed(tmp_path):
    """B543: of a file, where the terminal takes only UTF-8."""
    path = tmp_path / os.fsdecode(b"\xff.yaml")
    path.write_text("chunk_size: 64")
    done = run("config", "validate", str(path), PYTHONIOENCODING="utf-8:strict")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/?.yaml: fine, sets chunk_size\n")


def test_an_unknown_command_is_code_2():
    """A command that does not exist is a usage error."""
    done = run("konfig")
    assert done.returncode == 2
    assert "No such command 'konfig'" in done.stderr


# The package


def test_importing_the_package_loads_nothing():
    """`import qkvault` alone loads no module of ours or anybody's that is not needed to say so."""
    code = "import sys, qkvault; print([name for name in sys.modules if name.startswith(('qkvault.', 'torch'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["CacheKind", "Config", "StatsMonitor"])
def test_a_light_name_comes_without_torch(name):
    """Settings, statistics and vocabulary are there for programs without torch."""
    code = f"import sys, qkvault; print(qkvault.{name}.__name__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [name, "False"]


def test_the_public_names_are_pinned():
    """A public name that comes or goes is a decision."""
    assert qkvault.__all__ == [
        "CacheEngine",
        "CacheEngineBuilder",
        "CacheEngineKey",
        "CacheKind",
        "ChunkedTokenDatabase",
        "Config",
        "StatsMonitor",
        "__version__",
    ]
    assert dir(qkvault) == sorted(qkvault.__all__)


@pytest.mark.parametrize("name", qkvault.__all__)
def test_every_public_name_can_be_loaded(name):
    """What the package offers is there, and the same object every time."""
    pytest.importorskip("torch", reason="the engine stands on torch")
    assert getattr(qkvault, name) is getattr(qkvault, name)


def test_any_other_name_is_an_attribute_error():
    """A misspelt name fails as in any module."""
    with pytest.raises(AttributeError, match="module 'qkvault' has no attribute 'CacheEngin'"):
        _ = qkvault.CacheEngin


def test_a_source_tree_has_a_version_too(monkeypatch):
    """Not installed, the package still starts and says that it does not know its version."""

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.delitem(vars(qkvault), "__version__", raising=False)
    assert qkvault.__version__ == "0+unknown"
    monkeypatch.delitem(vars(qkvault), "__version__", raising=False)
