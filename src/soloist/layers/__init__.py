"""Building blocks of a decoder. Each holds its weights under the names of its slots and calls the largest op."""
