"""One JSON object a line on stderr. What users write and models answer is in it only with --log-text."""

from __future__ import annotations

import sys
import time
import traceback
from typing import Any

import msgspec


def log(event: str, **fields: Any) -> None:
    """Fields that are None are left out."""
    known = {name: value for name, value in fields.items() if value is not None}
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
    sys.stderr.write(msgspec.json.encode({"time": f"{stamp}Z", "event": event, **known}).decode() + "\n")
    sys.stderr.flush()


def log_fault(error: BaseException, **fields: Any) -> None:
    """A fault of ours, with the way to it."""
    log("fault", error=repr(error), trace="".join(traceback.format_exception(error)), **fields)
