"""Targets of fuzzing: the files of other toolkits, next to their weights."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from campaigns.fuzzing import mutators
from campaigns.fuzzing.harness import Read, Target, file_reader
from jax_transformer.architectures import registry
from jax_transformer.errors import InputError, about_file
from jax_transformer.extras.toolkits import fairseq, joeynmt, opennmt_py
from jax_transformer.extras.toolkits.marian import marian_model, marian_names
from jax_transformer.extras.toolkits.t5x import t5x_format
from jax_transformer.extras.toolkits.toolkit import Toolkit
from jax_transformer.storage import tensors, yaml_data
from jax_transformer.storage.tensors import TensorInfo
from jax_transformer.weights import rules
from parity_tests import marian_files

_WORDS = "<unk> <pad> <s> </s> a b ▁the no".split()


def _describe(toolkit: Toolkit, path: Path, content: Any) -> None:
    """Describe a checkpoint, as it is done before its weights are looked at."""
    if not toolkit.recognises_content(content):
        raise InputError("not recognised")
    config = toolkit.describe(path, content).config
    rules.aliases(registry.unchecked_table(config.architecture, config))


# Marian


def _read_marian_options(folder: Path) -> Read:
    """The options in a file of weights, and the arrays that they ask for."""
    arrays = tensors.in_memory(marian_files.weights(marian_files.options()))

    def read(content: bytes) -> None:
        options = yaml_data.parse("model.npz (special:model.yml)", content)
        if not isinstance(options, dict):
            raise InputError("no map")
        with about_file("model.npz"):
            marian_names.state(arrays, marian_names.configuration(options))

    return read


def _marian_options() -> Iterator[bytes]:
    yield marian_files.yaml(marian_files.options()).encode()
    yield marian_files.yaml(marian_files.options() | marian_files.PRE_NORM).encode()


def _read_decoder(folder: Path) -> Read:
    """The options of decoding, which name the files of a model."""
    chosen = marian_files.options(dec_depth=1)
    content = marian_files.model({"Wemb": np.zeros((11, 6), np.float32)}, chosen)
    inner = marian_files.opus(folder / "en-fr", content, {"</s>": 0, "a": 1})
    read = file_reader(
        marian_model.DECODER, lambda _: marian_model.end_id(marian_model.find(inner))
    )
    return read(inner)


def _decoder_seeds() -> Iterator[bytes]:
    vocabulary = b"  - opus.spm32k-spm32k.vocab.yml\n"
    yield (
        b"models:\n  - opus.spm32k-spm32k.transformer.model1.npz.best-perplexity.npz\n"
        b"vocabs:\n" + vocabulary + vocabulary + b"beam-size: 6\nnormalize: 1\n"
    )
    yield b"relative-paths: true\n"


def _vocabulary_seeds() -> Iterator[bytes]:
    words = ["</s>", "<unk>", "no", "▁the", "'", '"', ":", "#", "1", "~", "null"]
    for escape in (False, True):
        texts = [json.dumps(word, ensure_ascii=escape) for word in words]
        yield "".join(f"{text}: {i}\n" for i, text in enumerate(texts)).encode()
    yield json.dumps({word: i for i, word in enumerate(words)}).encode()


def _yaml_seeds() -> Iterator[bytes]:
    yield b'a: no\nb: [1, 0x10, ~, "\\u20ac"]\n"</s>": {null: 1.0}\n? - a\n: |\n  text\n'
    yield b"%YAML 1.1\n---\n- a\n-  b: 'c''d'\n   e: >-\n     folded\n...\n"
    yield from _marian_options()


# JoeyNMT


def _joey_folder(folder: Path) -> Callable[[], None]:
    for side in ("src", "trg"):
        (folder / f"{side}_vocab.txt").write_text("".join(f"{word}\n" for word in _WORDS))
    (folder / joeynmt.CONFIG).write_bytes(next(_joey_configs()))
    content = {"model_state": {"src_embed.lut.weight": TensorInfo((8, 6), "float32")}}
    return lambda: _describe(joeynmt.FORMAT, folder / "best.ckpt", content)


def _joey_reader(name: str) -> Callable[[Path], Read]:
    def begin(folder: Path) -> Read:
        describe = _joey_folder(folder)
        return file_reader(name, lambda _: describe())(folder)

    return begin


def _joey_configs() -> Iterator[bytes]:
    embeddings = {"embedding_dim": 6, "scale": True, "dropout": 0.1}
    stack = {"type": "transformer", "num_layers": 2, "num_heads": 2, "hidden_size": 6}
    stack |= {"ff_size": 10, "embeddings": embeddings, "layer_norm": "pre"}
    model = {"encoder": stack, "decoder": stack | {"num_layers": 1}, "tied_softmax": True}
    yield json.dumps({"name": "a", "data": {"src": {"lang": "de"}}, "model": model}).encode()
    tokens = {f"{role}_token": text for role, (_, text) in joeynmt._SPECIALS.items()}
    ids = {f"{role}_id": number for role, (number, _) in joeynmt._SPECIALS.items()}
    special = tokens | ids | {"lang_tags": ["<de>", "<en>"], "sep_token": "<sep>"}
    yield json.dumps({"data": {"special_symbols": special}, "model": model}).encode()
    lines = [b"data:", b"  special_symbols:", b"    unk_id: 0", b"model:", b"  tied_softmax: true"]
    for name in (b"encoder", b"decoder"):
        lines += [b"  " + name + b":", b"    type: transformer", b"    num_layers: 2"]
        lines += [b"    num_heads: 2", b"    embeddings:", b"      scale: true", b"    ff_size: 8"]
    yield b"\n".join(lines)


def _words_seeds() -> Iterator[bytes]:
    yield "".join(f"{word}\n" for word in _WORDS).encode()
    yield "a\r\nb\u2028c\n\n".encode()


# fairseq and OpenNMT-py


def _read_dictionary(folder: Path) -> Read:
    languages = {"source_lang": "de", "target_lang": "de"}
    content = {"model": _fairseq_content(None)["model"], "args": languages}
    checkpoint, describe = folder / "checkpoint_best.pt", fairseq.FORMAT.describe
    return file_reader("dict.de.txt", lambda _: describe(checkpoint, content))(folder)


def _dictionary_seeds() -> Iterator[bytes]:
    yield "a 9\nb 8\n▁the 7\n: 6\n".encode()
    yield b"a 9\nb 8\n\nc 7 \nd 6"


def _read_options(toolkit: Toolkit, around: Callable[[Any], Any]) -> Callable[[Path], Read]:
    """Options as plain values of a file's pickle, which are written here as JSON."""

    def begin(folder: Path) -> Read:
        def read(content: bytes) -> None:
            try:
                values = json.loads(content)
            except (ValueError, RecursionError):
                raise InputError("not JSON") from None
            _describe(toolkit, folder / "checkpoint.pt", around(values))

        return read

    return begin


def _fairseq_content(values: Any) -> Any:
    weight = TensorInfo((8, 6), "float32")
    state = {f"{side}.embed_tokens.weight": weight for side in ("encoder", "decoder")}
    return {"model": state, "cfg": values}


def _fairseq_options() -> Iterator[bytes]:
    sides = ("encoder", "decoder")
    model: dict[str, Any] = {f"{side}_layers": 2 for side in sides}
    model |= {f"{side}_attention_heads": 2 for side in sides}
    model |= {f"{side}_embed_dim": 6 for side in sides} | {"share_all_embeddings": True}
    model |= {f"{side}_ffn_embed_dim": 6 for side in sides} | {"dropout": 0.1}
    task = {"_name": "translation", "source_lang": "de", "target_lang": "en"}
    yield json.dumps({"model": model, "task": task}).encode()


def _onmt_content(values: Any) -> Any:
    weight = TensorInfo((8, 6), "float32")
    content = values if isinstance(values, dict) else {}
    name = "encoder.embeddings.make_embedding.emb_luts.0.weight"
    return content | {"model": {name: weight}, "generator": {"weight": weight}}


def _onmt_options() -> Iterator[bytes]:
    options = {"enc_layers": 2, "dec_layers": 1, "heads": 2, "enc_hid_size": 6}
    options |= {"dec_hid_size": 6, "transformer_ff": 8, "dropout": [0.1]}
    options |= {"model_type": "text", "encoder_type": "transformer", "decoder_type": "transformer"}
    words = ["<unk>", "<blank>", "<s>", "</s>", "a"]
    vocab = {"src": words, "tgt": words, "data_task": "seq2seq", "decoder_start_token": "<s>"}
    yield json.dumps({"opt": options, "vocab": vocab}).encode()


# T5X


def _gin_seeds() -> Iterator[bytes]:
    yield (
        b"# Parameters:\nfrom t5x import models\nDROPOUT_RATE = 0.1\n"
        b"seqio.SentencePieceVocabulary.sentencepiece_model_file = \\\n"
        b"    'gs://t5-data/vocabs/mc4.250000.100extra/sentencepiece.model'\n"
        b"network.T5Config:\n  dropout_rate = %DROPOUT_RATE\n"
        b"network.T5Config.mlp_activations = ('gelu', 'linear')\n"
        b"network.T5Config.param_scan_axis = 1\n"
    )


_SIGNS = tuple(b"--- |!!python/object:os.system|&a |*a|? |- |: |<<: *a|{|[|%YAML 1.1|#".split(b"|"))
_lines = mutators.lines
_json = mutators.json_values

TARGETS = {
    "yaml": Target(
        lambda folder: lambda content: yaml_data.parse("file.yml", content), _yaml_seeds,
        37_500, 2, _lines, _SIGNS, ratio=1000,
    ),
    "marian options": Target(_read_marian_options, _marian_options, 7_500, 1, _lines, ratio=1000),
    "marian decoder": Target(_read_decoder, _decoder_seeds, 7_500, 1, _lines, ratio=1000),
    "marian vocabulary": Target(
        file_reader("a.vocab.yml", marian_model.read_vocabulary), _vocabulary_seeds, 20_000, 1,
        _lines,
        _SIGNS, ratio=1000,
    ),
    "joeynmt config": Target(
        _joey_reader(joeynmt.CONFIG), _joey_configs, 5_000, 1, _json, ratio=1000,
    ),
    "joeynmt vocabulary": Target(_joey_reader("src_vocab.txt"), _words_seeds, 5_000, 1, _lines),
    "fairseq dictionary": Target(_read_dictionary, _dictionary_seeds, 15_000, 1, _lines),
    "fairseq options": Target(
        _read_options(fairseq.FORMAT, _fairseq_content), _fairseq_options, 7_500, 1, _json,
    ),
    "opennmt-py options": Target(
        _read_options(opennmt_py.FORMAT, _onmt_content), _onmt_options, 7_500, 1, _json,
    ),
    "config.gin": Target(
        file_reader("config.gin", lambda path: t5x_format.find_gin(path.parent)),
        _gin_seeds, 15_000, 1, _lines,
    ),
}  # fmt: skip
