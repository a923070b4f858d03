"""The process of the service: its socket, its signals, and its end."""

import logging
import math
import signal
import socket
import sys

import uvicorn

from jax_transformer.errors import ConfigError
from jax_transformer.extras.serve.app import Service

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


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


def run(service: Service, bound: socket.socket) -> None:
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
