"""How good translations are, by sacreBLEU."""

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
    """sacreBLEU's figures with their signatures, and the percentage of lines that are exactly right.

    Args:
        hypotheses, references: one string a line, as many of one as of the other.
        names: of ``bleu``, ``chrf`` (0 to 100, more is better) and ``ter`` (edits per 100 words, less is better); BLEU and chrF are
            cased, TER is not, and BLEU's words are those of its tokenizer 13a.
        bootstrap: how many times the lines are resampled for a 95 % interval of each figure (Koehn 2004); 0 is not to.

    Returns:
        each of ``names``, ``exact_match``, ``signatures`` by name and, with ``bootstrap``, ``confidence``: by name, the ``mean`` over the
        resampled lines and ``half_width``, half the width of the interval around it.
    """
    import sacrebleu.metrics

    if not references:
        raise InputError("there are no translations to score")
    if bootstrap < 0 or bootstrap == 1:
        raise ConfigError(f"bootstrap={bootstrap} must be 0 or at least 2")
    right = sum(h == r for h, r in zip(hypotheses, references, strict=True))
    found: dict[str, Any] = {}
    signatures, confidence = {}, {}
    for name in names:
        metric = getattr(sacrebleu.metrics, METRICS[name])()
        result = metric.corpus_score(
            list(hypotheses), [list(references)], n_bootstrap=max(1, bootstrap)
        )
        found[name] = result.score
        signatures[name] = str(metric.get_signature())
        if bootstrap:
            confidence[name] = {"mean": float(result._mean), "half_width": float(result._ci)}
    found |= {"exact_match": 100 * right / len(references), "signatures": signatures}
    return found | ({"confidence": confidence} if bootstrap else {})
