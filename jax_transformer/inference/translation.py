"""Translation: lines of text in, lines of text out."""

import dataclasses
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
from jaxtyping import Int

from jax_transformer import inference, transformer
from jax_transformer.config import MatmulPrecision
from jax_transformer.data import batches, encoding
from jax_transformer.data.options import LongLine
from jax_transformer.data.tokenizer import Tokenizer, TokenizerPair
from jax_transformer.errors import ConfigError
from jax_transformer.generate import decoding, prepare
from jax_transformer.generate.generation_config import GenerationConfig
from jax_transformer.inference import Engine
from jax_transformer.nn import sharding
from jax_transformer.runtime import process
from jax_transformer.transformer import Transformer

if TYPE_CHECKING:
    from jax_transformer.formats.base import Pretrained

TOKENS_PER_BATCH = 4096
"""Positions of the source in a batch, by default."""
_CACHE_POSITIONS = 8
"""Positions in the cache of translations, at most, for each position of the sources in a batch."""


class Hypothesis(NamedTuple):
    """A translation of a line."""

    text: str
    ids: Int[np.ndarray, " n"]
    """Its tokens, with the end token if there is one, and nothing after it."""
    score: float | None
    """The score of beam search; None without beam search."""


@dataclass
class Line:
    """A line to translate."""

    number: int
    """Its number, from 0."""
    source: str
    ids: list[int]
    """Its tokens, without special ones."""
    too_long: bool
    """True if it is over the model's maximum length, so that it was cut or skipped."""
    hypotheses: list[Hypothesis] = field(default_factory=list)
    """Its translations, best first; empty before they are made."""


class Batch(NamedTuple):
    """Lines that are translated together."""

    lines: list[Line]
    width: int
    rows: int
    full: bool


class Translator:
    """Translates lines of text with a model, its tokenizer, and its folder's own generation config.

    ``Translator.load(path)(["A line.", "Another."], num_beams=4)`` gives what ``jax-transformer
    translate`` prints. Options of a call are keywords named as the fields of
    :class:`GenerationConfig` and of its ``constraints``, or ``beam_size``, ``num_hypotheses`` and
    ``max_length``; the generation config has those that are not given.

    Lines are batched by length and padded to ``widths``, the widths that the model was trained
    with, or to the longest source that it reads. All beams of a batch together take at most
    ``tokens_per_batch`` positions of the source, and eight times as many of the caches of all
    models. The model is split for the compiled loops once, here: later changes of it are not seen.

    Several models are an ensemble: at each step, the mean of their probabilities decides.
    ``model`` is then the one that reads the shortest sequences.
    """

    def __init__(
        self,
        model: Transformer | Sequence[Transformer],
        tokenizer: Tokenizer | TokenizerPair,
        generation_config: GenerationConfig | None = None,
        *,
        widths: Sequence[int] = (),
        tokens_per_batch: int = TOKENS_PER_BATCH,
    ):
        if tokens_per_batch < 1:
            raise ConfigError(f"tokens_per_batch={tokens_per_batch} must be at least 1")
        self.split_model = prepare.split(model)
        self.split_model.config.check_text("translation")
        self.models = (model,) if isinstance(model, Transformer) else tuple(model)
        self.model = min(self.models, key=attrgetter("config.longest"))
        self.tokenizer, longest = tokenizer, self.model.config.longest
        self.generation_config = generation_config or GenerationConfig()
        known = sorted({*widths, longest})
        self.widths = tuple(known[: known.index(longest) + 1])
        self.tokens_per_batch = tokens_per_batch

    @classmethod
    def load(
        cls,
        path: str | Path | Sequence[str | Path],
        weights: str = "auto",
        *,
        source_lang: str | None = None,
        target_lang: str | None = None,
        precision: str | None = None,
        tokens_per_batch: int = TOKENS_PER_BATCH,
        **options: Any,
    ) -> "Translator":
        """Return the translator of a run folder, a Hugging Face folder or ``hf:owner/name``.

        Several paths are an ensemble, with the generation config of the first. ``precision`` is the
        dtype to compute in, such as ``bfloat16``, or ``medium``: float32, with the factors of
        products with weights rounded to bfloat16. None is the files' own. ``weights``, languages
        and errors are as in :func:`jax_transformer.load`, and a folder without a tokenizer raises
        InputError. ``options``, named as in a call, change the generation config.
        """
        from jax_transformer.formats import registry

        paths = [path] if isinstance(path, str | Path) else path
        if not paths:
            raise ConfigError("no path: give one, or several for an ensemble")
        return cls.from_opened(
            *(registry.open(each, weights) for each in paths),
            source_lang=source_lang,
            target_lang=target_lang,
            precision=precision,
            tokens_per_batch=tokens_per_batch,
            **options,
        )

    @classmethod
    def from_opened(
        cls,
        opened: "Pretrained",
        *others: "Pretrained",
        source_lang: str | None = None,
        target_lang: str | None = None,
        precision: str | None = None,
        tokens_per_batch: int = TOKENS_PER_BATCH,
        **options: Any,
    ) -> "Translator":
        """Return the translator of what :func:`jax_transformer.formats.registry.open` has opened;
        with ``others``, of their ensemble.

        Raises ConfigError for wrong ``options``, and for tokenizers that differ, before any weights
        are read.
        """
        if opened.config is not None:
            opened.config.check_text("translation")
        tokenizer = opened.tokenizer(source_lang, target_lang)
        settings = opened.generation_config(tokenizer).overridden(options)
        if opened.config is not None:
            longest = opened.config.longest
            prepare.max_new_tokens(opened.config, longest, settings.max_new_tokens)
        for other in others:
            if other.tokenizer(source_lang, target_lang).hash != tokenizer.hash:
                raise ConfigError(
                    f"{other.path}: its tokenizer is not the one of {opened.path}; "
                    "the models of an ensemble have one tokenizer"
                )
        models = [load_model(each, precision) for each in (opened, *others)]
        widths = opened.widths
        return cls(models, tokenizer, settings, widths=widths, tokens_per_batch=tokens_per_batch)

    @overload
    def __call__(
        self,
        lines: Sequence[str],
        *,
        num_return_sequences: None = None,
        num_hypotheses: None = None,
        **options: Any,
    ) -> list[str]: ...

    @overload
    def __call__(self, lines: Sequence[str], **options: Any) -> list[list[Hypothesis]]: ...

    def __call__(self, lines: Sequence[str], **options: Any) -> list[str] | list[list[Hypothesis]]:
        """Return the translation of each line, in order; a blank line has an empty one.

        With ``num_return_sequences`` (also ``num_hypotheses``), return that many
        :class:`Hypothesis` of each line instead, as :meth:`hypotheses` does.
        """
        several = self.hypotheses(lines, **options)
        asked = (options.get("num_return_sequences"), options.get("num_hypotheses"))
        if asked != (None, None):
            return several
        return [best[0].text for best in several]

    def hypotheses(self, lines: Sequence[str], **options: Any) -> list[list[Hypothesis]]:
        """Return the ``num_return_sequences`` hypotheses of each line, best first.

        A blank line has one hypothesis, which is empty.
        Raises ConfigError for options that are unknown or exclude each other, and InputError for a
        line longer than the model reads.
        """
        if isinstance(lines, str):
            raise ConfigError("lines is one string: give a list of lines")
        stream = self.stream([lines], len(lines) + 1, **options)
        return [line.hypotheses for ready in stream for line in ready]

    def stream(
        self,
        windows: Iterable[Sequence[str]],
        window_size: int,
        *,
        too_long: LongLine = LongLine.REFUSE,
        **options: Any,
    ) -> Iterator[list[Line]]:
        """Yield the lines of ``windows`` with their hypotheses, in order, as soon as they are made.

        After every batch and window comes a list of the lines that are ready, which may be empty.
        A window is translated before the next one is asked for. If it has ``window_size`` lines,
        more are expected at once, and those that fill no batch wait for the lines of the next
        window, but no longer. So batches are as full as if there were no windows.

        Raises errors as :meth:`hypotheses` does.
        """
        config, longest = self.generation_config.overridden(options), self.model.config.longest
        queue: deque[Line] = deque()
        filled: set[int] = set()
        start = 0
        for window in chain(windows, [()]):  # after the last one, nothing waits
            # As training drops pairs with a blank side, no token of a blank line is read
            texts = [line if line.strip() else "" for line in window]
            if too_long is LongLine.REFUSE:
                ids = encoding.encode_sources(
                    texts, self.tokenizer, longest, first_number=start + 1
                )
                cut = [False] * len(texts)
            else:
                ids, cut = encoding.cut_sources(texts, self.tokenizer, longest)
            for number, each in enumerate(zip(window, ids, cut, strict=True), start):
                line = Line(number, *each)
                if not line.source.strip() or (line.too_long and too_long is LongLine.SKIP):
                    line.hypotheses = [empty_hypothesis(config)]
                queue.append(line)
            for batch in self._batches([x for x in queue if not x.hypotheses], config, filled):
                new = min(batch.lines, key=attrgetter("number")).number >= start
                if new and len(window) == window_size and not batch.full:
                    continue
                self._translate(batch, config)
                yield list(_ready(queue))
            yield list(_ready(queue))
            start += len(window)

    def _batches(
        self, lines: Sequence[Line], config: GenerationConfig, filled: set[int]
    ) -> Iterator[Batch]:
        """Yield the lines of each batch, shortest first.

        A batch that is not full has the fewest rows of :func:`.batches.row_counts`, or as many as a
        full one if that width has had one: ``filled`` are these widths.
        """
        added, most = encoding.special_tokens(self.tokenizer).size, self.rows_per_batch(config)
        lengths = np.array([len(line.ids) + added for line in lines], np.int64)
        for bucket, indices in batches.by_length(lengths, self.widths, most):
            width, rows, full = self.widths[bucket], most[bucket], len(indices) == most[bucket]
            if full:
                filled.add(width)
            elif width not in filled:
                counts = batches.row_counts(rows)
                rows = counts[bisect_left(counts, len(indices))]
            yield Batch([lines[i] for i in indices], width, rows, full)

    def _translate(self, batch: Batch, config: GenerationConfig) -> None:
        """Translate a batch, and give each line its hypotheses."""
        sources, numbers = [], np.zeros(batch.rows, np.int32)
        # A loop lasts until all rows have ended: those that are left over repeat the lines
        for row, line in zip(range(batch.rows), cycle(batch.lines), strict=False):
            sources.append(line.ids)
            numbers[row] = line.number
        pad_id, added = self.model.config.source_pad_id, encoding.special_tokens(self.tokenizer)
        source = batches.pad_rows(sources, batch.width, batch.rows, pad_id, added)
        tokens, scores = decoding.generate(self.split_model, source, config, numbers)
        for line, ids, row_scores in zip(batch.lines, tokens, scores, strict=False):
            for each, score in zip(ids, row_scores, strict=True):
                line.hypotheses.append(self.hypothesis(each, float(score), config))

    def rows_per_batch(self, config: GenerationConfig) -> tuple[int, ...]:
        """Return the number of rows in a batch of each width.

        It is also bounded by the cache, which has room for the longest translation.
        """
        tokens, longest = self.tokens_per_batch, config.max_new_tokens
        rows = batches.rows_per_batch(
            self.widths, max(1, tokens // config.num_beams), sharding.row_shards()
        )
        in_cache = _CACHE_POSITIONS * tokens // (config.num_beams * len(self.models))
        lengths = [
            prepare.max_new_tokens(self.model.config, width, longest) for width in self.widths
        ]
        bounds = (max(1, in_cache // length) for length in lengths)
        return tuple(map(min, rows, bounds))

    def hypothesis(
        self, ids: Int[np.ndarray, " n"], score: float, config: GenerationConfig
    ) -> Hypothesis:
        """Return the hypothesis of a row of a loop's result, without the padding."""
        ends = np.flatnonzero(ids == config.start_and_end(self.model.config)[1])
        ids = ids[: ends[0] + 1] if len(ends) else ids
        return Hypothesis(self.tokenizer.decode(ids), ids, None if np.isnan(score) else score)


def load(
    opened: "Pretrained",
    *others: "Pretrained",
    engine: Engine = Engine.JAX,
    quantization: str | None = None,
    precision: str | None = None,
    **settings: Any,
) -> Translator:
    """Return the translator of what :func:`jax_transformer.formats.registry.open` has opened, for
    the commands. A line on stderr says if it decodes without a cache of keys and values.

    Arguments are those of :meth:`Translator.from_opened`, and the engine. Raises ConfigError for
    options that it does not have.
    """
    if engine is not Engine.JAX:
        load_engine = process.load_entry_point(process.entry_points(inference.ENTRY_POINTS)[engine])
        options = {"quantization": quantization, "precision": precision, **settings}
        computed: Translator = load_engine(opened, *others, **options)
        return computed
    if quantization is not None:
        engines = " or ".join([*Engine][1:]) or "another engine"
        raise ConfigError(f"--quantization {quantization} is for --engine {engines}")
    translator = Translator.from_opened(opened, *others, precision=precision, **settings)
    if (reason := translator.model.config.uncacheable) is not None:
        message = f"decoding runs the whole decoder again at each token, because {reason}"
        if translator.model.config.equal_lengths:
            message += "; a translation has at most as many tokens as its padded source"
        print(message, file=sys.stderr)
    return translator


def empty_hypothesis(config: GenerationConfig) -> Hypothesis:
    """Return the translation of an empty line."""
    return Hypothesis("", np.zeros(0, np.int32), 0.0 if config.num_beams > 1 else None)


def load_model(opened: "Pretrained", precision: str | None) -> Transformer:
    """Return the model with weights and arithmetic in ``precision``; None is as in its files.

    ``medium`` is float32, with the factors of products with weights rounded to bfloat16.
    """
    if precision is None or opened.config is None:
        return opened.model()
    dtype, products = precision, MatmulPrecision.HIGHEST
    if precision in ("medium", "bfloat16"):
        dtype = "float32" if precision == "medium" else precision
        products = MatmulPrecision.MEDIUM
    config = dataclasses.replace(opened.config, compute_dtype=dtype, matmul_precision=products)
    return transformer.unflatten(config, transformer.flatten(opened.model(dtype=dtype)))


def _ready(queue: deque[Line]) -> Iterator[Line]:
    """Take the lines from the front of a queue that have their hypotheses."""
    while queue and queue[0].hypotheses:
        yield queue.popleft()


def n_best_lines(line: Line) -> list[str]:
    """Return the lines of an n-best list as in Moses and fairseq: ``line ||| text ||| score``.

    Lines of the source are counted from 0; hypotheses come best first.
    """
    return [f"{line.number} ||| {each.text} ||| {each.score:.6f}" for each in line.hypotheses]
