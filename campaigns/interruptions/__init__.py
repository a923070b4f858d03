"""Training and conversions that are killed, stopped, made to fail, and continued."""
