"""Which weights these are: a digest that differs between checkpoints of one name, in seconds for any size."""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".gguf")
_NUM_SAMPLES: Final = 32  # of each file, spread evenly: an edit that misses them all needs a new model_revision
_SAMPLE_BYTES: Final = 1 << 16


def model_fingerprint(vllm_config: VllmConfig, model_revision: str) -> str:
    """32 hex digits over the model's configuration, its weights (sampled) and the operator's ``model_revision``."""
    model = vllm_config.model_config
    parts = [
        model.hf_config.to_json_string(use_diff=False),
        str(model.dtype),
        str(model.quantization),
        str(model.revision),
        model_revision,
        str(vllm_config.load_config.load_format),
        files_digest(model.model),
    ]
    if _depends_on_length(model.hf_config.to_dict()):
        parts.append(str(model.max_model_len))
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:32]


@lru_cache(maxsize=256)
def adapter_fingerprint(path: str) -> str:
    """16 hex digits over an adapter's files, read once a process."""
    return files_digest(path)[:16]


def files_digest(path: str) -> str:
    """Hex digest over samples of every file of weights at ``path``; of the name alone if nothing is there.

    A model named by its hub id is told apart by revision, which the caller adds.
    """
    digest = hashlib.sha256()
    root = Path(path)
    files = sorted(root.iterdir()) if root.is_dir() else [root] if root.is_file() else []
    if not files:
        digest.update(path.encode())
    for file in files:
        if file.suffix in _WEIGHTS or file.suffix == ".json":
            digest.update(file.name.encode() + b"\0")
            _update_with_samples(digest, file)
    return digest.hexdigest()


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
