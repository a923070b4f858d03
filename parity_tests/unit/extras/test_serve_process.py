"""The process of the service: its address, requests that end early, and its stop."""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import http.client
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jax_transformer.errors import ConfigError
from jax_transformer.extras.serve import app
from jax_transformer.extras.serve.app import Service
from jax_transformer.inference.translation import Translator
from parity_tests.unit import runs, services
from parity_tests.unit.services import LIMITS, device_busy, serving, until


@pytest.fixture(scope="module")
def translator() -> Translator:
    return services.translator()


@pytest.fixture(autouse=True)
def logger(monkeypatch) -> None:
    """Undo the changes of `app.serve` after the test."""
    logger = logging.getLogger("jax_transformer.extras.serve")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)


# Requests that end early

BODY = {"type": "http.request", "body": b'{"text": ["two", "three"]}'}
PART = {"type": "http.request", "body": b'{"text', "more_body": True}
GONE = {"type": "http.disconnect"}


async def status(service: Service, receive: Callable[[], Awaitable[dict[str, Any]]]) -> int:
    """The status of a request whose messages come from ``receive``."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/translate", "headers": headers}
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await service.app(scope, receive, send)
    return sent[0]["status"]


def count(service: Service, status: int) -> float:
    """The number of requests with that status in the metrics."""
    name = "jax_transformer_requests_total"
    return service.metrics.registry.get_sample_value(name, {"status": str(status)}) or 0


def test_a_body_that_does_not_come_in_time_is_408(translator):
    service = Service(translator, dataclasses.replace(LIMITS, timeout=0.05))
    messages = [PART]

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.sleep(60)
        return messages.pop()

    assert asyncio.run(status(service, receive)) == 408
    assert count(service, 408) == 1


def test_a_client_that_goes_while_it_sends_is_499(translator):
    service, messages = Service(translator, LIMITS), [GONE, PART]

    async def receive() -> dict[str, Any]:
        return messages.pop()

    assert asyncio.run(status(service, receive)) == 499
    assert count(service, 499) == 1


def test_the_lines_of_a_client_that_goes_leave_the_queue(translator, monkeypatch, caplog):
    gone, messages = threading.Event(), [BODY]

    async def receive() -> dict[str, Any]:
        while not messages and not gone.is_set():
            await asyncio.sleep(0.005)
        return messages.pop() if messages else GONE

    with (
        serving(translator) as (service, client),
        ThreadPoolExecutor(1) as threads,
        device_busy(service, monkeypatch) as batches,
    ):
        first = threads.submit(client.post, "/translate", json={"text": "one"})
        until(lambda: batches)
        second = client.portal.start_task_soon(status, service, receive)
        until(lambda: service.batcher.queued == 2)
        gone.set()
        assert second.result(60) == 499
    assert first.result().status_code == 200
    assert batches == [["one"]]
    assert (service.accepted, service.answered, service.abandoned) == (2, 1, 1)
    assert count(service, 499) == 1
    gc.collect()
    assert "asyncio" not in {record.name for record in caplog.records}, caplog.text


# The process


def test_an_address_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="cannot listen"):
            app.bind("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ConfigError, match="cannot listen"):
        app.bind("no.such.host.invalid", 0)
    with pytest.raises(ConfigError, match="port=65536"):
        app.bind("127.0.0.1", 65536)


def test_the_end_waits_for_a_body_and_a_translation_that_take_all_their_time(
    translator, monkeypatch
):
    configs: list[Any] = []

    class Server:
        force_exit = False

        def __init__(self, config):
            configs.append(config)

        def run(self, sockets):
            pass

    monkeypatch.setattr(app.uvicorn, "Server", Server)
    timeouts = (0.2, 1.0, 20.0, 20.3)
    for timeout in timeouts:
        with app.bind("127.0.0.1", 0) as bound:
            app.serve(Service(translator, dataclasses.replace(LIMITS, timeout=timeout)), bound)
    for timeout, config in zip(timeouts, configs, strict=True):
        assert 2 * timeout <= config.timeout_graceful_shutdown < 2 * timeout + 1
        assert not (config.proxy_headers or config.server_header or config.access_log)


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    monkeypatch.delitem(sys.modules, "jax_transformer.extras.serve.app")
    monkeypatch.delattr("jax_transformer.extras.serve.app")
    assert runs.main("serve", "nowhere") == 2
    assert "jax-seq2seq[serve]" in capsys.readouterr().err


def posted(port: int, fields: dict[str, Any]) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        body, headers = json.dumps(fields), {"Content-Type": "application/json"}
        connection.request("POST", "/translate", body, headers)
        with connection.getresponse() as response:
            return json.loads(response.read())


def test_sigterm_under_load_answers_what_was_accepted(tmp_path_factory):
    temporary = tmp_path_factory.getbasetemp()
    with runs.as_a_user():
        run = runs.trained(temporary).path
        expected = Translator.load(run)([f"the {word}" for word in runs.WORDS])
        process = runs.start(
            "serve", run, "--port", "0", "--batch-rows", "4", "--queue-size", "300"
        )
    texts = dict(zip((f"the {word}" for word in runs.WORDS), expected, strict=True))
    lines: list[str] = []
    try:
        while not any("ready" in line for line in lines):
            lines.append(process.stderr.readline())
            assert lines[-1], lines
        port = int(re.search(r"127\.0\.0\.1:(\d+)", lines[0])[1])
        chunk = "POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
        live = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
        no_http = "no HTTP\r\n\r\n"
        for nonsense, first in (
            (no_http, b""),
            (chunk.replace("/ ", "/translate "), b""),
            (no_http, live),
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
                connection.sendall(first)
                answer = b"" if first else b"}"
                while not answer.endswith(b"}"):
                    answer += connection.recv(1 << 12)
                connection.sendall(nonsense.encode())
                answer = connection.makefile("rb").read()
            assert b"400 Bad Request" in answer, answer
            head, body = answer.split(b"\r\n\r\n")
            assert b"application/json" in head
            assert json.loads(body) == {"error": "Invalid HTTP request received."}
        answers: list[bool] = []

        def load(number: int) -> None:
            line = list(texts)[number % len(texts)]
            with contextlib.suppress(ConnectionError, http.client.HTTPException):
                while True:
                    answer = posted(port, {"text": [line] * 3})
                    answers.append([t["text"] for t in answer["translations"]] == [texts[line]] * 3)

        threads = [threading.Thread(target=load, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        until(lambda: len(answers) > 20)
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(60)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    assert re.search(r"^ready: \d of \d\d programs after \d+ s$", "".join(lines), re.MULTILINE)
    accepted, answered, abandoned = map(int, re.findall(r"(\d+) ", errors.splitlines()[-1]))
    assert accepted == answered == len(answers) and abandoned == 0
    assert all(answers)


def test_a_stop_while_programs_are_compiled_answers_and_compiles_no_more(
    translator, monkeypatch, capfd
):
    started, compiled, answers = threading.Event(), [], []

    def compile(number: int) -> None:
        compiled.append(number)
        if number:
            started.set()
            until(ending)

    def ending() -> bool:
        with contextlib.suppress(RuntimeError):  # new work is refused
            return not service._encoder.submit(int)
        return True

    def stop() -> None:
        assert started.wait(60)
        until(lambda: service.ready and not refuses(port))  # ready may be before listening
        waiting = threads.submit(posted, port, {"text": "one"})
        until(lambda: service.accepted)
        os.kill(os.getpid(), signal.SIGTERM)
        with contextlib.suppress(ValueError):  # no answer
            answers.append(waiting.result()["translations"][0]["text"])

    def slow(lines: list[Any]) -> list[Any]:
        until(lambda: refuses(port))
        time.sleep(0.2)
        return translate(lines)

    service, bound = Service(translator, LIMITS), app.bind("127.0.0.1", 0)
    port, first = bound.getsockname()[1], len(translator.widths)
    programs = [functools.partial(compile, max(0, n + 1 - first)) for n in range(first + 3)]
    translate = service.engine.translate
    monkeypatch.setattr(service.engine, "programs", lambda: programs)
    monkeypatch.setattr(service.engine, "translate", slow)
    with ThreadPoolExecutor(2) as threads:
        stopped = threads.submit(stop)
        app.serve(service, bound)
        stopped.result()
    assert answers == translator(["one"])
    assert compiled == [0] * first + [1] and "stopped: 1 requests" in capfd.readouterr().err


def test_a_second_ctrl_c_does_not_wait_for_answers(translator, monkeypatch, capfd):
    service, bound = Service(translator, LIMITS), app.bind("127.0.0.1", 0)
    port, started, free = bound.getsockname()[1], threading.Event(), threading.Event()

    def translate(lines):
        started.set()
        free.wait(60)
        return []

    def press() -> bool:
        """Ctrl-C during a batch; True if only the second one ended the server."""
        try:
            until(lambda: service.ready and not refuses(port))  # ready may be before listening
            waiting = threads.submit(posted, port, {"text": "one"})
            assert started.wait(60)
            os.kill(os.getpid(), signal.SIGINT)
            until(lambda: refuses(port))
            return not waiting.done()
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(service.engine, "programs", lambda: ())
    monkeypatch.setattr(service.engine, "translate", translate)
    with ThreadPoolExecutor(2) as threads:
        pressed = threads.submit(press)
        with pytest.raises(KeyboardInterrupt):
            app.serve(service, bound)
        free.set()
    assert pressed.result()
    assert "1 requests accepted, 0 answered, 0 abandoned by their clients, 1 lost" in (
        capfd.readouterr().err
    )


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False
