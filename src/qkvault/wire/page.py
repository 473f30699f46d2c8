"""The page docs/wire.md, out of the messages and the frame. Knows no socket."""

from __future__ import annotations

import inspect
import re
from enum import Enum
from typing import Final, get_args

import msgspec
from msgspec import inspect as shape

from qkvault.types import CacheKind, ChunkRefs, Medium, NewChunk, Outcome, RefRun
from qkvault.wire import codec
from qkvault.wire import messages as m

_PLAIN: Final[dict[type[shape.Type], str]] = {
    shape.IntType: "int",
    shape.FloatType: "float",
    shape.BoolType: "bool",
    shape.NoneType: "nil",
    shape.StrType: "str",
    shape.BytesType: "bin",
}
_COMMENT: Final = re.compile(r"^    (\w+): .*?  # (.*)$", re.MULTILINE)
_HEAD_FIELDS: Final = (
    ("u32", "body length", f"bytes of the body, at most {codec.MAX_BODY_BYTES}"),
    ("u32", "sequence", "the client's number of the request; its reply has the same"),
    ("u64", "epoch", "of a reply: which life of the store it is from; of a request: anything"),
    ("u64", "data length", "bytes of data behind the body"),
)


def wire_markdown() -> str:
    """The page docs/wire.md."""
    offset, head = 0, []
    for kind, name, meaning in _HEAD_FIELDS:
        head.append(f"| {offset} | {kind} | {name} | {meaning} |")
        offset += int(kind[1:]) // 8
    parts = (ChunkRefs, RefRun, NewChunk, m.Instance, m.InstanceStatus, m.TierStatus)
    return _PAGE.format(
        version=m.PROTOCOL_VERSION,
        head_bytes=codec.HEAD.size,
        head="\n".join(head),
        requests="\n".join(_section(each) for each in get_args(m.AnyRequest)),
        replies="\n".join(_section(each) for each in get_args(m.AnyReply)),
        parts="\n".join(_section(each) for each in parts),
        names="\n".join(_names(each) for each in (CacheKind, Medium, Outcome)),
    ).replace("``", "`")


def _section(struct: type[msgspec.Struct]) -> str:
    told = shape.type_info(struct)
    if not isinstance(told, shape.StructType):
        msg = f"{struct.__name__} is no struct"
        raise TypeError(msg)
    lines = [f"### {struct.__name__}", "", inspect.cleandoc(struct.__doc__ or ""), ""]
    if told.array_like:
        lines += ["An array of these, in this order:", ""]
    if told.fields:
        comments = dict(_COMMENT.findall(inspect.getsource(struct)))
        lines += ["| field | type | default | |", "|---|---|---|---|"]
        lines += [_row(field, comments.get(field.name, "")) for field in told.fields]
        lines.append("")
    return "\n".join(lines)


def _row(field: shape.Field, comment: str) -> str:
    default = "" if field.default is msgspec.NODEFAULT else f"`{_value(field.default)}`"
    if field.default_factory is not msgspec.NODEFAULT:
        default = "empty"
    return f"| `{field.name}` | {_type(field.type)} | {default} | {comment} |"


def _value(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return {"None": "nil", "True": "true", "False": "false", "()": "[]"}.get(repr(value), repr(value).lstrip("b"))


def _type(told: shape.Type) -> str:
    if isinstance(told, shape.UnionType):
        return " or ".join(_type(each) for each in told.types)
    if isinstance(told, shape.VarTupleType):
        return f"array of {_type(told.item_type)}{_at_most(told.max_length, 'of them')}"
    if isinstance(told, shape.DictType):
        return f"map from {_type(told.key_type)} to {_type(told.value_type)}"
    if isinstance(told, shape.IntType) and told.ge is not None:
        most = told.le if told.le is not None else (told.lt or 0) - 1
        return f"int (from {told.ge} to {most})"
    if isinstance(told, (shape.StructType, shape.EnumType)):
        return told.cls.__name__
    if isinstance(told, (shape.StrType, shape.BytesType)):
        unit = "characters" if isinstance(told, shape.StrType) else "bytes"
        return f"{_PLAIN[type(told)]}{_at_most(told.max_length, unit)}"
    return _PLAIN[type(told)]


def _at_most(count: int | None, unit: str) -> str:
    return "" if count is None else f" (at most {count} {unit})"


def _names(enum: type[Enum]) -> str:
    comments = dict(re.findall(r"^    (\w+) = .*?  # (.*)$", inspect.getsource(enum), re.MULTILINE))
    lines = [f"### {enum.__name__}", "", inspect.cleandoc(enum.__doc__ or ""), ""]
    lines += [f"- `{each.value}`{': ' if each.name in comments else ''}{comments.get(each.name, '')}" for each in enum]
    return "\n".join([*lines, ""])


_PAGE: Final = """\
# The wire

Generated from `qkvault/wire/messages.py` and `qkvault/wire/codec.py` by `make docs`. This is protocol {version}.

A client speaks to a store over a stream: a Unix socket, or TCP with or without TLS. It sends requests and gets exactly
one reply to each, in order; it may send the next before the reply to the last has come. The first request is `Hello`.
A session is a connection: its leases end with it.

## Frames

A frame is a head of {head_bytes} bytes, a body, and data. All numbers of the head are unsigned and little-endian.

| offset | type | field | meaning |
|---|---|---|---|
{head}

The body is one message in [MessagePack](https://msgpack.org): a map of its fields by name, and `type`, the message's
name. Fields that have their default may be left out, and unknown ones are passed over. Data are images of chunks, one
after the other, as they lie in slots: [decision 4](decisions/0004-one-image-in-slot-file-and-wire.md). Only `Commit`
and `Data` have any, and a client that maps the pool needs neither.

On a Unix socket the first bytes of `Welcome` carry the pool's file descriptor (`SCM_RIGHTS`):
[decision 7](decisions/0007-the-pool-is-passed-by-descriptor.md).

## What ends a connection, and what does not

- A body that is no message, a field that holds more than its type says, data of another size than what is reserved: the
  reply is `Failed`, and the connection goes on.
- A head that announces too long a body ends it, and so does anything before a `Hello` that is not one, a wrong token,
  another protocol version, and ten seconds without a `Hello`.
- While a client does not read what it was sent, nothing more is read from it. Others are not kept waiting.
- Ten seconds in which it takes nothing of what waits for it, or leaves a frame unfinished, end a connection. What it
  moves meanwhile is worth a second for every 64 KiB.
- A client that sees another epoch than before knows that the store was restarted: what it holds is gone.

## Requests

{requests}
## Replies

{replies}
## Parts of messages

{parts}
## Names

{names}"""
