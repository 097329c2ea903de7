"""What sockets of each role bear."""

from pannier.gateway.service import SILENT_AFTER
from pannier.runtime.config import AttentionConfig, ComputeConfig, GatewayConfig
from pannier.runtime.encryption import gateway_sockets, worker_sockets


def test_connections_of_steps_outlive_the_gateways_patience() -> None:
    """What is lost on them stays lost while hearts beat; a worker that is silent for longer is given up anyway."""
    config = GatewayConfig(model="m", heartbeat_s=5.0)
    workers = [worker_sockets(kind) for kind in (ComputeConfig(model="m"), AttentionConfig())]
    bearing = [gateway_sockets(config).data, *(sockets.gateway for sockets in workers)]
    assert min(options.silence_s for options in bearing) > SILENT_AFTER * config.heartbeat_s
    assert gateway_sockets(config).clients.silence_s < min(options.silence_s for options in bearing)


def test_links_outlive_the_usual_patience_of_a_gateway() -> None:
    """So that a host that is cut off is missed, before others are asked to reach it again; and no more than thrice."""
    patience_s = SILENT_AFTER * GatewayConfig(model="m").heartbeat_s
    for sockets in (worker_sockets(ComputeConfig(model="m")), worker_sockets(AttentionConfig())):
        assert patience_s < sockets.links.silence_s <= 3 * patience_s
