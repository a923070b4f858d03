"""Training states, both ways between Optax and torch.optim."""
