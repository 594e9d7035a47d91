"""Text: tokenizers, chat templates, and text that arrives token by token. Knows nothing of tensors."""
