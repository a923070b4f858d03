"""An architecture from outside the package: converted both ways, compared, trained, and used.

The folder docs/examples/my_translator is copied elsewhere, and only the public API and the command
line touch it. Its checkpoint has the form that PyTorch Lightning writes.
"""

import dataclasses
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save

import jax_transformer as jt
from jax_transformer import cli
from jax_transformer.architectures import registry, twins
from jax_transformer.data.options import DataOptions
from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.formats import registry as formats
from jax_transformer.training import recipe
from jax_transformer.training.options import ModelOptions, TrainOptions
from parity_tests.cases import under
from parity_tests.unit import runs

EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "my_translator"
SIZES = dict(vocabulary=300, width=16, heads=4, layers=1, inner=24, longest=40)
FIELDS = dict(vocab_size=300, d_model=16, num_heads=4, num_layers=1, d_ff=24, max_length=40)


pytestmark = pytest.mark.usefixtures("as_a_user")


@pytest.fixture(autouse=True)
def _registry_and_imports_as_before(monkeypatch):
    """Take back what a test registers and imports."""
    modules, path, added = set(sys.modules), list(sys.path), dict(registry._added)
    yield
    for name in set(sys.modules) - modules:
        if name.startswith("my_"):
            del sys.modules[name]
    sys.path[:] = path
    registry._added.clear()
    registry._added.update(added)
    importlib.invalidate_caches()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the example, outside of the package."""
    return shutil.copytree(EXAMPLE, tmp_path / "mine")


@pytest.fixture
def mine(folder: Path) -> jt.Architecture:
    """The example's architecture; its folder can be imported from."""
    random_module(folder)
    return importlib.import_module("my_architecture").MY_TRANSLATOR


@pytest.fixture
def spec(folder: Path) -> str:
    """The value of --architecture."""
    return f"{folder / 'my_architecture.py'}:MY_TRANSLATOR"


def random_module(folder: Path, seed: int = 0, **sizes: int) -> torch.nn.Module:
    """The user's module; every weight is random, biases and scales too."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    module = importlib.import_module("my_model").MyTranslator(**(SIZES | sizes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn * 0.3 + ("norm" in name))
    return module.eval()


def lightning_checkpoint(module: torch.nn.Module, path: Path) -> Path:
    """Write what PyTorch Lightning 2 saves of a LightningModule whose ``self.model`` this is."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    module(torch.ones(2, 3, dtype=torch.long), torch.ones(2, 4, dtype=torch.long)).sum().backward()
    optimizer.step()
    content = {
        "epoch": 3,
        "global_step": 120,
        "pytorch-lightning_version": "2.5.1",
        "state_dict": under("model", module.state_dict()),
        "loops": {"fit_loop": {"epoch_progress": {"total": {"ready": 4, "completed": 3}}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_path": ""}},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": {"width": 16, "heads": 4, "learning_rate": 1e-3},
    }
    torch.save(content, path)
    return path


def run(*arguments: object) -> None:
    assert cli.main([str(argument) for argument in arguments]) == 0


def same_bits(ours: dict[str, np.ndarray], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == np.float32 and ours[name].tobytes() == tensor.numpy().tobytes()
        for name, tensor in theirs.items()
    )


def test_the_page_quotes_the_example():
    """Every block of Python that defines something stands in the example as it is."""
    page = (EXAMPLE.parents[1] / "adding-an-architecture.md").read_text(encoding="utf-8")
    code = (EXAMPLE / "my_architecture.py").read_text(encoding="utf-8")
    blocks = [block.partition("```")[0] for block in page.split("```python\n")[1:]]
    quoted = [block for block in blocks if block in code]
    assert len(quoted) == 3 and len(blocks) == 4


def test_python_takes_an_architecture_that_is_not_registered(folder, mine):
    module = random_module(folder)
    config = mine.presets["my_translator"].with_sizes(**FIELDS)
    model = jt.convert.from_torch(module.state_dict(), config, architecture=mine)
    source, target = np.array([[5, 6, 7, 0], [8, 9, 0, 0]]), np.array([[1, 5, 6], [1, 7, 2]])
    theirs = module(torch.from_numpy(source), torch.from_numpy(target)).detach().numpy()
    np.testing.assert_allclose(np.asarray(model(source, target)), theirs, atol=2e-5)

    assert same_bits(jt.convert.to_torch(model, architecture=mine), module.state_dict())
    other = random_module(folder, seed=1)
    jt.convert.into_torch(model, other, architecture=mine)
    assert all(torch.equal(x, module.state_dict()[n]) for n, x in other.state_dict().items())
    assert jt.parity.compare(model, module, [source, target], architecture=mine).agrees
    with pytest.raises(ConfigError, match=r"^unknown architecture 'my_translator'.*--architecture"):
        jt.convert.to_torch(model)
    jt.register(mine)
    assert same_bits(jt.convert.to_torch(model), module.state_dict())
    assert jt.preset("my_translator", **FIELDS) == config


def test_files_are_read_and_written_by_an_architecture_that_is_not_registered(
    folder, mine, tmp_path
):
    module = random_module(folder, layers=2)
    path = lightning_checkpoint(module, tmp_path / "last.ckpt")
    options = dict(preset="my_translator", strip_prefix="model.", architecture=mine, num_heads=4)
    automatic = jt.convert.plan(path, tmp_path / "run", **(options | {"strip_prefix": ""}))
    assert automatic.stripped_prefix == "model."
    model = jt.convert.load(path, **options)
    assert model.config == mine.presets["my_translator"].with_sizes(**(FIELDS | {"num_layers": 2}))
    plan = jt.convert.plan(path, tmp_path / "run", **options)
    names = {name for move in plan.moves for name in move.source}
    assert names == module.state_dict().keys() - {"to_words.weight"} and plan.ties
    jt.convert.save(model, tmp_path / "model.safetensors", architecture=mine)
    assert same_bits(load_file(tmp_path / "model.safetensors"), module.state_dict())


def test_the_command_line_converts_compares_trains_and_translates(
    folder, spec, tmp_path, monkeypatch, capsys
):
    module = random_module(folder)
    checkpoint = lightning_checkpoint(module, tmp_path / "last.ckpt")
    monkeypatch.chdir(tmp_path)
    mine = ["--architecture", spec]

    run("convert", checkpoint, "begun", *mine, "--preset", "my_translator", "--set", "num_heads=4",
        "--strip-prefix", "model.")  # fmt: skip
    assert "PyTorch twin in float64" in capsys.readouterr().out
    run("convert", "begun", "back.safetensors", *mine)
    assert same_bits(load_file("back.safetensors"), module.state_dict())
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    theirs = save(state, metadata={"format": "pt"})
    assert Path("back.safetensors").read_bytes() == theirs
    run("convert", "begun", "back.pt", *mine)
    module.load_state_dict(torch.load("back.pt", weights_only=True), strict=True)

    run("parity", "begun", "twin", "--no-gradients", *mine)
    run("golden", "make", "golden.safetensors", "begun", *mine)
    run("golden", "check", "golden.safetensors", *mine)

    words = [*runs.ENGLISH.split(), *runs.GERMAN.split()]
    Tokenizer.train(words, vocab_size=300, pad_id=0, bos_id=1, eos_id=2).save("tokenizer.json")
    # A run has a complete config.json: to train it and to translate needs no weight table
    run("train", "--run", "more", "--init", "begun", "--data.tokenizer", "tokenizer.json",
        *runs.write_text(tmp_path),
        "--steps", 10, "--eval-every", 10, "--data.buckets", 1, "--data.tokens-per-batch", 128,
        "--optimizer.warmup-steps", 1)  # fmt: skip
    (tmp_path / "lines").write_text("the cat\na red dog\n")
    capsys.readouterr()
    run("translate", "--run", "more", "--input", "lines", "--max-length", 8)
    assert capsys.readouterr().out.count("\n") == 2

    run("convert", "more", "more.pt", *mine)
    trained = torch.load("more.pt", weights_only=True)
    module.load_state_dict(trained, strict=True)
    assert not torch.equal(trained["words.weight"], torch.load(
        "back.pt", weights_only=True)["words.weight"])  # fmt: skip


@pytest.mark.slow
def test_another_process_trains_a_preset_of_the_file(spec, tmp_path):
    """In a separate process, from another folder than the package's, as for a user."""
    options = "--model.preset my_translator --model.d-model 16 --model.num-heads 2 --model.d-ff 16"
    done = subprocess.run(
        [sys.executable, "-m", "jax_transformer", "train", "--architecture", spec, "--run", "new",
         "--steps", "3", "--eval-every", "3", "--eval-pairs", "2", "--optimizer.warmup-steps", "1",
         "--model.encoder-layers", "1", "--model.decoder-layers", "1", "--data.vocab-size", "300",
         "--data.buckets", "1", "--data.tokens-per-batch", "64", *options.split(),
         *runs.write_text(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert '"architecture": "my_translator"' in (tmp_path / "new" / "config.json").read_text()


@pytest.mark.slow
def test_python_trains_an_architecture_that_is_not_registered(mine, tmp_path):
    text = runs.fields_of(runs.write_text(tmp_path))
    data = DataOptions(**text, vocab_size=300, buckets=1, tokens_per_batch=64)
    model = ModelOptions("my_translator", 16, 2, 16, 1, 1)
    options = TrainOptions(str(tmp_path / "run"), steps=1, eval_pairs=1, model=model, data=data)
    with runs.as_a_user():
        trained = recipe.train(options, architecture=mine)
    assert formats.open(trained.path).config.architecture == "my_translator"


def test_nothing_is_imported_because_a_checkpoint_names_it(folder, spec, tmp_path, capsys):
    module = random_module(folder)
    path = lightning_checkpoint(module, tmp_path / "last.ckpt")
    run("convert", path, tmp_path / "run", "--architecture", spec, "--preset", "my_translator",
        "--set", "num_heads=4", "--strip-prefix", "model.", "--no-check")  # fmt: skip
    registry._added.clear()
    capsys.readouterr()
    assert cli.main(["convert", str(tmp_path / "run"), str(tmp_path / "back.safetensors")]) == 2
    message = capsys.readouterr().err
    assert "unknown architecture 'my_translator'" in message and "--architecture" in message


# Mistakes


def test_a_file_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(InputError, match=r"mine\.py: no such file$"):
        registry.load_from(f"{tmp_path / 'mine.py'}:MINE")


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("MY_TRANSLATOR = 1", "MY_TRANSLATR", r"no 'MY_TRANSLATR' \(did you mean 'MY_TRANSLATOR'"),
        ("MINE = 1", "MINE", r"MINE is a int, not a jax_transformer\.Architecture$"),
        ("MINE = 1 / 0", "MINE", r"ZeroDivisionError: division by zero$"),
        ("raise SystemExit('no\\nmore')", "MINE", r"SystemExit: no more$"),
        ("def (", "MINE", r"SyntaxError: .*"),
        ("import not_installed", "MINE", r"ModuleNotFoundError: No module named 'not_installed'$"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_file_is_one_line(tmp_path, text, name, message):
    (tmp_path / "my_file.py").write_text(text)
    for _ in range(2):
        with pytest.raises(ConfigError, match=message) as error:
            registry.load_from(f"{tmp_path / 'my_file.py'}:{name}")
        assert "\n" not in str(error.value)


def test_the_folder_of_a_file_comes_last_on_the_path(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "json.py").write_text("A = None")  # hides no other module
    (tmp_path / "mine.py").write_text("import json, neighbour\nA = json.dumps and neighbour.A")
    text = "from jax_transformer.architectures import registry\nA = registry.resolve('lesson10')"
    (tmp_path / "neighbour.py").write_text(text)
    before = [*sys.path]
    for _ in range(2):
        assert registry.load_from(f"{tmp_path / 'mine.py'}:A") is registry.resolve("lesson10")
        assert sys.path == [*before, str(tmp_path)]
    other = tmp_path / "other" / "mine.py"  # of the same name
    other.parent.mkdir()
    other.write_text(text.replace("lesson10", "blog2023"))
    assert registry.load_from(f"{other}:A") is registry.resolve("blog2023")


def test_a_file_without_a_name_and_unknown_names_are_refused():
    with pytest.raises(ConfigError, match=r"name the Architecture too, mine\.py:NAME$"):
        registry.load_from("mine.py")
    message = r"^unknown architecture 'lesson1' \(did you mean 'lesson"
    with pytest.raises(ConfigError, match=message):
        registry.load_from("lesson1")
    with pytest.raises(ConfigError, match=r"^cannot import not_installed: ModuleNotFoundError"):
        registry.load_from("not_installed:MINE")
    assert registry.load_from("lesson10").name == "lesson10"


def test_names_are_registered_once(mine):
    assert jt.register(mine) is jt.register(mine) is registry.resolve("my_translator") is mine
    again = jt.Architecture("my_translator", "Another.", mine.weight_table)
    with pytest.raises(ConfigError, match="another architecture is registered as 'my_translator'"):
        jt.register(again)
    assert jt.register(again, replace=True) is registry.resolve("my_translator") is again
    for replace in (False, True):
        with pytest.raises(ConfigError, match="registered as 'lesson10'"):
            jt.register(jt.Architecture("lesson10", "", mine.weight_table), replace=replace)
    own = mine.presets["my_translator"]
    for source in ("Again.", "And again."):  # with the presets of the one before
        same = jt.Architecture("my_translator", source, mine.weight_table, dict(mine.presets))
        assert jt.register(same, replace=True) is registry.resolve("my_translator") is same
    assert jt.preset("my_translator") == own.config
    entry = jt.Preset(own.config.with_sizes(architecture="x"), "")
    with pytest.raises(ConfigError, match="'deep_dive' has a preset 'deep_dive': choose"):
        jt.register(jt.Architecture("x", "", mine.weight_table, {"deep_dive": entry}))
    with pytest.raises(ConfigError, match=r"preset 'y' .* another, architecture='my_translator'"):
        jt.register(jt.Architecture("x", "", mine.weight_table, {"y": own}))


def test_a_table_that_does_not_cover_the_model_is_refused_with_the_names(mine):
    config = mine.presets["my_translator"].with_sizes(**FIELDS)
    short = jt.Architecture("my_translator", "", lambda config: mine.weight_table(config)[:-1])
    message = r"architecture 'my_translator' has no names .*final_norm"
    with pytest.raises(ConfigError, match=message):
        jt.convert.weight_table(config, architecture=short)


@pytest.mark.parametrize("error", [ConfigError("no\nbias"), InputError("no"), ValueError("no\n")])
def test_an_error_of_a_table_names_the_architecture_unless_it_is_a_refusal(mine, error):
    def table(config):
        raise error

    config = mine.presets["my_translator"].config
    refusal = isinstance(error, ConfigError | InputError)
    text = f"{error}" if refusal else "architecture 'x': its weight_table raised ValueError: no"
    with pytest.raises(ConfigError if not refusal else type(error)) as caught:
        registry.unchecked_table(jt.Architecture("x", "", table), config)
    assert str(caught.value) == text and (caught.value is error) == refusal


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (None, "has no PyTorch twin: set its field `reference`"),
        ("my_missing:X", "cannot import its twin my_missing:X: ModuleNotFoundError"),
        ("my_broken:X", r"cannot import its twin my_broken:X: ZeroDivisionError: "),
        ("my_model:MyTranslatr", r"my_model has no class 'MyTranslatr' \(did you mean 'MyTr"),
        ("my_model:MyTranslator", "its twin raised TypeError"),
    ],
)
def test_what_is_wrong_with_a_twin_is_one_line(folder, mine, reference, message):
    (folder / "my_broken.py").write_text("1 / 0")
    config = mine.presets["my_translator"].config
    other = jt.Architecture(
        "my_translator", "", mine.weight_table, reference=reference,
        reference_arguments=lambda config: ((), {"widht": 3}),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        twins.twin(config, other)


def test_an_architecture_s_own_preset_goes_before_another_of_its_name(mine):
    preset = mine.presets["my_translator"]
    other = dataclasses.replace(mine, presets={"lesson10": preset})
    assert registry.find_preset("lesson10", other) is preset
    assert registry.find_preset("lesson10").config.architecture == "lesson10"


# Installed packages

GROUP = "jax_transformer.architectures"


def test_an_installed_package_registers_its_architecture(folder, tmp_path):
    sys.path.append(str(folder))
    assert "my_translator" not in jt.preset_names()
    points = dict.fromkeys(("my_translator", "another"), "my_architecture:MY_TRANSLATOR")
    runs.install(folder, GROUP, **points)  # read already
    assert "my_architecture" not in sys.modules
    assert jt.preset("my_translator", **FIELDS).architecture == "my_translator"
    assert "my_translator" in jt.preset_names() and "my_translator" in registry.names()
    assert registry.resolve("my_translator").reference == "my_model:MyTranslator"
    with pytest.raises(ConfigError, match=r"another = .* not an Architecture of that name"):
        registry.resolve("another")


BROKEN = [("my_missing:X", "ModuleNotFoundError"), ("my_broken:X", "AssertionError")]
BROKEN += [("my_model:MyTranslator", "not an Architecture of that name")]


@pytest.mark.parametrize(("value", "message"), BROKEN)
def test_a_broken_package_is_named_and_hides_no_other(folder, capsys, value, message):
    (folder / "my_broken.py").write_text("assert False")
    runs.install(folder, GROUP, my_translator=value)
    sys.path.append(str(folder))
    assert "lesson10" in registry.names()
    warning = capsys.readouterr().err
    assert "my_translator" in warning and message in warning and warning.count("\n") == 1
    assert "lesson10" in registry.names() and capsys.readouterr().err == "", "once"
    with pytest.raises(ConfigError, match=message):
        registry.resolve("my_translator")
