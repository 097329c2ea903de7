"""Which form the operators take in this process, said once."""

import structlog
import torch

from pannier.ops.gpu import gpu_form
from pannier.ops.native import cpu_isa

log = structlog.get_logger()


def log_kernels(device: torch.device, lost: str) -> None:
    """Log the compiled operators in use on a device, or that there are none, and what is lost by that.

    Raises ValueError when a form is named that this device can't take.
    """
    form, reason = gpu_form(device) if device.type == "cuda" else cpu_isa()
    if form in (None, "torch"):
        log.warning("no compiled attention", lost=lost, reason=reason)
    else:
        log.info("compiled attention", form=form, reason=reason)
