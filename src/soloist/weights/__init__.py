"""Checkpoints: reading folders and GGUF files, and filling a model from them."""
