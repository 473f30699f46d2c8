"""Settings: where a value comes from, how text is read, and that nothing wrong is ever accepted."""

from __future__ import annotations

import re
import subprocess
import sys

import msgspec
import pytest

from qkvault.config import CACHE_POLICIES, Config, load
from qkvault.config_names import LMCACHE_KEYS
from qkvault.config_page import schema_markdown
from qkvault.errors import ConfigError
from qkvault.policies import POLICIES
from qkvault.units import GIB, MIB

FIELDS = Config.__struct_fields__


@pytest.fixture
def write(tmp_path):
    """Write a settings file and return its path."""

    def write(text: str):
        path = tmp_path / "qkvault.yaml"
        path.write_text(text)
        return path

    return write


def refusal(**sources) -> str:
    """What `load` says when it refuses."""
    with pytest.raises(ConfigError) as caught:
        load(**{"env": {}, **sources})
    return str(caught.value)


# Sources and their order


def test_without_sources_every_value_is_the_default_and_says_so():
    """Nothing set gives the documented defaults, and each says `default`."""
    loaded = load(env={})
    assert loaded.config == Config()
    assert loaded.sources == dict.fromkeys(FIELDS, "default")


def test_the_defaults_are_those():
    """A default that changes is a change that users see."""
    assert msgspec.structs.asdict(Config()) == {
        "instance_id": "default",
        "chunk_size": 256,
        "hash_algorithm": "sha256",
        "ram_bytes": 5 * GIB,
        "query_bytes": None,
        "cache_policy": "lru",
        "hot_cache": True,
        "start_frozen": False,
        "prefault": True,
        "disk_path": None,
        "disk_bytes": 50 * GIB,
        "disk_workers": 4,
        "disk_direct_io": True,
        "disk_keep": True,
        "drain_seconds": 60.0,
        "save_decode": True,
        "save_partial_chunks": True,
        "min_hit_tokens": 0,
        "load_deadline_seconds": 10.0,
        "lease_seconds": 60.0,
        "autostart": False,
        "timeout_seconds": 1.0,
        "token": "",
        "tls_ca_path": None,
        "listen": "",
        "http": "",
        "tls_cert_path": None,
        "tls_key_path": None,
        "insecure": False,
        "reap_timeout_seconds": 120.0,
        "registration_grace_seconds": 3600.0,
        "events_endpoint": "",
        "events_replay_endpoint": "",
        "events_topic": "",
        "address": None,
        "transfer_intermediate_tensors": False,
        "q_requests": "all",
        "q_layers": "",
        "q_ring_blocks": 0,
        "q_ring_depth": 2,
        "model_revision": "",
        "log_level": "info",
        "metrics": True,
    }


def test_the_default_chunk_has_256_tokens():
    """A chunk is 256 tokens, with a configuration and without one (B 13)."""
    assert Config().chunk_size == load(env={}).config.chunk_size == 256


def test_a_later_source_wins(write):
    """Default, file, environment, vLLM, command line: each beats those before it, and is named as the source."""
    names = ["disk_workers", "min_hit_tokens", "model_revision", "instance_id", "chunk_size"]
    path = write("min_hit_tokens: 1\nmodel_revision: file\ninstance_id: file\nchunk_size: 16\n")
    env = {"QKVAULT_MODEL_REVISION": "env", "QKVAULT_INSTANCE_ID": "env", "QKVAULT_CHUNK_SIZE": "32"}
    vllm = {"qkvault.instance_id": "vllm", "qkvault.chunk_size": 48}
    loaded = load(path, env=env, vllm=vllm, cli={"chunk_size": "64"})
    assert [getattr(loaded.config, name) for name in names] == [4, 1, "env", "vllm", 64]
    assert [loaded.sources[name] for name in names] == [
        "default",
        f"file {path}",
        "env QKVAULT_MODEL_REVISION",
        "vllm",
        "cli",
    ]


def test_the_environment_names_the_file(write):
    """QKVAULT_CONFIG is read when no path is given."""
    path = write("chunk_size: 64")
    loaded = load(env={"QKVAULT_CONFIG": str(path)})
    assert (loaded.config.chunk_size, loaded.sources["chunk_size"]) == (64, f"file {path}")


def test_a_path_given_beats_the_one_in_the_environment(write, tmp_path):
    """With a path in hand QKVAULT_CONFIG is not even read."""
    assert load(write("chunk_size: 64"), env={"QKVAULT_CONFIG": str(tmp_path / "gone")}).config.chunk_size == 64


def test_the_process_environment_is_the_default_one(monkeypatch):
    """Without `env` the variables are those of the process."""
    monkeypatch.setenv("QKVAULT_RAM_BYTES", "8GiB")
    assert load().config.ram_bytes == 8 * GIB


def test_a_flag_that_was_not_given_changes_nothing():
    """None on the command line leaves what weaker sources said."""
    loaded = load(env={"QKVAULT_CHUNK_SIZE": "64"}, cli={"chunk_size": None})
    assert (loaded.config.chunk_size, loaded.sources["chunk_size"]) == (64, "env QKVAULT_CHUNK_SIZE")


def test_keys_of_other_products_in_vllms_dictionary_are_ignored():
    """Only the prefix `qkvault.` is ours; the dictionary is shared."""
    vllm = {"lmcache.mp.port": 5555, "chunk_size": 512, "qkvault.chunk_size": 64, "shared_storage_path": "/x"}
    assert load(env={}, vllm=vllm).config.chunk_size == 64


@pytest.mark.parametrize("key", ["qkvault", "qkvault_ram_bytes", "qkvault/ram_bytes", "QKVault.ram_bytes"])
def test_a_misspelt_prefix_in_vllms_dictionary_is_refused(key):
    """What can only be meant for us is never silently ignored."""
    assert refusal(vllm={key: "8GiB"}) == f"unknown setting {key!r} (vllm): write it as 'qkvault.<setting>'"


@pytest.mark.parametrize(
    "name",
    [
        "QKVAULT_SERVICE_HOST",
        "QKVAULT_SERVICE_PORT",
        "QKVAULT_SERVICE_PORT_HTTP",
        "QKVAULT_PORT",
        "QKVAULT_PORT_9400_TCP",
        "QKVAULT_PORT_9400_TCP_ADDR",
        "QKVAULT_SERVER_SERVICE_HOST",
        "QKVAULT_SERVER_PORT_9400_TCP_PROTO",
    ],
)
def test_variables_that_kubernetes_makes_for_a_service_are_no_settings(name):
    """A Service called qkvault puts variables with our prefix into every container."""
    assert load(env={name: "tcp://10.0.0.7:9400"}).config == Config()


def test_no_setting_looks_like_a_variable_of_kubernetes():
    """The exception for Kubernetes hides none of our own names."""
    env = {f"QKVAULT_{name.upper()}": "surely not" for name in FIELDS}
    assert len(env) == len(FIELDS)
    for name, text in env.items():
        try:
            said = str(load(env={"QKVAULT_EVENTS_ENDPOINT": "for its replays", name: text}).sources)
        except ConfigError as error:
            said = str(error)
        assert f"env {name}" in said


# Files


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "null\n"])
def test_an_empty_file_sets_nothing(write, text):
    """A file without settings is a file of defaults."""
    assert load(write(text), env={}).config == Config()


def test_a_missing_file_is_an_error(tmp_path):
    """A file that is named and is not there stops the start; the message says who named it."""
    path = tmp_path / "gone.yaml"
    assert refusal(path=path).startswith(f"cannot read the settings in {path} (given): [Errno 2]")
    assert f"{path} (from QKVAULT_CONFIG)" in refusal(env={"QKVAULT_CONFIG": str(path)})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"chunk_size: [", "cannot read the settings"),
        (b"\xff\xfe", "cannot read the settings"),
        (b"a: 2024-13-45", "cannot read the settings"),
        (b"? [a]\n: b", "cannot read the settings"),
        (b"- chunk_size", "holds no settings"),
        (b"64", "holds no settings"),
        (b"chunk_size: 64\nchunk_size: 32", "sets chunk_size more than once"),
        (b"[" * 9999, "cannot read the settings"),
        (b"a: !!bool maybe", "cannot read the settings"),
        (b"a: !!timestamp soon", "cannot read the settings"),
        (b"a: b\n\tc: d", "found character '\\t' that cannot start any token in line 2"),
        (b"64: 32", "unknown setting '64'"),
        (b"chunk_size: {a: 1}", "expected int, got object"),
        (b"model_revision: 7", "expected str, got int; put it in quotes"),
        (b"model_revision: 2024-01-01", "put it in quotes"),
        (b"listen: [unix:///a, tcp://b:1]", "expected str, got array; write one text, separated by commas"),
        (b"q_layers: [0, 1]", "expected str, got array; write one text, separated by commas"),
        (b"disk_path: 7", "put it in quotes"),
    ],
)
def test_a_file_that_cannot_be_understood_is_refused_in_one_line(write, content, message):
    """Broken YAML, repeated keys and values of another kind are errors that name the file."""
    path = write("")
    path.write_bytes(content)
    said = refusal(path=path)
    assert message in said
    assert str(path) in said
    assert "\n" not in said


def test_a_directory_is_no_settings_file(tmp_path):
    """Reading a directory fails as any unreadable file does."""
    assert "cannot read the settings" in refusal(path=tmp_path)


# Unknown keys


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"env": {"QKVAULT_LEASE": "1"}}, "'QKVAULT_LEASE' (env QKVAULT_LEASE): did you mean 'QKVAULT_LEASE_SECONDS'?"),
        ({"vllm": {"qkvault.chunksize": 1}}, "'qkvault.chunksize' (vllm): did you mean 'qkvault.chunk_size'?"),
        ({"cli": {"hot-cache": "1"}}, "'hot-cache' (cli): did you mean 'hot_cache'?"),
        ({"cli": {"CHUNK_SIZE": "1"}}, "'CHUNK_SIZE' (cli): did you mean 'chunk_size'?"),
        ({"cli": {"zzz": "1"}}, "'zzz' (cli): expected one of instance_id, chunk_size"),
    ],
)  # fmt: skip
def test_a_misspelt_key_is_refused_with_the_right_name(sources, message):
    """B131: an unknown key stops the start and names the nearest right one, spelled for its source."""
    assert refusal(**sources).startswith(f"unknown setting {message}")


def test_a_misspelt_key_in_a_file_is_refused_with_the_right_name(write):
    """A typing error in the file is never a default."""
    path = write("chunk_sise: 64")
    assert refusal(path=path) == f"unknown setting 'chunk_sise' (file {path}): did you mean 'chunk_size'?"


@pytest.mark.parametrize("name", sorted(LMCACHE_KEYS))
def test_a_key_of_lmcache_is_refused_with_what_ours_is_called(name, write):
    """Who comes from LMCache is told our name, or that there is none."""
    ours, note = LMCACHE_KEYS[name]
    said = refusal(path=write(f"{name}: 1"))
    expected = (
        f"LMCache's {name} is called {ours} here" if ours else f"LMCache's {name} is not supported here; remove it"
    )
    assert f"{expected}{', ' if note else ''}{note}" in said
    assert name not in FIELDS
    assert ours is None or ours in FIELDS


def test_a_size_in_gigabytes_is_explained():
    """LMCache counted in GB what we count in bytes."""
    assert refusal(env={"QKVAULT_MAX_LOCAL_CPU_SIZE": "5.0"}) == (
        "unknown setting 'QKVAULT_MAX_LOCAL_CPU_SIZE' (env QKVAULT_MAX_LOCAL_CPU_SIZE): LMCache's max_local_cpu_size "
        "is called QKVAULT_RAM_BYTES here, in bytes, where theirs was in GB: 5.0 becomes 5GiB"
    )


@pytest.mark.parametrize(("name", "value"), [("chunk_size", 512), ("cache_policy", "LRU"), ("cache_policy", "FIFO")])
def test_keys_that_lmcache_has_too_mean_the_same(name, value):
    """`chunk_size` and `cache_policy` may be taken over, capital letters and all."""
    taken = getattr(load(env={}, cli={name: value}).config, name)
    assert taken == (value.lower() if isinstance(value, str) else value)


# Values


@pytest.mark.parametrize(
    ("name", "raw", "expected"),
    [
        ("ram_bytes", "lots", "expected bytes: a whole number, or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB"),
        ("ram_bytes", "8G", "expected bytes"),
        ("ram_bytes", "-8GiB", "expected bytes"),
        ("ram_bytes", "5", "expected int >= 4096; a bare number is bytes, '5GiB' is not"),
        ("ram_bytes", 5.5, "expected int, got float"),
        ("ram_bytes", True, "expected int, got bool"),
        ("ram_bytes", None, "expected int, got null"),
        ("lease_seconds", "soon", "expected seconds, or a number with us, ms, s, m or h"),
        ("lease_seconds", "0", "expected float > 0.0"),
        ("lease_seconds", "25h", "expected float <= 86400.0"),
        ("lease_seconds", float("nan"), "expected float > 0.0"),
        ("lease_seconds", float("inf"), "expected float <= 86400.0"),
        ("ram_bytes", "99999999999TiB", "expected int <= 4611686018427387903"),
        ("query_bytes", 1 << 62, "expected int <= 4611686018427387903"),
        ("reap_timeout_seconds", "9000h", "expected float <= 31536000.0"),
        ("reap_timeout_seconds", float("inf"), "expected float <= 31536000.0"),
        ("registration_grace_seconds", 1e300, "expected float <= 31536000.0"),
        ("chunk_size", 1 << 20, "expected int <= 262144"),
        ("hot_cache", "maybe", "expected one of true, yes, on, 1, false, no, off, 0"),
        ("hot_cache", 2, "expected one of true"),
        ("chunk_size", "many", "expected a whole number"),
        ("chunk_size", "1.5", "expected a whole number"),
        ("chunk_size", "-16", "expected int >= 1"),
        ("chunk_size", "0", "expected int >= 1"),
        ("chunk_size", "100", "multiple of 16"),
        ("disk_workers", "0", "expected int >= 1"),
        ("min_hit_tokens", "-1", "expected int >= 0"),
        ("hash_algorithm", "md5", "expected one of sha256, blake3, builtin"),
        ("log_level", "loud", "expected one of debug, info, warning, error"),
        ("instance_id", "", "expected str matching regex"),
        ("instance_id", "../escape", "expected str matching regex"),
        ("disk_path", "~nobody-of-that-name/x", "home directory"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_key_value_and_source(name, raw, expected):
    """A wrong value never becomes a default: the error names the key, the value, its source and what is expected."""
    if raw is not None:
        assert refusal(cli={name: raw}).startswith(f"{name}={raw!r} (cli): ")
        assert expected in refusal(cli={name: raw})
    assert refusal(vllm={f"qkvault.{name}": raw}).startswith(f"qkvault.{name}={raw!r} (vllm): ")
    assert expected in refusal(vllm={f"qkvault.{name}": raw})


@pytest.mark.parametrize("text", ['"a\\0b"', '"a\\uD800"'])
def test_text_that_no_path_can_be_is_refused(write, text):
    """B543: as a setting, before anything is asked of the system."""
    assert "expected text, without zero bytes" in refusal(path=write(f"disk_path: {text}"))
    assert "expected text, without zero bytes" in refusal(path=write(f"tls_cert_path: {text}"))


def test_text_means_the_same_in_every_source(write):
    """A size, a duration and a boolean are read alike from the file, the environment, vLLM and the command line."""
    texts = {"ram_bytes": "8GiB", "lease_seconds": "2m", "hot_cache": "off", "chunk_size": "64"}
    expected = Config(ram_bytes=8 * GIB, lease_seconds=120.0, hot_cache=False, chunk_size=64)
    path = write("".join(f"{name}: '{text}'\n" for name, text in texts.items()))
    assert load(path, env={}).config == expected
    assert load(env={f"QKVAULT_{name.upper()}": text for name, text in texts.items()}).config == expected
    assert load(env={}, vllm={f"qkvault.{name}": text for name, text in texts.items()}).config == expected
    assert load(env={}, cli=texts).config == expected


def test_numbers_and_booleans_of_yaml_and_json_are_taken_as_they_are(write):
    """Who writes a number gets that number."""
    path = write("ram_bytes: 1048576\nlease_seconds: 30\nhot_cache: false\n")
    assert load(path, env={}).config == Config(ram_bytes=MIB, lease_seconds=30.0, hot_cache=False)


@pytest.mark.parametrize("text", ["", "  "])
@pytest.mark.parametrize("name", ["disk_path", "address"])
def test_an_empty_text_switches_an_optional_setting_off(name, text, write):
    """An empty variable takes back what the file set."""
    path = write(f"{name}: {'/data' if name == 'disk_path' else 'tcp://localhost:9400'}")
    loaded = load(path, env={f"QKVAULT_{name.upper()}": text})
    assert getattr(loaded.config, name) is None
    assert loaded.sources[name] == f"env QKVAULT_{name.upper()}"


@pytest.mark.parametrize("name", ["token", "http", "listen", "q_layers", "model_revision"])
def test_a_text_that_was_left_blank_in_a_file_was_to_be_put_in_quotes(name, write):
    """It is empty, as the page says of the setting; so is null of vLLM's JSON."""
    loaded = load(write(f"{name}:\n"), env={})
    assert getattr(loaded.config, name) == ""
    assert loaded.sources[name].startswith("file ")
    assert getattr(load(env={}, vllm={f"qkvault.{name}": None}).config, name) == ""


@pytest.mark.parametrize("text", ["instance_id:", "http: [a]", "http: {a: b}", "disk_path: [a]"])
def test_what_quotes_do_not_mend_was_to_be_put_in_quotes(text, write):
    """What is expected, and what is there, is all that is said."""
    assert re.fullmatch(r"[^;]* expected str( \| null)?, got (null|array|object)", refusal(path=write(text)))


def test_a_disk_path_is_made_absolute(monkeypatch, tmp_path):
    """The home directory is filled in, and a relative path no longer depends on the working directory."""
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.chdir(tmp_path)
    assert load(env={"QKVAULT_DISK_PATH": "~/kv"}).config.disk_path == "/home/somebody/kv"
    assert load(env={"QKVAULT_DISK_PATH": "kv"}).config.disk_path == str(tmp_path / "kv")


# Secrets


@pytest.mark.parametrize(
    "text",
    ["token: 5317008", "token: [geheim]", "token: @geheim", 'token: "geheim', "token: *geheim", "token: !geheim",
     "token: !!int geheim", "token: !!bool geheim", "token: !!timestamp geheim", "token: {geheim: ", "token:geheim",
     "chunk_size: 64\ntoken:geheim", "token: geheim: geheim", "tokn: geheim"],
)  # fmt: skip
def test_no_error_about_a_file_shows_the_token(write, text):
    """B540: neither one of ours, which shows values, nor one of YAML, which shows the line."""
    said = refusal(path=write(text))
    assert not {"geheim", "5317008"} & set(re.findall(r"\w+", said)), said


def test_a_token_of_another_type_is_refused_without_showing_it(write):
    """B540: it is said that there is one, wherever it came from."""
    path = write("token: 5317008")
    assert refusal(path=path) == f"token=(set) (file {path}): expected str, got int; put it in quotes"
    assert refusal(vllm={"qkvault.token": 5317008}).startswith("qkvault.token=(set) (vllm): expected str")
    with pytest.raises(ConfigError, match=re.escape("token=(set): expected str, got int")):
        Config(token=5317008)


def test_settings_that_are_printed_hide_the_token():
    """B540: in a log, a traceback or a debugger."""
    assert "token=(set)" in repr(Config(token="geheim"))
    assert "geheim" not in repr(load(env={}, cli={"token": "geheim"}))
    assert "token=''" in repr(Config())


# Settings that do not go together


def test_a_cap_for_a_disk_that_is_not_there_is_refused():
    """`disk_bytes` without `disk_path` would do nothing, so it is an error, even at its default value."""
    expected = "disk_bytes is set (env QKVAULT_DISK_BYTES), and disk_path is not: there is no disk tier to cap"
    assert refusal(env={"QKVAULT_DISK_BYTES": "1GB"}) == expected
    assert refusal(env={"QKVAULT_DISK_BYTES": "50GiB"}) == expected
    with pytest.raises(ConfigError, match="there is no disk tier to cap"):
        Config(disk_bytes=GIB)
    assert load(env={"QKVAULT_DISK_BYTES": "1GB", "QKVAULT_DISK_PATH": "/data"}).config.disk_bytes == 10**9


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [("autostart", True, "address"), ("events_replay_endpoint", "ipc:///replay", "events_endpoint")],
)
def test_a_setting_that_did_nothing_without_another_was_accepted(name, value, needed):
    """B561: it is refused, and the other one is named."""
    expected = f"{name} is set, and {needed} is not: it does nothing. Set {needed}, or remove {name}"
    assert refusal(cli={name: value}) == expected
    with pytest.raises(ConfigError, match=re.escape(expected)):
        Config(**{name: value})


def test_queries_are_a_part_of_ram(write):
    """B315: `query_bytes` is no more than `ram_bytes`; empty is the default again, and 0 is none."""
    with pytest.raises(ConfigError, match="query_bytes=6442450944 is more than ram_bytes=5368709120"):
        load(env={"QKVAULT_QUERY_BYTES": "6GiB"})
    assert load(env={"QKVAULT_QUERY_BYTES": "2GiB"}).config.query_bytes == 2 * GIB
    assert load(env={"QKVAULT_QUERY_BYTES": "0"}).config.query_bytes == 0
    loaded = load(write("query_bytes: 1GiB\n"), env={"QKVAULT_QUERY_BYTES": ""})
    assert (loaded.config.query_bytes, loaded.sources["query_bytes"]) == (None, "env QKVAULT_QUERY_BYTES")
    assert refusal(env={"QKVAULT_QUERY_BYTES": "-1"}).startswith("QKVAULT_QUERY_BYTES='-1'")
    assert refusal(cli={"query_bytes": -1}).startswith("query_bytes=-1 (cli): expected int >= 0")


@pytest.mark.parametrize("path", ["file:///mnt/kv", "s3://bucket/kv", "://"])
def test_a_disk_path_is_a_path(path):
    """An address where a path belongs is an error, not a directory of that name."""
    assert refusal(cli={"disk_path": path}) == f"disk_path={path!r} (cli): expected a plain path, without a scheme"


def test_a_lease_outlives_a_load():
    """A lease that ends before a load's deadline would let chunks go while they are read."""
    assert "chunks could leave while they are being loaded" in refusal(cli={"lease_seconds": "5s"})
    assert load(env={}, cli={"lease_seconds": "5s", "load_deadline_seconds": "5s"}).config.lease_seconds == 5


@pytest.mark.parametrize(
    "address",
    [
        "unix:///run/qkvault.sock",
        "unix:///" + "x" * 106,
        "tcp://127.0.0.1:9400",
        "tcp://cache.example.org:1",
        "tcp://[::1]:65535",
        "tcp://bücher.example:1",
    ],
)
def test_an_address_is_a_socket_or_a_host_with_a_port(address):
    """Addresses that can be connected to are taken."""
    assert Config(address=address).address == address


@pytest.mark.parametrize(
    "address",
    [
        "localhost:9400",
        "unix://relative.sock",
        "unix:///" + "x" * 107,
        "tcp://localhost",
        "tcp://localhost:0",
        "tcp://localhost:65536",
        "tcp://:9400",
        "tcp://::1:9400",
        "http://localhost:9400",
        "tcp://a b:1",
        "tcp://a..b:1",
        f"tcp://{'a' * 64}:1",
        f"tcp://{'é' * 60}:1",
        "nonsense",
        "",
    ],
)
def test_an_address_nobody_can_connect_to_is_refused(address):
    """A wrong address is an error at start, not at the first request."""
    with pytest.raises(ConfigError, match=r"expected unix:///absolute/path of at most 107 bytes, or tcp://host:port"):
        Config(address=address)


def test_the_policies_are_those_of_the_registry():
    """The names that are accepted are the names that can be loaded."""
    assert sorted(CACHE_POLICIES) == POLICIES.names
    for name in CACHE_POLICIES:
        POLICIES.load(Config(cache_policy=name).cache_policy)


def test_an_unknown_policy_is_refused_with_the_nearest_name():
    """A misspelt policy stops the start; one's own is named by its class, as it is."""
    with pytest.raises(ConfigError, match="cache_policy='lrru': did you mean 'lru'"):
        Config(cache_policy="lrru")
    assert load(env={}, cli={"cache_policy": "My.policies:Oldest"}).config.cache_policy == "My.policies:Oldest"


# The class


def test_a_wrong_type_is_refused_in_python_too():
    """The constructor checks what the readers check."""
    with pytest.raises(ConfigError, match="ram_bytes='8GiB': expected int, got str"):
        Config(ram_bytes="8GiB")
    with pytest.raises(ConfigError, match="chunk_size=100"):
        msgspec.structs.replace(Config(), chunk_size=100)


def test_a_configuration_is_a_value():
    """Equal settings are equal and can be keys; none can be changed; an unknown one cannot be given."""
    assert {Config(chunk_size=64), Config(chunk_size=64)} == {Config(chunk_size=64)}
    with pytest.raises(AttributeError):
        Config().chunk_size = 64
    with pytest.raises(TypeError):
        Config(chunk_sise=64)


def test_names_carry_their_units():
    """Whole numbers are bytes, tokens or counts, floats are seconds, and the name says which."""
    for field in msgspec.structs.fields(Config):
        if isinstance(field.default, float):
            assert field.name.endswith("_seconds")
        if type(field.default) is int:
            assert (
                field.name.endswith(("_bytes", "_tokens", "_workers", "_blocks", "_depth"))
                or field.name == "chunk_size"
            )


def test_every_number_has_bounds():
    """B542: whatever is set has room in a message, in JSON and in what waits for it; editors are told."""
    properties = msgspec.json.schema(Config)["$defs"]["Config"]["properties"]
    numbers = {
        name: kind
        for name, field in properties.items()
        for kind in field.get("anyOf", [field])
        if kind.get("type") in {"integer", "number"}
    }
    assert {"query_bytes", "disk_bytes", "chunk_size", "reap_timeout_seconds", "q_ring_depth"} <= set(numbers)
    for name, kind in numbers.items():
        most = min(kind.get("maximum", 1 << 63), kind.get("exclusiveMaximum", 1 << 63))
        assert most <= (365 * 24 * 3600 if name.endswith("_seconds") else 1 << 62), name
        assert {"minimum", "exclusiveMinimum"} & set(kind), name


def test_there_are_few_settings():
    """Forty-five settings are the most that anybody can know."""
    assert len(FIELDS) <= 45


def test_the_page_explains_every_setting():
    """The generated page has a row with default and meaning for each setting, and one for each key of LMCache."""
    page = schema_markdown()
    for name in FIELDS:
        assert re.search(rf"^\| `{name}` \| (`\S+`|empty) \| [A-Z][^|]+\. \|$", page, flags=re.MULTILINE), name
    for name in LMCACHE_KEYS:
        assert f"| `{name}` | " in page
    assert "| `min_hit_tokens` | `0` |" in page
    assert "| `ram_bytes` | `5GiB` |" in page
    assert "| `hot_cache` | `true` |" in page


def test_examples_in_the_page_can_be_set():
    """Every example that the page shows is accepted."""
    for field in msgspec.structs.fields(Config):
        for example_value in field.type.__metadata__[0].examples or ():
            extra = {"disk_path": "/data", "events_endpoint": "ipc:///e"}
            load(env={}, cli={**extra, field.name: example_value})


def test_the_import_is_light():
    """Importing the settings loads neither YAML nor pydantic, NumPy or torch."""
    code = "import sys, qkvault.config; print(*{'yaml', 'pydantic', 'numpy', 'torch', 'typer'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
