"""A translator for one batch at a time, over a fixed few shapes; batches of the lines that wait,
one after the other, for as long as the service runs; and its figures in the format of Prometheus.
"""

import asyncio
import dataclasses
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from jax_transformer.data import batches, encoding
from jax_transformer.errors import ConfigError, InputError, Refusal
from jax_transformer.extras.serve.requests import Limits, RequestError
from jax_transformer.generate import decoding
from jax_transformer.generate.generation_config import GenerationConfig
from jax_transformer.inference import attention_page
from jax_transformer.inference.translation import Hypothesis, Translator

logger = logging.getLogger(__name__)

_PAGE_BEAM = 4
CONTENT_TYPE = prometheus_client.CONTENT_TYPE_PLAIN_0_0_4
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LINES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Group(NamedTuple):
    """Lines that can share a batch: equal options, and sources of the same padded width."""

    config: GenerationConfig
    """It returns all of its beams: requests for fewer hypotheses share its batches."""
    width: int


@dataclass(frozen=True, eq=False)
class EncodedLine:
    """A line to be translated."""

    text: str
    ids: Sequence[int]
    group: Group
    row_id: int
    """Number of the line in its request, which decides its draws."""
    hypotheses: int
    """Number of hypotheses to return."""
    attention: bool


class Translation(NamedTuple):
    """The translation of a line."""

    hypotheses: list[Hypothesis]
    maps: Sequence[dict[str, Any] | None]
    """The attention maps of each hypothesis, if the line asks for them."""


class Engine:
    """Translates lines as its translator does, in batches of the translator's widths.

    A batch of each width has one of a few numbers of rows, so a set of options compiles few
    programs; those of :meth:`programs` at the start, others when they are first asked for. One
    thread may translate, one encode, and one compile the programs of the start: if two of them need
    the same program, JAX compiles it once and the other waits.
    """

    def __init__(self, translator: Translator, limits: Limits):
        self.translator, self.limits = translator, limits
        config = translator.generation_config
        most = min(_PAGE_BEAM, limits.max_beam, translator.model.config.target_vocab_size // 2)
        beams = most if config.num_beams == 1 else config.num_beams
        # The page shows all hypotheses of a beam search
        self.page_config = config.overridden({"num_beams": beams, "num_return_sequences": beams})
        self._warmed = {_compiled(each) for each in (config, self.page_config)}
        self._others: set[GenerationConfig] = set()
        self._pending = {
            _program(group, rows) for group in self._groups() for rows in self.rows(group)
        }

    def encode(
        self, lines: Sequence[str], config: GenerationConfig, attention: bool
    ) -> list[EncodedLine | None]:
        """Return the lines as ids, None without text. Raises RequestError 422 for one too long."""
        tokenizer = self.translator.tokenizer
        lines = [line if line.strip() else "" for line in lines]  # as the translator does
        try:
            ids = encoding.encode_sources(lines, tokenizer, self.translator.model.config.longest)
        except InputError as error:
            raise RequestError(422, str(error)) from None
        added = encoding.special_tokens(tokenizer).size
        widths = self.translator.widths
        shared = dataclasses.replace(config, num_return_sequences=config.num_beams)
        groups = {width: Group(shared, width) for width in widths}

        def encoded(number: int, text: str, row: Sequence[int]) -> EncodedLine:
            group = groups[next(width for width in widths if width >= len(row) + added)]
            return EncodedLine(text, row, group, number, config.num_return_sequences, attention)

        numbered = enumerate(zip(lines, ids, strict=True))
        return [encoded(number, text, row) if text else None for number, (text, row) in numbered]

    def rows(self, group: Group) -> tuple[int, ...]:
        """Return the numbers of rows that a batch can have, ascending: 1, 4, 16, 64 and so on."""
        index = self.translator.widths.index(group.width)
        most = min(self.limits.batch_rows, self.translator.rows_per_batch(group.config)[index])
        return batches.row_counts(most)

    def rows_now(self, group: Group) -> tuple[int, ...]:
        """Return the numbers of rows whose programs are not still to be compiled at the start.

        If all of them are, a batch has one line and compiles the smallest.
        """
        rows = self.rows(group)
        done = tuple(each for each in rows if _program(group, each) not in self._pending)
        return done or rows[:1]

    def admit(self, config: GenerationConfig) -> None:
        """Raise RequestError 422 for a length beyond the model, or programs over the maximum."""
        try:
            self.translator.rows_per_batch(config)
        except ConfigError as error:
            raise RequestError(422, str(error)) from None
        compiled = _compiled(config)
        if compiled in self._warmed or compiled in self._others:
            return
        if len(self._others) >= self.limits.max_configs:
            raise RequestError(
                422,
                f"this server has compiled programs for {len(self._others)} other sets of decoding "
                "options, its maximum (--max-configs): use one of those, or its defaults",
            )
        self._others.add(compiled)

    def forget(self, config: GenerationConfig) -> None:
        """Undo :meth:`admit` for a config that the model refused, as nothing was compiled."""
        self._others.discard(_compiled(config))

    def programs(self) -> Iterator[Callable[[], None]]:
        """Yield a function for each program of the start, which compiles it: of the default
        options, of the page's, and of every attention map.

        The first ones are for single lines of each width with the default options.
        """
        groups = self._groups()
        for group in groups:
            yield partial(self.compile, group, self.rows(group)[0])
        for widths in attention_page.shapes(self.translator):
            yield partial(attention_page.compile, self.translator, *widths)
        for group in groups:
            for rows in self.rows(group)[1:]:
                yield partial(self.compile, group, rows)

    def _groups(self) -> list[Group]:
        """Return the groups whose programs are compiled at the start."""
        configs = dict.fromkeys((self.translator.generation_config, self.page_config))
        shared = [dataclasses.replace(one, num_return_sequences=one.num_beams) for one in configs]
        return [Group(config, width) for config in shared for width in self.translator.widths]

    def compile(self, group: Group, rows: int) -> None:
        """Translate a batch of empty lines, unless its program is compiled."""
        if _program(group, rows) in self._pending:
            self._translate([EncodedLine("", (), group, 0, 1, False)], rows)

    def translate(self, lines: Sequence[EncodedLine]) -> list[Translation]:
        """Return the translation of each line of a batch; all are of the same group."""
        counts = self.rows_now(lines[0].group)
        return self._translate(lines, next(rows for rows in counts if rows >= len(lines)))

    def _translate(self, lines: Sequence[EncodedLine], count: int) -> list[Translation]:
        """Translate a batch with so many rows.

        The rows that are left over repeat the lines, because a decoding loop lasts until all rows
        have ended.
        """
        group, translator = lines[0].group, self.translator
        filled = [lines[i % len(lines)] for i in range(count)]
        source = batches.pad_rows(
            [line.ids for line in filled],
            group.width,
            count,
            translator.model.config.source_pad_id,
            encoding.special_tokens(translator.tokenizer),
        )
        row_ids = np.array([line.row_id for line in filled], np.int32)
        tokens, scores = decoding.generate(translator.split_model, source, group.config, row_ids)
        self._pending.discard(_program(group, count))
        result = []
        for line, ids, row_scores in zip(lines, tokens, scores, strict=False):
            hypotheses = [
                translator.hypothesis(ids[i], float(row_scores[i]), group.config)
                for i in range(line.hypotheses)
            ]
            asked = hypotheses if line.attention else []
            maps = [attention_page.maps(translator, line.text, each) for each in asked]
            result.append(Translation(hypotheses, maps))
        return result


def _compiled(config: GenerationConfig) -> GenerationConfig:
    """Return the config without the values that compile nothing."""
    top_p = 1.0 if config.top_p == 1 else 0.5
    traced: dict[str, Any] = {"length_penalty": 0.0, "temperature": 1.0, "top_p": top_p, "seed": 0}
    return dataclasses.replace(config, num_return_sequences=1, **traced)


def _program(group: Group, rows: int) -> tuple[GenerationConfig, int, int]:
    return _compiled(group.config), group.width, rows


# Batches


class Metrics:
    """Counters and histograms of one service."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"namespace": "jax_transformer", "registry": self.registry}
        text = "Translation requests by status code."
        self.requests = Counter("requests", text, ["status"], **own)
        text = "Seconds from a translation request to its answer."
        self.seconds = Histogram("request_seconds", text, buckets=_SECONDS, **own)
        text = "Translation requests that entered the queue."
        self.accepted = Counter("accepted_requests", text, **own)
        self.queued = Gauge("queued_lines", "Lines that wait for a batch.", **own)
        self.batch_lines = Histogram("batch_lines", "Lines of a batch.", buckets=_LINES, **own)
        text = "Seconds of a batch on the device."
        self.batch_seconds = Histogram("batch_seconds", text, buckets=_SECONDS, **own)

    def text(self) -> bytes:
        return prometheus_client.generate_latest(self.registry)


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
            futures.append(loop.create_future())
            waiting = _Waiting(line, futures[-1], loop.time())
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
            most = self.engine.rows_now(group)[-1]
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
        each_line = seconds / len(batch)
        self._seconds_per_line = 0.9 * (self._seconds_per_line or each_line) + 0.1 * each_line
        for each, translation in zip(batch, translations, strict=True):
            if not each.translation.done():
                each.translation.set_result(translation)


def _fail(batch: Sequence[_Waiting], error: RequestError) -> None:
    for each in batch:
        if not each.translation.done():
            each.translation.set_exception(error)
