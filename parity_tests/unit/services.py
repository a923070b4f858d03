"""A service of a tiny model, for the tests of serving."""

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette import testclient

from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.extras.serve.app import Service
from jax_transformer.extras.serve.requests import Limits
from jax_transformer.inference.translation import Translator
from parity_tests.unit.helpers import tiny
from parity_tests.unit.speakers import loud

WORDS = "one two three four five six seven eight nine ten".split()
LINES = ["one two three four five six", "seven", "", "eight nine ten", " ten ten", "one"]
LIMITS = Limits(
    **dict(queue_size=12, max_lines=11, max_characters=200, max_body_bytes=2000),
    **dict(max_beam=6, max_configs=2, batch_rows=4, timeout=20.0),
)


@functools.cache
def translator(num_layers: int = 1, widths: tuple[int, ...] = (8,)) -> Translator:
    """A translator whose translations differ from line to line."""
    tokenizer = Tokenizer.train([" ".join(WORDS)] * 9, 300, pad_id=1, bos_id=2, eos_id=3)
    sizes = dict(vocab_size=tokenizer.vocab_size, max_length=16, num_layers=num_layers)
    return Translator(loud(tiny("lesson10_repaired", **sizes), 3), tokenizer, widths=widths)


@contextlib.contextmanager
def serving(translator: Translator, **changes: Any) -> Iterator[tuple[Service, Any]]:
    """A service whose programs are compiled, and a client of it."""
    service = Service(translator, dataclasses.replace(LIMITS, **changes), title="a <model>")
    with testclient.TestClient(service.app, raise_server_exceptions=False) as client:
        until(lambda: service.ready and service.compiled == service.programs)
        yield service, client


def until(condition: Any) -> None:
    """Wait for a condition; on a busy machine the programs take minutes to compile."""
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextlib.contextmanager
def device_busy(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """The device stops before its next batch, until the end; yields the batches."""
    free, batches, translate = threading.Event(), [], service.engine.translate

    def wait(lines):
        batches.append([line.text for line in lines])
        assert free.wait(60)
        return translate(lines)

    with monkeypatch.context() as patch:
        patch.setattr(service.engine, "translate", wait)
        try:
            yield batches
        finally:
            free.set()
            until(lambda: not service.batcher.queued)


def status_and_message(answer: Any) -> tuple[int, str]:
    """The status of a refusal and its message, which is one line of JSON."""
    assert answer.headers["content-type"] == "application/json"
    (message,) = answer.json().values()
    assert "\n" not in message
    return answer.status_code, message
