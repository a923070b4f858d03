"""Small random models of the Hugging Face families: transformers' classes and ours.

transformers computes three things in float32 whatever dtype a model has: T5's norm, the softmax of
LongT5's local attention, and the table of positions of M2M100. If float64 is asked for, these are
replaced here by the same arithmetic in float64; nothing else of its code is touched.
"""

import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers

import jax_transformer as jt
from jax_transformer.architectures import huggingface
from jax_transformer.architectures.huggingface import HuggingFaceFamily
from jax_transformer.architectures.huggingface_config import from_config
from jax_transformer.config import Positions, Sinusoids, TransformerConfig
from jax_transformer.nn.embeddings import sinusoids
from parity_tests.marks import quick_if
from torch_reference.huggingface import KeepFloat64

_IDS = dict(pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2)
_STACKS = dict(encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=20)
_STACKS |= dict(decoder_layers=3, decoder_attention_heads=3, decoder_ffn_dim=28)
_SIZES: dict[str, Any] = _STACKS | _IDS
_SIZES |= dict(vocab_size=41, d_model=24, max_position_embeddings=33)
_T5_SIZES: dict[str, Any] = dict(vocab_size=41, d_model=24, d_kv=5, d_ff=20, num_heads=4)
# transformers sizes its cache by the encoder's layers
_T5_SIZES |= dict(num_layers=2, num_decoder_layers=2)
_T5_SIZES |= dict(relative_attention_num_buckets=8, relative_attention_max_distance=12)
_T5_SIZES |= dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
# Several local and global blocks in a source of 17 tokens, and one that is not whole
_LONG_T5 = _T5_SIZES | dict(encoder_attention_type="local", local_radius=4, global_block_size=4)
# Lengths are equal, so that no shape shows a missing transpose
_SQUARE: dict[str, Any] = dict(d_model=20, encoder_ffn_dim=20, decoder_ffn_dim=20, vocab_size=20)
_SQUARE |= dict(encoder_attention_heads=4, decoder_attention_heads=4)
_TEXT_SQUARE = _SQUARE | dict(max_position_embeddings=20)
_MARIAN = dict(pad_token_id=40, decoder_start_token_id=40, activation_function="swish")
_MARIAN |= dict(eos_token_id=0, forced_eos_token_id=0)
_PEGASUS = dict(pad_token_id=0, decoder_start_token_id=0, eos_token_id=1)
_BLENDERBOT = dict(pad_token_id=0, bos_token_id=1, decoder_start_token_id=1, forced_eos_token_id=2)
_FSMT = _STACKS | _IDS | dict(d_model=24, max_position_embeddings=33)
_FSMT |= dict(src_vocab_size=41, tgt_vocab_size=37)
# Padding is the end token, as in the published files
_SOUND = _STACKS | _IDS | dict(d_model=24, vocab_size=67, decoder_start_token_id=40, pad_token_id=2)
_SOUND |= dict(num_mel_bins=5, max_source_positions=17, max_target_positions=33)
_SQUARE_SOUND = _SQUARE | dict(decoder_start_token_id=3, num_mel_bins=20)
_SQUARE_SOUND |= dict(max_source_positions=10, max_target_positions=20)
_GATED = dict(feed_forward_proj="gated-gelu")


@dataclass(frozen=True)
class Case:
    """A family's model at small sizes."""

    model_type: str
    values: dict[str, Any]

    @property
    def family(self) -> HuggingFaceFamily:
        return huggingface.families()[self.model_type]

    @property
    def classes(self) -> tuple[type, type]:
        """Return transformers' classes of the configuration and of the model."""
        model = getattr(transformers, self.family.model_class)
        return model.config_class, model


CASES = {
    "marian": Case("marian", _SIZES | _MARIAN | {"scale_embedding": True}),
    "marian two vocabularies": Case(
        "marian",
        _SIZES
        | _MARIAN
        | dict(share_encoder_decoder_embeddings=False, decoder_vocab_size=37)
        | dict(pad_token_id=36, decoder_start_token_id=36),
    ),
    "bart": Case("bart", _SIZES),
    "bart square": Case("bart", _SIZES | _TEXT_SQUARE),
    "mbart": Case("mbart", _SIZES | {"scale_embedding": True}),
    "plbart": Case("plbart", _SIZES),
    "m2m_100": Case("m2m_100", _SIZES),
    "pegasus": Case("pegasus", _SIZES | _PEGASUS),
    "blenderbot": Case("blenderbot", _SIZES | _BLENDERBOT | {"scale_embedding": True}),
    "blenderbot-small": Case("blenderbot-small", _SIZES | _BLENDERBOT | {"scale_embedding": True}),
    "fsmt": Case("fsmt", _FSMT),
    "fsmt tied": Case(
        "fsmt", _FSMT | dict(tgt_vocab_size=41, tie_word_embeddings=True, scale_embedding=False)
    ),
    "mvp": Case("mvp", _SIZES | {"scale_embedding": True}),
    "whisper": Case("whisper", _SOUND),
    "whisper square": Case("whisper", _SOUND | _SQUARE_SOUND),
    "t5": Case("t5", _T5_SIZES),
    "t5 v1.1": Case("t5", _T5_SIZES | _GATED | {"tie_word_embeddings": False}),
    "mt5": Case("mt5", _T5_SIZES | _GATED),
    "longt5": Case("longt5", _LONG_T5),
    "longt5 global": Case(
        "longt5",
        _LONG_T5
        | _GATED
        | {"encoder_attention_type": "transient-global", "tie_word_embeddings": False},
    ),
    "longt5 square": Case(
        "longt5",
        _LONG_T5
        | {"encoder_attention_type": "transient-global", "local_radius": 3}
        | dict.fromkeys(("vocab_size", "d_model", "d_ff"), 20),
    ),
    "umt5": Case("umt5", _T5_SIZES | _GATED),
}


REPEATED = ("plbart", "mvp", "fsmt tied", "longt5", "longt5 square", "whisper square")
"""Cases made of the same parts as others; their tests are slow."""
PARAMETERS = [quick_if(name not in REPEATED, name) for name in CASES]


class Pair(NamedTuple):
    """One model in both frameworks."""

    theirs: Any
    config: TransformerConfig
    ours: jt.Transformer

    def logits(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Return transformers' logits."""
        arguments = inputs(self.config, source)
        with torch.no_grad():
            out = self.theirs(**arguments, decoder_input_ids=torch.from_numpy(target))
        return out.logits.numpy()


def module(
    name: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, dropout: float | None = None
) -> Any:
    """Return transformers' model of a case with random weights everywhere, in eval mode.

    Positions that no file holds are unchanged. ``dropout`` is every rate.
    """
    case = CASES[name]
    config, model = case.classes
    rates = {"dropout", "attention_dropout", "activation_dropout", "dropout_rate"}
    known = {} if dropout is None else dict.fromkeys(rates & config().to_dict().keys(), dropout)
    theirs = model(config(**case.values, **known, attn_implementation="eager")).eval()
    generator = torch.Generator().manual_seed(seed)
    described = from_config({"model_type": case.model_type} | case.values)
    computed = (
        described.encoder.positions is Positions.SINUSOIDAL_STORED and described.mel_bins is None
    )
    with torch.no_grad():
        for key, value in theirs.state_dict().items():
            if not (computed and "embed_positions" in key):
                value.copy_(torch.randn(value.shape, generator=generator) * 0.3)
    theirs.tie_weights()
    if case.model_type == "fsmt":
        theirs.config.use_cache = False  # with a cache it has no causal mask
        for stack in (theirs.model.encoder, theirs.model.decoder):
            stack.embed_positions.requires_grad_(False)  # as in fairseq
    if described.mel_bins is not None:  # a spectrogram of any dtype
        stem = theirs.model.encoder.conv1
        stem.register_forward_pre_hook(lambda module, args: (args[0].to(module.weight.dtype),))
    return theirs.to(dtype)


def pair(
    name: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, dropout: float | None = None
) -> Pair:
    """Return the same model in both frameworks."""
    theirs = module(name, seed=seed, dtype=dtype, dropout=dropout)
    config = from_config(
        json.loads(theirs.config.to_json_string()),
        names=theirs.state_dict(),
        same=lambda one, other: True,
    )
    return Pair(theirs, config, jt.convert.from_torch(theirs.state_dict(), config))


def compute_in_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compute T5's norm, LongT5's softmax and M2M100's positions in float64; see above.

    Use :func:`pair` after it, and :func:`exact_positions` on M2M100.
    """

    def norm(self, x):
        rate = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (x * rate)

    for family, prefix in (("t5", "T5"), ("mt5", "MT5"), ("umt5", "UMT5"), ("longt5", "LongT5")):
        modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        monkeypatch.setattr(getattr(modeling, f"{prefix}LayerNorm"), "forward", norm)
    with KeepFloat64():
        yield


def exact_positions(both: Pair) -> Pair:
    """Compute M2M100's tables in float64, as ours: its own float32 is off by 8e-7 at 33."""
    if both.config.architecture == "m2m_100":
        for stack in (both.theirs.model.encoder, both.theirs.model.decoder):
            rows, width = stack.embed_positions.weights.shape
            rows += both.config.source_pad_id  # positions begin after it, and the table would grow
            layout = Sinusoids.TENSOR2TENSOR
            table = torch.from_numpy(np.array(sinusoids(rows, width, layout=layout)))
            table[both.config.source_pad_id] = 0
            stack.embed_positions.weights = table.to(stack.embed_positions.weights.dtype)
    return both


def batch(
    config: TransformerConfig, *, rows: int = 3, source: int = 17, target: int = 13, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return random ids (b, s) and (b, t) with ragged padding at the end; no padding, start or end
    inside. The source of a model that reads sound is a random spectrogram (b, c, w).
    """
    random = np.random.default_rng(seed)
    special = {config.source_pad_id, config.target_pad_id, config.bos_id, config.eos_id}
    sides = []
    for length, size in ((source, config.source_vocab_size), (target, config.target_vocab_size)):
        ids = random.choice([i for i in range(size) if i not in special], (rows, length))
        for row in range(rows):
            ids[row, max(1, length - 4 * row) :] = config.source_pad_id
        sides.append(ids)
    sides[1][:, 0] = config.bos_id
    if config.mel_bins is not None:
        sides[0] = random.standard_normal((rows, config.mel_bins, config.mel_frames))
    return sides[0], sides[1]


def inputs(config: TransformerConfig, source: np.ndarray) -> dict[str, torch.Tensor]:
    """Return the arguments of transformers for a source."""
    if config.mel_bins is not None:
        return {"input_features": torch.from_numpy(source)}
    return {
        "input_ids": torch.from_numpy(source),
        "attention_mask": torch.from_numpy((source != config.source_pad_id).astype(np.int64)),
    }
