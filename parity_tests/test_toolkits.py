"""Checkpoints of other toolkits, against plain modules and, if installed, the toolkit itself."""

import argparse
import copy
import functools
import json
import shutil
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.torch
import torch

import jax_transformer as jt
from jax_transformer import cli, transformer
from jax_transformer.architectures.registry import model_weights
from jax_transformer.errors import InputError, UnsafeFileError
from jax_transformer.formats import registry
from jax_transformer.storage import pt
from jax_transformer.weights import rules
from parity_tests import published
from parity_tests import toolkit_models as models
from parity_tests.bounds import BOUNDS
from parity_tests.marks import quick_if
from parity_tests.unit import hostile

BOUND = BOUNDS["float64"]["logits"]
WORDS = ["<unk>", "<pad>", "<s>", "</s>", *"abcdefg"]
STACK: dict[str, Any] = {
    "type": "transformer",
    "num_layers": 2,
    "num_heads": 3,
    "embeddings": {"embedding_dim": 6, "scale": True},
    "hidden_size": 6,
    "ff_size": 10,
    "dropout": 0.1,
    "layer_norm": "pre",
}


def joey_options(encoder: Any = (), decoder: Any = (), **model: Any) -> dict[str, Any]:
    stacks = {"encoder": STACK | dict(encoder), "decoder": STACK | {"num_layers": 1}}
    stacks["decoder"] |= dict(decoder)
    return copy.deepcopy(stacks) | model


SQUARE = {"num_heads": 2, "hidden_size": 8, "ff_size": 8, "embeddings": {"embedding_dim": 8}}
POST = {"layer_norm": "post", "activation": "gelu"}
JOEY = {
    "pre-norm": joey_options(),
    "post-norm, square, all tied": joey_options(
        POST | SQUARE, POST | SQUARE, tied_embeddings=True, tied_softmax=True
    ),
    "post-norm, tied output": joey_options(POST, POST | {"activation": "swish"}, tied_softmax=True),
}


def joey(folder: Path, options: dict[str, Any], target: int = 9) -> tuple[Path, models.Joey]:
    """A folder of training as JoeyNMT leaves it, in float64."""
    words = WORDS if options.get("tied_embeddings") else WORDS[:target]
    module = models.Joey(options, len(WORDS), len(words)).double()
    models.randomized(module)
    optimizer = torch.optim.Adam(module.parameters())
    sum(parameter.sum() for parameter in module.parameters()).backward()
    optimizer.step()
    state = {
        "model_state": module.state_dict(),
        "optimizer_state": optimizer.state_dict(),
        "scaler_state": None,
        "scheduler_state": None,
        "train_iter_state": torch.Generator().get_state(),
        "stats_state": {"steps": 7, "is_min_lr": False, "best_ckpt_score": float("inf")},
    }
    folder.mkdir(parents=True)
    torch.save(state, folder / "7.ckpt")
    (folder / "best.ckpt").symlink_to("7.ckpt")
    config = {"name": "small", "data": {"src": {"lang": "de"}}, "model": options}
    (folder / "config.yaml").write_text(json.dumps(config))
    (folder / "src_vocab.txt").write_text("".join(f"{word}\n" for word in WORDS))
    (folder / "trg_vocab.txt").write_text("".join(f"{word}\n" for word in words))
    return folder / "best.ckpt", module


def batch(source_words: int, target_words: int, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """A source (3, 7) and a target (3, 5), both padded raggedly."""
    draw = np.random.default_rng(1)
    source, target = draw.integers(4, source_words, (3, 7)), draw.integers(4, target_words, (3, 5))
    for row, (read, written) in enumerate(((7, 5), (4, 3), (1, 1))):
        source[row, read:], target[row, written:] = pad, pad
    return source, target


def compare(path: Path, module: torch.nn.Module, pad: int) -> None:
    """Compare logits and gradients of a checkpoint with a module's."""
    opened = registry.open(path)
    config = opened.config
    assert config is not None
    source, target = batch(config.source_vocab_size, config.target_vocab_size, pad)
    weights = np.random.default_rng(2).normal(size=(3, 5, config.target_vocab_size))
    weights[target == pad] = 0
    module.eval().zero_grad()
    theirs = module(torch.from_numpy(source), torch.from_numpy(target))
    (theirs * torch.from_numpy(weights)).sum().backward()
    arrays = opened.arrays()

    @functools.partial(jax.jit, static_argnums=1)
    def run(arrays: Any, config: Any) -> Any:
        def loss(arrays: Any) -> Any:
            logits = transformer.unflatten(config, arrays)(source, target)
            return (logits * weights).sum(), logits

        return jax.value_and_grad(loss, has_aux=True)(arrays)

    (_, ours), gradients = run({name: jax.numpy.array(a) for name, a in arrays.items()}, config)
    expected = theirs.detach().numpy()
    seen = target != pad
    assert np.abs(np.asarray(ours) - expected)[seen].max() <= BOUND * np.abs(expected).max()
    model = model_weights(config, None)
    ours = {name: np.asarray(g) for name, g in gradients.items() if name not in model.frozen}
    named = rules.to_torch(rules.restrict(model.table, ours), ours)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    derived = [note.name for note in opened.derived]
    assert derived == [name for name in opened.tensors if name in derived], "in one order"
    zero = {note.name for note in opened.derived if "is zero" in note.reason}
    assert named.keys() - zero <= parameters.keys() and not zero & parameters.keys()
    trained = [p.grad for p in module.parameters() if p.grad is not None]
    largest = max(float(grad.abs().max()) for grad in trained)
    for name in named.keys() - zero:
        gradient, grad = named[name], parameters[name].grad.numpy()
        assert np.abs(gradient - grad).max() <= BOUNDS["float64"]["gradients"] * largest, name


class Adapter(torch.nn.Module):
    """A toolkit's own model, called with the ids alone."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def named_parameters(self, **options: Any) -> Any:
        return self.model.named_parameters(**options)


JOEY_ALONE = [
    (joey_options({"type": "recurrent"}), "encoder.type='recurrent'"),
    (joey_options({"layer_norm": "post"}), "layer_norm of encoder and decoder differ"),
    (joey_options({"alpha": 1.5}), "encoder.alpha='1.5'"),
    (joey_options({"activation": "tanh"}), "encoder.activation='tanh'"),
    (joey_options(decoder={"heads": 4}), "unknown option 'model.decoder.heads'"),
    (joey_options({"num_layers": 10**8}), "encoder.num_layers=100,000,000"),
    (joey_options({"dropout": "."}), "encoder.dropout='.' is not a number"),
    (joey_options({"num_heads": 0}), "num_heads"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", JOEY)
def test_joeynmt_itself_computes_the_same(name, tmp_path, in_float64):
    package = pytest.importorskip("joeynmt.model", reason="JoeyNMT is not installed")
    from joeynmt.config import _check_special_symbols
    from joeynmt.vocabulary import Vocabulary

    path, _ = joey(tmp_path / "model", JOEY[name])
    symbols = type("Symbols", (), _check_special_symbols({}))
    tokens = [(path.parent / f"{side}_vocab.txt").read_text().split() for side in ("src", "trg")]
    words = [Vocabulary(side, symbols) for side in tokens]
    model = package.build_model(copy.deepcopy(JOEY[name]), *words).double()
    model.load_state_dict(torch.load(path, weights_only=True)["model_state"])

    class Adapted(Adapter):
        def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            masks = {"src_mask": source[:, None] != 1, "trg_mask": target[:, None] != 1}
            lengths = (source != 1).sum(1)
            return self.model._encode_decode(
                src=source, trg_input=target, src_length=lengths, **masks
            )[0]

    compare(path, Adapted(model), pad=1)


# OpenNMT-py

ONMT_WORDS = ["<unk>", "<blank>", "<s>", "</s>", *"abcdefg"]
ONMT_TASK = {"data_task": "seq2seq", "decoder_start_token": "<s>"}
ONMT_OPTIONS = published.read("opennmt_py")
_SHARED = {"share_embeddings": True, "share_decoder_embeddings": True, "add_qkvbias": True}
_SQUARE = dict.fromkeys(
    ("enc_hid_size", "dec_hid_size", "src_word_vec_size", "tgt_word_vec_size", "heads"), 8
)
ONMT = {
    "base": ONMT_OPTIONS,
    "square, shared, biases": ONMT_OPTIONS | _SHARED | _SQUARE | {"transformer_ff": 8},
    "rms, gated": ONMT_OPTIONS
    | {"layer_norm": "rms", "add_ffnbias": False, "pos_ffn_activation_fn": "silu"}
    | {"position_encoding": False, "share_decoder_embeddings": True, "norm_eps": 1e-5},
    # OpenNMT-py 3.5.1's defaults
    "square, no biases in feed-forwards": ONMT_OPTIONS
    | {**_SQUARE, "add_ffnbias": False, "pos_ffn_activation_fn": "gated-gelu"},
}


def onmt(path: Path, options: dict[str, Any], **changes: Any) -> tuple[Path, models.Onmt]:
    """A checkpoint as OpenNMT-py saves it, in float64."""
    words = ONMT_WORDS if options["share_embeddings"] else ONMT_WORDS[:9]
    module = models.Onmt(options, len(ONMT_WORDS), len(words)).double()
    models.randomized(module)
    state = module.state_dict()
    content = {
        "model": {name: value for name, value in state.items() if "generator" not in name},
        "generator": module.generator.state_dict(),
        "vocab": {"src": ONMT_WORDS, "tgt": words} | ONMT_TASK,
        "opt": argparse.Namespace(**options | changes, _all_transform=set()),
        "optim": {"training_step": 7, "decay_step": 7, "optimizer": {"state": {}}},
    }
    torch.save(content, path)
    return path, module


def separate(path: Path, parts: Sequence[str]) -> None:
    """Move the weights of a checkpoint into files next to it, as ``save_format: safetensors``."""
    content = torch.load(path, weights_only=False)
    generator = {f"generator.{name}": each for name, each in content.pop("generator").items()}
    weights = list((content.pop("model") | generator).items())
    torch.save(content, path)
    for number, part in enumerate(parts):
        state = dict(weights[number :: len(parts)])
        safetensors.torch.save_file(state, path.with_name(part))


@pytest.mark.parametrize(
    "parts",
    [["model_step_7.safetensors"], ["model_step_7.00.safetensors", "model_step_7.01.safetensors"]],
)
def test_weights_of_opennmt_py_in_files_of_their_own_are_the_same(parts, tmp_path, capsys):
    path, _ = onmt(tmp_path / "model_step_7.pt", ONMT["base"])
    expected = jt.convert.load(path, dtype="float32")
    separate(path, parts)
    assert {file.name for file in registry.open(path).files} >= {path.name, *parts}
    assert cli.main(["inspect", str(path)]) == 0
    assert "a checkpoint of OpenNMT-py" in capsys.readouterr().out
    loaded = jt.convert.load(path, dtype="float32")
    assert loaded.config == expected.config
    pairs = zip(jax.tree.leaves(loaded), jax.tree.leaves(expected), strict=True)
    assert all(np.array_equal(*pair) for pair in pairs)
    assert cli.main(["convert", str(path), str(tmp_path / "run"), "--no-check"]) == 0
    assert jt.Translator.load(str(tmp_path / "run")).tokenizer.encode("a g") == [4, 10]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "model.pt: has no weights, and model.safetensors is not next to it"),
        (
            ["model.safetensors", "model.00.safetensors"],
            "model.pt: has no weights, and both model.safetensors and model.00.safetensors have",
        ),
        (["model.00.safetensors", "moved"], "the weights do not fit the model"),
        (["model.0.safetensors"], "and so has another file"),
    ],
)
def test_weights_of_opennmt_py_that_are_not_clear_are_refused(parts, message, tmp_path, capsys):
    """Without a file, with two kinds, with one of two parts, and with a part twice."""
    path, _ = onmt(tmp_path / "model.pt", ONMT_OPTIONS)
    separate(path, parts)
    if len(parts) == 1:
        shutil.copy(tmp_path / parts[0], tmp_path / "model.1.safetensors")
    assert cli.main(["convert", str(path), str(tmp_path / "run")]) == 3
    error = capsys.readouterr().err
    assert message in error and not (tmp_path / "run").exists()


def named(**values: Any) -> list[tuple[dict[str, Any], str]]:
    """Return options that are refused one by one, each by its name and value."""
    return [({name: value}, f"{name}={value!r}") for name, value in values.items()]


ONMT_ALONE = [
    *named(encoder_type="brnn", decoder_type="rnn", model_task="lm", self_attn_type="average"),
    *named(encoder_type="cnn", max_relative_positions=20, copy_attn=True, num_experts=8),
    *named(max_relative_positions=-1, num_kv=1, parallel_residual=True, sliding_window=4096),
    *named(lora_layers=["w_1"]),
    ({"layer_norm": "rms"}, "add_ffnbias=True"),
    ({"tgt_word_vec_size": 4}, "tgt_word_vec_size is not enc_hid_size=6"),
    ({"enc_layers": 10**9 - 1}, "enc_layers=999,999,999"),
]


NAMESPACE = hostile.name("argparse", "Namespace") + b")\x81"
ITEM = hostile.text("heads") + b"K\x03"


def test_a_namespace_is_a_dict_of_its_attributes(tmp_path):
    expected = {"heads": 3, "data": {"a": [1, None]}}
    options = argparse.Namespace(**expected, transforms={"bpe"}, none=set())
    torch.save({"opt": options}, tmp_path / "a.pt")
    assert pt.read(tmp_path / "a.pt") == {"opt": expected | {"transforms": ["bpe"], "none": []}}
    (tmp_path / "b.pt").write_bytes(hostile.file(NAMESPACE + b"}" + ITEM + b"sb"))
    assert pt.read(tmp_path / "b.pt") == {"heads": 3}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (hostile.name("argparse", "Namespace") + b"K\x01\x85\x81", "instruction NEWOBJ"),
        (hostile.name("argparse", "Namespace") + b")R", "a call of something"),
        (b"]" + hostile.name("argparse", "Namespace") + b"a", "as a value"),
        (NAMESPACE + b"}K\x01K\x02sb", "attributes that have no names"),
        (NAMESPACE + b"]b", "attributes that have no names"),
        (NAMESPACE + b"}" + ITEM + b"sb}" + ITEM + b"sb", "attributes that are set twice"),
        (NAMESPACE + ITEM + b"s", "something is put into a value"),
        (NAMESPACE + b"q\x01}" + hostile.text("self") + b"h\x01sb", "containers within containers"),
    ],
)
def test_a_namespace_is_made_of_nothing_else(body, message, tmp_path):
    (tmp_path / "a.pt").write_bytes(hostile.file(body))
    with pytest.raises(UnsafeFileError, match=message):
        pt.read(tmp_path / "a.pt")


@pytest.mark.slow
@pytest.mark.parametrize("name", ONMT)
@pytest.mark.filterwarnings("ignore")
def test_opennmt_py_itself_computes_the_same(name, tmp_path, in_float64, monkeypatch):
    package = pytest.importorskip("onmt.model_builder", reason="OpenNMT-py is not installed")
    # It rounds attention scores and rms norms to float32, whatever its dtype
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self)
    monkeypatch.setattr(torch, "float32", torch.float64)
    path, module = onmt(tmp_path / "model.pt", ONMT[name])
    words = {"src": ONMT_WORDS, "tgt": ONMT_WORDS[: module.generator.out_features]}
    vocabs = {
        side: type("Vocabulary", (dict,), {})({word: i for i, word in enumerate(tokens)})
        for side, tokens in words.items()
    }
    model = package.build_base_model(argparse.Namespace(**ONMT[name]), vocabs).double()
    torch.nn.Module.load_state_dict(model, module.state_dict())

    class Adapted(Adapter):
        def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            lengths = (source != 1).sum(1)
            # the model drops the last word of a target: it is what is to be written
            begun = torch.nn.functional.pad(target, (0, 1), value=1)[..., None]
            output, _ = self.model(source[..., None], begun, lengths)
            return self.model.generator(output)

    compare(path, Adapted(model), pad=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_weights_that_opennmt_py_itself_saves_apart_are_read(tmp_path):
    """It cannot save weights that are tied in this way."""
    package = pytest.importorskip("onmt.models.model_saver", reason="OpenNMT-py is not installed")
    module = models.Onmt(ONMT["base"], len(ONMT_WORDS), 9)
    models.randomized(module)
    words = {"src": ONMT_WORDS, "tgt": ONMT_WORDS[:9]}
    vocabs = {
        side: types.SimpleNamespace(ids_to_tokens=tokens, default_id=0)
        for side, tokens in words.items()
    }
    optimizer = types.SimpleNamespace(state_dict=lambda: {"training_step": 7})
    options, name = argparse.Namespace(**ONMT["base"]), str(tmp_path / "model")
    arguments = (name, module, options, vocabs | ONMT_TASK, optimizer)
    package.ModelSaver(*arguments, save_format="safetensors").save(7)
    state = jt.convert.to_torch(jt.convert.load(tmp_path / "model_step_7.pt"))
    expected = module.state_dict()
    assert state.keys() == expected.keys()
    assert all(np.array_equal(state[each], expected[each]) for each in expected)


# fairseq

FAIRSEQ_WORDS = ["<s>", "<pad>", "</s>", "<unk>", *"abcdefg"]
FAIRSEQ_OPTIONS = published.read("fairseq")
FAIRSEQ = {
    "base": FAIRSEQ_OPTIONS,
    "square, pre-norm, learned, all shared": FAIRSEQ_OPTIONS
    | {"normalize_before": True, "learned_pos": True, "share_all_embeddings": True}
    | {"activation_fn": "gelu", "layernorm_embedding": True, "encoder_attention_heads": 2}
    | dict.fromkeys(("encoder_embed_dim", "decoder_embed_dim"), 8)
    | dict.fromkeys(("encoder_ffn_embed_dim", "decoder_ffn_embed_dim"), 8),
    "own output, unscaled": FAIRSEQ_OPTIONS
    | {"share_decoder_input_output_embed": False, "no_scale_embedding": True}
    | {"activation_fn": "gelu_accurate"},
}


def fairseq(
    folder: Path, options: dict[str, Any], *, legacy: bool = False, **changes: Any
) -> tuple[Path, models.Fairseq]:
    """A checkpoint as fairseq saves it, in float64, with dictionaries."""
    words = FAIRSEQ_WORDS if options["share_all_embeddings"] else FAIRSEQ_WORDS[:9]
    module = models.Fairseq(options, len(FAIRSEQ_WORDS), len(words)).double()
    models.randomized(module)
    for name in ("normalize_before", "learned_pos"):
        changes = {f"{side}_{name}": options[name] for side in ("encoder", "decoder")} | changes
    values = argparse.Namespace(**options | changes)
    task = {"_name": "translation", "source_lang": "de", "target_lang": "en"}
    content: dict[str, Any] = {"args": None, "cfg": {"model": values, "task": task}}
    state = module.state_dict()
    if legacy:  # before 0.10; tied copies and the fast path came later
        vars(values).update(task)
        content = {"args": values}
        state = {n: v for n, v in state.items() if "projection" not in n and "_proj_" not in n}
    content |= {"model": state, "criterion": None, "last_optimizer_state": None}
    content |= {"optimizer_history": [{"optimizer_name": "FairseqAdam", "num_updates": 7}]}
    content |= {"extra_state": {"metrics": [], "previous_training_time": 1.5}}
    folder.mkdir()
    torch.save(content, folder / "checkpoint_best.pt")
    for language, tokens in (("de", FAIRSEQ_WORDS), ("en", words)):
        lines = "".join(f"{token} {9 - i}\n" for i, token in enumerate(tokens[4:]))
        (folder / f"dict.{language}.txt").write_text(lines)
    return folder / "checkpoint_best.pt", module


def test_a_tied_copy_of_fairseq_that_differs_is_refused(tmp_path, capsys):
    path, _ = write("fairseq", "base", tmp_path)
    content = torch.load(path, weights_only=False)
    content["model"]["decoder.output_projection.weight"] = torch.zeros(
        content["model"]["decoder.embed_tokens.weight"].shape
    )
    torch.save(content, path)
    assert cli.main(["convert", str(path), str(tmp_path / "run"), "--no-check"]) == 3
    assert "decoder.output_projection.weight differs from" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["de", "en"])
def test_a_model_of_fairseq_without_one_dictionary_has_none(missing, tmp_path):
    path, _ = fairseq(tmp_path / "model", FAIRSEQ["base"])
    assert len(registry.open(path).files) == 3
    (tmp_path / f"model/dict.{missing}.txt").unlink()
    assert registry.open(path).config and registry.open(path).files == (path,)


FAIRSEQ_ALONE = [
    *named(adaptive_input=True, adaptive_softmax_cutoff="10,20", no_cross_attention=True),
    *named(no_token_positional_embeddings=True, quant_noise_pq=0.1, activation_fn="relu_squared"),
    ({"decoder_embed_dim": 4}, "decoder_embed_dim is not encoder_embed_dim=6"),
    ({"decoder_normalize_before": True}, "normalize_before of encoder and decoder differ"),
    ({"decoder_layers": 5000}, "decoder_layers=5,000"),
]


# All of them


TEXT: dict[str, tuple[list[str], int, tuple[int, ...], set[int]]] = {
    "JoeyNMT": (WORDS, 2, (3,), {1, 2, 3}),
    "OpenNMT-py": (ONMT_WORDS, 2, (), {1, 2, 3}),
    "fairseq": (FAIRSEQ_WORDS, 2, (2,), {1, 2}),
}
"""Words, the id that begins, those that end a source, and those that are no text."""


def write(toolkit: str, name: str, folder: Path) -> tuple[Path, torch.nn.Module]:
    """A checkpoint of these options; ``legacy`` is fairseq's older form."""
    if toolkit == "JoeyNMT":
        return joey(folder / "model", JOEY[name])
    if toolkit == "OpenNMT-py":
        return onmt(folder / "model.pt", ONMT[name])
    legacy = name == "base legacy"
    return fairseq(folder / "model", FAIRSEQ["base" if legacy else name], legacy=legacy)


@pytest.mark.parametrize(
    ("toolkit", "name"),
    [
        quick_if("square" in name, toolkit, name)
        for toolkit, options in (("JoeyNMT", JOEY), ("OpenNMT-py", ONMT), ("fairseq", FAIRSEQ))
        for name in options
    ],
)
def test_it_computes_the_same(toolkit, name, tmp_path, in_float64):
    path, module = write(toolkit, name, tmp_path)
    compare(path, module, pad=1)


def greedy(module: torch.nn.Module, source: list[int], begin: int, end: int, steps: int) -> list:
    words = [begin]
    for _ in range(steps):
        logits = module(torch.tensor([source]), torch.tensor([words]))[0, -1]
        words.append(int(logits.argmax()))
        if words[-1] == end:
            break
    return words[1:]


@pytest.mark.parametrize(
    ("toolkit", "name", "note"),
    [
        ("JoeyNMT", "pre-norm", "not converted: optimizer_state"),
        ("JoeyNMT", "post-norm, tied output", "not converted: optimizer_state"),
        ("OpenNMT-py", "base", ""),
        ("fairseq", "base", "encoder.layers.1.fc1_bias: is filled"),
        ("fairseq", "base legacy", "encoder.layers.1.fc1_bias: is filled"),
    ],
)
def test_a_checkpoint_is_recognised_translates_and_comes_back(
    toolkit, name, note, tmp_path, capsys
):
    path, module = write(toolkit, name, tmp_path)
    assert cli.main(["inspect", str(path)]) == 0
    assert f"a checkpoint of {toolkit}" in capsys.readouterr().out
    run = str(tmp_path / "run")
    assert cli.main(["convert", str(path), run, "--no-check"]) == 0
    assert note in capsys.readouterr().out
    words, begin, suffix, silent = TEXT[toolkit]
    translator = jt.Translator.load(run)
    tokenizer = translator.tokenizer
    assert tokenizer.encode("a g unheard-of c") == [4, 10, words.index("<unk>"), 6]
    end = words.index("</s>")
    assert tokenizer.suffix == suffix and tokenizer.target.suffix == (end,)
    assert tokenizer.target.decode([4, 8, end]) == "a e"
    lines, expected = ["a b c", "g"], []
    for line in lines:
        ids = [words.index(word) for word in line.split()]
        tokens = greedy(module, [*ids, *suffix], begin, end, 5)
        expected.append(" ".join(words[word] for word in tokens if word not in silent))
    assert translator(lines, beam_size=1, max_length=5) == expected
    assert any(expected)
    assert cli.main(["convert", run, str(tmp_path / "a.pt"), "--no-check"]) == 0
    state, original = torch.load(tmp_path / "a.pt", weights_only=True), module.state_dict()
    if toolkit == "fairseq":  # what the fast path alone uses does not come back
        assert len(state) > len(original) / 2
    else:
        assert state.keys() == original.keys()
    assert all(torch.equal(state[name], original[name]) for name in state)


@pytest.mark.parametrize(
    ("toolkit", "changes", "message"),
    [
        *(quick_if(i < 2, "JoeyNMT", *case) for i, case in enumerate(JOEY_ALONE)),
        *(("OpenNMT-py", *case) for case in ONMT_ALONE),
        *(("fairseq", *case) for case in FAIRSEQ_ALONE),
    ],
)
def test_what_a_toolkit_has_alone_is_refused_by_name(toolkit, changes, message, tmp_path, capsys):
    if toolkit == "JoeyNMT":
        path, _ = joey(tmp_path / "model", JOEY["pre-norm"])
        named = path.with_name("config.yaml")
        named.write_text(json.dumps({"model": changes}))
    elif toolkit == "OpenNMT-py":
        named = path = onmt(tmp_path / "model.pt", ONMT_OPTIONS, **changes)[0]
    else:
        named = path = fairseq(tmp_path / "model", FAIRSEQ_OPTIONS, **changes)[0]
    assert cli.main(["convert", str(path), str(tmp_path / "run")]) == 3
    error = capsys.readouterr().err
    assert message in error and str(named) in error and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("toolkit", "name"), [("JoeyNMT", "pre-norm"), ("OpenNMT-py", "base"), ("fairseq", "base")]
)
def test_the_model_of_a_checkpoint_is_loaded_by_its_path_alone(toolkit, name, tmp_path):
    path, module = write(toolkit, name, tmp_path)
    state = jt.convert.to_torch(jt.convert.load(path, dtype="float32"))
    expected = {name: np.asarray(each.float()) for name, each in module.state_dict().items()}
    shared = state.keys() & expected.keys()
    assert len(shared) > len(expected) / 2
    assert all(np.array_equal(state[name], expected[name]) for name in shared)
    with pytest.raises(InputError, match="gets its tokenizer in a run: jax-transformer convert"):
        jt.Translator.load(path)
    key = "model_state" if toolkit == "JoeyNMT" else "model"
    assert registry.open(path, key=key).format.name == "pt", "the names of a part of the file"


def test_an_error_names_its_own_file_once(tmp_path, capsys, monkeypatch):
    """The folder's name begins as an option does; lines are counted with empty ones."""
    monkeypatch.chdir(tmp_path)
    path, _ = fairseq(Path("enc"), FAIRSEQ_OPTIONS, encoder_layers="two")
    joey_path, _ = joey(Path("joey"), JOEY["pre-norm"])
    config = json.loads(Path("joey/config.yaml").read_text())
    config["data"] = {"special_symbols": {"pad_id": "one"}}
    Path("joey/config.yaml").write_text(json.dumps(config))
    fairseq(Path("good"), FAIRSEQ_OPTIONS)
    words = Path("good/dict.de.txt")
    words.write_text("\n\na 3\nno count\n")
    for file, message in (
        (path, "enc/checkpoint_best.pt: encoder_layers='two'"),
        (joey_path, "joey/config.yaml: data.special_symbols.pad_id='one'"),
        (Path("good/checkpoint_best.pt"), "good/dict.de.txt: line 4: 'no count'"),
    ):
        assert cli.main(["convert", str(file), "run"]) == 3
        assert f"jax-transformer: {message}" in capsys.readouterr().err
    Path("joey/config.yaml").unlink()
    assert cli.main(["convert", str(joey_path), "run"]) == 3
    assert "joey/config.yaml: missing; JoeyNMT writes it" in capsys.readouterr().err
    words.write_text("a 3\n<s> 2\n")
    monkeypatch.chdir("good")
    assert cli.main(["convert", "checkpoint_best.pt", "run"]) == 3
    assert "jax-transformer: dict.de.txt: has a token twice" in capsys.readouterr().err
