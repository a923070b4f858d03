"""Folders of Hugging Face transformers: their configuration, weights and tokenizer, read and written without it."""
