"""Count the files and functions of the package that the main ways run through.

``python benchmarks/ways.py [NAME ...] [--list] [--package FOLDER]``

Each way is a tiny run in a process of its own. A function counts once if any thread enters it
outside an import; so do lambdas and comprehensions, by their qualified names. A file counts if one
of its functions does. ``--list`` prints what ran, file by file; ``--package`` counts another
checkout.
"""

import argparse
import collections
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GOALS = {
    "train": (50, 400),
    "translate": (36, 230),
    "python": (32, 260),
    "convert": (40, 320),
    "init": (65, 600),
    "export": (45, 380),
}
SIZES = "d_model=16 num_heads=2 d_ff=32 num_layers=1 max_length=20".split()
TRAIN = (
    "train --steps 1 --eval-every 1 --log-every 1 --data.buckets 1 --data.tokens-per-batch 128 "
    "--data.train-source train.en --data.train-target train.de "
    "--data.valid-source valid.en --data.valid-target valid.de "
).split()
MODEL = (
    "--data.vocab-size 300 --model.d-model 16 --model.num-heads 2 --model.d-ff 32 "
    "--model.encoder-layers 1 --model.decoder-layers 1 --model.max-length 40"
).split()
PRELUDE = """
import atexit, json, sys, threading
seen = set()
def note(frame, event, argument):
    if event == "call" and frame.f_code not in seen:
        outer = frame
        while outer is not None and outer.f_code.co_name != "_call_with_frames_removed":
            outer = outer.f_back
        if outer is None:  # not in an import
            seen.add(frame.f_code)
threading.setprofile(note)
sys.setprofile(note)
def report():
    sys.setprofile(None)
    package = FOLDER + "/jax_transformer/"
    names = {
        (code.co_filename.removeprefix(package), code.co_qualname)
        for code in set(seen)
        if code.co_filename.startswith(package)
    }
    modules = [name for name in sys.modules if name.split(".")[0] == "jax_transformer"]
    with open(RESULT, "w") as file:
        json.dump([sorted(names), sorted(modules)], file)
atexit.register(report)
import os
end, os._exit = os._exit, lambda code: (report(), end(code))
"""
COMMAND = "from jax_transformer import cli\nsys.exit(cli.main(ARGUMENTS))\n"
PYTHON = """
import numpy as np
import jax_transformer as jt
config = jt.preset("lesson10", source_vocab_size=11, target_vocab_size=13, **SIZES)
model = jt.convert.load("m.pt", config)
ids = np.ones((2, 5), np.int32)
model(ids, ids).block_until_ready()
jt.convert.save(model, "again.pt")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *GOALS], help="default: all")
    parser.add_argument("--list", action="store_true", help="print what ran, file by file")
    parser.add_argument("--package", type=Path, default=ROOT, help="another checkout")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        print(f"{'way':10} {'files':>5} {'functions':>9}   goal       modules imported")
        for name in options.names or GOALS:
            functions, modules = count(name, Path(folder), options.package.resolve())
            files = collections.Counter(file for file, _ in functions)
            goal = " / ".join(map(str, GOALS[name]))
            print(f"{name:10} {len(files):5} {len(functions):9}   {goal:10} {len(modules)}")
            if options.list:
                for file, number in files.items():
                    ran = ", ".join(function for each, function in functions if each == file)
                    print(f"    {file} {number}: {ran}")


def prepare(folder: Path) -> None:
    """Write the text, the PyTorch file, the Hugging Face folder and the run that the ways read."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    import jax_transformer as jt

    choose = random.Random(0)
    words = "the cat dog sees a red house small bird and".split()
    for name, lines in (("train", 60), ("valid", 8)):
        for side in ("en", "de"):
            text = "".join(" ".join(choose.choices(words, k=4)) + "\n" for _ in range(lines))
            (folder / f"{name}.{side}").write_text(text)
    sizes = {key: int(value) for key, value in (pair.split("=") for pair in SIZES)}
    config = jt.preset("lesson10", source_vocab_size=11, target_vocab_size=13, **sizes)
    from flax import nnx

    state = jt.convert.to_torch(jt.Transformer(config, rngs=nnx.Rngs(0)))
    torch.save({key: torch.tensor(value) for key, value in state.items()}, folder / "m.pt")
    words_of = Tokenizer(models.BPE())
    words_of.pre_tokenizer = pre_tokenizers.ByteLevel()
    words_of.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    words_of.train_from_iterator(
        (folder / "train.en").read_text().splitlines(),
        trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False),
    )
    fast = transformers.BartTokenizerFast(tokenizer_object=words_of)
    fast.save_pretrained(folder / "bart")
    bart = transformers.BartConfig(
        vocab_size=len(fast), d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, max_position_embeddings=64,
    )  # fmt: skip
    transformers.BartForConditionalGeneration(bart).save_pretrained(folder / "bart")
    for run, arguments in (("run", MODEL), ("tuned", ["--init", "bart"])):
        _python(folder, COMMAND, [*TRAIN, "--run", run, *arguments], ROOT)


def count(name: str, folder: Path, package: Path) -> tuple[list[tuple[str, str]], list[str]]:
    """Run one way, and return its functions as (file, name) and the imported modules."""
    commands = {
        "train": [*TRAIN, "--run", f"new-{os.getpid()}-{name}", *MODEL],
        "translate": ["translate", "--run", "run"],
        "convert": ["convert", "m.pt", "imported", "--preset", "lesson10", "--set", *SIZES],
        "init": [*TRAIN, "--run", f"new-{os.getpid()}-{name}", "--init", "bart"],
        "export": ["convert", "tuned", "exported", "--to", "hf"],
    }
    program = COMMAND if name in commands else PYTHON
    return _python(folder, PRELUDE + program, commands.get(name, []), package)


def _python(
    folder: Path, program: str, arguments: list[str], package: Path
) -> tuple[list[tuple[str, str]], list[str]]:
    result = folder / "result.json"
    sizes = {key: int(value) for key, value in (pair.split("=") for pair in SIZES)}
    names = {"ARGUMENTS": arguments, "FOLDER": str(package), "RESULT": str(result), "SIZES": sizes}
    start = "import sys\n" + "".join(f"{name} = {value!r}\n" for name, value in names.items())
    subprocess.run(
        [sys.executable, "-c", start + program],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(package)},
        input="the cat sees a dog\n",
        text=True,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    if not result.exists():
        return [], []
    functions, modules = json.loads(result.read_text())
    return [tuple(function) for function in functions], modules


if __name__ == "__main__":
    main()
