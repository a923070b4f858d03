"""Options of toolkits: each decides its field, and what is left out has the toolkit's default."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jax_transformer.config import TransformerConfig
from jax_transformer.config.model import MOST_LAYERS
from jax_transformer.errors import InputError
from jax_transformer.extras.toolkits import fairseq, joeynmt, opennmt_py
from jax_transformer.extras.toolkits.marian import marian_names
from jax_transformer.extras.toolkits.toolkit import Options, Vocabularies, tokenizer_files
from jax_transformer.storage import yaml_data
from parity_tests import marian_files, published

# The two sides have the special tokens at other places
WORDS = Vocabularies(
    ("a", "<pad>", "<s>", "</s>", "<unk>"),
    ("<s>", "<unk>", "b", "c", "</s>", "<pad>"),
    *("<pad>", "<s>", "</s>", "<unk>"),
)
STACKS = ("encoder", "decoder")
CASES = """
fairseq | | d_model=512 d_ff=2048 num_heads=8 max_length=1024 norm_placement=post bos_id=2 eos_id=2
fairseq | | source_vocab_size=9 target_vocab_size=11 source_pad_id=1 target_pad_id=1 tying=none
fairseq | | dropout=0.1 attention_dropout=0.0 activation_dropout=0.0 embedding_dropout=0.1
fairseq | | embedding_scale=sqrt_d_model output_bias=false encoder.layers=6 decoder.layers=6
fairseq | | encoder.positions=sinusoidal encoder.position_offset=2 encoder.activation=relu
fairseq | | encoder.embedding_norm=false encoder.final_norm=false decoder.final_norm=false
fairseq | encoder_layers=3 decoder_layers=4 | encoder.layers=3 decoder.layers=4
fairseq | encoder_attention_heads=4 decoder_attention_heads=2 | encoder.num_heads=4
fairseq | encoder_attention_heads=4 decoder_attention_heads=2 | decoder.num_heads=2 num_heads=4
fairseq | encoder_ffn_embed_dim=10 decoder_ffn_embed_dim=12 | encoder.d_ff=10 decoder.d_ff=12
fairseq | encoder_embed_dim=64 decoder_embed_dim=64 | d_model=64
fairseq | encoder_normalize_before=true decoder_normalize_before=true | encoder.final_norm=true
fairseq | encoder_normalize_before=true decoder_normalize_before=true | decoder.final_norm=true
fairseq | encoder_normalize_before=true decoder_normalize_before=true | norm_placement=pre
fairseq | encoder_normalize_before=true decoder_normalize_before=true no_decoder_final_norm=true \
 | decoder.final_norm=false encoder.final_norm=true
fairseq | max_source_positions=30 max_target_positions=20 | max_length=20
fairseq | max_source_positions=20 max_target_positions=30 | max_length=20
fairseq | encoder_learned_pos=true decoder_learned_pos=true | decoder.positions=learned
fairseq | no_scale_embedding=true | embedding_scale=none
fairseq | no_scale_embedding=True layernorm_embedding=FALSE | embedding_scale=none
fairseq | layernorm_embedding=true | encoder.embedding_norm=true decoder.embedding_norm=true
fairseq | dropout=0.4 | dropout=0.4 embedding_dropout=0.4 attention_dropout=0.0
fairseq | attention_dropout=0.4 | dropout=0.1 attention_dropout=0.4 activation_dropout=0.0
fairseq | activation_dropout=0.4 | dropout=0.1 attention_dropout=0.0 activation_dropout=0.4
fairseq | activation_fn=gelu | encoder.activation=gelu
fairseq | activation_fn=gelu_fast | decoder.activation=gelu_tanh
fairseq | activation_fn=gelu_accurate | encoder.activation=gelu_tanh
fairseq | share_decoder_input_output_embed=true | tying=output
fairseq | share_all_embeddings=true | tying=all
opennmt | | d_ff=2048 num_heads=8 norm_epsilon=1e-06 dropout=0.3 attention_dropout=0.3 bias=true
opennmt | | attention_bias=false embedding_scale=none tying=none norm=layer norm_placement=pre
opennmt | | source_pad_id=1 target_pad_id=5 bos_id=0 eos_id=4 source_vocab_size=5
opennmt | | encoder.layers=2 decoder.layers=2 encoder.positions=none encoder.activation=relu
opennmt | | encoder.gated=false decoder.final_norm=true output_bias=true target_vocab_size=6
opennmt | enc_layers=3 dec_layers=4 | encoder.layers=3 decoder.layers=4
opennmt | heads=4 transformer_ff=10 | num_heads=4 d_ff=10
opennmt | norm_eps=1e-05 add_qkvbias=true | norm_epsilon=1e-05 attention_bias=true
opennmt | position_encoding=true | embedding_scale=sqrt_d_model encoder.sinusoids=interleaved
opennmt | position_encoding_type=SinusoidalConcat | decoder.sinusoids=tensor2tensor
opennmt | dropout=[0.4,0.5] | dropout=0.4 attention_dropout=0.4 embedding_dropout=0.4
opennmt | attention_dropout=[0.4] | dropout=0.3 attention_dropout=0.4
opennmt | share_decoder_embeddings=true | tying=output
opennmt | share_embeddings=true | tying=embeddings
opennmt | pos_ffn_activation_fn=silu | encoder.activation=silu decoder.gated=true
opennmt | pos_ffn_activation_fn=gelu | encoder.activation=gelu decoder.gated=false
opennmt | pos_ffn_activation_fn=gated-gelu | decoder.activation=gelu encoder.gated=true
opennmt | enc_hid_size=16 | d_model=16
opennmt | attention_dropout=0.4 | attention_dropout=0.4 activation_dropout=0.3
joeynmt | encoder.layer_norm=post encoder.activation=gelu decoder.activation=swish \
 | encoder.activation=gelu decoder.activation=silu
joeynmt | decoder.layer_norm=pre | norm_placement=pre d_model=512 num_heads=4 d_ff=2048
joeynmt | decoder.layer_norm=pre | dropout=0.1 embedding_dropout=0.1 tying=none max_length=5000
joeynmt | decoder.layer_norm=pre | source_pad_id=1 target_pad_id=5 embedding_scale=none
joeynmt | decoder.layer_norm=pre | encoder.layers=8 encoder.num_heads=4 encoder.final_norm=false
joeynmt | decoder.layer_norm=pre | decoder.layers=4 decoder.num_heads=8 decoder.final_norm=true
joeynmt | encoder.layer_norm=post | norm_placement=post
joeynmt | encoder.layer_norm=post encoder.embeddings.dropout=0.4 | embedding_dropout=0.4
joeynmt | encoder.layer_norm=post encoder.dropout=0.4 decoder.dropout=0.4 | attention_dropout=0.4
joeynmt | encoder.layer_norm=post encoder.num_heads=2 decoder.num_heads=16 | encoder.num_heads=2
joeynmt | encoder.layer_norm=post encoder.num_heads=2 decoder.num_heads=16 | decoder.num_heads=16
joeynmt | encoder.layer_norm=post encoder.ff_size=10 decoder.ff_size=12 | decoder.d_ff=12
joeynmt | encoder.layer_norm=post tied_softmax=true | tying=output
joeynmt | encoder.layer_norm=post encoder.embeddings.scale=true decoder.embeddings.scale=true \
 | embedding_scale=sqrt_d_model
joeynmt | encoder.layer_norm=post tied_embeddings=true encoder.embeddings.scale=true \
 | embedding_scale=sqrt_d_model
marian | | source_vocab_size=10 target_vocab_size=12 source_pad_id=9 target_pad_id=11 bos_id=11
marian | | eos_id=0 norm_epsilon=1e-06 embedding_dropout=0.1 logits_bias=true output_bias=false
marian | transformer-decoder-dim-ffn="8" | encoder.d_ff=10 decoder.d_ff=8
marian | transformer-decoder-dim-ffn="0" | encoder.d_ff=10 decoder.d_ff=10
marian | enc-depth="3" dec-depth="4" | encoder.layers=3 decoder.layers=4
marian | transformer-postprocess-emb=n | embedding_dropout=0.0 encoder.embedding_norm=true
marian | transformer-heads="2" | num_heads=2
marian | transformer-ffn-activation=swish | encoder.activation=silu decoder.activation=silu
marian | transformer-ffn-activation=gelu | encoder.activation=gelu decoder.activation=gelu
marian | tied-embeddings="true" | tying=output
marian | tied-embeddings-src="true" dim-vocabs=["9","9"] | tying=embeddings
marian | tied-embeddings-all="true" dim-vocabs=["9","9"] | tying=all
"""
"""A toolkit, options of a model that says nothing else, and the fields that these decide."""


def nested(text: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for pair in text.split():
        *above, name = (key := pair.partition("="))[0].split(".")
        inner = result
        for word in above:
            inner = inner.setdefault(word, {})
        is_word = key[2][0].isalpha() and key[2] not in ("true", "false")
        inner[name] = key[2] if is_word else json.loads(key[2])
    return result


def configuration(toolkit: str, options: dict[str, Any]) -> TransformerConfig:
    shared = ("share_all_embeddings", "share_embeddings", "tied_embeddings")
    one_vocabulary = any(options.get(name) for name in shared)
    words = replace(WORDS, target=WORDS.source) if one_vocabulary else WORDS
    match toolkit:
        case "fairseq":
            return fairseq.configuration(Options(options), 9, 9 if one_vocabulary else 11)
        case "opennmt":
            return opennmt_py.configuration(Options({"hidden_size": 24} | options), words)
        case "joeynmt":
            transformer = {"type": "transformer"}
            sides = {name: transformer | options.get(name, {}) for name in ("encoder", "decoder")}
            return joeynmt.configuration(Options(options | sides), words)
    written = yaml_data.parse("a", marian_files.yaml(published.read("marian")).encode())
    sizes = {"dim-vocabs": ["9", "11"], "tied-embeddings-all": "false"}
    return marian_names.configuration(written | sizes | options)


@pytest.mark.parametrize("case", CASES.replace("\\\n", "").strip().split("\n"))
def test_an_option_decides_its_field(case):
    toolkit, options, fields = case.split("|")
    config = configuration(toolkit.strip(), nested(options))
    expected = nested(fields)
    for holder, values in (
        (config, {name: value for name, value in expected.items() if name not in STACKS}),
        *((getattr(config, name), expected.get(name, {})) for name in STACKS),
    ):
        actual = {name: getattr(holder, name) for name in values}
        assert {name: getattr(value, "value", value) for name, value in actual.items()} == values


def test_learned_positions_of_fairseq_have_one_length():
    learned = "encoder_learned_pos=true decoder_learned_pos=true"
    with pytest.raises(InputError, match="max_positions of encoder and decoder differ: 20 and 30"):
        configuration(
            "fairseq", nested(f"{learned} max_source_positions=20 max_target_positions=30")
        )


@pytest.mark.parametrize("name", ["tied-embeddings-src", "tied-embeddings-all"])
def test_one_embedding_of_marian_has_one_vocabulary(name):
    with pytest.raises(InputError, match="dim-vocabs=9, 11: one embedding has one vocabulary"):
        configuration("marian", {name: "true"})


def test_two_embeddings_of_joeynmt_have_one_scale():
    with pytest.raises(InputError, match=r"embeddings\.scale of encoder and decoder differ"):
        configuration("joeynmt", nested("encoder.layer_norm=post encoder.embeddings.scale=true"))


@pytest.mark.parametrize(
    ("toolkit", "names"),
    [
        ("fairseq", "encoder_embed_dim decoder_embed_dim decoder_input_dim decoder_output_dim"),
        ("opennmt", "enc_hid_size dec_hid_size src_word_vec_size tgt_word_vec_size"),
    ],
)
def test_a_toolkit_s_model_has_one_width(toolkit, names):
    width, *others = names.split()
    same = dict.fromkeys([width, *others], 64)
    assert configuration(toolkit, same).d_model == 64
    for name in others:
        with pytest.raises(InputError, match=f"{name} is not {width}=64"):
            configuration(toolkit, same | {name: 32})


def test_an_embedding_of_fairseq_has_a_row_for_more_than_the_special_tokens():
    state = {"a": np.zeros((5, 2)), "b": np.zeros((4, 2)), "c": np.zeros(9)}
    assert fairseq._rows(state, "a") == 5
    for name in ("b", "c", "d"):
        with pytest.raises(InputError, match=f"{name} is not an embedding"):
            fairseq._rows(state, name)


def test_a_dictionary_of_fairseq_has_each_token_of_its_embedding(tmp_path):
    (tmp_path / "dict.txt").write_text("a b 3 \n\n# 2\n")
    words = ("<s>", "<pad>", "</s>", "<unk>", "a b", "#")
    assert fairseq._dictionary(tmp_path / "dict.txt", 6) == words
    for size in (5, 7):
        with pytest.raises(InputError, match=f"has 6 tokens, and the model's embedding {size}"):
            fairseq._dictionary(tmp_path / "dict.txt", size)


def test_one_embedding_of_joeynmt_has_one_vocabulary():
    both = {"encoder": {"type": "transformer", "layer_norm": "post"}}
    options = Options(both | {"decoder": {"type": "transformer"}, "tied_embeddings": True})
    with pytest.raises(InputError, match="tied_embeddings: the vocabularies differ"):
        joeynmt.configuration(options, replace(WORDS, target=WORDS.source[::-1]))


@pytest.mark.parametrize(
    ("symbols", "message"),
    [
        ({"eos_id": 2}, "eos_id is not the id of eos_token"),
        ({"pad_token": "<unk>"}, "pad_id is not the id of pad_token"),
        ({"unk_token": 5}, "special_symbols are not text"),
        ({"sep_token": ["a"]}, "special_symbols are not text"),
        ({"lang_tags": [["a"]]}, "special_symbols are not text"),
    ],
)
def test_special_tokens_of_joeynmt_have_their_ids(symbols, message):
    with pytest.raises(InputError, match=message):
        joeynmt._vocabularies([["a"], ["b"]], Options(symbols))


def test_special_tokens_of_joeynmt_come_before_its_languages():
    symbols = {"lang_tags": ["<de>", "<en>"], "sep_token": "<sep>"}
    words = joeynmt._vocabularies([["a"], ["b", "<de>"]], Options(symbols))
    first = ("<unk>", "<pad>", "<s>", "</s>", "<sep>", "<de>", "<en>")
    assert (words.source, words.target) == ((*first, "a"), (*first, "b"))
    assert (words.unknown, words.pad, words.bos, words.eos) == first[:4]


@pytest.mark.parametrize("value", [[], {}, None, "x", -1, 0.5, 10**400, True, ["a"], float("nan")])
def test_a_value_of_any_kind_is_read_or_refused_by_name(value):
    options = Options({"n": value}, "model")
    choices = {"a": 1, "b": 2}
    readers = {options.number: int, options.layers: int, options.real: float, options.flag: bool}
    for read, kind in readers.items() | {(lambda name, _: options.choice(name, choices, "a"), int)}:
        try:
            assert type(read("n", 1)) is kind
        except InputError as error:
            assert str(error).startswith(("model.n=", "model: n=")), error


@pytest.mark.parametrize("toolkit", [fairseq, opennmt_py, marian_names])
def test_a_fixed_option_may_be_text_of_any_case(toolkit):
    for name, accepted in toolkit._FIXED.items():
        for value in accepted:
            for text in (value, str(value), str(value).upper(), str(value).title()):
                Options({name: text}).check_fixed(toolkit._FIXED)
        with pytest.raises(InputError) as error:
            Options({name: "x"}).check_fixed(toolkit._FIXED)
        assert str(error.value) == f"{name}='x': only {accepted[0]!a} is supported"


@pytest.mark.parametrize("layers", [0, 1, MOST_LAYERS, MOST_LAYERS + 1])
def test_layers_are_read_up_to_their_limit(layers):
    if 0 < layers <= MOST_LAYERS:
        assert Options({"n": layers}).layers("n") == layers
        assert Options({"n": str(layers)}).layers("n") == layers
    else:
        with pytest.raises(InputError, match=f"n={layers:,}"):
            Options({"n": layers}).layers("n")


def test_the_start_of_opennmt_py_is_a_token_of_both_vocabularies():
    tokens = ["<blank>", "</s>", "<unk>", "<s>", "⦅s⦆", "a"]
    vocab: dict[str, Any] = {"src": tokens, "tgt": tokens[::-1]}
    for named, begin in ((None, "<s>"), ("", "<s>"), ("</s>", "</s>"), ("⦅s⦆", "⦅s⦆")):
        read = opennmt_py._vocabularies(vocab | {"decoder_start_token": named})
        assert (read.bos, read.source, read.target) == (begin, tuple(tokens), tuple(tokens[::-1]))
    for named, words in ((5, "decoder_start_token is 5, and no text"), ("<go>", "has no <go>")):
        with pytest.raises(InputError, match=words):
            opennmt_py._vocabularies(vocab | {"decoder_start_token": named})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"src_feats": {"case": ["a"]}}, "features of the source"),
        ({"data_task": "lm"}, "or a language model"),
        ({"src": "<s>"}, "src is not a list of tokens"),
        ({"tgt": [*"<blank> </s> <unk> <s>".split(), 5]}, "tgt is not a list of tokens"),
        ({"tgt": "<blank> </s> <unk> <s> a a".split()}, "tgt has a token twice"),
        ({"src": "</s> <unk> <s>".split()}, "src has a token twice, or has no <blank>"),
    ],
)
def test_vocabularies_of_opennmt_py_are_lists_of_tokens(changes, message):
    vocab: dict[str, Any] = dict.fromkeys(("src", "tgt"), "<blank> </s> <unk> <s> a".split())
    assert opennmt_py._vocabularies(vocab | {"data_task": "seq2seq", "src_feats": {}}).eos == "</s>"
    with pytest.raises(InputError, match=message):
        opennmt_py._vocabularies(vocab | changes)


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_word_with_the_name_of_another_role_is_refused(side):
    tokens = ("<blank>", "<s>", "</s>", "<unk>")
    words = Vocabularies(tokens, tokens, "<blank>", "<s>", "</s>", "<unk>")
    assert len(tokenizer_files("a.pt", words)) == 2
    clash = replace(words, **{side: (*tokens, "<pad>")})
    with pytest.raises(InputError, match=f"a.pt: the {side} vocabulary has a token '<pad>'"):
        tokenizer_files("a.pt", clash)


@pytest.mark.parametrize("number", [-1, 0, 10**9 - 1, 10**9, True, 1.0])
@pytest.mark.parametrize("kind", [str, lambda number: number])
def test_a_whole_number_has_at_most_nine_digits(number, kind):
    options = Options({"a": kind(number)}, "model")
    if type(number) is int and 0 <= number < 10**9:
        assert options.number("a") == number
    else:
        with pytest.raises(InputError, match=r"model\.a=.* is not a whole number"):
            options.number("a")


CONTENTS: dict[str, dict[str, Any]] = {
    "fairseq": {"model": {"decoder.embed_tokens.weight": 0}, "args": {}},
    "opennmt_py": {"model": {}, "generator": {}, "opt": {}, "vocab": {}},
    "joeynmt": {"model_state": {"src_embed.lut.weight": 0}},
}


@pytest.mark.parametrize("toolkit", CONTENTS)
def test_a_checkpoint_is_a_toolkit_s_if_it_has_all_of_its_parts(toolkit):
    content = CONTENTS[toolkit]
    formats = [each.FORMAT for each in (fairseq, opennmt_py, joeynmt)]
    assert [each.name for each in formats if each.recognises_content(content)] == [toolkit]
    for part, value in content.items():
        for other in ({}, [*value]) if value else ([],):
            assert not any(each.recognises_content(content | {part: other}) for each in formats)
