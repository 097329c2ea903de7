"""Which form the operators take in this process, said once."""

import structlog
import torch

from pannier.ops.native import cpu_isa

log = structlog.get_logger()


def log_kernels(device: torch.device, lost: str) -> None:
    """Log the compiled operators in use on a CPU, or that there are none, and what is lost by that."""
    if device.type != "cpu":
        return
    isa, reason = cpu_isa()
    if isa is None:
        log.warning("no compiled attention", lost=lost, reason=reason)
    else:
        log.info("compiled attention", isa=isa, reason=reason)
