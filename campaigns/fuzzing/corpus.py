"""Add inputs of new coverage to the shipped corpus of fuzzing.

``python -m campaigns.fuzzing.corpus [FOLDER] [--seed S]`` runs a block of every target, or takes
the inputs that are in ``FOLDER/TARGET``, and writes the small ones, next to those that were there,
to the shipped ``corpus.tar.xz``. Needs the extra ``fuzz``.
"""

import argparse
import io
import tarfile
import tempfile
from pathlib import Path

from campaigns.fuzzing import campaign, targets

LONGEST = 1500  # bytes of an input; a longer one is rarely worth its place
MOST = 120  # inputs of a target


def grow(folder: Path, seed: int) -> None:
    """Write the inputs of new coverage of one block of each target."""
    shared, scratch = folder / "shared", folder / "scratch"
    shared.mkdir()
    campaign.prepare(shared)
    for name, target in targets.TARGETS.items():
        for each in (folder / name, scratch / name):
            each.mkdir(parents=True)
        print(name, flush=True)
        folders = shared / name, scratch / name
        campaign.run(name, *folders, seed, target.inputs, "--new", str(folder / name))


def collect(folder: Path) -> dict[str, list[bytes]]:
    """The shipped inputs and those in a folder: small ones first, and not too many of a target."""
    shipped = campaign.corpus()
    result = {}
    for name in targets.TARGETS:
        new = [path.read_bytes() for path in sorted((folder / name).glob("*"))]
        inputs = {each for each in (*shipped[name], *new) if len(each) <= LONGEST}
        result[name] = sorted(inputs, key=lambda each: (len(each), each))[-MOST:]
    return result


def write(inputs: dict[str, list[bytes]]) -> None:
    """Write the corpus; equal inputs give equal bytes."""
    with tarfile.open(campaign.CORPUS, "w:xz", preset=9) as archive:
        for name, contents in inputs.items():
            for number, content in enumerate(contents):
                member = tarfile.TarInfo(f"{name}/{number:03}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="inputs by target")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if options.folder is None:
            grow(folder, options.seed)
        inputs = collect(folder)
        write(inputs)
    print(f"{sum(map(len, inputs.values()))} inputs, {campaign.CORPUS.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
