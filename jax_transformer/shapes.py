"""The legend of axes, and types of the arrays that go in and out of the model.

b batch · s source · t target · q query · k key · h head · e head width
d model · f feed-forward · v vocabulary · c channel · w frame of a window
"""

import jax
import numpy as np
from jaxtyping import Float, Int

AnyArray = jax.Array | np.ndarray

SourceIds = Int[AnyArray, "b s"]
TargetIds = Int[AnyArray, "b t"]
Segments = tuple[SourceIds, TargetIds]
"""The pair of each token in packed rows, from 1 on in each row; 0 at padding."""
Features = Float[AnyArray, "b c w"]
"""A source of numbers, for a model with ``config.input_layer``."""
Source = SourceIds | Features
Hidden = Float[jax.Array, "b n d"]
Memory = Float[jax.Array, "b s d"]
Logits = Float[jax.Array, "b t v"]
Weights = Float[jax.Array, "b h q k"]
