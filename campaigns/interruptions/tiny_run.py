"""The run that is interrupted: a tiny model on tiny text."""

import random
from pathlib import Path

STEPS, EVAL_EVERY, LOG_EVERY = 20, 5, 3
COMMON = (
    "--model.preset t5 --model.d-model 8 --model.num-heads 2 --model.d-ff 16 "
    "--model.encoder-layers 1 --model.decoder-layers 1 --model.max-length 16 "
    "--data.tokens-per-batch 128 --eval-pairs 2 "
    "--optimizer.warmup-steps 10 --optimizer.learning-rate 0.01 "
    f"--steps {STEPS} --eval-every {EVAL_EVERY} --log-every {LOG_EVERY} --average 3"
)
CORPUS = "corpus"
SETTINGS = {
    "ema": "--data.buckets 1 --optimizer.ema 0.9",
    "accumulate": "--data.buckets 2 --optimizer.accumulate 2",
    "prepared": f"--data.prepared {CORPUS} --data.buckets 2",
}
PREPARE = ["prepare", CORPUS, "--preset", "t5", "--data.max-source-length", "16"]
PREPARE += ["--data.max-target-length", "16", "--processes", "1", "--data.vocab-size", "300"]
SHARDED = "accumulate"
"""The setting in which several processes divide the weights, by ``--mesh.fsdp``."""
ENGLISH, GERMAN = (
    "the cat dog sees a red house small bird and",
    "die Katze Hund sieht eine rote Haus kleine Vogel und",
)
RUN = "run"


def write_text(folder: Path) -> list[str]:
    """Write four files of text and return the flags that name them."""
    words = dict(zip(ENGLISH.split(), GERMAN.split(), strict=True))
    random_source = random.Random(0)
    for split, count in (("train", 60), ("valid", 8)):
        lines = [
            [random_source.choice(list(words)) for _ in range(random_source.randint(1, 6))]
            for _ in range(count)
        ]
        for side, text in (
            ("source", lines),
            ("target", [[words[word] for word in line] for line in lines]),
        ):
            content = "".join(" ".join(line) + "\n" for line in text)
            (folder / f"{split}.{side}").write_text(content, encoding="utf-8")
    return text_flags(folder)


def text_flags(folder: Path) -> list[str]:
    """The flags that name the files of :func:`write_text`."""
    files = [(split, side) for split in ("train", "valid") for side in ("source", "target")]
    return [
        word
        for split, side in files
        for word in (f"--data.{split}-{side}", str(folder / f"{split}.{side}"))
    ]


def train_flags(setting: str) -> list[str]:
    """The flags of the run of a setting, on the text or the corpus in its folder."""
    text = [] if CORPUS in setting else [*text_flags(Path()), "--data.vocab-size", "300"]
    return [*text, *COMMON.split(), *setting.split()]
