import jax
import numpy as np
import pytest
from flax import nnx

pytest.importorskip("transformers")
from campaigns import port_faults


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed, self.norm = nnx.Embed(9, 4, rngs=rngs), nnx.LayerNorm(4, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        for _, variable in nnx.to_flat_state(nnx.state(self, nnx.Param)):
            variable[...] = np.random.default_rng(0).standard_normal(variable.shape, np.float32)

    def __call__(self, ids):
        return self.norm(self.attention(self.embed(ids)))


@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
def test_each_fault_changes_the_module_that_it_names():
    ids = np.arange(6).reshape(2, 3)
    model, kinds = Model(), set()
    for fault in port_faults.of_modules(model):
        changed = nnx.clone(model)
        fault.change(changed)
        kinds.add(fault.kind)
        assert not np.array_equal(changed(ids), model(ids)), fault
    assert len(kinds) == 9
