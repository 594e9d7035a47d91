"""A headless Chromium that tests steer: pages are looked at as they are drawn."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync --remote-debugging-pipe"
).split()


class Browser:
    """Chromium's protocol over a pair of pipes, its file descriptors 3 and 4; messages end with a zero byte."""

    def __init__(self, folder: Path):
        asks, self._ask = os.pipe()
        self._told, tells = os.pipe()
        shell = ["bash", "-c", f'exec "$@" 3<&{asks} 4>&{tells}', "bash"]
        command = [*shell, str(CHROMIUM), *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        self.process = subprocess.Popen(command, pass_fds=(asks, tells), stderr=subprocess.DEVNULL)
        os.close(asks)
        os.close(tells)
        self._count, self._rest, self._session = 0, b"", ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._ask, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                came = os.read(self._told, 1 << 16)
                assert came, "the browser has ended"
                self._rest += came
            one, self._rest = self._rest.split(b"\0", 1)
            answer = json.loads(one)
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]

    def evaluate(self, script: str) -> Any:
        return self.call("Runtime.evaluate", expression=script)["result"].get("value")

    def until(self, script: str) -> None:
        for _ in range(300):
            if self.evaluate(script):
                return
            time.sleep(0.1)
        raise AssertionError(f"never true: {script}; the page says {self.evaluate('document.body.innerText')!r}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
