"""`qkvault config`: what is in force, and where it came from."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from qkvault.cli.app import app
from qkvault.config import Config, load
from qkvault.config_page import schema_markdown
from qkvault.errors import ConfigError
from qkvault.server.server import Server

runner = CliRunner()


@pytest.fixture
def file(tmp_path):
    """A settings file with two settings."""
    path = tmp_path / "qkvault.yaml"
    path.write_text("chunk_size: 64\nram_bytes: 8GiB\n")
    return path


def test_show_names_the_source_of_every_value(file, monkeypatch):
    """The effective configuration is shown whole, each value with the source that decided it."""
    monkeypatch.setenv("QKVAULT_CONFIG", str(file))
    monkeypatch.setenv("QKVAULT_RAM_BYTES", "4GiB")
    result = runner.invoke(app, ["config", "show", "--set", "lease_seconds=2m", "--set", "metrics=no", "--json"])
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert list(shown) == list(Config.__struct_fields__)
    assert shown["chunk_size"] == {"value": 64, "source": f"file {file}"}
    assert shown["ram_bytes"] == {"value": 4 << 30, "source": "env QKVAULT_RAM_BYTES"}
    assert shown["lease_seconds"] == {"value": 120.0, "source": "cli"}
    assert shown["metrics"] == {"value": False, "source": "cli"}
    assert shown["disk_path"] == {"value": None, "source": "default"}


def test_show_writes_a_table_for_people(file):
    """Sizes and booleans are shown as they can be written, one setting a line however long its source."""
    result = runner.invoke(app, ["config", "show", "--file", str(file)])
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["setting", "value", "source"]
    assert ["ram_bytes", "8GiB", "file", str(file)] in lines
    assert ["hot_cache", "true", "default"] in lines
    assert ["address", "default"] in lines
    assert len(lines) == 1 + len(Config.__struct_fields__)


def test_show_refuses_what_is_wrong():
    """A wrong flag is code 2 and a line that names it."""
    result = runner.invoke(app, ["config", "show", "--set", "ram_bytes=lots"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("qkvault: ram_bytes='lots' (cli): expected bytes")
    result = runner.invoke(app, ["config", "show", "--set", "ram_bytes"])
    assert (result.exit_code, result.stderr) == (2, "qkvault: --set 'ram_bytes': expected NAME=VALUE\n")


@pytest.mark.parametrize("setting", ["token:geheim", "token geheim", " token: geheim"])
def test_a_token_without_an_equals_sign_is_not_shown(setting):
    """B540: only the name is repeated."""
    result = runner.invoke(app, ["config", "show", "--set", setting])
    assert (result.exit_code, result.stderr) == (2, "qkvault: --set 'token': expected NAME=VALUE\n")


def test_validate_accepts_a_good_file(file):
    """A good file is code 0, and what it sets is listed."""
    result = runner.invoke(app, ["config", "validate", str(file)])
    assert (result.exit_code, result.stdout) == (0, f"{file}: fine, sets chunk_size, ram_bytes\n")
    result = runner.invoke(app, ["config", "validate", str(file), "--json"])
    assert json.loads(result.stdout) == {"file": str(file), "settings": ["chunk_size", "ram_bytes"]}


def test_validate_looks_at_the_file_alone(file, monkeypatch):
    """A broken environment does not make a good file bad."""
    monkeypatch.setenv("QKVAULT_CHUNK_SIZE", "many")
    assert runner.invoke(app, ["config", "validate", str(file)]).exit_code == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chunk_sise: 64", "did you mean 'chunk_size'?"),
        ("max_local_cpu_size: 5", "LMCache's max_local_cpu_size is called ram_bytes here"),
        ("hot_cache: maybe", "hot_cache='maybe'"),
    ],
)
def test_validate_refuses_a_bad_file(file, text, message):
    """A bad file is code 2 and one line that says what is wrong."""
    file.write_text(text)
    result = runner.invoke(app, ["config", "validate", str(file)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("listen: tcp://0.0.0.0:9400", "other machines reach it"),
        ("listen: nonsense", "expected unix:///absolute/path"),
        ("http: nonsense", "expected host:port"),
        ("tls_cert_path: /x", "tls_key_path is not"),
        ("listen: tcp://127.0.0.1:0\ntls_cert_path: /x\ntls_key_path: /x", "No such file"),
        ("cache_policy: no.such:Thing", "cannot be imported: ModuleNotFoundError"),
        ("cache_policy: collections:OrderedDict", "is no class derived from Policy"),
        ("events_endpoint: tcp://0.0.0.0:5557", "events tell the tokens"),
        ("events_endpoint: nonsense", "expected tcp://host:port or ipc:///path"),
        ("disk_path: {file}", "no directory that this user can write to"),
    ],
)
def test_validate_refuses_what_a_server_would(file, text, message):
    """B541: in the words of the server."""
    file.write_text(text.format(file=file))
    result = runner.invoke(app, ["config", "validate", str(file)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    with pytest.raises(ConfigError) as refused:
        Server(load(file, env={}, cli={"ram_bytes": "4MiB", "prefault": False}))
    assert result.stderr == f"qkvault: {refused.value}\n"


def test_validate_makes_nothing_and_listens_nowhere(file, monkeypatch, tmp_path):
    """B541: neither the folder of the default address, nor that of a disk, nor a socket."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    file.write_text(
        f"disk_path: {tmp_path}/disk\nhttp: unix://{tmp_path}/http\nevents_endpoint: ipc://{tmp_path}/events"
    )
    assert runner.invoke(app, ["config", "validate", str(file)]).exit_code == 0
    assert list(tmp_path.iterdir()) == [file]


def test_validate_takes_the_settings_of_an_engine_whose_server_is_elsewhere(file):
    """B541: no server of ours is to listen at its address."""
    file.write_text("address: tcp://cache.example.org:9400\ntoken: geheim\ntls_ca_path: /ca.pem\n")
    assert runner.invoke(app, ["config", "validate", str(file)]).exit_code == 0


def test_validate_refuses_a_missing_file(tmp_path):
    """A file that is not there is never an empty one."""
    result = runner.invoke(app, ["config", "validate", str(tmp_path / "gone.yaml")])
    assert result.exit_code == 2
    assert "No such file" in result.stderr


def test_schema_is_the_page_or_json_schema():
    """The schema is printed for people, and for editors, to whom "8GiB" is as good as a number."""
    assert runner.invoke(app, ["config", "schema"]).stdout == schema_markdown()
    schema = json.loads(runner.invoke(app, ["config", "schema", "--json"]).stdout)
    assert list(schema["properties"]) == list(Config.__struct_fields__)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["ram_bytes"]["type"] == ["integer", "string"]
    assert schema["properties"]["lease_seconds"]["type"] == ["number", "string"]
    assert [one["type"] for one in schema["properties"]["query_bytes"]["anyOf"]] == ["integer", "null", "string"]
    assert all(setting["description"] for setting in schema["properties"].values())
