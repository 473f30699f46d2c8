"""QKVault in some minutes: questions about one document, cold, from RAM, and from disk after vLLM was restarted.

Then what an answer looked at, from captured queries, and the answer from half of the document (capture_queries.py does
that at length). This process asks, compares and prints; each life of vLLM is a process of its own (engine_life.py).
``make demo`` runs it.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple, TextIO

import typer
from engine_life import (
    HERE,
    Answer,
    Ask,
    EngineDied,
    life,
    model_path,
    progress_on,
    scratch,
    show_death,
    vllm_version,
)
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

if TYPE_CHECKING:
    from capture_queries import Story

DOCUMENT: Final = HERE / "data" / "julius-caesar.txt"
QUESTIONS: Final = (
    "Why did Brutus kill Caesar?",
    "What did Caesar do three times on the Lupercal?",
    "What do the citizens want Antony to read?",
    "What does Antony say about Brutus?",
)
COLD, RAM, DISK = "cold", "hit in RAM", "hit on disk, restarted"
NUM_ANSWER_TOKENS: Final = 16
MIN_REUSED: Final = 0.9  # of a prompt; what is not the document is less than a tenth
CAPTURED: Final = 2  # the question whose answer's attention is shown
CAPTURE: Final = {"qkvault.transfer_intermediate_tensors": True, "qkvault.q_requests": "asked"}
PICTURE: Final = Path(tempfile.gettempdir(), "qkvault-attention.png")


class Measured(NamedTuple):
    """One question that was asked in one way."""

    way: str
    question: int
    answer: Answer


def measure(
    settings: dict[str, object], log: TextIO, progress: Progress, *, quick: bool
) -> tuple[list[Measured], Story | None]:
    """Ask all questions in all ways, in two lives of vLLM; in the second one also capture the queries of one answer.

    ``quick`` asks one question, and captures nothing.
    """
    measured: list[Measured] = []
    questions = QUESTIONS[:1] if quick else QUESTIONS
    num_questions = len(questions)
    document = DOCUMENT.read_text(encoding="utf-8")
    task = progress.add_task("", total=(2 if quick else 3) + 3 * num_questions)

    def ask_all(ask: Ask, way: str, shift: int) -> None:
        for question, text in enumerate(questions):
            progress.update(task, description=f"{way}: {text}")
            message = f"{document}\n\n{text} Answer in one sentence."
            salt = f"copy-{(question + shift) % num_questions}"
            answer = ask({"message": message, "salt": salt, "num_tokens": NUM_ANSWER_TOKENS})
            measured.append(Measured(way, question, answer))
            progress.advance(task)
            line = f"{answer.ttft_seconds:7.2f} s  {way}: {text}"
            progress.console.print(line, style="dim", highlight=False, soft_wrap=True)

    progress.update(task, description="starting vLLM")
    with life(settings, log) as ask:
        progress.advance(task)
        ask_all(ask, COLD, 0)
        ask_all(ask, RAM, 1)
        progress.update(task, description="stopping vLLM")
    progress.update(task, description="starting vLLM again")
    with life(settings if quick else settings | {"extra": settings["extra"] | CAPTURE}, log) as ask:
        progress.advance(task)
        ask_all(ask, DISK, 2)
        story = None
        if not quick:
            progress.update(task, description=f"capturing queries: {QUESTIONS[CAPTURED]}")
            story = captured(ask, Path(str(settings["model"])), document)
            progress.advance(task)
        progress.update(task, description="stopping vLLM")
    return measured, story


def captured(ask: Ask, model: Path, document: str) -> Story:
    """What one answer looked at, and the answer to half of the document: the steps of capture_queries.py."""
    from capture_queries import tell  # brings torch, which the first life does without
    from capture_steps import attached

    with attached(ask, model) as session:
        return tell(session, document, QUESTIONS[CAPTURED], 0.5, PICTURE)


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
        if different := len(of_way(measured, way)) - num_same(measured, way):
            yield f"{way}: {different} answers have other tokens than cold"


def results_table(measured: Sequence[Measured], dtype: str) -> Table:
    num_questions = len(of_way(measured, COLD))
    num_tokens = max(one.answer.num_prompt_tokens for one in measured)
    table = Table(
        title=f"Time to the first token of {num_questions} questions, prompts of up to {num_tokens:,} tokens",
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
    }


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def demo(
    *,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16: slow on many CPUs, and tokens may differ.")] = (
        "float32"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="One question, and no captured queries.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the disk tier and vLLM's log, and say where.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")] = False,
) -> None:
    """Questions cold, from RAM and from disk, and what an answer looked at. Exit code 1 if something is amiss."""
    console = Console(stderr=True)
    minutes = "one or two minutes" if quick else "three to five minutes"
    console.print(f"Two lives of vLLM with a small model; {minutes} on two cores.")
    with scratch(keep=keep) as (folder, log_path):
        settings = {"model": str(model_path()), "dtype": dtype, "extra": {"qkvault.disk_path": str(folder)}}
        try:
            with log_path.open("w", encoding="utf-8") as log, progress_on(console) as progress:
                measured, story = measure(settings, log, progress, quick=quick)
        except EngineDied as error:
            show_death(error, log_path, console)
            raise typer.Exit(1) from error
        show(measured, story, dtype, as_json=as_json, console=console)


def show(measured: Sequence[Measured], story: Story | None, dtype: str, *, as_json: bool, console: Console) -> None:
    """The results. Ends the program with code 1 if they are not as they should be."""
    found, told = list(problems(measured)), results_json(measured, dtype)
    if not as_json:
        Console().print(results_table(measured, dtype))
    if story is not None:
        import capture_queries

        found += capture_queries.problems(story)
        told["capture"] = capture_queries.as_json(story, [], [])
        if not as_json:
            capture_queries.show(story, Console())
    if as_json:
        print(json.dumps(told | {"problems": found}, indent=2))
    for problem in found:
        console.print(problem, style="red")
    if found:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
