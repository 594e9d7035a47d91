"""Golden outputs of independent implementations, how they are made, and when ours count as equal."""
