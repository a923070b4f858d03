"""Weights that a format has opened: their names, ties, notes, widths and dtypes."""

import functools
import re
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

from jax_transformer import convert
from jax_transformer.architectures.registry import model_weights
from jax_transformer.architectures.tensor_names import NameChanges
from jax_transformer.errors import CheckpointError, ConfigError, InputError
from jax_transformer.formats import registry
from jax_transformer.formats.base import Pretrained
from jax_transformer.formats.runs import CheckpointWeights
from jax_transformer.storage import checkpoint, tensors
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.storage.tensors import Note
from jax_transformer.weights import rules
from parity_tests.unit import helpers
from parity_tests.unit.conversions import config_of, state_of


def opened(state: dict[str, np.ndarray], format: str = "pt", **more) -> Pretrained:
    lazy = tensors.in_memory(state)
    infos = {name: tensor.info for name, tensor in lazy.items()}
    path = Path("file.pt")
    return Pretrained(registry.get(format), path, "file.pt", infos, lambda: lazy, **more)


def test_ties_and_notes_follow_the_names():
    array = np.ones(2, np.float32)
    state = {f"m.{name}": array for name in ("a", "b", "x", "c", "y")}
    ties = ("m.c", "m.y"), ("m.a", "m.x", "m.b")
    before = opened(state, ties=ties, dropped=(Note("step", "no weight"),))
    after = before.with_names(NameChanges("m.", ignore=("x", "y"), rename={"b": "d"}))
    assert after.ties == (("a", "d"),)
    assert [note.name for note in after.dropped] == ["step", "m.x", "m.y"]
    assert [*after.tensors] == [*after.scan()] == ["a", "d", "c"]
    assert before.with_names(NameChanges()) is before
    with pytest.raises(ConfigError, match="names of transformers"):
        opened(state, "hf").with_names(NameChanges("m."))


def test_tied_tensors_become_one_array_of_its_own():
    array = np.ones(2, np.float32)
    state = tensors.arrays(tensors.in_memory({"a": array, "b": array, "c": array.copy()}))
    assert state["a"] is state["b"] and not np.shares_memory(state["a"], array)


def test_load_asks_for_the_tokenizer_between_its_languages(monkeypatch):
    weights = mock.Mock(has_tokenizer=True)
    monkeypatch.setattr(registry, "open", lambda *_: weights)
    registry.load("a", source_lang="de", target_lang="fr")
    weights.tokenizer.assert_called_once_with("de", "fr")
    weights.has_tokenizer = False
    for languages in ((None, "fr"), ("de", None)):  # it is the tokenizer that refuses them
        registry.load("a", source_lang=languages[0], target_lang=languages[1])
        weights.tokenizer.assert_called_with(*languages)
    assert registry.load("a")[1] is None


def test_a_path_that_does_not_exist_may_be_a_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    for path in ("owner/name", "owner/a.pt", "owner/a b", "here/name", "name"):
        hint = " (did you mean hf:owner/name?)" if path == "owner/name" else ""
        with pytest.raises(InputError, match=f"^{path}: no such file or folder{re.escape(hint)}$"):
            registry.of(Path(path))
    with pytest.raises(InputError, match="neither a file nor a folder"):
        registry.of(Path("/dev/null"))


def test_widths_are_the_powers_of_two_from_16_below_the_longest(tmp_path):
    for longest in (1, 15, 16, 17, 31, 32, 33, 64, 65, 300):
        config = helpers.tiny(max_length=longest)
        file = opened({}, config=config)
        of_run = CheckpointWeights(**vars(file) | {"run": RunFolder(tmp_path)})
        expected = tuple(2**i for i in range(4, 20) if 2**i < longest)
        assert file.widths == of_run.widths == expected  # a converted run was not trained here
    (tmp_path / "data.json").write_text('{"widths": [4, 12]}')
    assert of_run.widths == (4, 12)
    (tmp_path / "train_config.json").touch()  # a run that was trained has its own
    (tmp_path / "data.json").write_text("{}")
    with pytest.raises(Exception, match=r"data\.json: 'widths'$"):
        _ = of_run.widths
    (tmp_path / "data.json").unlink()
    with pytest.raises(InputError, match=r"not a run folder \(data\.json is missing\)"):
        _ = of_run.widths


def test_tied_weights_that_differ_are_refused_by_every_reader():
    config = config_of("small", d_ff=20)
    state, aliases = state_of(config), rules.aliases(model_weights(config).table)
    assert len(aliases) > 1
    for name in aliases:
        file = opened(state | {name: state[name] + 1})
        as_it_is = functools.partial(file.state, names="torch")
        for read in (file.state, as_it_is, file.arrays, file.model):
            with pytest.raises(InputError, match=f"{name} differs from"):
                read(config)


def test_the_configuration_of_the_files_wins_and_a_dtype_is_that_of_every_array():
    config = config_of("lesson10", d_ff=20)
    other, state = config_of("lesson10", d_ff=24), state_of(config)
    file = opened(state, config=config)
    model = file.model(other, dtype="bfloat16")
    assert model.config == config
    arrays = file.arrays(other, dtype="float16")
    assert {str(array.dtype) for array in arrays.values()} == {"float16"}
    wide = state_of(config, "float64")
    of_run = opened(wide, config=config, run=RunFolder(Path("run")))
    with jax.enable_x64(False):
        arrays = of_run.arrays(dtype="float32")
        assert {str(array.dtype) for array in arrays.values()} == {"float32"}
        with pytest.raises(CheckpointError, match="holds float64 and JAX is in 32-bit mode"):
            of_run.arrays()
        with pytest.raises(InputError, match="float64 and JAX is in 32-bit mode"):
            opened(wide, config=config).arrays()
    source = file.scan()
    for name, array in file.state(names="torch").items():
        assert helpers.furthest(array, source[name].read()) == 0


def test_arrays_of_a_run_that_do_not_fit_its_configuration_are_named():
    config = config_of("lesson10", d_ff=20)
    state = helpers.random_arrays(config)
    state["more"] = state.pop("output.bias")
    file = opened(state, "run", config=config, run=RunFolder(Path("run")))
    with pytest.raises(CheckpointError, match=r"missing output\.bias .*; unexpected more "):
        file.state()


@pytest.mark.parametrize(
    ("listed", "missing"),
    [(["model.safetensors"], "config.json"), (["config.json"], "any of model.safetensors, ")],
)
def test_a_repository_of_the_hub_has_a_configuration_and_weights(listed, missing):
    with pytest.raises(InputError, match=f"hf:a/b: .* it lacks {missing}"):
        registry._to_download("hf:a/b", listed)


def test_a_checkpoint_in_a_run_has_its_tokenizer_and_widths(run):
    entire, one = registry.open(run), registry.open(run / "checkpoints" / "200")
    assert one.tokenizer().hash == entire.tokenizer().hash
    assert one.widths == entire.widths and one.run is not None


def test_a_saved_run_names_frozen_arrays_and_not_how_its_model_is_computed(tmp_path):
    config = helpers.tiny("marian", num_layers=1)
    scanned = config.with_sizes(scan_layers=True, matmul_precision="medium")
    convert.save(helpers.random_model(scanned, dtype="float32"), tmp_path / "run")
    assert registry.open(tmp_path / "run").config == config
    names = checkpoint.open(tmp_path / "run" / "checkpoints", 0).tensors
    frozen = {name.partition("/")[2] for name in names if name.startswith("frozen/")}
    assert frozen == {"encoder.positions.table", "decoder.positions.table", "logits_bias"}
