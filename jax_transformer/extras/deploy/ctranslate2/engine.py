"""The engine CTranslate2, with the extra ``ctranslate2``.

It computes in float32 or with int8 matrices on the CPU. Its beam search is
transformers' ``generate`` with ``early_stopping=True``, and other searches are refused: facts from
``src/decoding.cc`` of version 4.8.
"""

import hashlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer import transformer
from jax_transformer.data import encoding
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.extras.deploy.ctranslate2 import checks, folder
from jax_transformer.extras.deploy.ctranslate2.checks import Quantization
from jax_transformer.formats.base import CONVERTED, Pretrained
from jax_transformer.generate import prepare
from jax_transformer.generate.generation_config import (
    BeamScorer,
    Constraints,
    EarlyStopping,
    GenerationConfig,
)
from jax_transformer.inference.translation import TOKENS_PER_BATCH, Batch, Translator
from jax_transformer.storage import atomic, run_files

_FORMAT = "2"  # of the folders that `converted` writes


def check_generation(generation: GenerationConfig) -> None:
    """Raise one ConfigError for all settings with which CTranslate2's tokens would be others."""
    if reasons := list(_differing(generation)):
        raise ConfigError(f"--engine ctranslate2 decodes otherwise: {'; '.join(reasons)}")


def _differing(generation: GenerationConfig) -> Iterator[str]:
    if generation.do_sample:
        yield "do_sample=True (its draws are others)"
    if generation.num_beams > 1:
        yield from _differing_search(generation)
    constraints = generation.constraints
    neutral = Constraints()
    exact = {"min_new_tokens", "suppress_tokens", "bad_words_ids", "renormalize_logits"}
    exact |= {"forced_eos_token_ids"} if generation.num_beams == 1 else set()
    for name, value in vars(constraints).items():
        if name not in exact and value != getattr(neutral, name):
            yield f"{name.replace('_token_ids', '_token_id')}={value}"
    if any(len(word) > 1 for word in constraints.bad_words_ids):
        yield f"bad_words_ids={constraints.bad_words_ids} (only single tokens are the same)"
    if len(constraints.forced_eos_token_ids) > 1:
        yield f"forced_eos_token_id={constraints.forced_eos_token_ids} (it may force only one)"


def _differing_search(generation: GenerationConfig) -> Iterator[str]:
    if generation.beam_scorer is not BeamScorer.AVERAGE:
        yield (
            f"beam_scorer={generation.beam_scorer} (a score is divided by length ** "
            "length_penalty: give --penalty average --early-stopping full)"
        )
    elif generation.length_penalty == 0:
        if generation.early_stopping is EarlyStopping.FULL or generation.num_return_sequences > 1:
            yield "length_penalty=0.0 (it then ends with the best hypothesis, and has one)"
    elif generation.early_stopping is not EarlyStopping.FULL:
        yield (
            f"early_stopping={generation.early_stopping} (it ends after num_beams hypotheses: "
            "give --early-stopping full)"
        )
    if generation.forced_bos_token_id is not None:
        yield (
            f"forced_bos_token_id={generation.forced_bos_token_id} (an end directly after it is "
            "allowed only in the best beam: give --beam 1)"
        )
    constraints = generation.constraints
    for name in ("min_new_tokens", "suppress_tokens", "bad_words_ids"):
        if getattr(constraints, name) and not constraints.renormalize_logits:
            yield f"{name}={getattr(constraints, name)} (the scores of the others are raised)"


class CTranslate2Translator(Translator):
    """A :class:`Translator` whose tokens CTranslate2 computes, on the CPU."""

    def __init__(
        self,
        opened: Pretrained,
        quantization: Quantization = Quantization.FLOAT32,
        *,
        source_lang: str | None = None,
        target_lang: str | None = None,
        tokens_per_batch: int = TOKENS_PER_BATCH,
        **options: Any,
    ):
        """Convert the model first, unless its folder has it already.

        For the other arguments see :meth:`Translator.from_opened`. Raises ConfigError for a
        model or a setting that CTranslate2 does not compute as JAX does.
        """
        checks.check_installed("--engine ctranslate2")
        import ctranslate2

        config = opened.config
        if config is not None:
            config.check_text("translation")
        tokenizer = opened.tokenizer(source_lang, target_lang)
        generation = opened.generation_config(tokenizer).overridden(options)
        check_generation(generation)
        assert config is not None, "a folder with a tokenizer has a configuration"
        prepare.max_new_tokens(config, config.longest, generation.max_new_tokens)
        super().__init__(
            transformer.abstract(config),
            tokenizer,
            generation,
            widths=opened.widths,
            tokens_per_batch=tokens_per_batch,
        )
        path = converted(opened, quantization)
        # float16 is only stored: CPUs compute it in float32
        compute = "int8_float32" if quantization is Quantization.INT8 else "float32"
        try:
            self._engine = ctranslate2.Translator(str(path), device="cpu", compute_type=compute)
        except (RuntimeError, ValueError) as error:
            raise InputError(f"{path}: CTranslate2 cannot read it: {error}") from None

    def _translate(self, batch: Batch, config: GenerationConfig) -> None:
        check_generation(config)
        model, constraints = self.model.config, config.constraints
        start, end = config.start_and_end(model)
        longest = prepare.max_new_tokens(model, batch.width, config.max_new_tokens)
        suppressed = {word[0] for word in constraints.bad_words_ids} - {end}
        suppressed.update(constraints.suppress_tokens)
        special = encoding.special_tokens(self.tokenizer)
        forced = config.forced_bos_token_id
        prefix = _tokens([start] if forced is None else [start, forced])
        results = self._engine.translate_batch(
            [_tokens([*special.prefix, *line.ids, *special.suffix]) for line in batch.lines],
            target_prefix=[prefix] * len(batch.lines),
            beam_size=config.num_beams,
            num_hypotheses=config.num_return_sequences,
            length_penalty=config.length_penalty,
            return_scores=config.num_beams > 1,
            max_input_length=0,
            max_decoding_length=longest,
            min_decoding_length=min(constraints.min_new_tokens, longest),
            suppress_sequences=[[token] for token in _tokens(suppressed)],
            end_token=_tokens([end]),
            return_end_token=True,
        )
        for line, result in zip(batch.lines, results, strict=True):
            line.hypotheses = []
            for tokens, score in zip(result.hypotheses, result.scores or [np.nan], strict=True):
                ids = np.array([int(token) for token in tokens], np.int32)
                if constraints.forced_eos_token_ids and len(ids) == longest:
                    ids[-1] = constraints.forced_eos_token_ids[0]
                line.hypotheses.append(self.hypothesis(ids, float(score), config))


def _tokens(ids: Iterable[int]) -> list[str]:
    """Return the tokens of a converted model, which are ids in decimal."""
    return [str(i) for i in ids]


def converted(opened: Pretrained, quantization: Quantization) -> Path:
    """Return the folder of the converted model, which is written if it does not exist, and again if
    one of its files is damaged.

    Its name is a hash of the weights, the configuration and the quantization. Its tokens are ids in
    decimal, and the decoder's start is given with each line, so any tokenizer can be used with it.
    """
    assert opened.config is not None
    hashed = hashlib.sha256(f"{_FORMAT} {quantization} {opened.config.portable.to_json()}".encode())
    for path in opened.files:
        hashed.update(bytes.fromhex(run_files.sha256(path)))
    owner = opened.path if opened.run is None else opened.run.path
    path = owner / CONVERTED / hashed.hexdigest()[:32]
    damage = next(_damage(path), None) if path.is_dir() else None
    if damage is not None:
        print(f"warning: {damage}; the model is converted again", file=sys.stderr)
    if damage is not None or not path.is_dir():
        ids = folder.vocabularies(opened.config, None, explicit=True)
        path.parent.mkdir(exist_ok=True)
        with atomic.folder(path) as temporary:
            folder.write(temporary, opened.config, opened.state(), ids, quantization)
            files = sorted(temporary.iterdir())
            sums = {file.name: [run_files.sha256(file)] for file in files}
            run_files.write_sums(temporary, sums)
    return path


def _damage(path: Path) -> Iterator[str]:
    """Name the damaged files of a converted model."""
    try:
        sums = run_files.read_sums(path)
        yield from run_files.changed(path, sums)
        if checks.MODEL not in sums:
            yield f"{path / run_files.SHA256SUMS}: damaged: it does not list {checks.MODEL}"
    except InputError as error:
        yield str(error)


def load(
    opened: Pretrained,
    *others: Pretrained,
    quantization: str | None = None,
    precision: str | None = None,
    **settings: Any,
) -> CTranslate2Translator:
    """Return the translator of what :func:`jax_transformer.formats.registry.open` has opened.

    For the arguments see :meth:`Translator.from_opened`. Raises ConfigError for options that
    CTranslate2 does not have.
    """
    if others:
        raise ConfigError("--engine ctranslate2 has no ensembles: leave out --ensemble")
    if precision is not None:
        raise ConfigError(
            f"--precision {precision}: --engine ctranslate2 has --quantization float32, float16 "
            "or int8"
        )
    return CTranslate2Translator(opened, checks.quantization(quantization), **settings)
