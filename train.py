"""Train an encoder-decoder Transformer: ``python train.py --help`` lists every option.

Without options it learns the built-in task, localising English dates, prices, units and lists into
German, French and Spanish, in about three minutes on two cores. The steps are in
``jax_transformer/training/recipe.py``:

1. choose the run folder: the one of ``--run``, the newest unfinished one of the same options, or a
   new number;
2. read the text, train the tokenizer, plan the batches;
3. build the model of the preset, or restore the newest checkpoint;
4. step, record, validate, save, until the last step.

``jax-transformer train`` is the same command.
"""

from jax_transformer.cli import process

if __name__ == "__main__":
    process("train")
