"""Scores of translations by sacreBLEU."""

from collections.abc import Sequence
from typing import Any

from jax_transformer.errors import ConfigError, InputError

METRICS = {"bleu": "BLEU", "chrf": "CHRF", "ter": "TER"}


def score(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    names: Sequence[str] = ("bleu", "chrf"),
    bootstrap: int = 0,
) -> dict[str, Any]:
    """sacreBLEU's figures with their signatures, and the percentage of exactly right lines.

    Args:
        hypotheses, references: one string per line, equally many of both.
        names: any of ``bleu``, ``chrf`` (0 to 100, higher is better) and ``ter`` (edits per 100
            words, lower is better). BLEU and chrF are cased, TER is not; BLEU uses tokenizer 13a.
        bootstrap: number of resamplings of the lines for a 95 % interval of each figure
            (Koehn 2004). 0: no intervals.

    Returns:
        each of ``names``, ``exact_match``, ``signatures`` by name and, with ``bootstrap``,
        ``confidence`` by name: the ``mean`` over the resampled lines and ``half_width``, half the
        width of the interval around it.
    """
    import sacrebleu.metrics

    if not references:
        raise InputError("there are no translations to score")
    if bootstrap < 0 or bootstrap == 1:
        raise ConfigError(f"bootstrap={bootstrap} must be 0 or at least 2")
    exact = sum(h == r for h, r in zip(hypotheses, references, strict=True))
    figures: dict[str, Any] = {}
    signatures, confidence = {}, {}
    for name in names:
        metric = getattr(sacrebleu.metrics, METRICS[name])()
        result = metric.corpus_score(
            list(hypotheses), [list(references)], n_bootstrap=max(1, bootstrap)
        )
        figures[name] = result.score
        signatures[name] = str(metric.get_signature())
        if bootstrap:
            confidence[name] = {"mean": float(result._mean), "half_width": float(result._ci)}
    figures |= {"exact_match": 100 * exact / len(references), "signatures": signatures}
    return figures | ({"confidence": confidence} if bootstrap else {})
