"""Key files: what is made, what is kept, and what is refused."""

import stat
from pathlib import Path

import pytest
import zmq

from pannier.net import BadKeys
from pannier.net.keys import client_keys, gateway_keys, make_keys, worker_keys


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "keys"
    make_keys(made, ["alice"])
    return made


def test_the_parts_fit(folder: Path) -> None:
    """Each end knows the other by its public key, and workers know one another."""
    gateway, worker = gateway_keys(folder), worker_keys(folder)
    clients = [client_keys(folder), client_keys(folder / "alice")]
    assert gateway.workers.peers == worker.links.peers == {zmq.curve_public(worker.gateway.secret)}
    assert gateway.clients.peers == {zmq.curve_public(client.secret) for client in clients}
    for end in (worker.gateway, *clients):
        assert end.peers == {zmq.curve_public(gateway.workers.secret)}
    assert len({gateway.workers.secret, worker.gateway.secret, *(client.secret for client in clients)}) == 4


def test_secrets_are_the_owners_alone(folder: Path) -> None:
    """Whatever the umask says."""
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*.secret")}
    assert modes == {"gateway.secret": 0o600, "worker.secret": 0o600, "client.secret": 0o600}


def test_what_is_there_is_kept(folder: Path) -> None:
    """More clients can be added; a client that was turned away stays so."""
    before = {path: path.read_bytes() for path in folder.rglob("*.*")}
    (folder / "clients" / "alice.public").unlink()
    made = make_keys(folder, ["alice", "bob"])
    assert sorted(path.relative_to(folder).as_posix() for path in made) == [
        "bob/client.secret", "bob/gateway.public", "clients/bob.public",
    ]  # fmt: skip
    assert all(path.read_bytes() == key for path, key in before.items() if path.name != "alice.public")
    assert not (folder / "clients" / "alice.public").exists()


def test_a_public_key_without_its_secret_one_is_not_replaced(folder: Path) -> None:
    """Others may know it."""
    (folder / "worker.secret").unlink()
    with pytest.raises(BadKeys, match=r"worker\.public is there and .*worker\.secret is not"):
        make_keys(folder)


@pytest.mark.parametrize("name", ["", "client", "clients", "..", "a/b", "x" * 65])
def test_a_client_has_a_name_that_can_be_a_file(tmp_path: Path, name: str) -> None:
    """And takes nobody else's place."""
    with pytest.raises(BadKeys, match="can't be a client's name; it must be"):
        make_keys(tmp_path, [name])


def test_a_missing_file_is_named(folder: Path) -> None:
    """With what makes it."""
    (folder / "gateway.public").unlink()
    with pytest.raises(BadKeys, match=rf"{folder}/gateway\.public is missing; pannier keys makes it"):
        worker_keys(folder)


def test_a_secret_that_others_can_read_is_refused(folder: Path) -> None:
    """With its mode, and the one that it must have."""
    (folder / "client.secret").chmod(0o640)
    with pytest.raises(BadKeys, match=r"client\.secret is open to others \(mode 0640\).* must have mode 0600"):
        client_keys(folder)


@pytest.mark.parametrize("text", ["", "short", "x" * 41, "~" * 40, "é" * 20, "#" * 40])
def test_what_is_no_key_is_refused(folder: Path, text: str) -> None:
    """With what a key looks like."""
    (folder / "worker.public").write_text(text)
    with pytest.raises(BadKeys, match=r"worker\.public is no key; it must have 40 characters of Z85"):
        gateway_keys(folder)


def test_a_gateway_without_clients_is_refused(folder: Path) -> None:
    """Nobody could ask it anything."""
    for path in (folder / "clients").iterdir():
        path.unlink()
    with pytest.raises(BadKeys, match=r"clients has no NAME\.public"):
        gateway_keys(folder)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """Is named with the reason."""
    (tmp_path / "file").write_text("")
    with pytest.raises(BadKeys, match=r"can't make keys in .*file"):
        make_keys(tmp_path / "file")
