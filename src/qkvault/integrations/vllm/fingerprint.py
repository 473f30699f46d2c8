"""Which weights these are: a digest that differs between checkpoints of one name, in seconds for any size."""

from __future__ import annotations

import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".gguf", ".json")
_NUM_SAMPLES: Final = 32  # of each file, spread evenly: an edit that misses them all needs a new model_revision
_SAMPLE_BYTES: Final = 1 << 16
# Of a model's configuration: where it lies, and which release wrote it. Neither changes a byte of KV.
_NO_MATTER: Final = ("_name_or_path", "transformers_version")


def model_fingerprint(vllm_config: VllmConfig, model_revision: str) -> str:
    """32 hex digits over the model's configuration, its weights (sampled) and the operator's ``model_revision``."""
    model = vllm_config.model_config
    config = {name: value for name, value in model.hf_config.to_dict().items() if name not in _NO_MATTER}
    parts = [
        json.dumps(config, sort_keys=True, default=str),
        str(model.dtype),
        str(model.quantization),
        # Of a model with a hub's name, whose files are not looked at, the commit that was found is all there is.
        f"{model.revision} {getattr(model.hf_config, '_commit_hash', None)}",
        model_revision,
        str(vllm_config.load_config.load_format),
        files_digest(model.model),
    ]
    if _depends_on_length(config):
        parts.append(str(model.max_model_len))
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:32]


def adapter_fingerprint(path: str) -> str:
    """16 hex digits over an adapter's files, which are read again when one of them has changed. Raises OSError."""
    times = tuple((file.name, file.stat().st_mtime_ns) for file in _files(path))
    return _adapter_digest(path, times)


@lru_cache(maxsize=256)
def _adapter_digest(path: str, times: tuple[tuple[str, int], ...]) -> str:
    del times
    return files_digest(path)[:16]


def files_digest(path: str) -> str:
    """Hex digest over samples of every file of weights at ``path``; of the name alone if nothing is there.

    A model named by its hub id is told apart by revision, which the caller adds. Raises OSError.
    """
    digest = hashlib.sha256()
    files = _files(path)
    if not files:
        digest.update(path.encode())
    for file in files:
        digest.update(file.name.encode() + b"\0")
        _update_with_samples(digest, file)
    return digest.hexdigest()


def _files(path: str) -> list[Path]:
    root = Path(path)
    files = sorted(root.iterdir()) if root.is_dir() else [root] if root.is_file() else []
    return [file for file in files if file.suffix in _WEIGHTS]


def _update_with_samples(digest: hashlib._Hash, file: Path) -> None:
    size = file.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    descriptor = os.open(file, os.O_RDONLY)
    try:
        stride = max(size // _NUM_SAMPLES, _SAMPLE_BYTES)
        for offset in range(0, size, stride):
            digest.update(os.pread(descriptor, _SAMPLE_BYTES, offset))
        digest.update(os.pread(descriptor, _SAMPLE_BYTES, max(0, size - _SAMPLE_BYTES)))
    finally:
        os.close(descriptor)


def _depends_on_length(config: dict[str, object]) -> bool:
    # Rotary scalings whose angles depend on how long a context the engine was started for.
    return any(word in str(config) for word in ("dynamic", "longrope", "su_rope"))
