"""The HTTP interface of the service, on Starlette; and its process: socket, signals, and end."""

import asyncio
import contextlib
import json
import logging
import math
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from jax_transformer import webpage
from jax_transformer.errors import ConfigError
from jax_transformer.extras.serve import requests
from jax_transformer.extras.serve.engine import CONTENT_TYPE, Batcher, Engine, Metrics, Translation
from jax_transformer.extras.serve.requests import Limits, RequestError
from jax_transformer.inference import attention_page
from jax_transformer.inference.translation import Translator, empty_hypothesis

logger = logging.getLogger(__name__)

_DEFAULTS = Limits()
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_PROGRESS = 10.0
"""Seconds between two lines about the programs that are compiled."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
CLIENT_CLOSED = 499
"""Status of a request whose client has gone, in logs and metrics; nobody receives it."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Service:
    """One model behind HTTP. :attr:`app` is the ASGI application."""

    def __init__(
        self,
        translator: Translator,
        limits: Limits = _DEFAULTS,
        *,
        title: str = "",
        allowed_hosts: Sequence[str] = ("*",),
    ):
        self.limits, self.metrics = limits, Metrics()
        self.defaults = translator.generation_config
        if self.defaults.num_beams > limits.max_beam:
            defaults = f"num_beams={self.defaults.num_beams} by default is over max_beam"
            raise ConfigError(f"{defaults}={limits.max_beam}: lower --beam or raise --max-beam")
        self.engine = Engine(translator, limits)
        self.title = title
        self.accepted = self.answered = self.abandoned = 0
        self.ready = False
        self.compiled = self.programs = 0
        self.failure: BaseException | None = None
        """An error outside of requests: the service cannot go on."""
        self.on_failure: Callable[[], None] = lambda: None
        self._page = attention_page.service_page(
            title, beam=self.engine.page_config.num_beams, max_beam=limits.max_beam
        )
        self.app = Starlette(
            routes=[
                Route("/", self._show_page),
                Route("/translate", self._translate, methods=["POST"]),
                Route("/health", self._readiness),
                Route("/health/ready", self._readiness),
                Route("/health/live", self._liveness),
                Route("/metrics", self._figures),
            ],
            middleware=[
                Middleware(_json_errors),
                Middleware(
                    TrustedHostMiddleware, allowed_hosts=list(allowed_hosts), www_redirect=False
                ),
            ],
            exception_handlers={HTTPException: _http_error, Exception: _internal_error},
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.batcher = Batcher(self.engine, self.limits, self.metrics)
        self._encoder = ThreadPoolExecutor(1, "encode")
        self._compiler = ThreadPoolExecutor(1, "compile")
        tasks = [asyncio.create_task(self._warm()), asyncio.create_task(self.batcher.run())]
        for task in tasks:
            task.add_done_callback(self._finished)
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for threads in (self._encoder, self._compiler, self.batcher.device):
            threads.shutdown()

    def _finished(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = error
            self.on_failure()

    async def _warm(self) -> None:
        """Compile all programs of the start, one at a time; after the first, requests come in."""
        loop = asyncio.get_running_loop()
        programs, start = list(self.engine.programs()), loop.time()
        self.programs, last = len(programs), start
        first = min(len(self.engine.translator.widths), self.programs)
        for self.compiled, program in enumerate([*programs, None]):
            if self.compiled == first or program is None or loop.time() >= last + _PROGRESS:
                self.ready, last = self.compiled >= first, loop.time()
                state = "ready:" if self.compiled == first else "compiled"
                figures = self.compiled, self.programs, last - start
                logger.info("%s %d of %d programs after %.0f s", state, *figures)
            if program is not None:
                await loop.run_in_executor(self._compiler, program)

    # Endpoints

    async def _show_page(self, request: Request) -> Response:
        policy = f"{webpage.content_policy(self._page)}; frame-ancestors 'none'"
        return HTMLResponse(self._page, headers=_HEADERS | {"Content-Security-Policy": policy})

    async def _liveness(self, request: Request) -> Response:
        live = self.failure is None
        return _answer({"live": live}, status=200 if live else 503)

    async def _readiness(self, request: Request) -> Response:
        live = self.failure is None
        body = {"live": live, "ready": self.ready and live, "model": self.title}
        body |= {"compiled": self.compiled, "programs": self.programs}
        return _answer(body, status=200 if body["ready"] else 503)

    async def _figures(self, request: Request) -> Response:
        return PlainTextResponse(self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _translate(self, request: Request) -> Response:
        loop = asyncio.get_running_loop()
        start, status = loop.time(), 500
        try:
            body = await self._answered(request, start)
            response = _answer({"translations": body})
            status = 200
        except RequestError as error:
            status = error.status
            response = _answer({"error": error.message}, status=status, headers=error.headers)
        except ClientDisconnect:
            status = CLIENT_CLOSED
            response = Response(status_code=CLIENT_CLOSED)
        finally:
            self.metrics.requests.labels(str(status)).inc()
            self.metrics.seconds.observe(loop.time() - start)
        return response

    async def _answered(self, request: Request, start: float) -> list[dict[str, Any]]:
        """Return the translations of a request, as JSON."""
        loop = asyncio.get_running_loop()
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind.lower() != "application/json":
            raise RequestError(415, "the content type must be application/json")
        content = await self._body(request)
        parsed = requests.parse(content, self.defaults, self.limits)
        if not self.ready:
            raise RequestError(
                503, "the programs of this server are being compiled", {"Retry-After": "5"}
            )
        lines = await loop.run_in_executor(
            self._encoder, self.engine.encode, parsed.lines, parsed.config, parsed.attention
        )
        futures = self.batcher.submit([line for line in lines if line is not None])
        self.accepted += 1
        self.metrics.accepted.inc()
        try:
            translations = await _before(start + parsed.timeout, futures, request)
        except ClientDisconnect:
            self.abandoned += 1
            raise
        except RequestError:
            self.answered += 1
            raise
        self.answered += 1
        following, empty = iter(translations), Translation([empty_hypothesis(parsed.config)], [])
        return [_as_json(empty if line is None else next(following)) for line in lines]

    async def _body(self, request: Request) -> bytes:
        """Return the body of a request. Raises RequestError if it is too large or does not come."""
        content = bytearray()
        try:
            async with asyncio.timeout(self.limits.timeout):
                async for chunk in request.stream():
                    content += chunk
                    if len(content) > self.limits.max_body_bytes:
                        raise RequestError(
                            413, f"the body is over {self.limits.max_body_bytes} bytes"
                        )
        except TimeoutError:
            raise RequestError(408, "the body did not come in time") from None
        return bytes(content)


async def _before(
    deadline: float, futures: "Sequence[asyncio.Future[Translation]]", request: Request
) -> list[Translation]:
    """Return the results; all are cancelled at the deadline, at an error, if the client goes."""
    translations = asyncio.gather(*futures)
    # It is not an error that it was cancelled, also if nobody asks for the result
    translations.add_done_callback(lambda done: done.cancelled() or done.exception())
    gone = asyncio.ensure_future(_disconnected(request))
    seconds = deadline - asyncio.get_running_loop().time()
    try:
        either: set[asyncio.Future[Any]] = {translations, gone}
        await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if translations.done():
            return translations.result()
        if gone.done():
            raise ClientDisconnect
        raise RequestError(504, "the translation was not ready before the request's timeout")
    finally:
        gone.cancel()
        for future in futures:
            future.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _as_json(translation: Translation) -> dict[str, Any]:
    maps = translation.maps or [None] * len(translation.hypotheses)
    hypotheses = [
        attention_page.hypothesis_data(each, attention)
        for each, attention in zip(translation.hypotheses, maps, strict=True)
    ]
    return {"text": hypotheses[0]["text"], "hypotheses": hypotheses}


def _answer(body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(body, status, headers={**_HEADERS, **(headers or {})})


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _answer({"error": error.detail}, status=error.status_code, headers=error.headers)


async def _internal_error(request: Request, error: Exception) -> Response:
    return _answer({"error": "internal error: see the server's log"}, status=500)


def _json_errors(app: ASGIApp) -> ASGIApp:
    """ASGI middleware that answers in JSON what another one refuses in plain text."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        refused: list[int] = []

        async def as_json(message: Message) -> None:
            kind = dict(message.get("headers", ())).get(b"content-type", b"")
            if kind.startswith(b"text/plain") and message["status"] >= 400:
                refused.append(message["status"])
            elif refused:
                answer = _answer({"error": message["body"].decode()}, status=refused[0])
                await answer(scope, receive, send)
            else:
                await send(message)

        await app(scope, receive, as_json)

    return wrapped


class _Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol, with JSON for what is not HTTP."""

    def send_400_response(self, msg: str) -> None:
        body = json.dumps({"error": msg}).encode()
        head = "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n"
        # not within another answer
        if not self.cycle or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()


# The process


def bind(host: str, port: int) -> socket.socket:
    """Return a socket at the address, which does not listen yet. Raises ConfigError."""
    if not 0 <= port < 65536:  # getaddrinfo takes its last 16 bits
        raise ConfigError(f"port={port} must be between 0 and 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on host {host}, port {port}: {reason}") from None
    return bound


def hosts(host: str) -> tuple[str, ...]:
    """Return the names by which clients may call a server on ``host``.

    On loopback, only its own: no page of another site whose name was pointed at 127.0.0.1.
    """
    return ("localhost", "127.0.0.1", "[::1]") if host in _LOOPBACK else ("*",)


def url(bound: socket.socket) -> str:
    """Return the address of a socket as a browser takes it."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def serve(service: Service, bound: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT, then answer every request that was accepted and return.

    A second signal that is SIGINT ends it without these answers and raises KeyboardInterrupt. An
    error outside of requests also ends it, and is raised.
    """
    logger = logging.getLogger("jax_transformer.extras.serve")
    logger.addHandler(logging.StreamHandler(sys.stderr))
    logger.setLevel(logging.INFO)
    logger.propagate = False  # other packages give the root logger a handler of its own
    config = uvicorn.Config(
        service.app,
        http=_Protocol,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        ws="none",
        lifespan="on",
        # Nothing that was accepted waits longer than its timeout; the rest is for slow clients
        timeout_graceful_shutdown=math.ceil(2 * service.limits.timeout),
    )
    # uvicorn raises the signal again when it is done, which would end the process with its number
    before = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
    try:
        print(f"listening on {url(bound)} (compiling programs)", file=sys.stderr, flush=True)
        uvicorn_server = uvicorn.Server(config)
        service.on_failure = lambda: setattr(uvicorn_server, "should_exit", True)
        uvicorn_server.run(sockets=[bound])
    finally:
        for number, action in before.items():
            signal.signal(number, action)
    if service.failure is not None:
        raise service.failure
    lost = service.accepted - service.answered - service.abandoned
    print(
        f"stopped: {service.accepted} requests accepted, {service.answered} answered, "
        f"{service.abandoned} abandoned by their clients" + (f", {lost} lost" if lost else ""),
        file=sys.stderr,
        flush=True,
    )
    if uvicorn_server.force_exit:
        raise KeyboardInterrupt
