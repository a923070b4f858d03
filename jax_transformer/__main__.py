"""``python -m jax_transformer``."""

import sys

from jax_transformer.cli import main

sys.exit(main())
