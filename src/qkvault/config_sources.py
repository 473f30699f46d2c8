"""Where settings are written: a YAML file, the environment, vLLM's configuration, a command line. Values stay raw."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from qkvault.errors import ConfigError

ENV_PREFIX: Final = "QKVAULT_"
ENV_FILE: Final = "QKVAULT_CONFIG"
VLLM_PREFIX: Final = "qkvault."

# What Kubernetes puts into every container's environment for a Service called qkvault or qkvault-*.
_SERVICE_LINK: Final = re.compile(r"QKVAULT_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_[0-9]+_\w+)?)")
_QUOTED: Final = re.compile(r"""(['"])(?!<|\\\w').{2,}?\1""")  # of the file, but for a character or a kind of token


class Setting(NamedTuple):
    """One value that somebody gave."""

    source: str
    key: str  # as the user wrote it
    name: str  # the field it should be
    raw: object


def all_settings(
    path: str | os.PathLike[str] | None,
    environment: Mapping[str, str],
    vllm: Mapping[str, object],
    cli: Mapping[str, object],
) -> Iterator[Setting]:
    """Every setting that somebody gave, the weakest source first."""
    if path is not None:
        yield from _read_file(Path(path), "given")
    elif environment.get(ENV_FILE):
        yield from _read_file(Path(environment[ENV_FILE]), f"from {ENV_FILE}")
    for key, text in environment.items():
        if key.startswith(ENV_PREFIX) and key != ENV_FILE and not _SERVICE_LINK.fullmatch(key):
            yield Setting(f"env {key}", key, key.removeprefix(ENV_PREFIX).lower(), text)
    for key, raw in vllm.items():
        if key.startswith(VLLM_PREFIX):
            yield Setting("vllm", key, key.removeprefix(VLLM_PREFIX).replace(".", "_"), raw)  # q.ring_blocks
        elif key.lower().startswith("qkvault"):
            msg = f"unknown setting {key!r} (vllm): write it as '{VLLM_PREFIX}<setting>'"
            raise ConfigError(msg)
    for key, raw in cli.items():
        if raw is not None:
            yield Setting("cli", key, key, raw)


def _read_file(path: Path, origin: str) -> Iterator[Setting]:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        settings = yaml.safe_load(text)
    except (OSError, UnicodeError) as error:
        msg = f"cannot read the settings in {path} ({origin}): {error}"
        raise ConfigError(msg) from error
    except (ValueError, LookupError, AttributeError, RecursionError, yaml.YAMLError) as error:  # yaml's own
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        said = _QUOTED.sub("...", " ".join(str(getattr(error, "problem", error)).split()))
        msg = f"cannot read the settings in {path} ({origin}): {said}{where}"
        raise ConfigError(msg) from None  # the error has lines of the file, where a secret may be
    if settings is None:
        return
    if not isinstance(root, yaml.MappingNode):
        msg = f"{path} ({origin}) holds no settings: expected lines of `name: value`"
        raise ConfigError(msg)
    written = [key.value for key, _ in root.value]
    if twice := sorted({key for key in written if written.count(key) > 1}):
        msg = f"{path} ({origin}) sets {', '.join(twice)} more than once"
        raise ConfigError(msg)
    for key, raw in settings.items():
        yield Setting(f"file {path}", str(key), str(key).replace(".", "_"), raw)
