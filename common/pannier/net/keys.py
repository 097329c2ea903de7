"""The key files of a stack: what is made once, and what each role reads of it.

::

    FOLDER/gateway.secret        the gateway's
    FOLDER/gateway.public        by which workers and clients know it
    FOLDER/worker.secret         all workers'; attention workers listen with it too
    FOLDER/worker.public         by which the gateway and workers know workers
    FOLDER/client.secret         of the client named client
    FOLDER/clients/NAME.public   the clients that the gateway serves
    FOLDER/NAME/                 the folder of another client: client.secret and gateway.public

A file has one key, 40 characters of Z85; secret ones may be read by their owner only.
"""

import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from pannier.net.curve import Curve
from pannier.net.errors import BadKeys

GATEWAY, WORKER, CLIENT = "gateway", "worker", "client"
CLIENTS = "clients"
KEY_LENGTH = 40


class GatewayKeys(NamedTuple):
    """Of a gateway: towards workers and towards clients."""

    workers: Curve
    clients: Curve


class WorkerKeys(NamedTuple):
    """Of a worker: towards the gateway and towards other workers."""

    gateway: Curve
    links: Curve


def gateway_keys(folder: Path) -> GatewayKeys:
    """Raises `BadKeys`."""
    secret = _secret(folder / f"{GATEWAY}.secret")
    clients = sorted((folder / CLIENTS).glob("*.public"))
    if not clients:
        raise BadKeys(f"{folder / CLIENTS} has no NAME.public: nobody could talk to the gateway; run pannier keys")
    workers = frozenset({_public(folder / f"{WORKER}.public")})
    return GatewayKeys(Curve(secret, workers), Curve(secret, frozenset(map(_public, clients))))


def worker_keys(folder: Path) -> WorkerKeys:
    """Raises `BadKeys`."""
    secret = _secret(folder / f"{WORKER}.secret")
    gateway, worker = _public(folder / f"{GATEWAY}.public"), _public(folder / f"{WORKER}.public")
    return WorkerKeys(Curve(secret, frozenset({gateway})), Curve(secret, frozenset({worker})))


def client_keys(folder: Path) -> Curve:
    """Raises `BadKeys`."""
    return Curve(_secret(folder / f"{CLIENT}.secret"), frozenset({_public(folder / f"{GATEWAY}.public")}))


def make_keys(folder: Path, clients: Iterable[str] = ()) -> list[Path]:
    """Make what is missing in a folder, and the folders of these clients too; the files that were made.

    What is there already is kept, so that more clients can be added later. Raises `BadKeys`.
    """
    _check_names(clients)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / CLIENTS).mkdir(exist_ok=True)
        made = [
            *_pair(folder / f"{GATEWAY}.secret", folder / f"{GATEWAY}.public"),
            *_pair(folder / f"{WORKER}.secret", folder / f"{WORKER}.public"),
            *_client_pair(folder, folder, CLIENT),
        ]
        for name in clients:
            made += _client_folder(folder, name)
    except OSError as error:
        raise BadKeys(f"can't make keys in {folder}: {error.filename}: {error.strerror}") from error
    return made


def _client_folder(folder: Path, name: str) -> list[Path]:
    (folder / name).mkdir(mode=0o700, exist_ok=True)
    made = _client_pair(folder, folder / name, name)
    gateway = folder / name / f"{GATEWAY}.public"
    if not gateway.exists():
        made.append(_write(gateway, _public(folder / f"{GATEWAY}.public"), 0o644))
    return made


def _client_pair(folder: Path, own_folder: Path, name: str) -> list[Path]:
    """A client whose public key was removed has been turned away: it isn't made again."""
    secret = own_folder / f"{CLIENT}.secret"
    return [] if secret.exists() else _pair(secret, folder / CLIENTS / f"{name}.public")


def _check_names(clients: Iterable[str]) -> None:
    for name in clients:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) or name in (CLIENT, CLIENTS):
            raise BadKeys(
                f"{name!r} can't be a client's name; it must be 1 to 64 letters, digits, dashes or underscores, "
                f"and neither {CLIENT} nor {CLIENTS}"
            )


def _pair(secret: Path, public: Path) -> list[Path]:
    """Make the files that are missing of a pair. A public key follows from its secret one, and never the reverse."""
    made = []
    if not secret.exists():
        if public.exists():
            raise BadKeys(f"{public} is there and {secret} is not; remove the one, or bring the other back")
        made.append(_write(secret, zmq.curve_keypair()[1], 0o600))
    if not public.exists():
        made.append(_write(public, zmq.curve_public(_secret(secret)), 0o644))
    return made


def _write(path: Path, key: bytes, mode: int) -> Path:
    # Made with its mode: at no time could others have opened it.
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(key + b"\n")
    return path


def _secret(path: Path) -> bytes:
    key = _key(path)
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise BadKeys(
            f"{path} is open to others (mode {mode:04o}), so it may be secret no more; it must have mode 0600"
        )
    return key


def _public(path: Path) -> bytes:
    return _key(path)


def _key(path: Path) -> bytes:
    """Raises `BadKeys` naming the file, and what would be legal."""
    if not zmq.has("curve"):
        raise BadKeys(f"{path} is of no use: this build of ZeroMQ can't encrypt; install pyzmq from its wheels")
    try:
        key = path.read_bytes().strip()
    except FileNotFoundError as error:
        raise BadKeys(f"{path} is missing; pannier keys makes it") from error
    except OSError as error:
        raise BadKeys(f"{path} can't be read: {error.strerror}") from error
    if not _is_key(key):
        raise BadKeys(f"{path} is no key; it must have {KEY_LENGTH} characters of Z85, as pannier keys writes them")
    return key


def _is_key(text: bytes) -> bool:
    try:
        z85.decode(text)
    except (ValueError, KeyError, struct.error):  # a length, a character, and a number that Z85 doesn't have
        return False
    return len(text) == KEY_LENGTH
