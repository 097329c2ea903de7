"""Names of connections, where one peer has several to another: the first bears the peer's very name."""

MARK = "#"
"""Between the name and a number; no worker's name contains it."""


def flow_names(peer: str, count: int) -> list[str]:
    """One name for each connection."""
    return [peer, *(f"{peer}{MARK}{number}" for number in range(1, count))]


def peer_of_flow(identity: bytes) -> str:
    """Whose connection it is."""
    return identity.decode(errors="backslashreplace").partition(MARK)[0]
