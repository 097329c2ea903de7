"""Which sockets of a role are encrypted, and with which keys.

=========  =======================================  =====================================
encrypt    control, steps and clients               links of compute and attention workers
=========  =======================================  =====================================
all        encrypted                                encrypted
control    encrypted                                in the clear
none       in the clear                             in the clear
=========  =======================================  =====================================
"""

from typing import NamedTuple

from pannier.net import SocketOptions
from pannier.net.keys import gateway_keys, worker_keys
from pannier.runtime.config import AttentionConfig, ComputeConfig, GatewayConfig

MAX_CONTROL_BYTES = 16 << 20
MAX_DATA_BYTES = 256 << 20
MAX_LINK_BYTES = 4 << 30
DATA_SILENCE_S = 60.0
"""Of connections to the gateway that carry steps, which nobody sends again: it should have lost patience before."""
LINK_SILENCE_S = 30.0
"""Of links. Steps whose link is lost are repeated, so this may be shorter; but who computes for so long reads nothing
meanwhile. Longer than the usual patience of a gateway, which then finds first that a whole host is cut off."""


class GatewaySockets(NamedTuple):
    """Options of what a gateway listens on."""

    control: SocketOptions
    data: SocketOptions
    clients: SocketOptions


class WorkerSockets(NamedTuple):
    """Options of a worker's connections to the gateway, and of its links."""

    gateway: SocketOptions
    links: SocketOptions


def gateway_sockets(config: GatewayConfig) -> GatewaySockets:
    """Raises `BadKeys`."""
    keys = gateway_keys(config.used_keys) if config.used_keys is not None else None
    workers, clients = keys or (None, None)
    queue, insecure = config.queue, config.insecure
    return GatewaySockets(
        SocketOptions(queue, MAX_CONTROL_BYTES, insecure, curve=workers),
        SocketOptions(queue, MAX_DATA_BYTES, insecure, curve=workers, silence_s=DATA_SILENCE_S),
        SocketOptions(queue, MAX_CONTROL_BYTES, insecure, curve=clients),
    )


def worker_sockets(config: ComputeConfig | AttentionConfig) -> WorkerSockets:
    """Raises `BadKeys`."""
    keys = worker_keys(config.used_keys) if config.used_keys is not None else None
    gateway, links = keys or (None, None)
    queue, insecure = config.queue, config.insecure
    return WorkerSockets(
        SocketOptions(queue, MAX_LINK_BYTES, insecure, curve=gateway, silence_s=DATA_SILENCE_S),
        # Who encrypts control only has said that the network of the links is private.
        SocketOptions(
            queue,
            MAX_LINK_BYTES,
            insecure or config.encrypt == "control",
            curve=links if config.encrypts_links else None,
            silence_s=LINK_SILENCE_S,
        ),
    )
