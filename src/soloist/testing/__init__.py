"""For tests and demonstrations: tiny checkpoints of every family, and drafters of known skill."""
