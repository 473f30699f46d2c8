"""Attention over a document for people: words and sentences with their importance, a picture, tables for the terminal.

Drawn with Pillow, which comes with vLLM. Knows no engine and no store.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from capture_steps import Prompt
from PIL import Image, ImageDraw, ImageFont
from rich.table import Table
from rich.text import Text

WIDTH: Final = 1400
MARGIN: Final = 60
ROW_HEIGHT: Final = 9  # of a layer
STRIP_HEIGHT: Final = 16
LINE_HEIGHT: Final = 21
TICK_TOKENS: Final = 250
STRONGEST: Final = 0.995  # quantile that has the darkest colour: a few tokens get most of the attention
INK, PALE, KEPT, DROPPED = (25, 25, 25), (175, 175, 175), (45, 110, 150), (225, 225, 225)
COLOURS: Final = ((255, 255, 255), (254, 224, 144), (249, 142, 82), (215, 48, 39), (110, 0, 30))  # from none to most
_SENTENCE: Final = re.compile(r"[^.!?;]*[.!?;]+|[^.!?;]+$")
_WORD: Final = re.compile(r"\S+")
_MIN_WORDS: Final = 3
_MIN_LETTERS: Final = 4  # of a word that is told: some of the shortest are sinks, which everything looks at


class Part(NamedTuple):
    """A word or a sentence of the document."""

    text: str
    importance: float  # 1: what a token of the document gets on average
    kept: float  # share of its tokens that stay


def parts_of(prompt: Prompt, weights: torch.Tensor, kept: Sequence[int], pattern: re.Pattern[str]) -> list[Part]:
    """The document's parts that ``pattern`` finds. ``weights`` is ``[..., document tokens]``, and is averaged."""
    mean = weights.reshape(-1, weights.shape[-1]).mean(0)
    relative = (mean / mean.mean()).tolist()
    stays = set(kept) | set(range(prompt.body, prompt.stop))
    begin, end = prompt.characters[prompt.start][0], prompt.characters[prompt.stop - 1][1]
    parts, at = [], prompt.start
    for found in pattern.finditer(prompt.text, begin, end):
        while prompt.characters[at][1] <= found.start():
            at += 1
        tokens = []
        for token in range(at, prompt.stop):
            if prompt.characters[token][0] >= found.end():
                break
            tokens.append(token)
        importance = sum(relative[token - prompt.start] for token in tokens) / len(tokens)
        parts.append(Part(found.group(), importance, sum(token in stays for token in tokens) / len(tokens)))
    return parts


def words_of(prompt: Prompt, weights: torch.Tensor, kept: Sequence[int] = ()) -> list[Part]:
    return parts_of(prompt, weights, kept, _WORD)


def sentences_of(prompt: Prompt, weights: torch.Tensor, kept: Sequence[int] = ()) -> list[Part]:
    """Sentences of some length, each on one line."""
    parts = [part._replace(text=" ".join(part.text.split())) for part in parts_of(prompt, weights, kept, _SENTENCE)]
    return [part for part in parts if len(part.text.split()) >= _MIN_WORDS]


def most_important(parts: Sequence[Part], count: int) -> list[Part]:
    return sorted(parts, key=lambda part: -part.importance)[:count]


# ---- in the terminal ----


def sentences_table(prompt: Prompt, weights: torch.Tensor, kept: Sequence[int], count: int = 5) -> Table:
    """The sentences that the answer looked at most."""
    table = Table(title="What the answer looked at", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("attention", "kept"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    table.add_column("sentence", overflow="ellipsis", no_wrap=True)
    for part in most_important(sentences_of(prompt, weights, kept), count):
        table.add_row(f"{part.importance:.1f} x", f"{part.kept:.0%}", Text(part.text))
    return table


def words_line(prompt: Prompt, weights: torch.Tensor, count: int = 12) -> Text:
    """The words that the answer looked at most, each once."""
    words: dict[str, float] = {}
    for part in most_important(words_of(prompt, weights), 10 * count):
        words.setdefault(part.text.strip(".,:;!?[]()\"'-").lower(), part.importance)
    told = [
        f"{word} {importance:.1f} x"
        for word, importance in words.items()
        if len(word) >= _MIN_LETTERS and word.isalpha()
    ][:count]
    return Text("most looked-at words: " + ", ".join(told))


# ---- as a picture ----


def attention_picture(
    prompt: Prompt, weights: torch.Tensor, kept: Sequence[int], *, title: str, subtitle: str
) -> Image.Image:
    """Layers by tokens of the document, what was kept, and the document's words in their colours.

    ``weights`` is ``[layers, heads, document tokens]``.
    """
    words = words_of(prompt, weights, kept)
    layers = weights.mean(1)
    map_height = ROW_HEIGHT * len(layers)
    places = _flow(words)
    top = 112
    text_top = top + map_height + 2 * STRIP_HEIGHT + 96
    image = Image.new("RGB", (WIDTH, text_top + LINE_HEIGHT * (places[-1][1] + 1) + 24), "white")
    draw = ImageDraw.Draw(image)
    draw.text((MARGIN, 18), title, INK, font=_font(24))
    draw.text((MARGIN, 54), subtitle, INK, font=_font(16))
    _draw_map(image, layers, top)
    under = top + map_height + 4
    _paste(image, _scaled(layers.mean(0, keepdim=True)), under, STRIP_HEIGHT)
    stays = torch.zeros(1, prompt.stop - prompt.start)
    stays[0, [at - prompt.start for at in [*kept, *range(prompt.body, prompt.stop)] if at >= prompt.start]] = 1
    strip = Image.fromarray(_rgb_of(_binned(stays), (DROPPED, KEPT)))
    image.paste(strip.resize((strip.width, STRIP_HEIGHT), Image.Resampling.NEAREST), (MARGIN, under + STRIP_HEIGHT + 4))
    draw.text((8, under), "mean", INK, font=_font(13))
    draw.text((8, under + STRIP_HEIGHT + 4), "kept", KEPT, font=_font(13))
    for token in range(0, prompt.stop - prompt.start, TICK_TOKENS):
        x = MARGIN + token * (WIDTH - 2 * MARGIN) // (prompt.stop - prompt.start)
        draw.text((x, under + 2 * STRIP_HEIGHT + 8), f"{token:,}", INK, font=_font(13))
    draw.text((MARGIN, text_top - 30), "The document; words in grey were dropped.", INK, font=_font(16))
    _draw_words(draw, words, places, text_top)
    return image


def _draw_map(image: Image.Image, layers: torch.Tensor, top: int) -> None:
    _paste(image, _scaled(layers), top, ROW_HEIGHT * len(layers))
    draw = ImageDraw.Draw(image)
    label = "attention of the answer, by layer (mean of its heads, each layer in a scale of its own) and token"
    draw.text((MARGIN, top - 18), label, INK, font=_font(13))
    for layer in range(0, len(layers), 5):
        draw.text((MARGIN - 24, top + ROW_HEIGHT * layer - 3), f"{layer:2}", INK, font=_font(12))


def _draw_words(draw: ImageDraw.ImageDraw, words: Sequence[Part], places: Sequence[tuple[int, int]], top: int) -> None:
    font = _font(14)
    scaled = _scaled(torch.tensor([[word.importance for word in words]]))
    colours = _rgb_of(scaled, COLOURS)[0].tolist()
    for word, colour, (x, line) in zip(words, colours, places, strict=True):
        y = top + LINE_HEIGHT * line
        draw.rectangle((x - 2, y - 2, x + font.getlength(word.text) + 2, y + LINE_HEIGHT - 5), tuple(colour))
        is_dark = sum(colour) < 330
        ink = (255, 255, 255) if is_dark else INK if word.kept else PALE
        draw.text((x, y), word.text, ink, font=font)


def _flow(words: Sequence[Part]) -> list[tuple[int, int]]:
    """The x and the line of each word."""
    font, places, x, line = _font(14), [], MARGIN, 0
    for word in words:
        width = int(font.getlength(word.text)) + 6
        if x + width > WIDTH - MARGIN:
            x, line = MARGIN, line + 1
        places.append((x, line))
        x += width
    return places


def _scaled(rows: torch.Tensor) -> torch.Tensor:
    """Each row from 0 to 1; the root brings out what is weak."""
    return (rows / rows.quantile(STRONGEST, dim=1, keepdim=True).clamp(min=1e-9)).clamp(0, 1).sqrt()


def _binned(rows: torch.Tensor) -> torch.Tensor:
    """As many columns as the picture has, each the largest of its tokens."""
    return torch.nn.functional.adaptive_max_pool1d(rows[None], WIDTH - 2 * MARGIN)[0]


def _paste(image: Image.Image, rows: torch.Tensor, top: int, height: int) -> None:
    bands = Image.fromarray(_rgb_of(_binned(rows), COLOURS))
    image.paste(bands.resize((bands.width, height), Image.Resampling.NEAREST), (MARGIN, top))


def _rgb_of(values: torch.Tensor, colours: Sequence[tuple[int, int, int]]):  # noqa: ANN202  # a NumPy array [rows, columns, 3]
    """``values [rows, columns]`` from 0 to 1 as colours between the nearest two of ``colours``."""
    anchors, place = torch.tensor(colours, dtype=torch.float32), values * (len(colours) - 1)
    low = place.floor().long().clamp(max=len(colours) - 2)
    share = (place - low)[..., None]
    return (anchors[low] * (1 - share) + anchors[low + 1] * share).round().to(torch.uint8).numpy()


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
