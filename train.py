"""Train an encoder-decoder Transformer: ``python train.py --help`` lists every option.

Without options it learns the built-in task, localising English dates, prices, units and lists into
German, French and Spanish, in about three minutes on two cores. The steps are in
``jax_transformer/training/recipe.py``:

1. choose the run folder: ``--run``, the newest unfinished one of the same options, or a new number
   (``resume.py``);
2. read the text, train the tokenizer, plan the batches (``corpus.py``);
3. build the model of the preset, or restore the newest checkpoint (``run.py``);
4. step (``step.py``), record, validate, save, until the last step (``run.py``).

``jax-transformer train`` is the same command.
"""

from jax_transformer.cli import process

if __name__ == "__main__":
    process("train")
