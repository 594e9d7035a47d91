"""Running requests: the round, prefill, the runner that repeats the round, the engine that serves a request."""
