"""Code of README and docs/ does what the pages say: Python runs, commands have these flags.

A block of Python runs in a folder with tiny models under the names of the page, after the blocks
before it on the page. Those of NOT_RUN are checked for their names and keywords only; the reason
is there. Commands are parsed by the parser of the command, files of options are read.
"""

import ast
import functools
import inspect
import json
import re
import shlex
import shutil
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optax
import pytest
import torch
import yaml
from flax import nnx

import jax_transformer as jt
from jax_transformer import cli
from jax_transformer.cli import arguments
from jax_transformer.training.options import TrainOptions
from parity_tests import test_huggingface_tokenizers, tokenizer_models
from parity_tests.unit import runs
from torch_reference.lesson10 import TranslationTransformer

ROOT = runs.ROOT
PAGES = ["README.md", "CONTRIBUTING.md", "benchmarks/README.md", "campaigns/README.md"]
PAGES += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
TINY = dict(d_model=16, num_heads=8, d_ff=24, num_layers=1)
QUOTES = "parity_tests/test_own_architecture.py::test_the_page_quotes_the_example"
PLUGIN = "parity_tests/test_parity_plugin.py::test_"
EXAMPLES = f"{PLUGIN}the_examples_pass_and_their_faults_are_named"
NOT_RUN = {
    ("README.md", "def test_port(parity):"): EXAMPLES,
    ("README.md", "from jax_transformer.training"): (
        "parity_tests/test_own_architecture.py::"
        "test_python_trains_an_architecture_that_is_not_registered"
    ),
    ("docs/adding-an-architecture.md", "CONFIG = TransformerConfig("): QUOTES,
    ("docs/adding-an-architecture.md", "def weight_table("): QUOTES,
    ("docs/adding-an-architecture.md", "MY_TRANSLATOR = jt.Architecture("): QUOTES,
    ("docs/adding-an-architecture.md", "model = jt.convert.from_torch("): (
        "parity_tests/test_own_architecture.py::"
        "test_python_takes_an_architecture_that_is_not_registered"
    ),
    ("docs/switching-frameworks.md", "from jax_transformer.convert.training_state import"): (
        "parity_tests/test_optimizer_state.py::test_adamw_of_every_architecture "
        "parity_tests/test_switching_frameworks.py::test_there_and_back_changes_no_bit"
    ),
    **{
        ("docs/parity-report.md", f"# {name}.py"): EXAMPLES
        for name in ("their_block", "our_block", "test_port")
    },
    ("docs/speech.md", "import jax_transformer as jt"): (
        "parity_tests/test_huggingface_whisper.py::test_the_example_of_the_page_runs"
    ),
    ("docs/parity-report.md", "parity("): PLUGIN + "torch_in_another_process_and_goldens",
}
"""Blocks that do not run here, by page and beginning, with the tests that run them."""


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    @property
    def reason(self) -> str | None:
        """The tests that run the block instead, if it does not run here."""
        for (page, start), test in NOT_RUN.items():
            if page == self.page and self.text.startswith(start):
                return test
        return None


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, text[: match.start()].count("\n") + 1, match[2], textwrap.dedent(match[3]))
        for match in re.finditer(r"^( *)```(\w*)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def of(*languages: str) -> list:
    """The blocks of these languages, as parameters."""
    blocks = [block for block in BLOCKS if block.language in languages]
    return [pytest.param(block, id=f"{block.page}:{block.line}") for block in blocks]


# Python


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Tiny runs, folders and files under the names that pages use."""
    root = tmp_path_factory.mktemp("pages")
    run = ROOT / "parity_tests/v0_1/run"
    config = jt.preset("small", vocab_size=275, max_length=64, **TINY)
    model = jt.Transformer(config, rngs=nnx.Rngs(0))
    for name in ("phrases", "phrases-001", "en-de"):
        jt.convert.save(model, root / "runs" / name)
        shutil.copy(run / "tokenizer.json", root / "runs" / name)
        data = json.loads((run / "data.json").read_text()) | {"widths": [48], "rows": [4]}
        (root / "runs" / name / "data.json").write_text(json.dumps(data))
    shutil.copytree(ROOT / "parity_tests/v0_1/marian", root / "opus-mt-en-de")
    tokenizer_models.write(root / "nllb-200-distilled-600M", test_huggingface_tokenizers._nllb())
    sizes = dict(d_model=16, nhead=8, num_encoder_layers=1, num_decoder_layers=1)
    sizes |= dict(src_vocab_size=13, tgt_vocab_size=13, dim_feedforward=24)
    module = TranslationTransformer(**sizes)
    torch.save(module.state_dict(), root / "model.pt")
    return root


def _in_make() -> dict[str, Any]:
    options = TrainOptions().optimizer
    decay = optax.add_decayed_weights(options.weight_decay)
    return {"optax": optax, "options": options, "decay": decay}


def _nadam_makes_an_update(names: dict[str, Any]) -> None:
    tx = optax.chain(*names["rule"])
    params = {"w": np.ones(3, np.float32)}
    updates, _ = tx.update(params, tx.init(params), params)
    assert np.isfinite(updates["w"]).all()


BEFORE: dict[str, Callable[[], dict[str, Any]]] = {
    "docs/decoding.md": lambda: {"source": np.array([[5, 6, 2]])},
    "docs/adding-an-optimizer.md": _in_make,
}
"""Names that a page's blocks use and do not define."""
AFTER = {"docs/adding-an-optimizer.md": _nadam_makes_an_update}


@pytest.mark.parametrize(
    "page", sorted({b.page for b in BLOCKS if b.language == "python" and b.reason is None})
)
def test_blocks_of_python_run(page: str, folder: Path, monkeypatch, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page", **BEFORE.get(page, dict)()}
    blocks = [b for b in blocks_of(page) if b.language == "python" and b.reason is None]
    for block in blocks:
        code = compile("\n" * block.line + block.text, str(ROOT / page), "exec")
        if "jax_enable_x64" in block.text:
            exec(code, names)  # in the tests' own 64 bits
        else:
            with runs.as_a_user():
                exec(code, names)
    with runs.as_a_user():
        AFTER.get(page, lambda names: None)(names)


def calls(block: Block) -> Iterator[tuple[str, Callable[..., Any], ast.Call]]:
    """Yield each call of a name that the block imports, with the function and the call's tree."""
    tree = ast.parse(block.text)
    names: dict[str, Any] = {"jt": jt}
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom) and "my_" not in ast.unparse(node):
            exec(ast.unparse(node), names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            dotted = ast.unparse(node.func)
            first, *rest = dotted.split(".")
            if first in names and all(part.isidentifier() for part in rest):
                yield dotted, functools.reduce(getattr, rest, names[first]), node


def wrong_calls(block: Block) -> list[str]:
    """The calls of a block whose arguments their functions do not take."""
    wrong, all_calls = [], list(calls(block))
    assert all_calls, f"{block.page}:{block.line} calls nothing that it imports"
    for dotted, function, node in all_calls:
        keywords = {word.arg: None for word in node.keywords if word.arg}
        try:
            inspect.signature(function).bind(*node.args, **keywords)
        except TypeError as error:
            wrong.append(f"{dotted}: {error}")
    return wrong


CALLING = re.compile(r"(\bjt\.|^from jax_transformer\.\w+ import )[^\n]*", re.MULTILINE)
"""The beginning of a block's calls of this package."""


def calling(block: Block) -> bool:
    return block.reason is not None and CALLING.search(block.text) is not None


@pytest.mark.parametrize("block", [each for each in of("python") if calling(*each.values)])
def test_blocks_that_do_not_run_call_functions_as_they_are(block: Block):
    assert wrong_calls(block) == []


def test_a_wrong_call_is_detected():
    for text, words in (
        ("jt.preset('small', 8, sizes=3)", "too many positional arguments"),
        ("from jax_transformer.convert import plan\nplan(preset='small')", "missing a required"),
    ):
        (wrong,) = wrong_calls(Block("page", 1, "python", text))
        assert words in wrong
    with pytest.raises(AttributeError, match="no_such_function"):
        wrong_calls(Block("page", 1, "python", "jt.no_such_function()"))
    with pytest.raises(AssertionError, match="calls nothing"):
        wrong_calls(Block("page", 1, "python", "x = my_function()"))


def unproved(block: Block, tests: str) -> str | None:
    """Return why ``tests`` do not run the block: missing, or they do not call what it calls."""
    code = ""
    for test in tests.split():
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        if not re.search(rf"^def {name}\(", text, re.MULTILINE):
            return f"{test} does not exist"
        code += text
    if Path(block.page).name in code:
        return None
    functions = {dotted.rpartition(".")[2] for dotted, *_ in calls(block)}
    missing = sorted(each for each in functions if not re.search(rf"\b{each}\(", code))
    return f"{tests} do not call {missing}" if missing or not functions else None


def test_each_block_that_does_not_run_here_names_a_test_that_runs_it():
    for (page, start), tests in NOT_RUN.items():
        matching = [b for b in blocks_of(page) if b.text.startswith(start)]
        assert matching, f"{page} has no block that begins with {start!r}"
        for block in matching:
            assert unproved(block, tests) is None
    # Negative controls
    file = "parity_tests/test_optimizer_state.py"
    block = Block("docs/none.md", 1, "python", "jt.convert.save(model, path)")
    for name, words in (
        ("test_adamw_of_every", "does not exist"),
        ("test_adamw_of_every_architecture", "do not call ['save']"),
    ):
        assert unproved(block, f"{file}::{name}") == f"{file}::{name} {words}"


# Commands


class CommandLine(NamedTuple):
    """A command of the package, or a script, with its arguments."""

    program: str
    arguments: list[str]


def lines_of(text: str) -> Iterator[str]:
    """Yield the logical lines of a block of shell, without prompts and outputs."""
    console = re.search(r"^\$ ", text, re.MULTILINE)
    joined = re.sub(r"\\\n\s*|(?<=\|)\n\s*", " ", text)
    for line in joined.splitlines():
        if not console or line.startswith("$ "):
            yield line.removeprefix("$ ").strip()


def commands(text: str, variables: dict[str, str]) -> Iterator[CommandLine]:
    """Yield the commands of a block of shell, with variables replaced and added to."""
    for line in lines_of(text):
        if match := re.fullmatch(r'export (\w+)="(.*)"', line):
            variables[match[1]] = match[2]
            continue
        for name, value in variables.items():
            line = line.replace(f"${name}", value)
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("|&;"):
                yield from _command(words)
                words = []
            else:
                words.append(word)


def _command(words: list[str]) -> Iterator[CommandLine]:
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    for i, word in enumerate(words):
        if set(word) <= set("<>"):
            words = words[:i] + words[i + 2 :]
            break
    words = [word for word in words if word != "..."]
    if words[:1] == ["jax-transformer"]:
        yield CommandLine(words[1], words[2:])
    elif words[:2] == ["python", "train.py"]:
        yield CommandLine("train", words[2:])
    elif words[:2] == ["python", "-m"]:
        module = words[2].replace(".", "/")
        is_command = (ROOT / module / "__main__.py").exists() and module != "jax_transformer"
        yield CommandLine(f"{module}{'/__main__' * is_command}.py", words[3:])
    elif words[:1] == ["python"] and len(words) > 1 and words[1].endswith(".py"):
        yield CommandLine(words[1], words[2:])


def check(command: CommandLine) -> None:
    """Fail if the program has no such flag, or refuses the values."""
    if command.program in cli.COMMANDS:
        if not {"--help", "-h"} & {*command.arguments}:
            arguments.parse(command.program, cli.COMMANDS[command.program].kind, command.arguments)
        return
    path = ROOT / command.program
    if path.exists():  # not a module of another package
        code = path.read_text(encoding="utf-8")
        flags = [word for word in command.arguments if word.startswith("--")]
        missing = [flag for flag in flags if f'"{flag}"' not in code]
        assert not missing, f"{command.program} has no {', '.join(missing)}"


SHELL = ("", "bash", "console", "sh")


@pytest.mark.parametrize("block", of(*SHELL))
def test_commands_have_these_flags(block: Block, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for other in BLOCKS:
        if other.page == block.page and other.language == "yaml":
            (tmp_path / "de-en.yaml").write_text(other.text)
    variables: dict[str, str] = {}
    for each in [b for b in blocks_of(block.page) if b.line <= block.line]:
        page_commands = list(commands(each.text, variables)) if each.language in SHELL else []
    for command in page_commands:
        check(command)


def test_a_wrong_flag_is_detected(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = 'A=1 jax-transformer translate --run x | cat && python train.py \\\n    --stepz 3 > "y"'
    translate, train = commands(text, {})
    assert translate == CommandLine("translate", ["--run", "x"])
    check(translate)
    with pytest.raises(jt.errors.ConfigError, match="--stepz"):
        check(train)
    with pytest.raises(AssertionError, match="has no --speed"):
        check(CommandLine("benchmarks/faults.py", ["--speed"]))
    with pytest.raises(AssertionError, match="has no --speed"):
        check(*commands("python -m campaigns kills --speed", {}))


FLAG = re.compile(r"(?<![\w-])--[a-z][\w.-]*")


@functools.cache
def known_flags() -> str:
    """All flags of the commands, and the sources of the other programs."""
    folders = ("benchmarks", "campaigns", "torch_reference")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    paths += [ROOT / "jax_transformer/parity/plugin.py", ROOT / "pyproject.toml"]
    own = [flag for command in cli.COMMANDS.values() for flag in cli.flags(command.kind)]
    usual = ["--help", "--help-all", "--debug", "--version"]
    return " ".join([*own, *usual, *map(Path.read_text, paths), ""])


OTHERS = set(
    """--extra-index-url --wheel --no-cache --logdir --strict --inplace --execute
    --coalesce-streams --junitxml --output_dir --quantization --xla_gpu_deterministic_ops --nodes
    --ntasks-per-node --gpus-per-node --signal --requeue --no-deps""".split()
)
"""Flags of pip, build, import-linter, pytest, tensorboard, mkdocs, nbconvert, CTranslate2, XLA and
SLURM."""


@pytest.mark.parametrize("page", PAGES)
def test_flags_in_text_exist(page: str):
    text = (ROOT / page).read_text(encoding="utf-8")
    flags = {match.rstrip(".") for match in FLAG.findall(text)} - OTHERS
    patterns = {flag: rf'({re.escape(flag)}(?![\w-])|"{flag[2:]}")' for flag in flags}
    unknown = [flag for flag in flags if not re.search(patterns[flag], known_flags())]
    assert not unknown, unknown


@pytest.mark.parametrize("block", of("yaml"))
def test_files_of_options_are_read(block: Block, tmp_path):
    if block.text.startswith("- uses:"):
        pytest.skip("steps of a workflow: unit/test_light_install.py reads them")
    path = tmp_path / "options.yaml"
    path.write_text(block.text)
    command = arguments.parse("train", cli.COMMANDS["train"].kind, ["--config", str(path)])
    assert command.options.steps == yaml.safe_load(block.text)["steps"]


@pytest.mark.parametrize("block", of("toml"))
def test_toml_is_well_formed(block: Block):
    assert tomllib.loads(block.text)


# Files

NAMED = re.compile(
    r"(?<![\w/.-])((?:jax_transformer|torch_reference|parity_tests|benchmarks|campaigns|docs)"
    r"/[\w/.-]+\.\w+)"
)


@pytest.mark.parametrize("page", PAGES)
def test_files_that_pages_name_exist(page: str):
    text = (ROOT / page).read_text(encoding="utf-8")
    missing = sorted({name for name in NAMED.findall(text) if not (ROOT / name).exists()})
    short = re.findall(r"`((?:[a-z_]+/)+[a-z_0-9]+\.py)`", text)
    bases = (ROOT, ROOT / "jax_transformer", ROOT / "docs")
    missing += [name for name in short if not any((base / name).exists() for base in bases)]
    assert not [name for name in missing if "NAME" not in name], missing
