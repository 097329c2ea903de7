"""What can go wrong between two sockets."""


class NetError(Exception):
    """Base of this package's errors; the text is one sentence for the user."""


class PortBusy(NetError):
    """The address is taken by another process."""


class Exposed(NetError):
    """The address can be reached from other hosts and nobody asked for that."""


class PeerGone(NetError):
    """The peer has left, or takes nothing any more."""
