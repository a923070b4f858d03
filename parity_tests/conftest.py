"""JAX at its strictest around the model: 64 bits available, no silent promotion of dtypes or ranks. Imports no torch: the unit tests run without."""

import jax

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_default_matmul_precision", "highest")
