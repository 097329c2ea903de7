"""Why two processes can't share memory."""

from pannier.net.errors import NetError


class CannotShare(NetError):
    """They are not on one host, not of one user, or lack what it takes; the text says which."""
