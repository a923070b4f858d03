"""A model as an HTTP service: batches of fixed shapes, a bounded queue, and one page.

Starlette and uvicorn are in the extra ``serve``. Importing this package loads neither them nor jax.
"""
