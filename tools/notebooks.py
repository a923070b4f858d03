"""The notebooks of the five documents, all made from the text of this file.

    python tools/notebooks.py --write     # writes the cells; outputs of unchanged cells stay
    jupyter nbconvert --to notebook --execute --inplace docs/notebooks/document_*.ipynb

STEPS_LAYERS="2 1" in the environment makes a short run, as .ci/run does. ``REPOSITORY`` is the only
place for the address on GitHub: ``--write`` writes it into the other files that have it, too.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

REPOSITORY = "OWNER/REPOSITORY"
DOCS = Path(__file__).resolve().parent.parent / "docs"
FOLDER = DOCS / "notebooks"
WITH_ADDRESS = [
    FOLDER / "find_the_fault.ipynb",
    DOCS / "parity.md",
    DOCS / "parity-workflow.yml",
]
ADDRESS = re.compile(
    r"(//github\.com/|google\.com/github/|uses: )[\w.-]+/[\w.-]+(?=/blob/main/docs/|\\\"|@COMMIT)"
)
DOCUMENTS = {
    "deep_dive": (
        "In `deep_dive` a position is a cosine, cut to an integer. So the first word has a position"
        " of its own, and all others share one. The encoder sees a bag of words.",
        "The faithful model finds some of the right tokens and cannot order them: digits change"
        " places or are lost. The repaired one knows where each token stands, and learns faster.",
    ),
    "lesson10": (
        "In `lesson10` the decoder attends to source padding: a mask is missing in"
        " cross-attention. All else is `torch.nn.Transformer`.",
        "The curves lie close together. Batches have few widths, so padding is nearly a constant,"
        " and both models learn to ignore it. A fault can be real and cost little.",
    ),
    "from_scratch": (
        "`from_scratch` divides scores by the root of the model's width. The paper divides by the"
        " root of the head's width, which is smaller. With eight heads, scores are √8 times too"
        " small.",
        "Small scores make attention more even. Queries and keys can grow to compensate, so the"
        " curves stay close together.",
    ),
    "part2_encoder": (
        "In `part2_encoder` heads are merged as they lie in memory, so positions and heads get"
        " mixed. The feed-forward comes first and again, and adds positions each time.",
        "Here the *faithful* model learns faster. It adds positions at every feed-forward, so they"
        " are as large as the rest. The repaired one adds them once, next to embeddings that are √d"
        " times as large. One fault hides another: [the page on faults](../faults.md) tells them"
        " apart.",
    ),
    "blog2023": (
        "In `blog2023` attention returns the sum of all values, whatever the weights are. The"
        " decoder then adds the memory to itself, so the target never reaches the logits.",
        "The faithful model writes a translation in one pass: no token knows its neighbours, so"
        " they repeat. Look at its maps: weights exist, and have no effect. In the repaired one"
        " weights and values meet, and the target is read.",
    ),
}
TEXT = """\
# {preset}: faithful and repaired

[![Open in Colab](../assets/colab.svg)](https://colab.research.google.com/github/{address})
[![Open in Kaggle](../assets/kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/{address})

{fault}

This notebook trains the model with the document's faults, and the same model without them. It takes
less than five minutes on two CPU cores. [The document, side by side](../side-by-side/{preset}.md)
shows the code.
#%%
import importlib.util

if importlib.util.find_spec("jax_transformer") is None:  # on Colab and Kaggle
    %pip install --quiet "git+https://github.com/{repository}"
#%%
import os
import tempfile

PRESET = "{preset}"
STEPS, LAYERS = map(int, os.environ.get("STEPS_LAYERS", "600 2").split())
MODELS = [PRESET, PRESET + "_repaired"]
os.chdir(tempfile.mkdtemp())  # everything is written into a new folder
#%% md
## 1. Train both

The built-in task writes English dates, prices and lists in German, French and Spanish. Both models
have the same tokenizer, sizes, seed and batches.
#%%
%%bash -s {{PRESET}} {{STEPS}} {{LAYERS}}
set -e -o pipefail
tokenizer=
for preset in $1 $1_repaired; do
    jax-transformer train --run runs/$preset --model.preset $preset $tokenizer \\
        --steps $2 --eval-every $2 --eval-pairs 200 --samples 0 --log-every 20 \\
        --data.tokens-per-batch 512 --data.buckets 2 --model.dropout 0 \\
        --model.d-model 64 --model.num-heads 8 --model.d-ff 256 --model.max-length 40 \\
        --model.encoder-layers $3 --model.decoder-layers $3 \\
        --optimizer.learning-rate 3e-3 --optimizer.warmup-steps 100 2>&1 | tail -2
    tokenizer="--data.tokenizer runs/$1/tokenizer.json"
done
#%% md
## 2. What differs
#%%
import json
from pathlib import Path

import matplotlib.pyplot as plt

for name, colour in zip(MODELS, ["#D55E00", "#0072B2"], strict=True):
    lines = map(json.loads, Path("runs", name, "metrics.jsonl").read_text().splitlines())
    points = [(line["step"], line["nll_loss"]) for line in lines if "nll_loss" in line]
    plt.plot(*zip(*points, strict=True), color=colour, label=name)
plt.xlabel("step")
plt.ylabel("loss, nats per token")
plt.legend()
plt.show()
#%% md
{look}
#%% md
## 3. Translate
#%%
import jax_transformer as jt
from jax_transformer.data import phrases

sources, targets = zip(*phrases.load()["valid"][:4], strict=True)
translators = {{name: jt.Translator.load(f"runs/{{name}}") for name in MODELS}}
translations = {{name: each.hypotheses(sources) for name, each in translators.items()}}
for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
    print(f"{{source}}\\n{{'expected':>24}}  {{target}}")
    for name in MODELS:
        print(f"{{name:>24}}  {{translations[name][i][0].text}}")
#%% md
## 4. Attention

Point at a token to see which tokens it attends to: first faithful, then repaired.
#%%
import html

from IPython.display import HTML, display

from jax_transformer.inference import attention_page

for name in MODELS:
    pairs = sources[:2], translations[name][:2]
    attention_page.write("page.html", translators[name], *pairs, title=name)
    page = html.escape(Path("page.html").read_text())
    frame = f'<iframe title="{{name}}" srcdoc="{{page}}" width="100%" height="900"></iframe>'
    display(HTML(f"<div>{{frame}}</div>"))
#%% md
[The cost of each fault](../faults.md), with three seeds. Twelve more to mend: [find the
fault](find_the_fault.ipynb).
"""


def addressed(text: str) -> str:
    """Return a file's text with the address of the repository as it is now."""
    return ADDRESS.sub(lambda match: match[1] + REPOSITORY, text)


def path(preset: str) -> Path:
    return FOLDER / f"document_{preset}.ipynb"


def cells(preset: str) -> list[dict[str, Any]]:
    """Return the notebook's cells without outputs."""
    fault, look = DOCUMENTS[preset]
    address = f"{REPOSITORY}/blob/main/docs/notebooks/{path(preset).name}"
    named = {"repository": REPOSITORY, "address": address}
    text = TEXT.format(preset=preset, fault=fault, look=look, **named)
    result: list[dict[str, Any]] = []
    for i, part in enumerate(re.split(r"^#%%", " md\n" + text, flags=re.M)):
        kind, source = part.split("\n", 1)
        lines = source.strip().splitlines(True)
        cell: dict[str, Any] = {"id": f"cell-{i}", "metadata": {}, "source": lines}
        if kind.strip() == "md":
            result.append({"cell_type": "markdown", **cell})
        else:
            result.append({"cell_type": "code", "execution_count": None, "outputs": [], **cell})
    return result


def stored(preset: str) -> list[dict[str, Any]]:
    """Return the cells of the file, or none if there is no file."""
    file = path(preset)
    return json.loads(file.read_text(encoding="utf-8"))["cells"] if file.exists() else []


def write(preset: str) -> None:
    """Write the notebook; cells whose source is unchanged keep their outputs."""
    old = {"".join(cell["source"]): cell for cell in stored(preset)}
    new = [old.get("".join(cell["source"]), cell) | {"id": cell["id"]} for cell in cells(preset)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    notebook = {"cells": new, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    path(preset).write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write docs/notebooks")
    write_them = parser.parse_args().write
    for preset in DOCUMENTS:
        if write_them:
            write(preset)
        print(path(preset))
    for file in WITH_ADDRESS if write_them else ():
        file.write_text(addressed(file.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
