"""The steps of ``capture_queries.py``, one function each: ask, read Q and K back, score, drop, ask again.

The notebook and the demo call the same ones. Knows nothing of how results are shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TextIO

import torch
from engine_life import BLOCK_TOKENS, Answer, Ask, life, store_address

from qkvault.keys import RequestIdentity
from qkvault.sdk import CacheTensors, Context, connect
from qkvault.sdk.attention import Attention, best, last_window
from qkvault.sdk.edit import Rope, drop_tokens
from qkvault.types import CacheKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NUM_ANSWER_TOKENS: Final = 40  # more than a block: whole blocks are stored, and so the question is in one
CAPTURE: Final = {"qkvault.transfer_intermediate_tensors": True}
SMALL_CHUNKS: Final = {
    "qkvault.chunk_size": BLOCK_TOKENS
}  # a chunk that a hit ends in has no queries: small ones lose less


class Prompt(NamedTuple):
    """A question about a document. Tokens ``[start, stop)`` are the document's."""

    text: str
    tokens: list[int]
    characters: list[tuple[int, int]]  # of ``text``, for each token
    start: int
    stop: int

    @property
    def body(self) -> int:
        """The tokens before it are whole blocks, without the question: what an edit can keep some of."""
        return self.stop // BLOCK_TOKENS * BLOCK_TOKENS


class Read(NamedTuple):
    """An answer, and what the store has of it."""

    prompt: Prompt
    answer: Answer
    said: list[int]  # tokens of the answer up to its end
    keys: CacheTensors  # K and V of prompt and answer, from the first token on
    queries: CacheTensors  # Q of prompt and answer, from some token on
    salt: str


class Again(NamedTuple):
    """The same question to what is left of the document."""

    kept: list[int]  # positions
    tokens: list[int]  # of the new prompt
    answer: Answer
    said: list[int]


class Session(NamedTuple):
    """An engine that captures, its store as the SDK sees it, and what is known of its model."""

    ask: Ask
    keys: Context
    queries: Context
    tokenizer: PreTrainedTokenizerFast
    rope: Rope


@contextmanager
def session(model: Path, log: TextIO | None = None, *, dtype: str = "float32") -> Iterator[Session]:
    """A life of vLLM that captures the queries of all requests. Raises EngineDied."""
    settings = {"model": str(model), "dtype": dtype, "extra": CAPTURE | SMALL_CHUNKS}
    with life(settings, log) as ask, attached(ask, model) as session:
        yield session


@contextmanager
def attached(ask: Ask, model: Path) -> Iterator[Session]:
    """The SDK beside a life that captures: sessions with its store, over its socket."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rope = Rope.of(json.loads((model / "config.json").read_text(encoding="utf-8")))
    where = store_address()
    with connect(where, kind=CacheKind.KV) as keys, connect(where, kind=CacheKind.QUERY) as queries:
        yield Session(ask, keys, queries, tokenizer, rope)


def prompt_of(session: Session, document: str, question: str) -> Prompt:
    message = {"role": "user", "content": f"{document}\n\n{question} Answer in one sentence."}
    text = session.tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    encoded = session.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    characters = [tuple(pair) for pair in encoded["offset_mapping"]]
    first = text.index(document)
    inside = [at for at, (begin, end) in enumerate(characters) if first <= begin and end <= first + len(document)]
    return Prompt(text, list(encoded["input_ids"]), characters, inside[0], inside[-1] + 1)


def ask_and_read(session: Session, prompt: Prompt, salt: str, *, whole: bool = True) -> Read:
    """Ask, and read back by token ids what the engine has stored: K and V of all, Q of all or from the question on."""
    answer = session.ask(
        {
            "tokens": prompt.tokens,
            "salt": salt,
            "num_tokens": NUM_ANSWER_TOKENS,
            "ignore_eos": True,
            "transfer": {"qkvault.queries": True},
        }
    )
    tokens, identity = prompt.tokens + answer.tokens, RequestIdentity(cache_salt=salt)
    keys = session.keys.retrieve(tokens, identity=identity)
    queries = session.queries.retrieve(tokens, span=(0 if whole else prompt.stop, len(tokens)), identity=identity)
    assert keys is not None, "K and V of the prompt are stored"
    assert queries is not None, "Q of the question is stored"
    return Read(prompt, answer, said(session, answer), keys, queries, salt)


def ask_again(session: Session, read: Read) -> Answer:
    """The same prompt: a hit, since it is stored."""
    order = {"tokens": read.prompt.tokens, "salt": read.salt, "num_tokens": NUM_ANSWER_TOKENS, "ignore_eos": True}
    return session.ask(order)


def said(session: Session, answer: Answer) -> list[int]:
    """The tokens of an answer up to its end, which is among them if it was reached."""
    end = session.tokenizer.eos_token_id
    return answer.tokens[: answer.tokens.index(end) + 1] if end in answer.tokens else answer.tokens


def text_of(session: Session, tokens: list[int]) -> str:
    return session.tokenizer.decode(tokens, skip_special_tokens=True).strip()


def answer_attention(read: Read) -> torch.Tensor:
    """``[layers, heads, document tokens]``: the mean attention of the tokens of the answer to those of the document."""
    prompt, first = (
        read.prompt,
        len(read.prompt.tokens) - 1,
    )  # the last token of the prompt says the first of the answer
    span = first, first + len(read.said)
    attention = Attention(_rows(read.queries, *span), read.keys)
    sums = torch.stack([attention.received(layer, span=span) for layer in attention.layers])
    return sums[..., prompt.start : prompt.stop] / len(attention.queries)


def question_scores(read: Read) -> torch.Tensor:
    """``[layers, heads, body]``: what the question looks at, pooled: SnapKV with the question as its window."""
    prompt, num_tokens = read.prompt, len(read.prompt.tokens)
    attention = Attention(_rows(read.queries, prompt.stop, num_tokens), _rows(read.keys, 0, num_tokens))
    return last_window(attention, window=num_tokens - prompt.stop)[..., : prompt.body]


def num_kept(prompt: Prompt, share: float) -> int:
    """How many of the body's tokens stay if ``share`` of the document's do: whole blocks, as hits are."""
    num_tokens = prompt.start + round(share * (prompt.body - prompt.start))
    return num_tokens // BLOCK_TOKENS * BLOCK_TOKENS


def kept_by_score(read: Read, share: float = 0.5) -> list[int]:
    """Which tokens of the body stay: what is before the document (attention sinks), its last block, and the best."""
    prompt = read.prompt
    count = num_kept(prompt, share)
    return best(question_scores(read), count, sinks=prompt.start, recent=BLOCK_TOKENS)


def ask_edited(session: Session, read: Read, kept: list[int]) -> Again:
    """Store the body with the tokens ``kept`` only, and ask the same question behind it."""
    prompt, salt = read.prompt, f"{read.salt}, edited"
    edited = drop_tokens(
        session.keys,
        prompt.tokens[: prompt.body],
        kept,
        session.rope,
        identity=RequestIdentity(cache_salt=read.salt),
        into=RequestIdentity(cache_salt=salt),
    )
    assert edited is not None, "the body is stored"
    tokens = edited.tokens + prompt.tokens[prompt.body :]
    order = {"tokens": tokens, "salt": salt, "num_tokens": NUM_ANSWER_TOKENS, "ignore_eos": True}
    answer = session.ask(order)
    return Again(kept, tokens, answer, said(session, answer))


def _rows(tensors: CacheTensors, start: int, stop: int) -> CacheTensors:
    """Those of tokens ``[start, stop)`` that are there."""
    at = tensors.positions
    return tensors.rows(at[(at >= start) & (at < stop)])
