"""A translator for one batch at a time, over a fixed few shapes."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jax_transformer.data import batches, encoding
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.extras.serve.requests import RequestError
from jax_transformer.generate import decoding
from jax_transformer.generate.generation_config import GenerationConfig
from jax_transformer.inference import attention_page
from jax_transformer.inference.translation import Hypothesis, Translator

_PAGE_BEAM = 4


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
    programs; those of :meth:`programs` at the start, others when they are first asked for. Only
    one thread may translate at a time; another one may encode.
    """

    def __init__(self, translator: Translator, *, batch_rows: int, max_configs: int):
        self.translator, self.batch_rows, self.max_configs = translator, batch_rows, max_configs
        self.page_config = self._with_alternatives()
        self._warmed = {_compiled(c) for c in (translator.generation_config, self.page_config)}
        self._others: set[GenerationConfig] = set()

    def encode(
        self, lines: Sequence[str], config: GenerationConfig, attention: bool
    ) -> list[EncodedLine | None]:
        """Return the lines as ids; None for those that have no text.

        Raises RequestError 422 for a line that is longer than the model reads.
        """
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
        return [
            EncodedLine(
                text,
                row,
                groups[next(width for width in widths if width >= len(row) + added)],
                number,
                config.num_return_sequences,
                attention,
            )
            if text
            else None
            for number, (text, row) in enumerate(zip(lines, ids, strict=True))
        ]

    def rows(self, group: Group) -> tuple[int, ...]:
        """Return the numbers of rows that a batch can have, ascending: 1, 4, 16, 64 and so on."""
        index = self.translator.widths.index(group.width)
        most = min(self.batch_rows, self.translator.rows_per_batch(group.config)[index])
        return batches.row_counts(most)

    def admit(self, config: GenerationConfig) -> None:
        """Raise RequestError 422 for a length that the model does not have, and for a config that
        needs programs if there are too many already.
        """
        try:
            self.translator.rows_per_batch(config)
        except ConfigError as error:
            raise RequestError(422, str(error)) from None
        compiled = _compiled(config)
        if compiled in self._warmed or compiled in self._others:
            return
        if len(self._others) >= self.max_configs:
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
        """
        for config in dict.fromkeys((self.translator.generation_config, self.page_config)):
            for width in self.translator.widths:
                group = Group(
                    dataclasses.replace(config, num_return_sequences=config.num_beams), width
                )
                for rows in self.rows(group):
                    yield partial(self.compile, group, rows)
        for widths in attention_page.shapes(self.translator):
            yield partial(attention_page.compile, self.translator, *widths)

    def compile(self, group: Group, rows: int) -> None:
        """Translate a batch of empty lines, so that its program is compiled."""
        self.translate([EncodedLine("", (), group, 0, 1, False)] * rows)

    def translate(self, lines: Sequence[EncodedLine]) -> list[Translation]:
        """Return the translation of each line of a batch; all are of the same group.

        The rows that are left over repeat the lines, because a decoding loop lasts until all rows
        have ended.
        """
        group, translator = lines[0].group, self.translator
        count = next(rows for rows in self.rows(group) if rows >= len(lines))
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
        result = []
        for line, ids, row_scores in zip(lines, tokens, scores, strict=False):
            hypotheses = [
                translator.hypothesis(ids[i], float(row_scores[i]), group.config)
                for i in range(line.hypotheses)
            ]
            maps = [
                attention_page.maps(translator, line.text, each)
                for each in hypotheses
                if line.attention
            ]
            result.append(Translation(hypotheses, maps))
        return result

    def _with_alternatives(self) -> GenerationConfig:
        """Return the config of the page: all hypotheses of a beam search."""
        config = self.translator.generation_config
        beams = config.num_beams
        if beams == 1:
            beams = min(_PAGE_BEAM, self.translator.model.config.target_vocab_size // 2)
        return config.overridden({"num_beams": beams, "num_return_sequences": beams})


def _compiled(config: GenerationConfig) -> GenerationConfig:
    """Return the config without the values that compile nothing."""
    return dataclasses.replace(
        config,
        num_return_sequences=1,
        length_penalty=0.0,
        temperature=1.0,
        top_p=1.0 if config.top_p == 1 else 0.5,
        seed=0,
    )
