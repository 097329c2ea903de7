"""What can go wrong between two sockets."""


class NetError(Exception):
    """Base of this package's errors; the text is one sentence for the user."""


class PortBusy(NetError):
    """The address is taken by another process."""


class Exposed(NetError):
    """The address can be reached from other hosts and nobody asked for that."""


class BadKeys(NetError):
    """A key file is missing, malformed or open to others."""


class KeysRefused(NetError):
    """The peer and this process can't agree on keys, and never will."""


class PeerGone(NetError):
    """The peer has left, or takes nothing any more."""
