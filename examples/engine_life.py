"""One life of vLLM with the connector, in a process of its own, and the side that asks it. What the examples share.

    python engine_life.py '{"model": ..., "dtype": ..., "extra": {...}}' DESCRIPTOR

reads orders from stdin, a line of JSON each, and writes answers to the descriptor. A restart is then a restart: what
was in RAM is gone. While it lives, its store also answers other processes at ``store_address()``.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from vllm import LLMEngine

HERE: Final = Path(__file__).resolve().parent
FETCH_MODEL: Final = HERE.parent / "scripts" / "fetch_model.py"
BLOCK_TOKENS: Final = 32  # of vLLM's cache: a hit ends at a multiple of it
ENGINE_ID: Final = "demo"
INSTANCE_ID: Final = f"vllm-{ENGINE_ID}"  # what the connector calls its store
LOG_TAIL_LINES: Final = 15


class Answer(NamedTuple):
    """What one life of vLLM says of one question."""

    tokens: list[int]
    text: str
    ttft_seconds: float
    num_prompt_tokens: int
    num_reused_tokens: int
    num_disk_chunks: int  # that the store read from disk for it


class EngineDied(Exception):
    """The process of vLLM has ended, or never came up."""


# ---- the process of vLLM ----


def serve(settings: dict[str, object], orders: TextIO, answers: TextIO) -> None:
    """Start vLLM with the connector, answer each line of ``orders`` with one of ``answers``, and shut down."""
    from vllm import EngineArgs, LLMEngine
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="QKVaultConnector",
        kv_role="kv_both",
        engine_id=ENGINE_ID,
        kv_connector_extra_config={"qkvault.ram_bytes": "1GiB"} | settings["extra"],
    )
    arguments = EngineArgs(
        model=settings["model"],
        dtype=settings["dtype"],
        kv_transfer_config=transfer,
        block_size=BLOCK_TOKENS,
        max_model_len=4096,
        max_num_seqs=4,
        enforce_eager=True,  # torch.compile would add a minute to the first start
        seed=0,
    )
    engine = LLMEngine.from_engine_args(arguments)
    # The first request of a process also pays for what torch does once.
    ask(engine, {"message": "Nobody is here.\n\nWho is here?", "salt": "warm-up", "num_tokens": 16})
    print("ready", file=answers, flush=True)
    for line in orders:
        print(json.dumps(ask(engine, json.loads(line))), file=answers, flush=True)
    engine.engine_core.shutdown()  # what was begun is first written to disk


def ask(engine: LLMEngine, order: dict[str, object]) -> Answer:
    """Ask one question and time it until its first token. What is reused comes from QKVault, never from vLLM.

    ``order`` has a ``message`` to the model or the ``tokens`` of a whole prompt, a ``salt``, how many tokens to say
    (past the end of the answer with ``ignore_eos``), and what else the request tells the connector (``transfer``).
    """
    from vllm import SamplingParams

    drop_own_prefixes(engine)
    num_disk_chunks = chunks_from_disk()
    if (tokens := order.get("tokens")) is None:
        message = {"role": "user", "content": order["message"]}
        tokens = engine.get_tokenizer().apply_chat_template([message], add_generation_prompt=True, return_dict=False)
    prompt = {"prompt_token_ids": tokens, "cache_salt": order["salt"]}
    extra = {"kv_transfer_params": order["transfer"]} if "transfer" in order else None
    num_tokens, ignore_eos = order["num_tokens"], order.get("ignore_eos", False)
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=ignore_eos, extra_args=extra)
    output, ttft_seconds = None, 0.0
    started = time.perf_counter()
    engine.add_request(f"request-{started}", prompt, sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():  # noqa: B007  # the last one is the whole answer
            ttft_seconds = ttft_seconds or time.perf_counter() - started
    drop_own_prefixes(engine)  # also: what the request leaves is stored by now
    completion = output.outputs[0]
    return Answer(
        list(completion.token_ids),
        completion.text.strip(),
        ttft_seconds,
        len(tokens),
        output.num_cached_tokens or 0,
        chunks_from_disk() - num_disk_chunks,
    )


def drop_own_prefixes(engine: LLMEngine) -> None:
    """Empty vLLM's own prefix cache, so that what is found next comes from QKVault."""
    engine.step()  # an empty one, which stores what the last request has left
    assert engine.reset_prefix_cache(), "vLLM's prefix cache cannot be dropped"


def chunks_from_disk() -> int:
    """How many chunks the store of the connector, which lives in this process, has read from disk so far."""
    from qkvault import embedded

    with contextlib.closing(embedded.find(INSTANCE_ID).connect("demo")) as client:
        return client.status().counters.get("loaded.disk", 0)


# ---- the side that asks ----

Ask = Callable[[dict[str, object]], Answer]  # an order, as ``ask`` takes it


@contextlib.contextmanager
def life(settings: dict[str, object], log: TextIO | None = None) -> Iterator[Ask]:
    """A process of vLLM that answers. At the end it is shut down, so that all it stored is on disk.

    ``settings`` are ``model``, ``dtype``, and ``extra``: those of the connector. Raises EngineDied.
    """
    reading, writing = os.pipe()
    command = [sys.executable, __file__, json.dumps(settings), str(writing)]
    # vLLM in one process: it starts faster, and one is enough to die. No setting of the shell's reaches it.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QKVAULT_")} | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": log or subprocess.DEVNULL,
        "stderr": subprocess.STDOUT,
        "pass_fds": [writing],
    }
    with os.fdopen(reading) as answers, subprocess.Popen(command, text=True, env=environment, **pipes) as process:
        os.close(writing)

        def ask_it(order: dict[str, object]) -> Answer:
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            return Answer(*json.loads(next_line(process, answers)))

        try:
            next_line(process, answers)  # "ready"
            yield ask_it
            process.stdin.close()
            next_line(process, answers, at_end=True)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        msg = f"vLLM ended with code {process.returncode}"
        raise EngineDied(msg)


def next_line(process: subprocess.Popen[str], answers: TextIO, *, at_end: bool = False) -> str:
    line = answers.readline()
    if not line and not at_end:
        msg = f"vLLM ended with code {process.wait(60)} before it answered"  # a negative one is a signal
        raise EngineDied(msg)
    return line


def store_address() -> str:
    """Where the store of the life that runs now answers."""
    from qkvault.connecting import socket_address

    return socket_address(INSTANCE_ID)


# ---- what commands around it need ----


def vllm_version() -> str:
    """The version of vLLM, under either of the names it is published by, without importing it."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "not installed"


def model_path() -> Path:
    """Where ``make setup`` has put the model. Ends the program if it is not there."""
    model = runpy.run_path(str(FETCH_MODEL))["model_path"]()
    if not (model / "model.safetensors").is_file():
        print(f"no model in {model}: run `make setup`", file=sys.stderr)
        raise SystemExit(1)
    return model


@contextlib.contextmanager
def scratch(*, keep: bool) -> Iterator[tuple[Path, Path]]:
    """A folder for the disk tier, removed at the end, and a path for vLLM's log, removed unless something fails."""
    parent = "/var/tmp" if os.access("/var/tmp", os.W_OK) else None  # on a disk also where /tmp is in memory
    descriptor, log = tempfile.mkstemp(prefix="qkvault-demo-", suffix=".log")
    os.close(descriptor)
    folder = tempfile.mkdtemp(prefix="qkvault-demo-", dir=parent)
    try:
        yield Path(folder), Path(log)
        if not keep:
            Path(log).unlink()
    finally:
        if keep:
            print(f"kept: disk tier in {folder}, log of vLLM in {log}", file=sys.stderr)
        else:
            shutil.rmtree(folder)


def show_death(error: EngineDied, log_path: Path, console: Console) -> None:
    """The last lines of vLLM's log, and where the rest is."""
    tail = log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
    console.print("\n".join(tail), markup=False, highlight=False)
    console.print(f"{error}; its log is in {log_path}", style="red")


def progress_on(console: Console) -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, transient=True)


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[2]), "w") as pipe:
        serve(json.loads(sys.argv[1]), sys.stdin, pipe)
