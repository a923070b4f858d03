"""Training: options, optimizer, loss, a pure step, checkpoints, and the recipe that joins them."""
