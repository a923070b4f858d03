"""Names of a file's tensors: prefixes, patterns, new names, and messages on wrong ones."""

import json
import re

import numpy as np
import pytest

import jax_transformer as jt
from jax_transformer import convert
from jax_transformer.architectures import registry, tensor_names
from jax_transformer.architectures.tensor_names import NameChanges
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.formats import registry as formats
from parity_tests.unit import runs
from parity_tests.unit.conversions import config_of, state_of, write

CONFIG = config_of("lesson10", encoder_layers=2, decoder_layers=1, d_ff=20)
STATE = state_of(CONFIG)
LIGHTNING = {f"transformer.{name}": array for name, array in STATE.items()}
STRAY = {"criterion.weight": np.ones(13, np.float32)}
PRESET = ["--preset", "lesson10", "--set", "num_heads=3"]


def test_changes_say_the_new_name_of_every_tensor():
    names = ["m.a.x", "m.a.y", "m.b.x", "m.ab", "loss.x", "m.1.x"]
    changes = NameChanges("m.", ignore=("loss.*",), rename={"a": "c.0", "m.b.x": "y", "c.0": "d"})
    with pytest.raises(ConfigError, match=r"^--rename c\.0=d: no name of the file fits"):
        changes.apply(names)
    changes = NameChanges("m.", ignore=("loss.*", "1.?"), rename={"a": "c.0", "m.b.x": "y"})
    assert changes.apply(names) == {"m.a.x": "c.0.x", "m.a.y": "c.0.y", "m.b.x": "y", "m.ab": "ab"}
    assert NameChanges(rename={"loss": "m"}).apply(["loss.x", "a"]) == {"loss.x": "m.x", "a": "a"}


def test_changes_that_lose_or_mistake_a_tensor_are_refused():
    names = ["m.a", "m.b", "c"]
    with pytest.raises(InputError, match=r"--strip-prefix m\.: 1 of 3 names do not begin with it"):
        NameChanges("m.").apply(names)
    assert NameChanges("m.", ignore=("c",)).apply(names) == {"m.a": "a", "m.b": "b"}
    assert NameChanges("m.", rename={"c": "d"}).apply(names) == {"m.a": "a", "m.b": "b", "c": "d"}
    with pytest.raises(InputError, match=r"^m\.a and c would both be a$"):
        NameChanges("m.", rename={"c": "a"}).apply(names)
    with pytest.raises(ConfigError, match=r"^--ignore m\.d: no name .*did you mean 'm\.\w'"):
        NameChanges(ignore=("m.d",)).apply(names)


def test_the_prefix_is_the_one_before_most_names():
    twice = [*LIGHTNING, *(f"ema.{name}" for name in STATE)]
    assert tensor_names.common_prefix([*LIGHTNING, *STRAY], STATE) == "transformer."
    assert not [names for names in (STATE, twice, []) if tensor_names.common_prefix(names, STATE)]
    # Before more than half of what is expected, and of what there is
    for names, prefix in (
        ("p.a p.b p.c x", "p."),
        ("p.a p.b p.x y", ""),
        ("p.a p.b p.c x y", "p."),
        ("p.a p.b p.c x y z", ""),
        ("a b p.a p.b", ""),
        ("p.a p.b", "p."),
        ("p.q.a p.q.b p.x", "p.q."),
    ):
        assert tensor_names.common_prefix(names.split(), {*"abcd"}) == prefix, names
    assert tensor_names.common_prefix(["x.a"], {"a", "x.a"}) == "", "as many fit without it"


@pytest.mark.parametrize("preset", ["lesson10", "deep_dive", "from_scratch", "blog2023"])
def test_the_preset_whose_names_a_file_has_is_found(preset):
    config = config_of(preset, encoder_layers=3)
    names = [f"net.{rule.torch}" for rule in registry.unchecked_table(preset, config)]
    match = tensor_names.closest(["global_step", *names])
    assert registry.presets()[match.preset].config.architecture in (preset, "torch_nn")
    assert (match.prefix, match.count) == ("net.", len(names))
    assert tensor_names.closest(["wte.weight", "h.0.attn.c_attn.weight"]) is None
    others = [f"other.{i}.kernel" for i in range(len(names))]
    assert tensor_names.closest([*names, *others]) is None
    assert tensor_names.closest([*names, *others[1:]]) == match


@pytest.mark.parametrize("preset", ["marian", "pegasus"])
def test_of_presets_that_know_all_names_the_one_with_the_fewest_others_is_found(preset):
    def names(name: str) -> set[str]:
        config = registry.preset(name, num_layers=1)
        return tensor_names.torch_names(registry.unchecked_table(config.architecture, config))

    assert names(tensor_names.closest(names(preset)).preset) == names(preset)


def test_a_wrong_preset_gives_one_short_line_with_the_preset_that_fits(console, tmp_path):
    path = write(tmp_path / "model.safetensors", state_of(config_of("from_scratch")))
    command = ["convert", path, tmp_path / "run", *PRESET]
    code, out, err = console.say(*command)
    (line,) = err.splitlines()
    assert code == 3 and not out and len(line) < 2_000
    assert 10 <= line.count("missing ") + line.count("unexpected ") <= 12
    for words in ("unexpected ", "missing ", " more, which --debug and --json"):
        assert words in line
    assert line.endswith("names are names of preset 'from_scratch': give --preset from_scratch")
    code, out, err = console.say(*command, "--json")
    report = json.loads(out)
    assert code == 3 and report["error"] in err
    assert f"({len(report['problems'])} problems)" in line and len(report["problems"]) > 50
    with pytest.raises(InputError) as error:
        console.say(*command, "--debug")
    assert error.value.details == tuple(report["problems"]) == tuple(error.value.__notes__)
    assert not (tmp_path / "run").exists()


def test_without_a_preset_the_one_that_fits_is_named(console, tmp_path):
    path = write(tmp_path / "model.safetensors", state_of(config_of("deep_dive")))
    console.refused(2, ["--preset NAME", "those of deep_dive"], "convert", path, tmp_path / "run")


def test_a_prefix_before_most_names_is_removed_and_said(console, tmp_path):
    path = write(tmp_path / "model.safetensors", LIGHTNING | STRAY)
    command = ["convert", path, tmp_path / "run", *PRESET, "--no-check"]
    console.refused(3, ["(1 problem): unexpected criterion.weight", "--ignore NAME"], *command)
    for flag, word in (("--dry-run", "dropped"), ("--force", "not converted:")):
        code, out, _ = console.say(*command, "--ignore", "criterion.*", flag)
        assert code == 0 and f"{word} criterion.weight: fits --ignore criterion.*" in out
        assert "names without the prefix 'transformer.', as with --strip-prefix transformer." in out
        assert "encoder.layers=2" in out  # sizes are read after the prefix is gone
    code, out, _ = console.say(*command, "--ignore", "criterion.weight", "--json", "--force")
    assert code == 0 and json.loads(out)["plan"]["stripped_prefix"] == "transformer."
    model, _ = jt.load(tmp_path / "run")
    assert not runs.differing(convert.to_torch(model), STATE)
    loaded = convert.load(path, preset="lesson10", num_heads=3, ignore=["criterion.*"])
    assert loaded.config == model.config


def test_a_size_of_the_preset_is_named_with_the_flag_that_changes_it(console, tmp_path):
    config = config_of("lesson10", d_model=16, num_heads=4)
    path = write(tmp_path / "model.safetensors", state_of(config))
    command = ["convert", path, tmp_path / "run", "--preset", "lesson10", "--dry-run"]
    code, out, _ = console.say(*command)
    assert code == 0 and "as no shape shows it: num_heads=8 (--set changes it)" in out


def test_tensors_are_renamed_and_left_out_on_request(console, tmp_path):
    renamed = {re.sub(r"^linear\.", "head.", name): array for name, array in STATE.items()}
    path = write(tmp_path / "model.safetensors", renamed | STRAY | {"steps": np.ones(1)})
    command = ["convert", path, tmp_path / "copy.pt", "--rename", "head=linear"]
    command += ["--ignore", "criterion.*", "--ignore", "steps"]
    assert console.say(*command)[0] == 0  # a copy needs no model
    assert jt.convert.load(tmp_path / "copy.pt", CONFIG).config == CONFIG
    command = ["convert", path, tmp_path / "b.pt", "--rename", "heads=linear"]
    console.refused(2, ["--rename heads=linear: no name"], *command)
    console.refused(2, ["has the names of"], "convert", _run(tmp_path), tmp_path / "b.pt",
                    "--rename", "head=linear")  # fmt: skip
    with pytest.raises(ConfigError, match=r"--strip-prefix a\.: .* has the names of this project"):
        formats.open(tmp_path / "saved", strip_prefix="a.")


def _run(folder):
    convert.save(convert.from_torch(STATE, CONFIG), folder / "saved")
    return folder / "saved"


def test_from_torch_takes_the_same_changes_and_names_the_prefix():
    changes = dict(strip_prefix="transformer.", ignore=["criterion.*"])
    model = convert.from_torch(LIGHTNING | STRAY, CONFIG, **changes)
    assert convert.to_torch(model).keys() == STATE.keys()
    with pytest.raises(InputError, match=r"Most names begin with 'transformer\.'") as error:
        convert.from_torch(LIGHTNING | STRAY, CONFIG)
    assert len(error.value.details) == 2 * len(STATE) + 1
