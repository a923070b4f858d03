"""Load on `jax-transformer serve`: throughput, latency, and a test in which nothing is lost.

Both start the server as a process of its own on loopback and compare every answer with what
`jt.Translator` gives for the same lines; a wrong, missing or doubled one ends in exit code 1.

    python benchmarks/serve.py speed runs/phrases-001
    python benchmarks/serve.py load runs/phrases-001 --requests 10000

`speed` sends single lines one by one, and then from several clients at once. `load` sends requests
of one to four lines with different options from more clients than the queue holds, counts 200 and
429, and then stops a server under the same load.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax_transformer as jt
from jax_transformer.data import phrases

CLIENTS = (1, 4, 16, 64)
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"beam": 4, "n_best": 4}, {"beam": 4})
"""The decoding options of the load test; the programs of all are compiled at the start."""


@contextlib.asynccontextmanager
async def server(run: str, *flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """A server that is ready, and its port."""
    command = [sys.executable, "-m", "jax_transformer", "serve", run, "--port", "0", *flags]
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        port = 0
        async for line in process.stderr:
            if match := re.search(rb"listening on http://127\.0\.0\.1:(\d+)", line):
                port = int(match[1])
            if line.startswith(b"ready"):
                break
        else:
            raise SystemExit("the server ended before it was ready")
        yield process, port
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class Client:
    """A connection that is kept open from one request to the next."""

    def __init__(self, port: int):
        self.port = port
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, fields: dict[str, Any]) -> tuple[int, Any]:
        """The status and the body of an answer. Raises OSError if the server is gone."""
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.streams
        body = json.dumps(fields).encode()
        writer.write(
            b"POST /translate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head.lower())
            answer = json.loads(await reader.readexactly(int(length[1])))  # type: ignore[index]
        except asyncio.IncompleteReadError as error:
            raise ConnectionError("closed without an answer") from error
        if b"connection: close" in head.lower():
            self.close()
        return int(head.split()[1]), answer

    def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()
        self.streams = None


def sources(count: int) -> list[str]:
    """Lines of the built-in task, in random order."""
    lines = sorted({source for source, _ in phrases.load()["train"]})
    random.Random(0).shuffle(lines)
    return lines[:count]


# Speed


async def speed(run: str, count: int) -> None:
    lines = sources(count)
    expected = jt.Translator.load(run)(lines)
    print("| clients | lines/s | p50, ms | p99, ms |\n|---:|---:|---:|---:|")
    async with server(run) as (_, port):
        for clients in CLIENTS:
            share = count if clients > 1 else max(count // 8, 50)
            seconds, total = await _measure(port, lines[:share], expected, clients)
            p50, p99 = 1000 * np.quantile(seconds, [0.5, 0.99])
            print(f"| {clients} | {share / total:.0f} | {p50:.1f} | {p99:.1f} |", flush=True)


async def _measure(
    port: int, lines: list[str], expected: list[str], clients: int
) -> tuple[list[float], float]:
    """The seconds of each request, and of all."""
    queue, seconds = collections.deque(zip(lines, expected, strict=False)), []

    async def work() -> None:
        client = Client(port)
        while queue:
            line, translation = queue.popleft()
            start = time.perf_counter()
            status, answer = await client.post({"text": line})
            seconds.append(time.perf_counter() - start)
            if status != 200 or answer["translations"][0]["text"] != translation:
                raise SystemExit(f"wrong: {status} {answer} for {line!r}")
        client.close()

    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(clients)))
    return seconds, time.perf_counter() - start


# Load


class Load:
    """Requests by number, each with its own lines and options, and the answers to them."""

    def __init__(self, run: str, lines: list[str]):
        self.lines = lines
        translator = jt.Translator.load(run)
        self.expected = [
            dict(zip(lines, translator.hypotheses(lines, **options), strict=True))
            for options in OPTIONS
        ]
        self.statuses: collections.Counter[int | str] = collections.Counter()
        self.wrong: list[int] = []

    async def ask(self, client: Client, number: int) -> int:
        """Send request ``number`` and check the answer; returns the status."""
        choice = number % len(OPTIONS)
        start, count = (31 * number) % len(self.lines), 1 + number % 4
        some = [self.lines[(start + i) % len(self.lines)] for i in range(count)]
        status, answer = await client.post({"text": some, **OPTIONS[choice]})
        self.statuses[status] += 1
        if status == 200:
            texts = [[h["text"] for h in t["hypotheses"]] for t in answer["translations"]]
            if texts != [[h.text for h in self.expected[choice][line]] for line in some]:
                self.wrong.append(number)
        return status

    async def run(self, port: int, clients: int, numbers: Callable[[], int | None]) -> None:
        """Send requests until there are no more numbers, or the server is gone."""

        async def work() -> None:
            client = Client(port)
            with contextlib.suppress(ConnectionError):
                while (number := numbers()) is not None:
                    while await self.ask(client, number) == 429:
                        await asyncio.sleep(0.05 + 0.05 * random.random())
            client.close()

        await asyncio.gather(*(work() for _ in range(clients)))


async def load(run: str, requests: int, clients: int, queue: int) -> bool:
    """All requests are answered rightly, 429 if the queue is full; a stop loses none."""
    test = Load(run, sources(997))
    flags = ("--queue-size", str(queue), "--max-lines", "4")
    rest = iter(range(requests))
    start = time.perf_counter()
    async with server(run, *flags) as (process, port):
        start = time.perf_counter()
        await test.run(port, clients, lambda: next(rest, None))
        seconds = time.perf_counter() - start
        process.send_signal(signal.SIGTERM)
        first = await _end(process)
    answered = test.statuses[200]
    print(f"{requests} requests from {clients} clients, queue of {queue} lines: {seconds:.0f} s")
    print(f"  answered {answered}, wrong {len(test.wrong)}, refused and sent again "
          f"{test.statuses[429]}, other {_others(test)}; {first}")  # fmt: skip
    good = answered == requests and not test.wrong and not _others(test) and test.statuses[429] > 0

    stopped = Load(run, test.lines)
    async with server(run, *flags) as (process, port):
        endless = iter(range(10**9))
        running = asyncio.create_task(stopped.run(port, clients, lambda: next(endless)))
        await asyncio.sleep(3)
        process.send_signal(signal.SIGTERM)
        await running
        last = await _end(process)
    answered = stopped.statuses[200]
    print(f"stopped under the same load: answered {answered}, wrong {len(stopped.wrong)}; {last}")
    accepted = int(re.findall(r"(\d+) requests accepted", last)[0])
    return good and accepted == answered and not stopped.wrong and process.returncode == 0


def _others(test: Load) -> int:
    return sum(count for status, count in test.statuses.items() if status not in (200, 429))


async def _end(process: asyncio.subprocess.Process) -> str:
    """The last line of a server that was told to stop."""
    assert process.stderr is not None
    lines = (await process.stderr.read()).decode().splitlines()
    await process.wait()
    return f"{lines[-1]}, exit code {process.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("mode", choices=["speed", "load"])
    parser.add_argument("run", help="a run of the built-in task")
    parser.add_argument("--requests", type=int, default=None)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--queue", type=int, default=128)
    options = parser.parse_args()
    if not Path(options.run).is_dir():
        parser.error(f"{options.run} is not a folder")
    if options.mode == "speed":
        asyncio.run(speed(options.run, options.requests or 2000))
        return 0
    good = asyncio.run(
        load(options.run, options.requests or 10_000, options.clients, options.queue)
    )
    print("passed" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
