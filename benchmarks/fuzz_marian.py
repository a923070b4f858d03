"""Damage the files of a model of Marian and read them: the weights (npz), with valid checksums and
without, and YAML, that of its options and that of its vocabulary.

Every damaged file must be refused, or read within its own size. See docs/untrusted-files.md.

``python benchmarks/fuzz_marian.py --count 300 --seed 0`` makes the same files each time. It exits
with 1 if anything else happened, and keeps the file that caused it.
"""

import sys
import zipfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import fuzz_files, fuzzing
from jax_transformer import pretrained_files
from jax_transformer.errors import nearest
from jax_transformer.storage import marian
from parity_tests import marian_files

_TEXTS = (
    *(
        "!!python/object/apply:os.system [id]",
        "&a",
        "*a",
        "{{{{",
        "[[[[",
        "? ",
        "- ",
        ": ",
        "---\n",
    ),
    *("'descr': '|O'", "fortran_order': True", "(99999999999, 9)", "(-1,)", "\x00", "\x1b[2J", "é"),
    *("a" * 4000, "[" * 4000, "<<: *a", "0x10", "1e400", "\\ud800", "../../etc/passwd"),
)


def original(folder: Path) -> dict[str, Path]:
    """Write a model, and return the file of each kind."""
    chosen = marian_files.options(dec_depth=1)
    content = marian_files.model(marian_files.weights(chosen), chosen)
    words = ["</s>", "<unk>", "no", "▁the", "'", '"', ":", "#", "1", "~", "null"]
    marian_files.opus(folder, content, {word: number for number, word in enumerate(words)})
    vocabulary = next(folder.glob("*.vocab.yml"))
    files = {"npz": marian.weights(folder)[0], "vocab": vocabulary, "yaml": folder / marian.DECODER}
    _read(folder, len(content))  # imports what is imported when it is needed
    nearest("Wembb", ["Wemb"])
    return files


def changed(draw: Random, kind: str, content: bytes, others: list[bytes]) -> bytes:
    """Damaged bytes; of npz, also a member that is damaged before its checksum is computed."""
    if kind != "npz" or draw.random() < 0.3:
        return _damaged(draw, content, others)
    with zipfile.ZipFile(BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = draw.choice([*members, *["special:model.yml.npy"] * len(members)])
    cut = draw.choice((len(members[name]), 128, 80))
    members[name] = _damaged(draw, members[name][:cut], others) + members[name][cut:]
    return marian_files.npz(members)


def _damaged(draw: Random, content: bytes, others: list[bytes]) -> bytes:
    if draw.random() < 0.5:
        return fuzz_files.mutated(draw, content, others)
    at = draw.randrange(len(content) + 1)
    text = draw.choice(_TEXTS).encode("utf-8", "surrogatepass")
    return content[:at] + text + content[at + draw.choice((0, len(text))) :]


def judged(kind: str, path: Path) -> fuzzing.Watched:
    """Read a model with its options and vocabularies."""
    size = sum(each.stat().st_size for each in path.parent.iterdir())
    with fuzzing.watched(size) as result:
        _read(path.parent, size)
    return result


def _read(folder: Path, size: int) -> None:
    stored = pretrained_files.find(folder)
    assert stored.marian is not None, "read as something else"
    for file in stored.marian.vocabularies:
        marian.read_vocabulary(file)
    for array in stored.marian.arrays.values():
        assert array.read().nbytes <= size, "more numbers than the file has"


def main(arguments: Sequence[str] | None = None) -> int:
    return fuzzing.count(fuzzing.options(__doc__, arguments), original, changed, judged)


if __name__ == "__main__":
    raise SystemExit(main())
