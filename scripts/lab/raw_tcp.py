"""What a network gives to plain TCP: one connection, one sender, no message format.

As a script it is one of the two ends: `raw_tcp.py serve ADDRESS` or `raw_tcp.py measure ADDRESS PORT SECONDS`.
"""

import json
import socket
import subprocess
import sys
import time
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from scripts.lab.network import Network

ROUND_TRIPS = 200
PIECE = 256 << 10
PING, BULK = b".", b"!"


class RawTcp(NamedTuple):
    """Rate one way, and the median of round trips of one byte."""

    gigabits: float
    round_trip_us: float


def raw_tcp(network: "Network", sender: str, receiver: str, seconds: float = 1.0) -> RawTcp:
    """From one host to another."""
    address, end = network.address(receiver), [sys.executable, __file__]
    command = network.inside(receiver, [*end, "serve", address])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        try:
            port = serving.stdout.readline().strip()
            command = network.inside(sender, [*end, "measure", address, port, str(seconds)])
            said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60 + seconds)
        finally:
            serving.kill()
    return RawTcp(**json.loads(said.stdout))


def _serve(address: str) -> None:
    """Say which port; send back one byte at a time; then say how many came behind `BULK`."""
    with socket.create_server((address, 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        connection, _ = listening.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while (byte := connection.recv(1)) != BULK:
            connection.sendall(byte)
        buffer, received = bytearray(PIECE), 0
        while size := connection.recv_into(buffer):
            received += size
        connection.sendall(received.to_bytes(8, "big"))


def _measure(address: str, port: int, seconds: float) -> RawTcp:
    with socket.create_connection((address, port), timeout=30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        round_trips = [_round_trip(connection) for _ in range(ROUND_TRIPS)]
        connection.sendall(BULK)
        piece = bytes(PIECE)
        started = time.perf_counter()
        while time.perf_counter() < started + seconds:
            connection.sendall(piece)
        connection.shutdown(socket.SHUT_WR)
        received = int.from_bytes(connection.recv(8), "big")
        taken = time.perf_counter() - started
    return RawTcp(8 * received / taken / 1e9, median(round_trips) * 1e6)


def _round_trip(connection: socket.socket) -> float:
    started = time.perf_counter()
    connection.sendall(PING)
    connection.recv(1)
    return time.perf_counter() - started


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", address]:
            _serve(address)
        case ["measure", address, port, seconds]:
            print(json.dumps(_measure(address, int(port), float(seconds))._asdict()))
        case _:
            sys.exit(__doc__)
