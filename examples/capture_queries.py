"""What did the answer look at? Queries of stock vLLM, read back by token ids, and half of a document dropped by them.

1. vLLM with the connector answers a question about a document. Capture is on: Q is stored beside K and V.
2. The SDK reads Q, K and V back from the engine's store, by token ids; attention of the answer follows from them.
3. Half of the document's tokens, those that the question looks at least, are dropped from the cache. What is left is
   stored under the tokens that are left, and the question asked again: vLLM hits the edited prefix.
4. Over passages and questions, that half is compared with random halves of the same size (capture_compare.py).

The steps themselves are in capture_steps.py; capture_queries.ipynb goes through them one by one.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer
from capture_compare import (
    LATEST,
    RANDOM,
    SCORE,
    Compared,
    Judge,
    compare_all,
    compared_table,
    mean_of,
    num_closer,
    problems_of,
)
from capture_passages import PASSAGES
from capture_shown import attention_picture, sentences_of, sentences_table, words_line
from capture_steps import (
    Again,
    Read,
    Session,
    answer_attention,
    ask_again,
    ask_and_read,
    ask_edited,
    kept_by_score,
    prompt_of,
    session,
    text_of,
)
from engine_life import HERE, Answer, EngineDied, model_path, progress_on, scratch, show_death, vllm_version
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

DOCUMENT: Final = HERE / "data" / "julius-caesar.txt"
QUESTION: Final = "What do the citizens want Antony to read?"
SALT: Final = "the story"
NUM_SEEDS, QUICK_SEEDS = 5, 2
PICTURE: Final = Path(tempfile.gettempdir(), "qkvault-attention.png")


class Story(NamedTuple):
    """One question: asked, asked again, and asked of what is left."""

    question: str
    read: Read
    hit: Answer
    again: Again
    texts: dict[str, str]  # what was answered: whole, hit, edited
    picture: Path


def tell(session: Session, document: str, question: str, share: float, picture: Path) -> Story:
    """Steps 1 to 3."""
    prompt = prompt_of(session, document, question)
    read = ask_and_read(session, prompt, SALT)
    hit = ask_again(session, read)
    kept = kept_by_score(read, share)
    again = ask_edited(session, read, kept)
    texts = {
        "whole": text_of(session, read.said),
        "hit": text_of(session, hit.tokens[: len(read.said)]),
        "edited": text_of(session, again.said),
    }
    draw(read, kept, question, texts["whole"], picture)
    return Story(question, read, hit, again, texts, picture)


def draw(read: Read, kept: list[int], question: str, answer: str, picture: Path) -> None:
    image = attention_picture(
        read.prompt, answer_attention(read), kept, title=question, subtitle=f"The answer was: {answer}"
    )
    picture.parent.mkdir(parents=True, exist_ok=True)
    image.quantize(128).save(picture, optimize=True)


def problems(story: Story) -> Iterator[str]:
    """Everything that is not as it should be."""
    prompt, again = story.read.prompt, story.again
    if story.read.answer.num_reused_tokens:
        yield f"{story.read.answer.num_reused_tokens} tokens were reused, so the first answer was not cold"
    if story.read.queries.span != (0, story.read.keys.span.stop) or story.read.queries.holes:
        yield f"queries {story.read.queries.span} with holes {story.read.queries.holes}"
    if story.hit.num_reused_tokens < prompt.body:
        yield f"{story.hit.num_reused_tokens} of {len(prompt.tokens)} tokens were hit"
    if story.texts["hit"] != story.texts["whole"]:
        yield "the hit has another answer than the cold prompt"
    if again.answer.num_reused_tokens != len(again.kept):
        yield f"{again.answer.num_reused_tokens} tokens of the edited prompt were hit, {len(again.kept)} were stored"


def times_table(story: Story) -> Table:
    """The three ways the question was asked."""
    table = Table(title=story.question, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("", "first token", "prompt", "reused"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    table.add_column("answer", overflow="fold")
    ways = (
        ("whole, cold", story.read.answer, "whole"),
        ("whole, hit", story.hit, "hit"),
        ("half dropped, hit", story.again.answer, "edited"),
    )
    for name, answer, text in ways:
        numbers = f"{answer.ttft_seconds:.2f} s", f"{answer.num_prompt_tokens:,}", f"{answer.num_reused_tokens:,}"
        table.add_row(name, *numbers, story.texts[text])
    return table


def told_kept(story: Story) -> str:
    prompt, num_kept = story.read.prompt, len(story.again.kept)
    return f"{prompt.body - num_kept:,} tokens of {prompt.body:,} dropped, {num_kept:,} kept; picture: {story.picture}"


def show(story: Story, console: Console) -> None:
    prompt, weights = story.read.prompt, answer_attention(story.read)
    console.print(times_table(story))
    console.print()
    console.print(sentences_table(prompt, weights, story.again.kept))
    console.print(words_line(prompt, weights))
    console.print(told_kept(story), highlight=False, soft_wrap=True)


def as_json(story: Story, compared: list[Compared], found: list[str]) -> dict[str, object]:
    read, again = story.read, story.again
    answers = {"whole": read.answer, "hit": story.hit, "edited": again.answer}
    top = sentences_of(read.prompt, answer_attention(read), again.kept)
    return {
        "model": "SmolLM2-135M-Instruct",
        "vllm": vllm_version(),
        "question": story.question,
        "answers": {
            way: {
                "text": story.texts[way],
                "ttft_seconds": answer.ttft_seconds,
                "num_prompt_tokens": answer.num_prompt_tokens,
                "num_reused_tokens": answer.num_reused_tokens,
            }
            for way, answer in answers.items()
        },
        "num_body_tokens": read.prompt.body,
        "num_kept_tokens": len(again.kept),
        "num_query_tokens": read.queries.num_tokens,
        "sentences": [part._asdict() for part in sorted(top, key=lambda part: -part.importance)[:5]],
        "picture": str(story.picture),
        "mean_divergence_nats": {way: mean_of(compared, way) for way in (SCORE, RANDOM, LATEST) if compared},
        "num_closer": num_closer(compared),
        "compared": [one._asdict() for one in compared],
        "problems": found,
    }


def run(
    progress: Progress, log: Path, picture: Path, question: str, share: float, *, quick: bool, compares: bool
) -> tuple[Story, list[Compared]]:
    """All four steps, with progress. Raises EngineDied."""
    model = model_path()
    document = PASSAGES[1].text() if quick else DOCUMENT.read_text(encoding="utf-8")
    passages = [PASSAGES[3]._replace(questions=PASSAGES[3].questions[:1])] if quick else PASSAGES
    num_questions = sum(len(passage.questions) for passage in passages) if compares else 0
    task = progress.add_task("starting vLLM", total=2 + num_questions)
    compared: list[Compared] = []
    with log.open("w", encoding="utf-8") as out, session(model, out) as engine:
        progress.update(task, advance=1, description=question)
        story = tell(engine, document, question, share, picture)
        progress.advance(task)
        if compares:
            progress.update(task, description="comparing halves")
            judge, seeds = Judge(model, engine.rope), range(QUICK_SEEDS if quick else NUM_SEEDS)
            for one in compare_all(engine, judge, passages, seeds=seeds, share=share):
                compared.append(one)
                progress.advance(task)
                means = f"{one.mean(SCORE):.3f} by score, {one.mean(RANDOM):.3f} at random"
                line = f"{means}: {one.passage}, {one.question}"
                progress.console.print(line, style="dim", highlight=False, soft_wrap=True)
        progress.update(task, description="stopping vLLM")
    return story, compared


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    *,
    question: Annotated[str, typer.Option(help="About examples/data/julius-caesar.txt.")] = QUESTION,
    share: Annotated[float, typer.Option(min=0.1, max=0.9, help="Of the document's tokens that stays.")] = 0.5,
    picture: Annotated[Path, typer.Option(help="Where the picture goes.")] = PICTURE,
    compare: Annotated[bool, typer.Option(help="Also compare with random halves, over passages and questions.")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="A shorter document and one comparison.")] = False,
    as_json_: Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")] = False,
) -> None:
    """Ask, read Q and K back, drop half of the document by attention, ask again. Exit code 1 if something is amiss."""
    console = Console(stderr=True)
    console.print("One life of vLLM with a small model; some minutes on two cores, one or two with --quick.")
    with scratch(keep=False) as (_, log_path):
        try:
            with progress_on(console) as progress:
                story, compared = run(progress, log_path, picture, question, share, quick=quick, compares=compare)
        except EngineDied as error:
            show_death(error, log_path, console)
            raise typer.Exit(1) from error
    found = [*problems(story), *(problems_of(compared) if compared else ())]
    if as_json_:
        print(json.dumps(as_json(story, compared, found), indent=2))
    else:
        show(story, Console())
        if compared:
            Console().print(compared_table(compared))
    for problem in found:
        console.print(problem, style="red")
    if found:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
