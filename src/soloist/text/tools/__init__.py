"""Tool calls in the texts of models: recognised while they arrive, and asked for by a grammar."""
