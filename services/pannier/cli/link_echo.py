"""The other end of `pannier bench link`, in a process of its own: attention workers that only copy, and plain TCP."""

import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import structlog
import torch
import zmq

from pannier.attention.core import AttentionCore, Reply, Tensors
from pannier.attention.worker import AttentionWorker
from pannier.cli.link_cases import HEADER_BYTES, Plan, read_exactly
from pannier.net import SocketOptions, bind
from pannier.net.shm import SPIN_US
from pannier.runtime.threads import StopSignal
from pannier.wire import ComputeToAttention
from pannier.wire import messages as m

OPTIONS = SocketOptions(max_bytes=1 << 30)
LIFE = 1


class EchoCore(AttentionCore):
    """Answers a request with its queries, which it reads and writes as attention would; drops one-way pieces."""

    def receive(self, compute: str, message: ComputeToAttention, tensors: Tensors) -> Iterable[Reply]:  # noqa: ARG002
        """One reply to each piece."""
        if not isinstance(message, m.Piece):
            return
        frame = (message.life, message.session, message.step, message.lane, message.call)
        if message.is_request:
            yield m.Answer(*frame, 0.0, ()), [tensors[0].clone()]
        else:
            for tensor in tensors:  # into the cache
                tensor.clone()
            yield m.PieceWritten(*frame), []


def serve(folder: Path) -> None:
    """Print where everything listens as one JSON object, and serve until stdin ends."""
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))  # else it uses stdout
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    _gateway, gateway_at = bind(context, zmq.ROUTER, f"ipc://{folder}/gateway")
    listen = {
        "tcp": ("tcp://127.0.0.1:0", SPIN_US),
        "ipc": (f"ipc://{folder}/links", SPIN_US),
        "asleep": (f"ipc://{folder}/asleep", 0),
    }
    workers = {
        name: AttentionWorker(context, name, EchoCore(torch.device("cpu")), endpoint, OPTIONS, spin_us)
        for name, (endpoint, spin_us) in listen.items()
    }
    for worker in workers.values():
        worker.join(m.Welcome(LIFE, gateway_at, 1.0))
        threading.Thread(target=worker.loop, args=(StopSignal(),), daemon=True).start()
    plain = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_serve_plain, args=(plain,), daemon=True).start()
    places = {
        name: {"endpoint": worker.endpoint, "door": worker.door, "tcp": worker.tcp} for name, worker in workers.items()
    }
    print(json.dumps({**places, "plain": plain.getsockname()[1]}), flush=True)
    sys.stdin.read()
    os._exit(0)  # the loops have nothing to finish


def _serve_plain(listening: socket.socket) -> None:
    """Messages of the sizes that a plan says, echoed; of one-way ones only the last is answered, by one byte."""
    connection, _ = listening.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while (plan := Plan.read(connection)) is not None:
        buffer = memoryview(bytearray(HEADER_BYTES + plan.size))
        for _ in range(plan.count):
            read_exactly(connection, buffer)
            if plan.is_echoed:
                connection.sendall(buffer)
        connection.sendall(b"\0")


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
