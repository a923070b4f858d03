"""The page of attention maps: what a model attended to while it translated, as one HTML file."""

import base64
import math
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int32

from jax_transformer import webpage
from jax_transformer.data.tokenizer import BOS, EOS, PAD, Tokenizer
from jax_transformer.errors import ConfigError
from jax_transformer.generate import prepare
from jax_transformer.generate.prepare import ModelStructure
from jax_transformer.inference.translation import Hypothesis, Translator
from jax_transformer.storage import atomic
from jax_transformer.transformer import Attention

SENTENCES = 50
"""Maximum number of lines on a page."""
LONGEST_CHARACTER = 4
"""Maximum number of bytes of one character in UTF-8, and so of tokens that it may be split into."""
LEVELS = 255
"""Weights are rounded to multiples of 1/255, so that each is a byte."""


def write(
    path: str | Path,
    translator: Translator,
    lines: Sequence[str],
    hypotheses: Sequence[Sequence[Hypothesis]],
    *,
    title: str,
) -> None:
    """Write the page of the first 50 lines that are not blank and of their hypotheses.

    The weights come from a forward pass for each hypothesis: the model reads the source, padded as
    for translating, and the start token with all generated tokens but the last. A page takes about
    a byte for each weight, before compression. Raises ConfigError for an ensemble.
    """
    if len(translator.models) > 1:
        raise ConfigError("an ensemble has no attention weights of its own: give one model")
    sentences = [
        (number, line, several)
        for number, (line, several) in enumerate(zip(lines, hypotheses, strict=True), start=1)
        if line.strip() and several[0].ids.size  # not a line that was skipped
    ]

    def shown(line: str, several: Sequence[Hypothesis]) -> list[dict[str, Any]]:
        return [hypothesis_data(each, maps(translator, line, each)) for each in several]

    count = len(sentences)
    data = {
        "title": title,
        "note": f"The first {SENTENCES} of {count} lines." if count > SENTENCES else "",
        "sentences": [
            {"number": number, "source": line, "hypotheses": shown(line, several)}
            for number, line, several in sentences[:SENTENCES]
        ],
    }
    atomic.write_text(path, render(data))


def hypothesis_data(hypothesis: Hypothesis, attention: dict[str, Any] | None) -> dict[str, Any]:
    """Return a hypothesis as JSON, with its maps if there are any; a score of NaN is None."""
    score = hypothesis.score
    data: dict[str, Any] = {
        "text": hypothesis.text,
        "score": score if score is not None and math.isfinite(score) else None,
    }
    return data if attention is None else data | {"attention": attention}


def render(data: dict[str, Any], *, connect: str = "none") -> str:
    """Return the page's text; its script may connect to nothing, or with ``self`` to its server."""
    page, style, script = (
        resources.files("jax_transformer.inference")
        .joinpath(f"attention_page.{kind}")
        .read_text("utf-8")
        for kind in ("html", "css", "js")
    )
    page = page.replace("PAGE-STYLE", style, 1).replace("PAGE-SCRIPT", script, 1)
    return webpage.render(page.replace("CONNECT-SOURCE", connect, 1), data)


def service_page(title: str, *, beam: int, max_beam: int) -> str:
    """Return the page of a service: without lines, with a form that asks the service for them."""
    service = {"beam": beam, "max_beam": max_beam}
    data = {"title": title, "note": "", "sentences": [], "service": service}
    return render(data, connect="self")


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text of each token.

    A special token is shown by its name. If a character is split into several tokens, each shows
    the character and a count, such as ``é·1/2``.
    """
    names = {tokenizer.pad_id: PAD, tokenizer.bos_id: BOS, tokenizer.eos_id: EOS}
    result: list[str] = []
    before = ""
    while len(result) < len(ids):
        start = len(result)
        for end in range(start + 1, min(start + LONGEST_CHARACTER, len(ids)) + 1):
            text = tokenizer.decode(ids[:end])
            piece = text[len(before) :]
            if "\ufffd" not in piece:
                break
        else:  # bytes that are not a character
            end = start + 1
            text = tokenizer.decode(ids[:end])
            piece = text[len(before) :]
        piece = piece or names.get(int(ids[start]), f"<{ids[start]}>")
        count = end - start
        result += [piece] if count == 1 else [f"{piece}·{i}/{count}" for i in range(1, count + 1)]
        before = text
    return result


def maps(translator: Translator, line: str, hypothesis: Hypothesis) -> dict[str, Any]:
    """Return the maps of cross-attention and both stacks, with the tokens of rows and columns."""
    config, tokenizer = translator.model.config, translator.tokenizer
    room = config.longest - len(tokenizer.prefix) - len(tokenizer.suffix)
    source_ids = [*tokenizer.prefix, *tokenizer.encode(line)[:room], *tokenizer.suffix]
    target_ids = hypothesis.ids.tolist()
    start, _ = translator.generation_config.start_and_end(config)
    attention = _attention(translator, source_ids, [start, *target_ids[:-1]])
    source = pieces(tokenizer.source, source_ids)
    target = pieces(tokenizer.target, target_ids)
    return {
        "cross": _map(attention.cross, target, source),
        "encoder": _map(attention.encoder, source, source),
        "decoder": _map(attention.decoder, target, [BOS, *target[:-1]]),
    }


def _attention(
    translator: Translator, source_ids: Sequence[int], target_ids: Sequence[int]
) -> Attention:
    """Return the model's attention weights, with both sides padded as in :func:`shapes`."""
    config, split = translator.model.config, translator.split_model
    source = _padded(source_ids, translator.widths, config.source_pad_id)
    widths = _target_widths(translator, source.shape[1])
    target = _padded(target_ids, widths, config.target_pad_id)
    return _attend(split.structure, split.arrays, source, target)


def shapes(translator: Translator) -> Iterator[tuple[int, int]]:
    """Yield the widths of source and target of every program that :func:`maps` can need."""
    for source_width in translator.widths:
        for target_width in _target_widths(translator, source_width):
            yield source_width, target_width


def compile(translator: Translator, source_width: int, target_width: int) -> None:
    """Compile the program of one of the :func:`shapes`."""
    config = translator.model.config
    _attention(
        translator, [config.source_pad_id] * source_width, [config.target_pad_id] * target_width
    )


def _target_widths(translator: Translator, source_width: int) -> list[int]:
    """Return the widths of targets: the default length of translations, and the longest.

    Two for each width of sources, not all pairs of widths, so that there are few programs.
    """
    config = translator.model.config
    if config.equal_lengths:
        return [source_width]
    return sorted({prepare.max_new_tokens(config, source_width, None), config.longest})


def _map(layers: tuple[jax.Array, ...], rows: list[str], columns: list[str]) -> dict[str, Any]:
    """Return the weights of all layers and heads over the tokens.

    If a model attends to padding, a last column has its sum.
    """
    weights = np.stack([np.asarray(layer[0], np.float32) for layer in layers])[:, :, : len(rows)]
    padding = weights[..., len(columns) :].sum(axis=-1, keepdims=True)
    weights = weights[..., : len(columns)]
    if padding.max(initial=0) >= 1 / LEVELS:
        weights, columns = np.concatenate([weights, padding], axis=-1), [*columns, PAD]
    return {
        "layers": weights.shape[0],
        "heads": weights.shape[1],
        "rows": rows,
        "columns": columns,
        "weights": packed(weights),
    }


def packed(weights: Float[np.ndarray, "n h q k"]) -> str:
    """Return weights between 0 and 1 as one byte each, compressed, in base64."""
    levels = np.rint(weights.clip(0, 1) * LEVELS).astype(np.uint8)
    return base64.b64encode(zlib.compress(levels.tobytes(), 9)).decode()


def _padded(ids: Sequence[int], widths: Sequence[int], pad_id: int) -> Int32[np.ndarray, "1 n"]:
    width = next(width for width in widths if width >= len(ids))
    return np.array([[*ids, *[pad_id] * (width - len(ids))]], np.int32)


@partial(jax.jit, static_argnames="structure")
def _attend(
    structure: ModelStructure, arrays: list[jax.Array], source: jax.Array, target: jax.Array
) -> Attention:
    model: Any = structure.merge(arrays)
    return model(source, target, return_attention=True)[1]
