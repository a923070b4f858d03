"""How good translations are, by sacreBLEU."""

from collections.abc import Sequence
from typing import Any


def score(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """BLEU and chrF (0 to 100, cased, 13a) with their signatures, and the percentage of lines that are exactly right."""
    from sacrebleu.metrics import BLEU, CHRF

    bleu, chrf = BLEU(), CHRF()
    right = sum(h == r for h, r in zip(hypotheses, references, strict=True))
    return {
        "bleu": bleu.corpus_score(list(hypotheses), [list(references)]).score,
        "chrf": chrf.corpus_score(list(hypotheses), [list(references)]).score,
        "exact_match": 100 * right / len(references),
        "signatures": {"bleu": str(bleu.get_signature()), "chrf": str(chrf.get_signature())},
    }
