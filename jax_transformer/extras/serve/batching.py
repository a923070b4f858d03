"""Batches of the lines that wait, one after the other, for as long as the service runs."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from jax_transformer.errors import Refusal
from jax_transformer.extras.serve.engine import EncodedLine, Engine, Group, Translation
from jax_transformer.extras.serve.limits import Limits
from jax_transformer.extras.serve.metrics import Metrics
from jax_transformer.extras.serve.requests import RequestError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Waiting:
    line: EncodedLine
    translation: "asyncio.Future[Translation]"
    since: float


class Batcher:
    """Collects lines into batches: whenever the device is free, the next batch has the line that
    has waited longest, and all lines of its group that fit.

    All methods belong to the event loop's thread; a thread of its own translates.
    """

    def __init__(self, engine: Engine, limits: Limits, metrics: Metrics):
        self.engine, self.limits, self.metrics = engine, limits, metrics
        self.device = ThreadPoolExecutor(1, "translate")
        self._groups: dict[Group, deque[_Waiting]] = {}
        self._arrival = asyncio.Event()
        self._seconds_per_line = 0.0
        metrics.queued.set_function(lambda: self.queued)

    @property
    def queued(self) -> int:
        """Number of lines that wait for a batch."""
        return sum(map(len, self._groups.values()))

    def submit(self, lines: Sequence[EncodedLine]) -> "list[asyncio.Future[Translation]]":
        """Return the translations to come; one that is cancelled before its batch is dropped.

        Raises RequestError 429 if the lines do not all fit the queue, and 422 as the engine does.
        """
        queued = self.queued
        if queued + len(lines) > self.limits.queue_size:
            raise RequestError(
                429,
                f"{queued} lines are waiting: the queue of {self.limits.queue_size} has no room",
                {"Retry-After": str(max(1, math.ceil(queued * self._seconds_per_line)))},
            )
        if lines:
            self.engine.admit(lines[0].group.config)
        loop = asyncio.get_running_loop()
        futures = []
        for line in lines:
            future = loop.create_future()
            futures.append(future)
            waiting = _Waiting(line, future, loop.time())
            self._groups.setdefault(line.group, deque()).append(waiting)
        self._arrival.set()
        return futures

    async def run(self) -> None:
        """Translate batch after batch, until cancelled."""
        while True:
            await self._translate(await self._next_batch())

    async def _next_batch(self) -> list[_Waiting]:
        """Return the lines of the next batch, taken out of the queue."""
        loop = asyncio.get_running_loop()
        while True:
            self._drop_cancelled()
            while not self._groups:
                self._arrival.clear()
                await self._arrival.wait()
                self._drop_cancelled()
            group, members = min(self._groups.items(), key=lambda item: item[1][0].since)
            most = self.engine.rows(group)[-1]
            patience = members[0].since + self.limits.batch_wait - loop.time()
            if len(members) >= most or patience <= 0:
                break
            await asyncio.sleep(patience)
        batch = [members.popleft() for _ in range(min(most, len(members)))]
        if not members:
            del self._groups[group]
        return batch

    def _drop_cancelled(self) -> None:
        for group, members in list(self._groups.items()):
            left = deque(each for each in members if not each.translation.done())
            if len(left) < len(members):
                self._groups[group] = left
            if not left:
                del self._groups[group]

    async def _translate(self, batch: Sequence[_Waiting]) -> None:
        """Translate a batch and answer its lines, with an error if there was one."""
        loop = asyncio.get_running_loop()
        group, start = batch[0].line.group, loop.time()
        lines = [each.line for each in batch]
        try:
            translations = await loop.run_in_executor(self.device, self.engine.translate, lines)
        except Refusal as error:  # an option that this model does not have
            self.engine.forget(group.config)
            _fail(batch, RequestError(422, str(error)))
            return
        except Exception:
            logger.exception("a batch of %d lines failed", len(batch))
            _fail(batch, RequestError(500, "the translation failed: see the server's log"))
            return
        seconds = loop.time() - start
        self.metrics.batch_lines.observe(len(batch))
        self.metrics.batch_seconds.observe(seconds)
        self._seconds_per_line = 0.9 * (
            self._seconds_per_line or seconds / len(batch)
        ) + 0.1 * seconds / len(batch)
        for each, translation in zip(batch, translations, strict=True):
            if not each.translation.done():
                each.translation.set_result(translation)


def _fail(batch: Sequence[_Waiting], error: RequestError) -> None:
    for each in batch:
        if not each.translation.done():
            each.translation.set_exception(error)
