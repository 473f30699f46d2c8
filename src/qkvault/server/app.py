"""The pages for operators: what each answers, who may ask, and how much he may send. JSON but for the metrics.

Who reaches a Unix socket may do anything, as the file's mode says. Over TCP what changes the cache needs the token;
from other machines everything does, but for ``/healthz``.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import msgspec
from prometheus_client import ProcessCollector
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

import qkvault
from qkvault.address import Address
from qkvault.errors import ConfigError, QKVaultError, Unavailable
from qkvault.keys import RequestIdentity
from qkvault.logs import RateLimited, get_logger
from qkvault.metrics import MetricsExporter
from qkvault.reports import cached_prefixes, read_tokenizer, status_report

if TYPE_CHECKING:
    from qkvault.server.server import Server

_MAX_BODY_BYTES: Final = 16 << 20  # a million token ids as text, and then some
_BODY_SECONDS: Final = 10.0
_LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_CLOSE: Final = {"connection": "close"}  # what still comes of the body is not read
_HEADERS: Final = {401: {"www-authenticate": "Bearer"}, 408: _CLOSE, 413: _CLOSE}
_log = get_logger("http")
_limited = RateLimited(_log)

_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class LookupQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much of this prompt is cached? Either ``tokens``, or ``text`` with the path of a ``tokenizer``."""

    tokens: list[_TokenId] | None = None
    text: str | None = None
    tokenizer: str | None = None
    model_name: str | None = None  # None: all that the store knows
    cache_salt: str = ""
    adapter: str = ""
    media: list[str] | None = None  # None: all


class ClearOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to forget: everything, or only what is in RAM."""

    lower_tiers: bool = True


class SwitchOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which way to turn a switch."""

    enabled: bool


class _Refusal(Exception):
    def __init__(self, code: int, why: str) -> None:
        self.code, self.why = code, why


class Access(NamedTuple):
    """Who may ask what at one address."""

    place: Address
    token: str

    def require(self, request: Request, *, token: bool) -> None:
        """Raise _Refusal unless the request may be answered; ``token``: it needs one where clients are not known."""
        if self.place.is_unix:
            return
        if self.place.is_local and _host_of(request) not in {*_LOCAL_NAMES, self.place.host}:
            # A web page may have its own name resolve to this machine; the browser then sends that name.
            raise _Refusal(421, "the Host header does not name this machine")
        if not token:
            return
        if not self.token:
            why = "no token is set, so nobody may do that over TCP: set `token`, or let `http` be a Unix socket"
            raise _Refusal(403, why)
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode("latin-1", "replace"), f"Bearer {self.token}".encode()):
            _limited.warning("token_refused", peer=request.client.host if request.client else "")
            raise _Refusal(401, "send the header `Authorization: Bearer TOKEN` with the server's token")


def make_app(server: Server, access: Access) -> Starlette:
    """All pages of ``server``."""
    pages = _Pages(server)
    is_exposed = not access.place.is_local and bool(access.token)

    def route(path: str, method: str, answer: _Answer, *, token: bool = is_exposed) -> Route:
        async def endpoint(request: Request) -> Response:
            return await _respond(request, access, answer, token=token)

        return Route(path, endpoint, methods=[method])

    app = Starlette(
        routes=[
            route("/healthz", "GET", pages.health, token=False),
            route("/status", "GET", pages.status),
            route("/metrics", "GET", pages.metrics),
            route("/config", "GET", pages.config),
            route("/lookup", "POST", pages.lookup),
            route("/clear", "POST", pages.clear, token=True),
            route("/freeze", "POST", pages.freeze, token=True),
            route("/hot-cache", "POST", pages.hot_cache, token=True),
        ],
        exception_handlers={HTTPException: _on_http_exception},
    )
    app.router.redirect_slashes = False
    return app


class _Asked(NamedTuple):
    body: bytes
    require_token: Callable[[], None]  # raises _Refusal unless the request came with the token, or needs none


_Answer = Callable[[_Asked], object]


class _Pages:
    """Each page returns what is to be JSON, or a response. Called by any thread."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._client = server.connect("http")
        config = server.loaded.config
        self._exporter: MetricsExporter | None = None
        if config.metrics:
            self._exporter = MetricsExporter(None, self._client.status, instance_id=config.instance_id)
            ProcessCollector(registry=self._exporter.registry)

    def health(self, _: _Asked) -> object:
        if self._server.is_closing:
            return _json({"status": "stopping"}, 503)
        if dead := self._server.dead_threads:
            return _json({"status": "dead", "threads": dead}, 503)
        ill = [medium.name for medium in self._client.status().media if not medium.is_healthy]
        return {"status": "degraded", "unhealthy": ill} if ill else {"status": "ok"}

    def status(self, _: _Asked) -> object:
        server, config = self._server, self._server.loaded.config
        about = {
            "version": qkvault.__version__,
            "pid": os.getpid(),
            "epoch": server.epoch,
            "uptime_seconds": round(time.time() - server.started_seconds, 3),
            "addresses": server.addresses,
            "http": server.http_address,
            "instance_id": config.instance_id,
            "chunk_size": config.chunk_size,
            "hash_algorithm": config.hash_algorithm,
        }
        return {"server": about, **status_report(self._client.status())}

    def metrics(self, _: _Asked) -> object:
        if self._exporter is None:
            raise _Refusal(404, "metrics are switched off: set `metrics`")
        return Response(self._exporter.render(), media_type=_METRICS_TYPE)

    def config(self, _: _Asked) -> object:
        shown = self._server.loaded.shown()
        return {name: {"value": value, "source": source} for name, (value, source) in shown.items()}

    def lookup(self, asked: _Asked) -> object:
        query = msgspec.json.decode(asked.body, type=LookupQuery)
        if (query.tokens is None) == (query.text is None):
            msg = "give either tokens, a list of ids, or text with the path of a tokenizer"
            raise ValueError(msg)
        tokens = query.tokens
        if tokens is None:
            if query.tokenizer is None:
                msg = "text needs tokenizer, the path of its tokenizer.json on the server's machine"
                raise ValueError(msg)
            asked.require_token()  # it has us read a file
            tokens = read_tokenizer(query.tokenizer, query.text or "")
        identity = RequestIdentity(cache_salt=query.cache_salt, adapter=query.adapter)
        found = cached_prefixes(
            self._client, tokens, model_name=query.model_name, identity=identity, search_range=query.media
        )
        return {"num_tokens": len(tokens), "spaces": found}

    def clear(self, asked: _Asked) -> object:
        order = msgspec.json.decode(asked.body, type=ClearOrder) if asked.body else ClearOrder()
        num_chunks = self._client.clear(lower_tiers=order.lower_tiers)
        _log.info("cleared", by="http", chunks=num_chunks, lower_tiers=order.lower_tiers)
        return {"num_chunks": num_chunks}

    def freeze(self, asked: _Asked) -> object:
        enabled = msgspec.json.decode(asked.body, type=SwitchOrder).enabled
        _log.info("frozen" if enabled else "unfrozen", by="http")
        return {"is_frozen": self._client.switch(frozen=enabled).is_frozen}

    def hot_cache(self, asked: _Asked) -> object:
        enabled = msgspec.json.decode(asked.body, type=SwitchOrder).enabled
        _log.info("hot_cache", by="http", enabled=enabled)
        return {"hot_cache": self._client.switch(hot_cache=enabled).hot_cache}


async def _respond(request: Request, access: Access, answer: _Answer, *, token: bool) -> Response:
    try:
        access.require(request, token=token)
        asked = _Asked(await _body_of(request), lambda: access.require(request, token=True))
        result = await run_in_threadpool(answer, asked)
        return result if isinstance(result, Response) else _json(result)
    except _Refusal as refusal:
        return _problem(refusal.code, refusal.why)
    except (msgspec.MsgspecError, ValueError, ConfigError) as error:
        return _problem(400, str(error))
    except Unavailable as error:
        return _problem(503, str(error))
    except (QKVaultError, ClientDisconnect) as error:
        return _problem(500, str(error))
    except Exception:  # thread top: one request's fault is not the server's
        _log.exception("page_failed", page=request.url.path)
        return _problem(500, "the server failed, and has logged why")


async def _body_of(request: Request) -> bytes:
    if request.method != "POST":
        return b""
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > _MAX_BODY_BYTES:
        raise _Refusal(413, f"a body has at most {_MAX_BODY_BYTES} bytes")
    try:
        return await asyncio.wait_for(_collect(request), _BODY_SECONDS)
    except asyncio.TimeoutError:
        raise _Refusal(408, f"the body did not come in {_BODY_SECONDS:g} s") from None


async def _collect(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_BODY_BYTES:
            raise _Refusal(413, f"a body has at most {_MAX_BODY_BYTES} bytes")
    return bytes(body)


def _on_http_exception(request: Request, error: HTTPException) -> Response:
    why = {404: f"there is no page {request.url.path}", 405: f"{request.url.path} does not take {request.method}"}
    return _problem(error.status_code, why.get(error.status_code, str(error.detail)), dict(error.headers or {}))


def _problem(code: int, why: str, headers: dict[str, str] | None = None) -> Response:
    return _json({"error": why}, code, {**_HEADERS.get(code, {}), **(headers or {})})


def _json(value: object, code: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value) + b"\n", code, headers, "application/json")


def _host_of(request: Request) -> str:
    host = str(request.headers.get("host", ""))
    end = host.find("]") + 1 if host.startswith("[") else host.find(":")
    return (host[:end] if end > 0 else host).lower()
