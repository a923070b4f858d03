"""Lines of text in, lines of text out."""

from collections.abc import Sequence

import numpy as np

from jax_transformer import generate
from jax_transformer.data import batches, encoding
from jax_transformer.data.tokenizer import Tokenizer, TokenizerPair
from jax_transformer.transformer import Transformer


def translate(
    model: Transformer,
    tokenizer: Tokenizer | TokenizerPair,
    lines: Sequence[str],
    *,
    widths: Sequence[int] = (),
    beam_size: int = 1,
    length_penalty: float = 0.6,
    tokens_per_batch: int = 4096,
) -> list[str]:
    """The translation of each line, in order; an empty line stays empty.

    Lines are batched by length and padded to ``widths`` (those that the model was trained with), or to its ``max_length`` where none is wide
    enough; a translation may have twice its batch's width in tokens. Raises InputError for a line longer than the model reads.
    """
    longest = model.config.max_length
    widths = tuple(sorted({*(width for width in widths if width < longest), longest}))
    full = [i for i, line in enumerate(lines) if line]
    encoded = encoding.encode_sources(lines, tokenizer, longest)
    sources = [encoded[i] for i in full]
    result = [""] * len(lines)
    rows = batches.rows_per_batch(widths, tokens_per_batch)
    groups = batches.source_batches(sources, widths, rows, pad_id=model.config.source_pad_id, eos_id=tokenizer.eos_id) if full else []
    for indices, source in groups:
        places = min(longest, 2 * source.shape[1])
        if beam_size == 1:
            tokens = generate.greedy(model, source, max_length=places)
        else:
            tokens, _ = generate.beam(model, source, beam_size=beam_size, length_penalty=length_penalty, max_length=places)
        for i, ids in zip(indices, np.asarray(tokens), strict=False):
            result[full[i]] = tokenizer.decode(ids)
    return result
