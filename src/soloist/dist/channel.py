"""The line between rank 0 and the others: requests go out on it, and whoever is gone is noticed by its silence.

TCP, one JSON object a line, from rank 0 to each. Nothing comes back but last words. A process that is killed loses its
sockets at once, whatever its threads are stuck in, so the end of a stream is the end of a rank; a machine that vanishes
is found by keep-alive within seconds.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from soloist.errors import RankLost

FAREWELL = {"farewell": True}
"""What rank 0 says before it closes, so that the others end in peace."""

KEEP_ALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 4000}
"""Seconds, and in the last one milliseconds, after which a peer that does not answer is gone. Linux's names."""

VERDICT_S = 1.0
"""How long a failed exchange waits to be told who was lost."""


class Channel:
    """One end of the line; see `Leader` and `Follower`. lost: which rank is gone, once one is. at_end: called, from another
    thread, when a rank is gone or rank 0 parts, to free whatever waits for it. busy: whether something may wait.
    """

    lost: str | None = None

    def __init__(self) -> None:
        self.at_end: list[Callable[[], None]] = []
        self.busy: Callable[[], bool] = lambda: True

    def tell(self, message: Any) -> None:
        """Rank 0: send to all others.   Raises: RankLost."""
        raise NotImplementedError

    def hear(self) -> Any:
        """Others: the next message, in order; None after a farewell."""
        raise NotImplementedError

    def verdict(self, symptom: str) -> str:
        """What to say of an exchange that failed."""
        return symptom

    def complain(self, error: BaseException) -> None:
        """Say why this end closes."""

    def close(self) -> None:
        raise NotImplementedError


class Leader(Channel):
    """Rank 0's end. peers: a socket for every other rank, in order.

    on_loss: called once, from the watching thread, after `at_end`. noticed: whether the loss was reported to who works
    here.
    """

    def __init__(self, peers: list[socket.socket], on_loss: Callable[[Leader], None]):
        super().__init__()
        self._peers, self._on_loss = peers, on_loss
        self.noticed = False
        self._known, self._closing, self._heard = threading.Event(), False, threading.Lock()
        for rank, peer in enumerate(peers, 1):
            threading.Thread(target=self._watch, args=(rank, peer), daemon=True, name=f"watch rank {rank}").start()

    def _watch(self, rank: int, peer: socket.socket) -> None:
        words = _line(peer)
        with self._heard:
            if self._closing or self.lost is not None:
                return
            said = f": {json.loads(words)['error']}" if words else " without a word (killed?)"
            self.lost = f"rank {rank} of {len(self._peers) + 1} ended{said}; the model is lost, start it anew"
        self._known.set()
        for free in self.at_end:
            free()
        self._on_loss(self)

    def tell(self, message: Any) -> None:
        if self.lost is not None:
            raise RankLost(self.verdict(self.lost))
        line = (json.dumps(message) + "\n").encode()
        try:
            for peer in self._peers:
                peer.sendall(line)
        except OSError as error:
            raise RankLost(self.verdict(str(error))) from error

    def verdict(self, symptom: str) -> str:
        self._known.wait(VERDICT_S)
        self.noticed = True
        return self.lost or f"the exchange between ranks failed: {symptom}"

    def close(self) -> None:
        with self._heard:
            if self._closing:
                return
            self._closing, self.lost = True, self.lost or "the ranks of this model were closed; make a new one"
        self.noticed = True
        for peer in self._peers:
            try:
                peer.sendall((json.dumps(FAREWELL) + "\n").encode())
            except OSError:
                pass  # it is gone already
            peer.close()


class Follower(Channel):
    """Another rank's end. If rank 0 vanishes the process ends at once: its main thread may wait for rank 0 for ever."""

    def __init__(self, leader: socket.socket):
        super().__init__()
        self._leader = leader
        self._messages: SimpleQueue[Any] = SimpleQueue()
        self._ended = False
        threading.Thread(target=self._listen, daemon=True, name="listen to rank 0").start()

    def _listen(self) -> None:
        reader = self._leader.makefile()
        try:
            for line in reader:
                message = json.loads(line)
                if message == FAREWELL:
                    self._ended = True
                    self._messages.put(None)
                    for free in self.at_end:
                        free()
                    return
                self._messages.put(message)
        except OSError:
            pass  # a reset says the same as an end
        if not self._ended:
            print("soloist: rank 0 is gone; this rank ends", file=sys.stderr, flush=True)
            os._exit(1)

    def hear(self) -> Any:
        return self._messages.get()

    def complain(self, error: BaseException) -> None:
        """Last words. A rank that only felt the loss of another leaves the word to rank 0, which will end it."""
        if isinstance(error, RankLost):
            time.sleep(VERDICT_S)
        try:
            self._leader.sendall((json.dumps({"error": str(error) or type(error).__name__}) + "\n").encode())
        except OSError:
            pass  # rank 0 is gone as well

    def close(self) -> None:
        self._ended = True
        self._leader.close()


def _line(peer: socket.socket) -> str:
    """The next line, empty at the end of the stream."""
    try:
        return peer.makefile().readline()
    except OSError:
        return ""


# ---- joining -----------------------------------------------------------------------------------------------------------


def listen(host: str) -> socket.socket:
    """A port of this host for the other ranks to come to."""
    server = socket.create_server((host, 0), backlog=64)
    server.settimeout(0.2)
    return server


def accept(server: socket.socket, token: str, size: int, timeout_s: float, check: Callable[[], None]) -> list[socket.socket]:
    """Wait for the ranks 1 to size - 1. `check` is called now and then, and raises where waiting is in vain.

    Raises: RankLost naming the ranks that did not come in time.
    """
    peers: dict[int, socket.socket] = {}
    end = time.monotonic() + timeout_s
    while len(peers) < size - 1:
        check()
        if time.monotonic() > end:
            absent = [rank for rank in range(1, size) if rank not in peers]
            raise RankLost(f"ranks {absent} of {size} did not come within {timeout_s:.0f} s")
        try:
            peer, _ = server.accept()
        except TimeoutError:
            continue
        peer.settimeout(5.0)
        hello = _line(peer)
        rank = _rank_of(hello, token)
        if rank is None or rank in peers or not 0 < rank < size:
            peer.close()  # a stranger
            continue
        peers[rank] = _alive(peer)
    return [peers[rank] for rank in range(1, size)]


def _rank_of(hello: str, token: str) -> int | None:
    try:
        said = json.loads(hello)
        return int(said["rank"]) if hmac.compare_digest(str(said["token"]), token) else None
    except (ValueError, KeyError, TypeError):
        return None


def connect(host: str, port: int, token: str, rank: int, timeout_s: float) -> socket.socket:
    leader = socket.create_connection((host, port), timeout=timeout_s)
    leader.sendall((json.dumps({"rank": rank, "token": token}) + "\n").encode())
    return _alive(leader)


def _alive(peer: socket.socket) -> socket.socket:
    """Without delay or timeout, and with keep-alive."""
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return peer
