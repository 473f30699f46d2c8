"""The one schema of all settings, and how a value gets there. Environment, file, vLLM and pages come from this class.

A later source wins: default, then the YAML file, then ``QKVAULT_*`` of the environment, then ``qkvault.*`` of vLLM's
``kv_connector_extra_config``, then the command line. Nothing is guessed: an unknown key or a value that cannot be read
is a ConfigError that names the key, the value and where it came from.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Final, Literal, get_args

import msgspec
from msgspec import Meta

from qkvault.address import EXPECTED, parse_address
from qkvault.config_names import explain_unknown, nearest
from qkvault.config_sources import ENV_PREFIX, VLLM_PREFIX, Setting, all_settings
from qkvault.errors import ConfigError
from qkvault.types import GRAIN_TOKENS, MAX_CHUNK_TOKENS
from qkvault.units import GIB, parse_bool, parse_duration, parse_int, parse_numbers, parse_size

DEFAULT: Final = "default"
_LISTS: Final = frozenset({"listen", "q_layers"})  # of which one text has several, separated by commas
SECRETS: Final = frozenset({"token"})  # settings that are not shown
_MOST_BYTES: Final = 1 << 62  # what is computed of it has room in a message
_MOST: Final = 1 << 31
_NO_TEXT: Final = re.compile("[\0\ud800-\udc7f]")  # the system takes it in no path; beyond are bytes of its own names
_YEAR: Final = 31_536_000  # seconds
CACHE_POLICIES: Final = ("fifo", "lfu", "lru", "mru")  # a test holds them against qkvault.policies, a layer above


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings. Immutable; equal when every setting is. Raises ConfigError if a setting is impossible.

    The suffix of a name is its unit; ``_bytes`` and ``_seconds`` may be written as text ("8GiB", "500ms").
    """

    instance_id: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9._-]{1,64}$",
            description="Name of this cache: engines of one process that give the same name share one cache.",
        ),
    ] = "default"
    chunk_size: Annotated[
        int,
        Meta(
            ge=1, le=MAX_CHUNK_TOKENS, multiple_of=GRAIN_TOKENS, description="Tokens in a chunk, the unit of storage."
        ),
    ] = 256
    hash_algorithm: Annotated[
        Literal["sha256", "blake3", "builtin"],
        Meta(
            description="How token chunks are named. `builtin` is Python's `hash`: for one process, or for several "
            "with the same PYTHONHASHSEED."
        ),
    ] = "sha256"
    ram_bytes: Annotated[
        int, Meta(ge=4096, lt=_MOST_BYTES, description="Size of the pool in RAM.", examples=["8GiB", "500MB"])
    ] = 5 * GIB
    query_bytes: Annotated[
        Annotated[int, Meta(ge=0, lt=_MOST_BYTES)] | None,
        Meta(
            description="The share of queries in ram_bytes, and by the same ratio in disk_bytes. KV uses what they "
            "leave of it until they need it. 0: none are stored. Empty: a quarter.",
            examples=["2GiB", "0"],
        ),
    ] = None
    cache_policy: Annotated[
        str,
        Meta(
            description="Which chunk leaves first when room is needed: fifo, lfu, lru or mru, or `module.path:Class` "
            "of your own, derived from `qkvault.policies.Policy`.",
            examples=["lru", "my.policies:Oldest"],
        ),
    ] = "lru"
    hot_cache: Annotated[
        bool, Meta(description="Keep chunks in RAM. Without it RAM keeps nothing that a lower tier holds.")
    ] = True
    start_frozen: Annotated[
        bool, Meta(description="Start frozen: what is in RAM is served, nothing is stored or evicted.")
    ] = False
    prefault: Annotated[
        bool, Meta(description="Touch all RAM at start, about a second a GiB, so that no copy pays for it later.")
    ] = True
    disk_path: Annotated[
        str | None, Meta(description="Directory of the disk tier. Empty: no disk tier.", examples=["/mnt/nvme/qkvault"])
    ] = None
    disk_bytes: Annotated[
        int, Meta(ge=4096, lt=_MOST_BYTES, description="Cap of the disk tier. Only with disk_path.", examples=["2TB"])
    ] = 50 * GIB
    disk_workers: Annotated[int, Meta(ge=1, le=64, description="Threads that read and write the disk tier.")] = 4
    disk_direct_io: Annotated[
        bool, Meta(description="Pass the page cache by (O_DIRECT) where the file system can.")
    ] = True
    disk_keep: Annotated[
        bool, Meta(description="Keep the disk tier's chunks at exit. Without it they are removed.")
    ] = True
    drain_seconds: Annotated[
        float, Meta(ge=0, le=86400, description="How long `qkvault serve`, when it stops, may write to the disk.")
    ] = 60.0
    save_decode: Annotated[bool, Meta(description="Store generated tokens too, not only prompts.")] = True
    save_partial_chunks: Annotated[
        bool, Meta(description="Store the tail of a prompt, which fills less than a chunk.")
    ] = True
    min_hit_tokens: Annotated[int, Meta(ge=0, lt=_MOST, description="Hits shorter than this are not used.")] = 0
    load_deadline_seconds: Annotated[
        float,
        Meta(gt=0, le=86400, description="A load that takes longer is a miss.", examples=["500ms", "10s"]),
    ] = 10.0
    lease_seconds: Annotated[
        float,
        Meta(
            gt=0,
            le=86400,
            description="How long a client that falls silent holds its chunks. At least load_deadline_seconds.",
            examples=["60s", "2m"],
        ),
    ] = 60.0
    address: Annotated[
        str | None,
        Meta(
            description="Where the cache's server is. Empty: the cache lives in this process.",
            examples=["unix:///run/qkvault.sock", "tcp://127.0.0.1:9400"],
        ),
    ] = None
    autostart: Annotated[
        bool, Meta(description="Engines, not the SDK, start a server at address with these settings if none answers.")
    ] = False
    timeout_seconds: Annotated[
        float,
        Meta(gt=0, le=600, description="How long a client waits for an answer of the server.", examples=["1s"]),
    ] = 1.0
    token: Annotated[
        str, Meta(description="What clients of TCP have to know; the server's and theirs are the same.")
    ] = ""
    tls_ca_path: Annotated[
        str | None,
        Meta(description="Certificate that a TCP server's is signed by, or its own: the client then speaks TLS."),
    ] = None
    listen: Annotated[
        str,
        Meta(
            description="Where `qkvault serve` answers: addresses, separated by commas. Empty: at `address`, or at a "
            "Unix socket in the runtime directory.",
            examples=["unix:///run/qkvault.sock,tcp://127.0.0.1:9400"],
        ),
    ] = ""
    http: Annotated[
        str,
        Meta(
            description="Where `qkvault serve` answers over HTTP: host:port, or unix:///path. Empty: nowhere.",
            examples=["127.0.0.1:9401", "unix:///run/qkvault-http.sock"],
        ),
    ] = ""
    tls_cert_path: Annotated[
        str | None, Meta(description="Certificate of `qkvault serve` for TCP, in PEM. With tls_key_path.")
    ] = None
    tls_key_path: Annotated[str | None, Meta(description="Its private key.")] = None
    insecure: Annotated[
        bool,
        Meta(
            description="Let `qkvault serve` listen where other machines reach it without TLS and a token, and publish "
            "KV events there; let a client send its token to another machine in clear text."
        ),
    ] = False
    reap_timeout_seconds: Annotated[
        float, Meta(gt=0, le=_YEAR, description="An engine silent for that long is taken off the server's register.")
    ] = 120.0
    registration_grace_seconds: Annotated[
        float, Meta(gt=0, le=_YEAR, description="The same for one that has registered and never been heard of since.")
    ] = 3600.0
    events_endpoint: Annotated[
        str,
        Meta(
            description="ZeroMQ endpoint at which KV events are published. Empty: none are.",
            examples=["tcp://127.0.0.1:5557"],
        ),
    ] = ""
    events_replay_endpoint: Annotated[
        str, Meta(description="ZeroMQ endpoint that missed events are asked for at.", examples=["tcp://127.0.0.1:5558"])
    ] = ""
    events_topic: Annotated[str, Meta(description="Topic of the events.")] = ""
    transfer_intermediate_tensors: Annotated[
        bool,
        Meta(
            description="Capture queries under vLLM and store them beside KV, of which they take some times the bytes."
        ),
    ] = False
    q_requests: Annotated[
        Literal["all", "asked"],
        Meta(
            description="Whose queries are captured: of all requests but those whose kv_transfer_params have "
            "`qkvault.queries: false`, or only of those where it is true."
        ),
    ] = "all"
    q_layers: Annotated[
        str,
        Meta(description="Numbers of the layers whose queries are captured, from 0. Empty: all.", examples=["0,8-11"]),
    ] = ""
    q_ring_blocks: Annotated[
        int, Meta(ge=0, lt=_MOST, description="Blocks of the ring that queries are collected in. 0: by q_ring_depth.")
    ] = 0
    q_ring_depth: Annotated[
        int, Meta(ge=1, lt=_MOST, description="How many of the engine's largest steps that ring holds.")
    ] = 2
    model_revision: Annotated[
        str, Meta(description="Generation of the weights, part of every key: change it after a weight update.")
    ] = ""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severe message that is logged.")
    ] = "info"
    metrics: Annotated[bool, Meta(description="Count and export metrics.")] = True

    @property
    def is_shared(self) -> bool:
        """Whether other processes than this one, or a later one, read the keys."""
        return self.disk_path is not None or self.address is not None

    @property
    def query_layers(self) -> tuple[int, ...] | None:
        """Numbers of the layers whose queries are captured, in order; None: all."""
        return parse_numbers(self.q_layers) if self.q_layers else None

    def __repr__(self) -> str:
        """All settings, without the value of a secret."""
        return f"Config({', '.join(f'{name}={_shown(name, getattr(self, name))}' for name in self.__struct_fields__)})"

    def __post_init__(self) -> None:
        """Refuse what the types allow and the cache cannot do. Raises ConfigError."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if expected := _problem(name, value):
                msg = f"{name}={_shown(name, value)}: {expected}"
                raise ConfigError(msg)
        if self.disk_path is None and self.disk_bytes != _FIELDS["disk_bytes"].default:
            msg = f"disk_bytes={self.disk_bytes} is set, and disk_path is not: there is no disk tier to cap"
            raise ConfigError(msg)
        for name, needed in (("autostart", "address"), ("events_replay_endpoint", "events_endpoint")):
            if getattr(self, name) and not getattr(self, needed):
                msg = f"{name} is set, and {needed} is not: it does nothing. Set {needed}, or remove {name}"
                raise ConfigError(msg)
        if self.query_bytes is not None and self.query_bytes > self.ram_bytes:
            msg = f"query_bytes={self.query_bytes} is more than ram_bytes={self.ram_bytes}, of which it is a part"
            raise ConfigError(msg)
        if self.lease_seconds < self.load_deadline_seconds:
            msg = (
                f"lease_seconds={self.lease_seconds:g} is less than load_deadline_seconds="
                f"{self.load_deadline_seconds:g}: chunks could leave while they are being loaded"
            )
            raise ConfigError(msg)


class Loaded(msgspec.Struct, frozen=True):
    """Settings, and where each came from: ``default``, ``file PATH``, ``env NAME``, ``vllm`` or ``cli``."""

    config: Config
    sources: dict[str, str]

    def shown(self) -> dict[str, tuple[object, str]]:
        """Each setting's value, as it may be shown, and its source."""
        values = {name: getattr(self.config, name) for name in self.sources}
        values |= {name: "(set)" for name in SECRETS if values[name]}
        return {name: (value, self.sources[name]) for name, value in values.items()}


_FIELDS: Final = {field.name: field for field in msgspec.structs.fields(Config)}


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    vllm: Mapping[str, object] | None = None,
    cli: Mapping[str, object] | None = None,
) -> Loaded:
    """Read all sources and merge them, the later argument over the earlier.

    ``path`` is the YAML file; without it, the one that ``QKVAULT_CONFIG`` names, if any. ``env`` stands for
    ``os.environ``. Of ``vllm`` (``kv_connector_extra_config``) only keys with the prefix ``qkvault.`` are ours. In
    ``cli`` a value of None is a flag that was not given. Raises ConfigError.
    """
    environment = os.environ if env is None else env
    values: dict[str, object] = {}
    sources = dict.fromkeys(_FIELDS, DEFAULT)
    for setting in all_settings(path, environment, vllm or {}, cli or {}):
        if setting.name not in _FIELDS:
            msg = f"unknown setting {setting.key!r} ({setting.source}): {_explain(setting)}"
            raise ConfigError(msg)
        try:
            values[setting.name] = _coerce(setting.name, setting.raw)
        except (ValueError, RuntimeError) as error:  # RuntimeError: a home directory that does not exist
            msg = f"{setting.key}={_shown(setting.name, setting.raw)} ({setting.source}): {error}"
            raise ConfigError(msg) from error
        sources[setting.name] = setting.source
    if sources["disk_bytes"] != DEFAULT and values.get("disk_path") is None:
        msg = f"disk_bytes is set ({sources['disk_bytes']}), and disk_path is not: there is no disk tier to cap"
        raise ConfigError(msg)
    return Loaded(msgspec.convert(values, Config), sources)


def _shown(name: str, value: object) -> str:
    return "(set)" if name in SECRETS and value not in (None, "") else repr(value)


def _coerce(name: str, raw: object) -> object:
    """``raw`` as the type of the field, read from text by the unit in its name. Raises ValueError: what is expected."""
    base = get_args(_FIELDS[name].type)[0]
    value = raw
    if base is bool:
        value = parse_bool(raw)
    elif isinstance(raw, str):
        is_nothing = not raw.strip() and NoneType in get_args(base)
        value = None if is_nothing else _read_text(name, base, raw)
    elif raw is None and _FIELDS[name].default == "":  # a name with nothing behind it, in YAML
        value = ""
    if name == "disk_path" and isinstance(value, str) and "://" not in value:
        value = str(Path(value).expanduser().absolute())
    if expected := _problem(name, value):
        raise ValueError(expected)
    return value


def _read_text(name: str, base: object, raw: str) -> object:
    """``raw`` as people write such a setting. Raises ValueError."""
    text = raw.strip()
    if name.endswith("_bytes"):
        return parse_size(text)
    if name.endswith("_seconds"):
        return parse_duration(text)
    if base is int:
        return parse_int(text)
    if NoneType in get_args(base):
        return text
    return text.lower() if get_args(base) or (name == "cache_policy" and ":" not in text) else raw


def _problem(name: str, value: object) -> str:
    """What is expected of the field, or nothing if ``value`` is that."""
    annotated = _FIELDS[name].type
    try:
        msgspec.convert(value, annotated)
    except msgspec.ValidationError as error:
        choices = [choice for choice in get_args(get_args(annotated)[0]) if isinstance(choice, str)]
        if choices:
            return f"expected one of {', '.join(choices)}"
        told = str(error).replace("`", "").replace("Expected", "expected")
        return told + _hint(name, value, is_text=told.startswith("expected str"))
    text = value if isinstance(value, str) else ""
    if _NO_TEXT.search(text):
        return "expected text, without zero bytes"
    if name == "cache_policy" and ":" not in text and text not in CACHE_POLICIES:
        return nearest(text, {name: name for name in CACHE_POLICIES}) + ", or module.path:Class of your own"
    if name == "disk_path" and ("://" in text or value == ""):
        return "expected a plain path, without a scheme"
    if name == "address" and value is not None and not _is_address(text):
        return EXPECTED
    if name == "q_layers" and text:
        try:
            parse_numbers(text)
        except ValueError as error:
            return str(error)
    return ""


def _hint(name: str, value: object, *, is_text: bool) -> str:
    if name.endswith("_bytes"):
        return "; a bare number is bytes, '5GiB' is not"
    if name in _LISTS and isinstance(value, list):
        return "; write one text, separated by commas"
    return "; put it in quotes" if is_text and not isinstance(value, (str, list, dict, NoneType)) else ""


def _is_address(text: str) -> bool:
    try:
        where = parse_address(text)
    except ConfigError:
        return False
    return where.is_unix or where.port > 0  # 0 is for servers that let the system choose


def _explain(setting: Setting) -> str:
    is_env = setting.source.startswith("env ")
    prefix = ENV_PREFIX if is_env else VLLM_PREFIX if setting.source == "vllm" else ""
    return explain_unknown(setting.name, {name: prefix + (name.upper() if is_env else name) for name in _FIELDS})
