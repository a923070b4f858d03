"""Faults of the layout on a mesh of devices: rows of the table, and constraints of the step."""

from benchmarks.mutants_fault import Mutant

_TABLE, _STEP = (
    "jax_transformer/training/devices.py",
    "jax_transformer/training/step.py",
)
_ATTENTION, _BLOCKS, _EMBEDDINGS, _MODEL = (
    "jax_transformer/nn/attention.py",
    "jax_transformer/nn/blocks.py",
    "jax_transformer/nn/embeddings.py",
    "jax_transformer/transformer.py",
)
_TESTS = "parity_tests/unit/test_mesh.py"
_PLANNED = (f"{_TESTS}::test_every_parameter_lies_as_planned",)
_ADAPTERS = (f"{_TESTS}::test_adapters_lie_where_their_kernel_does",)
_CONSTRAINED = (f"{_TESTS}::test_the_step_constrains_activations_gradients_and_the_new_state",)
_REPLICATED = "an array that every device holds whole"
_ELSEWHERE = "communication where none is needed"


def _row(line: str) -> Mutant:
    """The table without this row."""
    name = line.split('"')[1]
    return Mutant(f"no rule for {name}", _TABLE, f"    {line}\n", "", _PLANNED, met=_REPLICATED)


MUTANTS = [
    _row('("query.kernel", (FSDP, TENSOR)),'),
    _row('("out.kernel", (TENSOR, FSDP)),'),
    _row('("gate.kernel", (FSDP, TENSOR)),'),
    _row('("down.kernel", (TENSOR, FSDP)),'),
    _row('("_embedding.embedding", (TENSOR, FSDP)),'),
    _row('("positions.table", (None, FSDP)),'),
    _row('("logits_bias", (TENSOR,)),'),
    Mutant(
        "an adapter's axes exchanged",
        _TABLE,
        "lora.B: (None, columns)",
        "lora.B: (None, rows)",
        _ADAPTERS,
        met=_ELSEWHERE,
    ),
    Mutant(
        "heads are not constrained",
        _ATTENTION,
        "return sharding.constrain(heads, ROWS, None, TENSOR, None)",
        "return heads",
        _CONSTRAINED,
        met=_ELSEWHERE,
    ),
    Mutant(
        "the feed-forward is not constrained",
        _BLOCKS,
        "y = sharding.constrain(y, ROWS, None, TENSOR)",
        "y = y * 1",
        _CONSTRAINED,
        met=_ELSEWHERE,
    ),
    Mutant(
        "a block's output is not constrained",
        _BLOCKS,
        "x = sharding.constrain(x, ROWS, None, None)",
        "x = x * 1",
        _CONSTRAINED,
        met=_ELSEWHERE,
    ),
    Mutant(
        "the table is looked up where its rows are divided",
        _EMBEDDINGS,
        "return sharding.constrain(table, TENSOR, None)",
        "return table",
        _CONSTRAINED,
        met="XLA's involuntary full rematerialization",
    ),
    Mutant(
        "embeddings are not constrained",
        _MODEL,
        "sharding.constrain(table(ids, valid), ROWS, None, None)",
        "table(ids, valid)",
        _CONSTRAINED,
        met=_ELSEWHERE,
    ),
    Mutant(
        "logits are not constrained",
        _MODEL,
        "logits = sharding.constrain(logits, ROWS, None, TENSOR)",
        "logits = logits * 1",
        _CONSTRAINED,
        met=_REPLICATED,
    ),
    Mutant(
        "gradients are not constrained",
        _STEP,
        "Sums(partitioning.constrain(gradients), losses)",
        "Sums(gradients, losses)",
        _CONSTRAINED,
        met=_REPLICATED,
    ),
    Mutant(
        "the new state is not constrained",
        _STEP,
        "return partitioning.constrain(new_state), metrics",
        "return new_state, metrics",
        _CONSTRAINED,
        met=_REPLICATED,
    ),
]
