"""What installing the package does to an environment, and what the package brings along."""

import json
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = {"numpy", "msgspec", "pyyaml", "prometheus-client", "psutil", "typer", "rich"}


def test_core_requirements_are_only_what_a_vllm_environment_has_and_are_never_capped():
    """The core install needs seven packages that vLLM brings too, none of them with an upper bound."""
    requirements = [r for r in metadata.requires("qkvault") or [] if "extra ==" not in r]
    names = {requirement.split(">")[0].split("=")[0].strip() for requirement in requirements}
    assert names == CORE
    assert not [requirement for requirement in requirements if "<" in requirement or "==" in requirement]


@pytest.mark.vllm
def test_installing_beside_vllm_changes_no_installed_version(tmp_path):
    """B132: the resolver, asked to install us beside vLLM without an index, would install nothing else."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-build-isolation", "--quiet"]
    found = subprocess.run([*command, "--report", report, ROOT], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    planned = {item["metadata"]["name"].lower() for item in json.loads(report.read_text())["install"]}
    assert planned == {"qkvault"}


def test_the_source_distribution_is_a_whole_checkout(tmp_path):
    """B493: it lacked what `make setup` runs, so that no test with a model ran from it."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode != 0:
        pytest.skip("not a checkout")
    builder = pytest.importorskip("hatchling.builders.sdist").SdistBuilder(str(ROOT))
    (path,) = builder.build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(path) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert set(tracked.stdout.split()) <= held
    assert not [name for name in held if "__pycache__" in name or name.startswith((".venv", ".cache"))]


def test_the_command_and_the_connector_are_found_by_their_entry_points():
    """``qkvault`` is a command, and vLLM finds the connector as a general plugin."""
    entries = metadata.distribution("qkvault").entry_points
    assert entries.select(group="console_scripts", name="qkvault")["qkvault"].value == "qkvault.cli.app:main"
    assert entries.select(group="vllm.general_plugins")["qkvault"].value == "qkvault.integrations.vllm:register"
