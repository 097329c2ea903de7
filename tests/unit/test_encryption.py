"""What sockets of each role bear."""

from pannier.gateway.service import SILENT_AFTER
from pannier.runtime.config import AttentionConfig, ComputeConfig, GatewayConfig
from pannier.runtime.encryption import gateway_sockets, worker_sockets


def test_connections_of_steps_and_tensors_outlive_the_gateways_patience() -> None:
    """What is lost on them stays lost while hearts beat; a worker that is silent for longer is given up anyway."""
    config = GatewayConfig(model="m", heartbeat_s=5.0)
    workers = [worker_sockets(kind) for kind in (ComputeConfig(model="m"), AttentionConfig())]
    bearing = [gateway_sockets(config).data, *(sockets.gateway for sockets in workers), *(s.links for s in workers)]
    assert min(options.silence_s for options in bearing) > SILENT_AFTER * config.heartbeat_s
    assert gateway_sockets(config).clients.silence_s < min(options.silence_s for options in bearing)
