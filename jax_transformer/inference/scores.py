"""Scores of translations: BLEU, chrF and TER by sacreBLEU, exact match, and COMET."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jax_transformer.errors import ConfigError, InputError

METRICS = {"bleu": "BLEU", "chrf": "CHRF", "ter": "TER"}


def score(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *others: Sequence[str],
    names: Sequence[str] = ("bleu", "chrf"),
    bootstrap: int = 0,
) -> dict[str, Any]:
    """Return sacreBLEU's figures with their signatures, and the percentage of exactly right lines.

    Args:
        hypotheses, references: one string per line, equally many of both.
        others: more references of each line, of which empty ones do not count. A line is exactly
            right if it is equal to one of its references.
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
    exact = sum(h in several for h, *several in zip(hypotheses, references, *others, strict=True))
    figures: dict[str, Any] = {}
    signatures, confidence = {}, {}
    for name in names:
        metric = getattr(sacrebleu.metrics, METRICS[name])()
        streams = [list(lines) for lines in (references, *others)]
        result = metric.corpus_score(list(hypotheses), streams, n_bootstrap=max(1, bootstrap))
        figures[name] = result.score
        signatures[name] = str(metric.get_signature())
        if bootstrap:
            confidence[name] = {"mean": float(result._mean), "half_width": float(result._ci)}
    figures |= {"exact_match": 100 * exact / len(references), "signatures": signatures}
    return figures | ({"confidence": confidence} if bootstrap else {})


def load_comet(path: str) -> Callable[[Sequence[tuple[str, str]], Sequence[str]], float]:
    """Return the function from pairs and translations to COMET's score of all (Rei et al. 2020).

    ``path`` is a checkpoint on disk, which is loaded as a pickle: only from a source that you
    trust. Raises ConfigError if the package is not installed, InputError if there is no such file.
    """
    try:
        from comet import load_from_checkpoint
    except ImportError:
        raise ConfigError(
            "COMET needs its package, unbabel-comet: docs/your-text.md says how to install it"
        ) from None
    if not Path(path).is_file():
        raise InputError(f"{path}: no such file: give the .ckpt file of a COMET model")
    model = load_from_checkpoint(path)

    def comet_score(pairs: Sequence[tuple[str, str]], translations: Sequence[str]) -> float:
        data = [
            {"src": source, "mt": translation, "ref": reference}
            for (source, reference), translation in zip(pairs, translations, strict=True)
        ]
        return float(model.predict(data, batch_size=8, gpus=0, progress_bar=False).system_score)

    return comet_score
