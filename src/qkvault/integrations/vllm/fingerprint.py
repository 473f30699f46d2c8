"""Which weights these are: a digest that differs between checkpoints of one name, in seconds for any size."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from qkvault.errors import ConfigError
from qkvault.logs import get_logger

if TYPE_CHECKING:
    from vllm.config import MultiModalConfig, VllmConfig
    from vllm.lora.request import LoRARequest

_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".gguf", ".json")
_WHOLE_BYTES: Final = 4 << 20  # up to this a file is read whole
_STRIDE_BYTES: Final = 1 << 20  # of a longer one a sample in each: what is smaller and misses them is not seen
_SAMPLE_BYTES: Final = 1 << 12
# Of a model's configuration: where it lies, and which release wrote it. Neither changes a byte of KV.
_NO_MATTER: Final = ("_name_or_path", "transformers_version")
# Of how vLLM handles media: limits, caches, transport, and which kernels compute. A field that is not here counts.
_NO_MATTER_OF_MEDIA: Final = frozenset(
    {
        "language_model_only", "limit_per_prompt", "enable_mm_embeds", "interleave_mm_strings", "mm_encoder_only",
        "mm_processor_cache_gb", "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb", "mm_hasher_algorithm",
        "mm_encoder_tp_mode", "mm_encoder_attn_backend", "mm_encoder_fp8_scale_save_path",
        "mm_encoder_fp8_scale_save_margin", "skip_mm_profiling", "mm_tensor_ipc", "mm_ipc_gpu_memory_gb",
        "allow_missing_mm_embeddings",
    }
)  # fmt: skip

_Stamp = tuple[str, int, int, int, int]
_log = get_logger("vllm")


def model_fingerprint(vllm_config: VllmConfig, model_revision: str) -> str:
    """32 hex digits over configuration of model and media, weights (sampled) and the operator's ``model_revision``.

    Raises OSError, and ConfigError if nothing tells which weights of that name these are.
    """
    model = vllm_config.model_config
    config = {name: value for name, value in model.hf_config.to_dict().items() if name not in _NO_MATTER}
    parts = [
        json.dumps(config, sort_keys=True, default=str),
        str(model.dtype),
        str(model.quantization),
        str(model.revision),
        model_revision,
        str(vllm_config.load_config.load_format),
        files_digest(_weights_path(vllm_config, model_revision)),
    ]
    if _depends_on_length(config):
        parts.append(str(model.max_model_len))
    if model.quantization_config is not None:  # what --quantization does not say itself
        parts.append(json.dumps(model.quantization_config, sort_keys=True, default=_plain))
    if model.model_weights:
        parts.append(model.model_weights)
    if model.multimodal_config is not None:
        parts.append(_media_settings(model.multimodal_config))
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:32]


def _weights_path(vllm_config: VllmConfig, model_revision: str) -> str:
    # Where they lie; of a hub's name what vLLM has downloaded: what the hub has under it may change any day.
    model, load_config = vllm_config.model_config, vllm_config.load_config
    if Path(model.model).exists() or model.model_weights or load_config.load_format == "dummy":
        return str(model.model)
    try:
        path = _downloaded(model.model, model.revision, load_config.download_dir)
        if any(file.suffix != ".json" for file in _files(path)):
            return path
        why = f"{path} holds no weights"
    except (OSError, ValueError) as error:
        why = str(error)
    if not model_revision:
        msg = f"which weights {model.model!r} are cannot be told: set model_revision, and change it with them ({why})"
        raise ConfigError(msg)
    return str(model.model)


class Adapters:
    """Which weights stand behind the adapters of requests, by their files. Owned by the scheduler's thread.

    The engine reads an adapter once, and again if it had no place for it meanwhile: so files that change under a number
    in use leave no telling which it has, until it is told to load them anew (``load_inplace``).
    """

    def __init__(self) -> None:
        self._known: dict[int, _Adapter] = {}
        self._digests: dict[tuple[str, str], set[str]] = {}  # all that have been at a name and path

    def name_of(self, adapter: LoRARequest) -> str:
        """Name and digest of the adapter, a part of every key. Blocks to read files that are new or have changed.

        Raises OSError if there are no weights here, or it cannot be told which of two the engine has; and ValueError.
        """
        path = adapter_path(adapter.lora_path)
        files = _files(path)
        if not any(file.suffix != ".json" for file in files):
            msg = f"no weights of the adapter {adapter.lora_name!r} are at {path!r}"
            raise FileNotFoundError(msg)
        stamps = tuple(_stamp(file) for file in files)
        known = self._known.get(adapter.lora_int_id)
        if known is None or known.stamps != stamps or (adapter.load_inplace and known.digest is None):
            digest = files_digest(path)[:16]
            is_told = known is None or adapter.load_inplace or known.digest == digest
            known = self._known[adapter.lora_int_id] = _Adapter(stamps, digest if is_told else None)
        if known.digest is None:
            msg = f"the files of the adapter {adapter.lora_name!r} have changed since its first use: load it in place"
            raise OSError(msg)
        name = f"{adapter.lora_name}:{known.digest}"
        digests = self._digests.setdefault((adapter.lora_name, adapter.lora_path), set())
        if known.digest not in digests:
            digests.add(known.digest)
            _log.info("adapter_named", adapter=name)  # what a lookup from outside has to say
        return name

    def have_changed(self, adapter: LoRARequest | None) -> bool:
        """Whether its name and path, which is all that vLLM's own prefix cache knows of it, have stood for others."""
        return adapter is not None and len(self._digests.get((adapter.lora_name, adapter.lora_path), ())) > 1

    def is_still(self, adapter: LoRARequest | None, name: str) -> bool:
        """Whether ``name_of`` said this of the adapter and would say it again; "" is no adapter."""
        try:
            return not name or (adapter is not None and self.name_of(adapter) == name)
        except (OSError, ValueError):
            return False


class _Adapter(NamedTuple):
    stamps: tuple[_Stamp, ...]  # of its files
    digest: str | None  # None: it is not known which files the engine has


def _stamp(file: Path) -> _Stamp:
    # Also of a file that is put in place with the times of the one before.
    stat = file.stat()
    return str(file), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def adapter_path(path: str) -> str:
    """Where vLLM finds the adapter (its ``get_adapter_absolute_path``); of a hub's name what was downloaded last."""
    if path.startswith("~"):
        return os.path.expanduser(path)  # noqa: PTH111  # as vLLM does: Path raises for an unknown user
    if Path(path).is_absolute() or Path(path).exists():
        return path
    return _downloaded(path)


def _downloaded(name: str, revision: str | None = None, folder: str | None = None) -> str:
    # The files of a hub's name that are here. Raises OSError if there are none, ValueError if it is no such name.
    from huggingface_hub import snapshot_download  # a dependency of vLLM, which ``compat`` looks at first
    from vllm import envs

    if envs.VLLM_USE_MODELSCOPE:
        msg = f"{name!r} is looked for at ModelScope: give its local path"
        raise FileNotFoundError(msg)
    return str(snapshot_download(name, revision=revision, cache_dir=folder, local_files_only=True))


def files_digest(path: str) -> str:
    """Hex digest over samples of every file of weights at ``path``; of the name alone if nothing is there.

    Raises OSError.
    """
    digest = hashlib.sha256()
    files = _files(path)
    if not files:
        digest.update(path.encode())
    for file in files:
        digest.update(file.name.encode() + b"\0")
        _update_with_samples(digest, file)
    return digest.hexdigest()


def _plain(value: object) -> object:
    # What json cannot write: settings in classes, and names.
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return str(value)


def _media_settings(media: MultiModalConfig) -> str:
    # vLLM's digests of media do not cover what is set for all requests.
    settings = {
        field.name: getattr(media, field.name)
        for field in dataclasses.fields(media)
        if field.name not in _NO_MATTER_OF_MEDIA
    }
    if scales := settings.get("mm_encoder_fp8_scale_path"):
        settings["mm_encoder_fp8_scale_path"] = hashlib.sha256(Path(scales).read_bytes()).hexdigest()
    return json.dumps(settings, sort_keys=True, default=str)


def _files(path: str) -> list[Path]:
    root = Path(path)
    files = sorted(root.iterdir()) if root.is_dir() else [root] if root.is_file() else []
    return [file for file in files if file.suffix in _WEIGHTS]


def _update_with_samples(digest: hashlib._Hash, file: Path) -> None:
    size = file.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    descriptor = os.open(file, os.O_RDONLY)
    try:
        sample_bytes = _SAMPLE_BYTES if size > _WHOLE_BYTES else _STRIDE_BYTES
        for offset in range(0, size, _STRIDE_BYTES):
            digest.update(os.pread(descriptor, sample_bytes, offset))
        digest.update(os.pread(descriptor, _SAMPLE_BYTES, max(0, size - _SAMPLE_BYTES)))
    finally:
        os.close(descriptor)


def _depends_on_length(config: dict[str, object]) -> bool:
    # Rotary scalings whose angles depend on how long a context the engine was started for.
    return any(word in str(config) for word in ("dynamic", "longrope", "su_rope"))
