"""Why there is no connection over plain TCP."""

from pannier.net.errors import NetError


class CannotTalk(NetError):
    """One of two ends doesn't offer it, or is not who it should be; the text says which."""
