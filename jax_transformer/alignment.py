"""What a model looked at while it translated, as one HTML page that needs nothing but a browser."""

import base64
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float, Int32

from jax_transformer import webpage
from jax_transformer.config import TransformerConfig
from jax_transformer.data.tokenizer import BOS, EOS, PAD, Tokenizer, TokenizerPair
from jax_transformer.transformer import Attention, Transformer
from jax_transformer.translation import Hypothesis

SENTENCES = 50
"""A page shows at most this many."""
LONGEST_CHARACTER = 4
"""Bytes of one character in UTF-8, and so the most tokens that it may be spread over."""
LEVELS = 255
"""Weights are rounded to multiples of 1/255, so that each is a byte."""


def write(
    path: str | Path,
    model: Transformer,
    tokenizer: Tokenizer | TokenizerPair,
    lines: Sequence[str],
    translations: Sequence[Hypothesis],
    *,
    widths: Sequence[int] = (),
    title: str,
) -> None:
    """Write the page of the first 50 lines that are not empty and of their translations, whole or not at all.

    One forward pass a line gives the weights: the model reads the source, padded to the narrowest of ``widths`` as for translating, and the
    start token with all generated tokens but the last. A page takes about a byte for each weight, before compression.
    """
    pairs = [
        (i, line, found)
        for i, (line, found) in enumerate(zip(lines, translations, strict=True), start=1)
        if line
    ]
    note = f"The first {SENTENCES} of {len(pairs)} lines." if len(pairs) > SENTENCES else ""
    weights = partial(_attend, *nnx.split(model))
    fitting = sorted(
        {*(width for width in widths if width < model.config.longest), model.config.longest}
    )
    described = [
        {
            "number": i,
            "source": line,
            "target": found.text,
            "maps": _maps(weights, model.config, tokenizer, line, found, fitting),
        }
        for i, line, found in pairs[:SENTENCES]
    ]
    data = {"title": title, "note": note, "sentences": described}
    webpage.write(path, render(data))


def render(data: dict[str, Any]) -> str:
    """The page's text."""
    return webpage.render(
        resources.files("jax_transformer").joinpath("alignment.html").read_text(encoding="utf-8"),
        data,
    )


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each token. A special token goes by its name; of a character spread over several, each has the whole and a count, as ``é·1/2``."""
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
        else:  # bytes that are no character
            end = start + 1
            text = tokenizer.decode(ids[:end])
            piece = text[len(before) :]
        piece = piece or names.get(int(ids[start]), f"<{ids[start]}>")
        result += (
            [piece]
            if end == start + 1
            else [f"{piece}·{i}/{end - start}" for i in range(1, end - start + 1)]
        )
        before = text
    return result


def _maps(
    weights: Callable[..., Attention],
    config: TransformerConfig,
    tokenizer: Tokenizer | TokenizerPair,
    line: str,
    found: Hypothesis,
    widths: Sequence[int],
) -> dict[str, Any]:
    """The maps of either stack and of the two together, with the tokens at their rows and columns."""
    reader, writer = (
        (tokenizer.source, tokenizer.target)
        if isinstance(tokenizer, TokenizerPair)
        else (tokenizer, tokenizer)
    )
    source_ids, target_ids = (
        [*tokenizer.prefix, *tokenizer.encode(line), *tokenizer.suffix],
        found.ids.tolist(),
    )
    read = _padded(source_ids, widths, config.source_pad_id)
    fitting = [read.shape[1]] if config.equal_lengths else widths
    attention = weights(
        read, _padded([config.bos_id, *target_ids[:-1]], fitting, config.target_pad_id)
    )
    source, written = pieces(reader, source_ids), pieces(writer, target_ids)
    return {
        "cross": _map(attention.cross, written, source),
        "encoder": _map(attention.encoder, source, source),
        "decoder": _map(attention.decoder, written, [BOS, *written[:-1]]),
    }


def _map(layers: tuple[jax.Array, ...], rows: list[str], columns: list[str]) -> dict[str, Any]:
    """The weights of all layers and heads over the tokens; what went to the padding behind them, if anything, is a column of its own."""
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
    """Weights between 0 and 1 as one byte each, compressed, in base64."""
    levels = np.rint(weights.clip(0, 1) * LEVELS).astype(np.uint8)
    return base64.b64encode(zlib.compress(levels.tobytes(), 9)).decode()


def _padded(ids: Sequence[int], widths: Sequence[int], pad_id: int) -> Int32[np.ndarray, "1 n"]:
    width = next(width for width in widths if width >= len(ids))
    return np.array([[*ids, *[pad_id] * (width - len(ids))]], np.int32)


@partial(jax.jit, static_argnames="graphdef")
def _attend(graphdef: Any, state: Any, source: jax.Array, target: jax.Array) -> Attention:
    return nnx.merge(graphdef, state)(source, target, return_attention=True)[1]
