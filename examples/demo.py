"""QKVault in two minutes: questions about one document, cold, from RAM, and from disk after vLLM was restarted.

This process asks, compares and prints. Each life of vLLM is a process of its own (the hidden command ``engine``), so
that a restart is a restart: what was in RAM is gone. ``make demo`` runs it.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple, TextIO

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from vllm import LLMEngine

HERE: Final = Path(__file__).resolve().parent
DOCUMENT: Final = HERE / "data" / "julius-caesar.txt"
FETCH_MODEL: Final = HERE.parent / "scripts" / "fetch_model.py"
QUESTIONS: Final = (
    "Why did Brutus kill Caesar?",
    "What did Caesar do three times on the Lupercal?",
    "What do the citizens want Antony to read?",
    "What does Antony say about Brutus?",
)
COLD, RAM, DISK = "cold", "hit in RAM", "hit on disk, restarted"
NUM_ANSWER_TOKENS: Final = 16
BLOCK_TOKENS: Final = 32  # of vLLM's cache: a hit ends at a multiple of it
MIN_REUSED: Final = 0.9  # of a prompt; what is not the document is less than a tenth
ENGINE_ID: Final = "demo"
RESET_SECONDS: Final = 30.0
LOG_TAIL_LINES: Final = 15


class Answer(NamedTuple):
    """What one life of vLLM says of one question."""

    tokens: list[int]
    text: str
    ttft_seconds: float
    num_prompt_tokens: int
    num_reused_tokens: int
    num_disk_chunks: int  # that the store read from disk for it


class Measured(NamedTuple):
    """One question that was asked in one way."""

    way: str
    question: int
    answer: Answer


class EngineDied(Exception):
    """The process of vLLM has ended, or never came up."""


# ---- one life of vLLM, in a process of its own ----


def serve(settings: dict[str, str], orders: TextIO, answers: TextIO) -> None:
    """Start vLLM with the connector, answer each line of ``orders`` with one of ``answers``, and shut down."""
    from vllm import EngineArgs, LLMEngine
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="QKVaultConnector",
        kv_role="kv_both",
        engine_id=ENGINE_ID,
        kv_connector_extra_config={"qkvault.ram_bytes": "1GiB", "qkvault.disk_path": settings["disk_path"]},
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
    ask(engine, {"document": "Nobody is here.", "question": "Who is here?", "salt": "warm-up"})
    print("ready", file=answers, flush=True)
    for line in orders:
        print(json.dumps(ask(engine, json.loads(line))), file=answers, flush=True)
    engine.engine_core.shutdown()  # what was begun is first written to disk


def ask(engine: LLMEngine, order: dict[str, str]) -> Answer:
    """Ask one question and time it until its first token. What is reused comes from QKVault, never from vLLM."""
    from vllm import SamplingParams

    deadline = time.monotonic() + RESET_SECONDS
    while not engine.reset_prefix_cache():  # False while blocks of the last request are still held
        engine.step()
        assert time.monotonic() < deadline, "vLLM's prefix cache cannot be dropped"
    num_disk_chunks = chunks_from_disk()
    message = {"role": "user", "content": f"{order['document']}\n\n{order['question']} Answer in one sentence."}
    tokens = engine.get_tokenizer().apply_chat_template([message], add_generation_prompt=True, return_dict=False)
    prompt = {"prompt_token_ids": tokens, "cache_salt": order["salt"]}
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_ANSWER_TOKENS)
    output, ttft_seconds = None, 0.0
    started = time.perf_counter()
    engine.add_request(order["question"], prompt, sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():  # noqa: B007  # the last one is the whole answer
            ttft_seconds = ttft_seconds or time.perf_counter() - started
    completion = output.outputs[0]
    return Answer(
        list(completion.token_ids),
        completion.text.strip(),
        ttft_seconds,
        len(tokens),
        output.num_cached_tokens or 0,
        chunks_from_disk() - num_disk_chunks,
    )


def chunks_from_disk() -> int:
    """How many chunks the store of the connector, which lives in this process, has read from disk so far."""
    from qkvault import embedded

    with contextlib.closing(embedded.find(f"vllm-{ENGINE_ID}").connect("demo")) as client:
        return client.status().counters.get("loaded.disk", 0)


# ---- the side that asks ----

AskFunction = Callable[[int, int], Answer]  # question, copy of the document


@contextlib.contextmanager
def life(settings: dict[str, str], log: TextIO) -> Iterator[AskFunction]:
    """A process of vLLM that answers. At the end it is shut down, so that all it stored is on disk.

    Raises EngineDied.
    """
    reading, writing = os.pipe()
    command = [sys.executable, __file__, "engine", json.dumps(settings), str(writing)]
    # vLLM in one process: it starts faster, and one is enough to die. No setting of the shell's reaches it.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QKVAULT_")} | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    pipes = {"stdin": subprocess.PIPE, "stdout": log, "stderr": subprocess.STDOUT, "pass_fds": [writing]}
    document = DOCUMENT.read_text(encoding="utf-8")
    with os.fdopen(reading) as answers, subprocess.Popen(command, text=True, env=environment, **pipes) as process:
        os.close(writing)

        def ask_it(question: int, copy: int) -> Answer:
            order = {"document": document, "question": QUESTIONS[question], "salt": f"copy-{copy}"}
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            return Answer(*json.loads(next_line(answers)))

        try:
            next_line(answers)  # "ready"
            yield ask_it
            process.stdin.close()
            next_line(answers, at_end=True)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        msg = f"vLLM ended with code {process.returncode}"
        raise EngineDied(msg)


def next_line(answers: TextIO, *, at_end: bool = False) -> str:
    line = answers.readline()
    if not line and not at_end:
        msg = "vLLM ended before it answered"
        raise EngineDied(msg)
    return line


def measure(settings: dict[str, str], log: TextIO, progress: Progress) -> list[Measured]:
    """Ask all questions in all ways, in two lives of vLLM."""
    measured: list[Measured] = []
    num_questions = len(QUESTIONS)
    task = progress.add_task("", total=2 + 3 * num_questions)

    def ask_all(ask_it: AskFunction, way: str, shift: int) -> None:
        for question, text in enumerate(QUESTIONS):
            progress.update(task, description=f"{way}: {text}")
            answer = ask_it(question, (question + shift) % num_questions)
            measured.append(Measured(way, question, answer))
            progress.advance(task)
            line = f"{answer.ttft_seconds:7.2f} s  {way}: {text}"
            progress.console.print(line, style="dim", highlight=False, soft_wrap=True)

    progress.update(task, description="starting vLLM")
    with life(settings, log) as ask_it:
        progress.advance(task)
        ask_all(ask_it, COLD, 0)
        ask_all(ask_it, RAM, 1)
        progress.update(task, description="stopping vLLM")
    progress.update(task, description="starting vLLM again")
    with life(settings, log) as ask_it:
        progress.advance(task)
        ask_all(ask_it, DISK, 2)
        progress.update(task, description="stopping vLLM")
    return measured


def of_way(measured: Sequence[Measured], way: str) -> list[Answer]:
    return [one.answer for one in measured if one.way == way]


def num_same(measured: Sequence[Measured], way: str) -> int:
    """How many answers of ``way`` have the tokens of the cold ones."""
    pairs = zip(of_way(measured, way), of_way(measured, COLD), strict=True)
    return sum(answer.tokens == cold.tokens for answer, cold in pairs)


def problems(measured: Sequence[Measured]) -> Iterator[str]:
    """Everything that is not as it should be."""
    for way, question, answer in measured:
        is_enough = answer.num_reused_tokens >= MIN_REUSED * answer.num_prompt_tokens
        reused = f"{answer.num_reused_tokens} of {answer.num_prompt_tokens} tokens were reused"
        if way == COLD and answer.num_reused_tokens:
            yield f"{way}, question {question + 1}: {reused}, so it was not cold"
        if way != COLD and not is_enough:
            yield f"{way}, question {question + 1}: {reused}, so the hit was missed"
        if (way == DISK) != (answer.num_disk_chunks > 0):
            yield f"{way}, question {question + 1}: {answer.num_disk_chunks} chunks came from disk"
    for way in (RAM, DISK):
        if different := len(QUESTIONS) - num_same(measured, way):
            yield f"{way}: {different} answers have other tokens than cold"


def results_table(measured: Sequence[Measured], dtype: str) -> Table:
    num_tokens = max(one.answer.num_prompt_tokens for one in measured)
    table = Table(
        title=f"Time to the first token of {len(QUESTIONS)} questions, prompts of up to {num_tokens:,} tokens",
        caption=(
            f"SmolLM2-135M in {dtype}, vLLM {vllm_version()}, {os.cpu_count()} CPUs. Cold: each question has a copy of "
            "the document to itself (by cache_salt). Hits: another question about each copy, after vLLM's own prefix "
            "cache was dropped (reset_prefix_cache), so that the hit is QKVault's. Disk: a new vLLM, with its "
            "RAM empty. Same tokens: answers with the tokens of the cold one."
        ),
        caption_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for name in ("", "median", "range", "reused", "speed-up", "same tokens"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    cold_seconds = statistics.median(answer.ttft_seconds for answer in of_way(measured, COLD))
    for way in (COLD, RAM, DISK):
        answers = of_way(measured, way)
        seconds = [answer.ttft_seconds for answer in answers]
        median_seconds = statistics.median(seconds)
        times = f"{median_seconds:.2f} s", f"{min(seconds):.2f}-{max(seconds):.2f} s"
        reused = f"{min(answer.num_reused_tokens for answer in answers):,}"
        compared = (f"{cold_seconds / median_seconds:.1f} x", f"{num_same(measured, way)} of {len(answers)}")
        table.add_row(way, *times, reused, *(("", "") if way == COLD else compared))
    return table


def results_json(measured: Sequence[Measured], dtype: str) -> dict[str, object]:
    return {
        "model": "SmolLM2-135M-Instruct",
        "dtype": dtype,
        "vllm": vllm_version(),
        "qkvault": metadata.version("qkvault"),
        "num_cpus": os.cpu_count(),
        "median_ttft_seconds": {
            way: statistics.median(answer.ttft_seconds for answer in of_way(measured, way)) for way in (COLD, RAM, DISK)
        },
        "answers": [
            {"way": way, "question": QUESTIONS[question], **answer._asdict()} for way, question, answer in measured
        ],
        "problems": list(problems(measured)),
    }


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
        raise typer.Exit(1)
    return model


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, subcommand_metavar="")


@app.callback(invoke_without_command=True)
def demo(
    context: typer.Context,
    *,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16: slow on many CPUs, and tokens may differ.")] = (
        "float32"
    ),
    keep: Annotated[bool, typer.Option("--keep", help="Keep the disk tier and vLLM's log, and say where.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")] = False,
) -> None:
    """Show the same questions cold, from RAM and from disk. Exit code 1 if tokens differ or a hit was missed."""
    if context.invoked_subcommand is not None:
        return
    settings = {"model": str(model_path()), "dtype": dtype}
    console = Console(stderr=True)
    console.print("Two lives of vLLM with a small model; about two minutes on two idle cores.")
    with scratch(keep=keep) as (folder, log_path):
        settings["disk_path"] = str(folder)
        try:
            with log_path.open("w", encoding="utf-8") as log, progress_on(console) as progress:
                measured = measure(settings, log, progress)
        except EngineDied as error:
            tail = log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
            console.print("\n".join(tail), markup=False, highlight=False)
            console.print(f"{error}; its log is in {log_path}", style="red")
            raise typer.Exit(1) from error
        found = list(problems(measured))
        if as_json:
            print(json.dumps(results_json(measured, dtype), indent=2))
        else:
            Console().print(results_table(measured, dtype))
        for problem in found:
            console.print(problem, style="red")
        if found:
            raise typer.Exit(1)


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


def progress_on(console: Console) -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, transient=True)


@app.command(hidden=True)
def engine(settings: str, answers: int) -> None:
    """One life of vLLM: settings in JSON, questions from stdin, answers to a file descriptor."""
    with os.fdopen(answers, "w") as pipe:
        serve(json.loads(settings), sys.stdin, pipe)


if __name__ == "__main__":
    app()
