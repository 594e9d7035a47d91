"""Drafters propose tokens. They cannot change the text: a wrong proposal costs time, nothing else."""
