"""Create parity_tests/v0_1: runs, checkpoints and exports of version 0.1, for later ones to read.

Created by the package as of commit bba11f3 (version 0.1.0), with PYTHONPATH at the root of the
commit that added this file as parity_tests/v0_1/make.py, whose package is the same; needs torch,
transformers and sentencepiece. A later version must not create them again: they would prove
nothing.
"""

import json
import os
import random
import shutil
import signal
from importlib import metadata
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import transformers
from jax_transformer.training.progress import Progress

import jax_transformer as jt
from parity_tests import tokenizer_models
from parity_tests.unit import conversions
from parity_tests.unit import v0_1_files as v0_1

WORDS = dict(zip("abcdefgh", "stuvwxyz", strict=True))
LINES = {"letters": ["a b c", "h g f e", "d"], "language": ["the lazy dog", "der Fuchs", "oui"]}
TEXT = [
    *"--data.train-source text/train.source --data.train-target text/train.target".split(),
    *"--data.valid-source text/valid.source --data.valid-target text/valid.target".split(),
    *"--data.buckets 1 --data.tokens-per-batch 128".split(),
]
SIZES = [
    *"--model.d-model 8 --model.num-heads 2 --model.d-ff 12 --model.max-length 12".split(),
    *"--model.encoder-layers 1 --model.decoder-layers 1 --data.vocab-size 275".split(),
]
RUN = "train --run run --steps 300 --eval-every 100 --log-every 20 --keep 1".split()
RUN += [*TEXT, *SIZES, *"--keep-best 0 --optimizer.warmup-steps 10".split()]
RUN += ["--optimizer.learning-rate", "0.03"]
STOPPED = 203
"""Step at which RUN is stopped: between two lines of metrics, three steps after a validation."""
AVERAGED = "train --run averaged_run --eval-every 100 --log-every 50 --average 2".split()
AVERAGED += [*TEXT, *SIZES, *"--optimizer.learning-rate 0.02 --optimizer.ema 0.9".split()]
AT_FIRST, FURTHER = ["--steps", "200"], ["--steps", "300"]
INIT = "train --run from_run --init run --steps 12 --eval-every 6 --log-every 3".split()
INIT += [*TEXT, *"--optimizer.learning-rate 0.001 --model.dropout 0.05".split()]
DEEP_DIVE = ["--preset", "deep_dive", "--set", "max_length=9"]


def text() -> None:
    """Write lines of letters, with other letters as translations."""
    choose = random.Random(0)
    Path("text").mkdir()
    for split, count in (("train", 48), ("valid", 6)):
        rows = [choose.choices(list(WORDS), k=choose.randint(1, 5)) for _ in range(count)]
        for side, words in (("source", {}), ("target", WORDS)):
            lines = [" ".join(words.get(word, word) for word in row) + "\n" for row in rows]
            Path("text", f"{split}.{side}").write_text("".join(lines))
    for name, lines in LINES.items():
        Path("text", name).write_text("".join(f"{line}\n" for line in lines))


def stopped() -> None:
    """Stop the run by SIGTERM after step STOPPED."""
    advance = Progress.advance

    def advance_and_stop(progress: Progress) -> None:
        advance(progress)
        if progress.step == STOPPED:
            os.kill(os.getpid(), signal.SIGTERM)

    with mock.patch.object(Progress, "advance", advance_and_stop):
        v0_1.command(*RUN, code=75)


def trained() -> dict[str, list]:
    """Create ``run``, ``averaged_run`` and ``torch_training.pt``; return resumed runs' ends."""
    ends = {}
    v0_1.command(*RUN)
    ends["run"] = v0_1.losses(Path("run"))
    shutil.rmtree("run")
    stopped()
    v0_1.command("convert", "run", "torch_training.pt", "--training")
    v0_1.command(*AVERAGED, *AT_FIRST)
    shutil.rmtree("averaged_run/checkpoints/100")  # large, and nothing needs it any more
    shutil.copytree("averaged_run", "kept")
    v0_1.command(*AVERAGED, *FURTHER)
    ends["averaged_run"] = v0_1.losses(Path("averaged_run"))
    shutil.rmtree("averaged_run")
    Path("kept").rename("averaged_run")
    v0_1.command(*INIT)
    ends["from_run"] = v0_1.losses(Path("from_run"))
    shutil.rmtree("from_run")
    for path in Path().glob("*/curves.png"):  # each validation draws it anew, and it is large
        path.unlink()
    return ends


def deep_dive() -> None:
    """Create weights of a model with frozen arrays, as a run and as files."""
    sizes = dict(d_model=6, num_heads=2, num_layers=1, max_length=9)
    state = conversions.state_of(conversions.config_of("deep_dive", **sizes))
    conversions.write(Path("made.safetensors"), state)
    v0_1.command("convert", "made.safetensors", "deep_dive_run", *DEEP_DIVE)
    Path("made.safetensors").unlink()
    for suffix in ("safetensors", "pt"):
        v0_1.command("convert", "deep_dive_run", f"deep_dive.{suffix}")


def huggingface(name: str, kind: str, files: dict, vocab_size: int, **sizes: int) -> None:
    """Create a family's folder as version 0.1 exports it, and the run that it converts to."""
    with mock.patch.dict(files["config.json"], vocab_size=vocab_size):
        tokenizer_models.write(Path("saved"), files)
        attributes = {
            key: value for key, value in files["config.json"].items() if key != "model_type"
        }
    model = getattr(transformers, kind)
    module = model(model.config_class(**attributes, d_model=16, **sizes))
    torch.manual_seed(0)
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if "embed_positions" not in key:  # positions are computed
                parameter.copy_(torch.randn(parameter.shape) * (0.2 if "shared" in key else 0.6))
    module.generation_config.update(num_beams=2, max_length=10, no_repeat_ngram_size=2)
    module.generation_config.bad_words_ids = [[module.config.pad_token_id]]
    module.save_pretrained("saved")
    v0_1.command("convert", "saved", "between")
    v0_1.command("convert", "between", name, "--to", "hf")
    v0_1.command("convert", name, f"{name}_run")
    for path in ("saved", "between"):
        shutil.rmtree(path)


def families() -> None:
    """Create Marian and T5, with SentencePiece models without 200 kB of normalization rules."""
    small = {"normalization_rule_name": "identity"}
    model = tokenizer_models.model

    def without_rules(*arguments, **more) -> bytes:
        return model(*arguments, **more, **small)

    with mock.patch.object(tokenizer_models, "model", without_rules):
        marian, t5 = tokenizer_models.marian(), tokenizer_models.t5()
    marian["config.json"]["decoder_start_token_id"] = marian["config.json"]["pad_token_id"]
    layers = {f"{side}_layers": 1 for side in ("encoder", "decoder")}
    heads = {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
    more = dict(encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32)
    size = len(marian["vocab.json"])
    huggingface("marian", "MarianMTModel", marian, size, **layers, **heads, **more)
    more = dict(d_kv=8, d_ff=16, num_layers=1, num_heads=2, relative_attention_num_buckets=8)
    huggingface("t5", "T5ForConditionalGeneration", t5, 340, **more)


def of_model(folder: str, weights: str = "auto", lines: str = "") -> dict:
    """Return the record of a model: tensors, numbers for random ids with padding, translations."""
    model, _ = jt.load(folder, weights)
    config, draw = model.config, np.random.default_rng(0)
    special = {config.source_pad_id, config.target_pad_id, config.bos_id, config.eos_id}
    ids = [i for i in range(config.source_vocab_size) if i not in special]
    source, target = draw.choice(ids, (3, 6)), draw.choice(ids, (3, 5))
    source[1, 4:], target[2, 3:] = config.source_pad_id, config.target_pad_id
    target[:, 0] = config.bos_id
    batch = {"source": source.tolist(), "target": target.tolist()}
    record = {"folder": folder, "weights": weights, "lines": lines, **batch}
    record |= {"tensors": v0_1.tensors(folder, weights), "numbers": v0_1.numbers(model, **batch)}
    path = Path("text", lines)
    return record | ({"translations": v0_1.translations(folder, weights, path)} if lines else {})


def main() -> None:
    """Create everything again, with ``expected.json``."""
    os.chdir(v0_1.HERE)
    for path in Path().iterdir():
        if path.name not in v0_1.NOT_RECORDED:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    text()
    ends = trained()
    deep_dive()
    families()
    chosen = {"run": ("200", "last"), "averaged_run": ("averaged", "best")}
    models = {"deep_dive_run": of_model("deep_dive_run")}
    for name, choices in chosen.items():
        models |= {f"{name} {which}": of_model(name, which, "letters") for which in choices}
    for name in ("marian", "marian_run", "t5", "t5_run"):
        models[name] = of_model(name, lines="language")
    versions = {name: metadata.version(name) for name in ("jax", "flax", "orbax-checkpoint")}
    record = {
        "made by": {"version": jt.__version__, "commit": "bba11f3", **versions},
        "commands": {"run": RUN, "averaged_run": AVERAGED + FURTHER, "from_run": INIT},
        "deep_dive": DEEP_DIVE,
        "ends": ends,
        "models": models,
        "files": v0_1.files(),
    }
    lines = [f'"{name}": {json.dumps(part, ensure_ascii=False)}' for name, part in record.items()]
    Path("expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
