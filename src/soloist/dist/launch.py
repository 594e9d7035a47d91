"""How the processes of a group come together: rank 0 starts the others, or torchrun started all of them.

Rank 0 listens; the others come to it with a token, so that nobody else takes their place. Over that line they learn where
torch.distributed meets. Under torchrun it is the other way round: the ranks meet first, and rank 0 says where it listens.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from soloist.dist.channel import Follower, Leader, accept, connect, listen
from soloist.dist.group import SOLO, Group, Lone, Ranks
from soloist.dist.place import RankPlace, child_environment, rank_place
from soloist.errors import RankLost, UserError

JOIN_S = 120.0
"""How long ranks may take to start: importing torch on a busy machine, not loading weights, which comes later."""

EXCHANGE_S = 600.0
"""How long one rank may wait for another in an exchange: the slowest may still be loading."""

ESCAPE_S = 4.0
"""How long rank 0 may stay stuck in its device after a loss before its process is ended."""

LOOPBACK = "127.0.0.1"


def local_rank(size: int) -> int:
    """Which of its machine's GPUs this process takes: 0 unless it was started as one of `size` ranks."""
    place = rank_place()
    return place.local_rank if size > 1 and place is not None else 0


def open_group(size: int, rank_of: int | None, device: torch.device, settings: Mapping[str, Any]) -> Group:
    """Join the ranks of a model. Returns when all of them are there.

    Args: size: tensor_parallel; rank_of: tp_rank_of; settings: of the LLM that the other ranks build, where rank 0 has to
        start them.
    Raises: UserError for sizes that do not fit together, RankLost for ranks that do not come.
    """
    if rank_of is not None or size == 1:
        return SOLO if rank_of is None else Lone(rank_of)
    group = _open_ranks(size, device, settings)
    atexit.register(group.close)
    if device.type == "cuda":
        from soloist.dist.peers import choose_sum

        choose_sum(group, device)
    return group


def outline(size: int, rank_of: int | None) -> Group:
    """The group that `open_group` would open, good for planning only."""
    place = rank_place()
    if size > 1:
        return Lone(size, 0 if place is None else min(place.rank, size - 1))
    return SOLO if rank_of is None else Lone(rank_of)


def _open_ranks(size: int, device: torch.device, settings: Mapping[str, Any]) -> Ranks:
    if dist.is_initialized():
        raise UserError("this process has a tensor-parallel model already; close it before making another")
    place = rank_place()
    if place is None:
        return _lead_children(size, device, settings)
    if place.size != size:
        raise UserError(
            f"tensor_parallel={size}, but {place.size} processes were started (WORLD_SIZE); make the two equal"
        )
    return _join(place, device)


def _lead_children(size: int, device: torch.device, settings: Mapping[str, Any]) -> Ranks:
    """Start the other ranks on this machine."""
    token = secrets.token_hex(16)
    with listen(LOOPBACK) as server:
        leader = f"{LOOPBACK}:{server.getsockname()[1]}:{token}"
        children = [_start(rank, size, leader, settings) for rank in range(1, size)]

        def check() -> None:
            for rank, child in enumerate(children, 1):
                if child.poll() is not None:
                    raise RankLost(f"rank {rank} of {size} ended with code {child.returncode} before it was ready")

        try:
            peers = accept(server, token, size, JOIN_S, check)
        except BaseException:
            _end(children)
            raise
    group = Ranks(0, size, Leader(peers, _escape(device)), backend(device), on_close=lambda: _end(children))
    store = TCPStore(LOOPBACK, 0, size, True, wait_for_workers=False)
    group.broadcast_object({"store": store.port})
    _meet(0, size, device, store)
    return group


def _start(rank: int, size: int, leader: str, settings: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    """A child in a session of its own: Ctrl+C is for rank 0, which tells the others."""
    environment = child_environment(RankPlace(rank, size, rank, leader))
    code = "import sys, json; from soloist.follower import follow; sys.exit(follow(json.loads(sys.argv[1])))"
    command = [sys.executable, "-c", code, json.dumps(dict(settings))]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)


def _end(children: list[subprocess.Popen[bytes]], patience_s: float = 5.0) -> None:
    """They were told to end; those that do not are killed."""
    for child in children:
        try:
            child.wait(patience_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _join(place: RankPlace, device: torch.device) -> Ranks:
    """Become the rank that this process was started as."""
    if place.leader is not None:  # by rank 0
        host, port, token = place.leader.split(":")
        channel = Follower(connect(host, int(port), token, place.rank, JOIN_S))
        meeting = channel.hear()
        _meet(place.rank, place.size, device, TCPStore(host, meeting["store"], place.size, False))
        return Ranks(place.rank, place.size, channel, backend(device))
    _meet(place.rank, place.size, device, None)  # by torchrun
    address: list[Any] = [None]
    if place.rank == 0:
        token = secrets.token_hex(16)
        with listen(place.master) as server:
            dist.broadcast_object_list([[place.master, server.getsockname()[1], token]], device=_meeting_device(device))
            peers = accept(server, token, place.size, JOIN_S, lambda: None)
        return Ranks(0, place.size, Leader(peers, _escape(device)), backend(device))
    dist.broadcast_object_list(address, device=_meeting_device(device))
    host, port, token = address[0]
    return Ranks(place.rank, place.size, Follower(connect(host, port, token, place.rank, JOIN_S)), backend(device))


def _meet(rank: int, size: int, device: torch.device, store: TCPStore | None) -> None:
    where: dict[str, Any] = {} if store is None else {"store": store, "rank": rank, "world_size": size}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        where["device_id"] = device
    dist.init_process_group(backend(device).lower(), timeout=timedelta(seconds=EXCHANGE_S), **where)


def _meeting_device(device: torch.device) -> torch.device | None:
    return device if device.type == "cuda" else None


def backend(device: torch.device) -> str:
    """What carries the ranks' exchanges."""
    return "NCCL" if device.type == "cuda" else "gloo"


def _escape(device: torch.device) -> Callable[[Leader], None]:
    """What frees rank 0 from waiting for a rank that is gone. gloo frees itself where sockets close, but not if a whole
    machine vanished; a GPU waits on in its kernel, which no exception reaches: NCCL is told to give up. If nothing of
    this frees who waits here, the process ends.
    """

    def escape(channel: Leader) -> None:
        timer = threading.Timer(ESCAPE_S, _exit_unless_noticed, [channel])
        timer.daemon = True
        timer.start()
        group = dist.group.WORLD
        if device.type == "cuda" and group is not None:
            group.abort()

    return escape


def _exit_unless_noticed(channel: Leader) -> None:
    if channel.busy() and not channel.noticed:
        print(f"soloist: {channel.lost}", file=sys.stderr, flush=True)
        os._exit(1)
