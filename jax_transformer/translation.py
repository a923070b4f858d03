"""Translation: lines of text in, lines of text out."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
from jaxtyping import Int

from jax_transformer import pretrained
from jax_transformer.config import TransformerConfig
from jax_transformer.data import batches, encoding
from jax_transformer.data.tokenizer import Tokenizer, TokenizerPair
from jax_transformer.errors import ConfigError
from jax_transformer.generate import decoding, prepare
from jax_transformer.generate.generation_config import GenerationConfig
from jax_transformer.pretrained import Pretrained
from jax_transformer.transformer import Transformer

_CACHE_POSITIONS = 8
"""Positions in the cache of translations, at most, for each position of the sources in a batch."""


class Hypothesis(NamedTuple):
    """A translation of a line."""

    text: str
    ids: Int[np.ndarray, " n"]
    """Its tokens, with the end token if there is one, and nothing after it."""
    score: float | None
    """The score of beam search; None without beam search."""


class Translator:
    """Translates lines of text with a model, its tokenizer, and its folder's own generation config.

    ``Translator.load(path)(["A line.", "Another."], beam_size=4)`` gives what ``jax-transformer
    translate`` prints. Options of a call are keywords named as the fields of
    :class:`GenerationConfig` and of its ``constraints``, or ``beam_size``, ``num_hypotheses`` and
    ``max_length``; those that are not given are the generation config's.

    Lines are batched by length and padded to ``widths``, the widths that the model was trained
    with, or to the longest source that it reads. All beams of a batch together take at most
    ``tokens_per_batch`` positions of the source, and eight times as many of the cache. The model is
    split for the compiled loops once, here: later changes of it are not seen.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | TokenizerPair,
        generation_config: GenerationConfig | None = None,
        *,
        widths: Sequence[int] = (),
        tokens_per_batch: int = 4096,
    ):
        longest = model.config.longest
        self.model, self.tokenizer = model, tokenizer
        self.generation_config = generation_config or GenerationConfig()
        self.widths = tuple(sorted({*(width for width in widths if width < longest), longest}))
        self.tokens_per_batch = tokens_per_batch
        self.split_model = prepare.split(model)

    @classmethod
    def load(
        cls,
        path: str | Path,
        weights: str = "auto",
        *,
        source_lang: str | None = None,
        target_lang: str | None = None,
        **options: Any,
    ) -> "Translator":
        """The translator of a run folder, a Hugging Face folder or ``hf:owner/name``.

        ``weights``, languages and errors are those of :func:`jax_transformer.load`, and a folder
        without a tokenizer raises InputError. ``options``, named as those of a call, change the
        folder's generation config.
        """
        opened = pretrained.open(path, weights)
        return cls.from_opened(opened, source_lang=source_lang, target_lang=target_lang, **options)

    @classmethod
    def from_opened(
        cls,
        opened: Pretrained,
        *,
        source_lang: str | None = None,
        target_lang: str | None = None,
        **options: Any,
    ) -> "Translator":
        """The translator of what :func:`jax_transformer.pretrained.open` has opened.

        Raises ConfigError for wrong ``options`` before any weights are read.
        """
        tokenizer = opened.tokenizer(source_lang, target_lang)
        generation_config = opened.generation_config(tokenizer).overridden(options)
        if opened.config is not None:
            longest = opened.config.longest
            prepare.max_new_tokens(opened.config, longest, generation_config.max_new_tokens)
        return cls(opened.model(), tokenizer, generation_config, widths=opened.widths)

    @overload
    def __call__(
        self, lines: Sequence[str], *, num_hypotheses: None = None, **options: Any
    ) -> list[str]: ...

    @overload
    def __call__(
        self, lines: Sequence[str], *, num_hypotheses: int, **options: Any
    ) -> list[list[Hypothesis]]: ...

    def __call__(
        self, lines: Sequence[str], *, num_hypotheses: int | None = None, **options: Any
    ) -> list[str] | list[list[Hypothesis]]:
        """The translation of each line, in order; that of a blank line is empty.

        With ``num_hypotheses``, that many :class:`Hypothesis` of each line instead, as from
        :meth:`hypotheses`.
        """
        if num_hypotheses is not None:
            return self.hypotheses(lines, num_hypotheses=num_hypotheses, **options)
        return [best[0].text for best in self.hypotheses(lines, **options)]

    def hypotheses(self, lines: Sequence[str], **options: Any) -> list[list[Hypothesis]]:
        """The ``num_return_sequences`` hypotheses of each line, best first.

        A blank line has one hypothesis, which is empty.
        Raises ConfigError for options that are unknown or exclude each other, and InputError for a
        line longer than the model reads.
        """
        if isinstance(lines, str):
            raise ConfigError("lines is one string: give a list of lines")
        config = self.generation_config.overridden(options)
        result = [[empty_hypothesis(config)] for _ in lines]
        for numbers, source in self._batches(lines, config):
            row_ids = np.zeros(len(source), np.int32)
            row_ids[: len(numbers)] = numbers
            tokens, scores = decoding.generate(self.split_model, source, config, row_ids)
            # Rows after the last line fill the batch
            for number, ids, row_scores in zip(numbers, tokens, scores, strict=False):
                result[number] = [
                    self.hypothesis(each, float(score), config)
                    for each, score in zip(ids, row_scores, strict=True)
                ]
        return result

    def _batches(
        self, lines: Sequence[str], config: GenerationConfig
    ) -> Iterator[tuple[list[int], Int[np.ndarray, "b s"]]]:
        """The numbers of the lines in each batch, and its source; blank lines are in none."""
        sizes = self.model.config
        lines = [line if line.strip() else "" for line in lines]  # as training drops blank sides
        encoded = encoding.encode_sources(lines, self.tokenizer, sizes.longest)
        filled = [i for i, line in enumerate(lines) if line]
        if not filled:
            return
        groups = batches.source_batches(
            [encoded[i] for i in filled],
            self.widths,
            self.rows_per_batch(config),
            sizes.source_pad_id,
            encoding.special_tokens(self.tokenizer),
        )
        for indices, source in groups:
            yield [filled[i] for i in indices], source

    def rows_per_batch(self, config: GenerationConfig) -> tuple[int, ...]:
        """The number of rows in a batch of each width.

        It is bounded by the cache, too, which has room for the longest translation.
        """
        tokens = self.tokens_per_batch
        rows = batches.rows_per_batch(self.widths, max(1, tokens // config.num_beams))
        in_cache = _CACHE_POSITIONS * tokens // config.num_beams
        lengths = [
            prepare.max_new_tokens(self.model.config, width, config.max_new_tokens)
            for width in self.widths
        ]
        return tuple(
            min(count, max(1, in_cache // length))
            for count, length in zip(rows, lengths, strict=True)
        )

    def hypothesis(
        self, ids: Int[np.ndarray, " n"], score: float, config: GenerationConfig
    ) -> Hypothesis:
        """A row of a loop's result, without the padding."""
        eos_id = config.eos_token_id
        ends = np.flatnonzero(ids == (self.model.config.eos_id if eos_id is None else eos_id))
        ids = ids[: ends[0] + 1] if len(ends) else ids
        return Hypothesis(self.tokenizer.decode(ids), ids, None if np.isnan(score) else score)


def empty_hypothesis(config: GenerationConfig) -> Hypothesis:
    """The translation of an empty line."""
    return Hypothesis("", np.zeros(0, np.int32), 0.0 if config.num_beams > 1 else None)


def without_cache(config: TransformerConfig) -> str | None:
    """A message for models that decode without a cache of keys and values; None for others."""
    if config.uncacheable is None:
        return None
    shorter = (
        "; a translation has at most as many tokens as its padded source"
        if config.equal_lengths
        else ""
    )
    reason = f"because {config.uncacheable}{shorter}"
    return f"decoding runs the whole decoder again at each token, {reason}"


def n_best_lines(hypotheses: Sequence[Sequence[Hypothesis]]) -> list[str]:
    """Lines of an n-best list in the format of Moses and fairseq: ``line ||| text ||| score``.

    Lines of the source are counted from 0; hypotheses come best first.
    """
    return [
        f"{i} ||| {hypothesis.text} ||| {hypothesis.score:.6f}"
        for i, several in enumerate(hypotheses)
        for hypothesis in several
    ]
