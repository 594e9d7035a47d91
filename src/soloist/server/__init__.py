"""The OpenAI-compatible server: one process, one model, one request at a time.

`wire` and `replies` are what travels; `prepare` turns a request into work; `worker` owns the model and its thread;
`chunks` and `answers` write what comes back; `app` speaks ASGI; `run` starts and ends the process.
"""
