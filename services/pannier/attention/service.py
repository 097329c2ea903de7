"""An attention worker as a process."""

from collections.abc import Sequence

import msgspec
import structlog
import torch

from pannier.attention.core import AttentionCore
from pannier.attention.emulated_network import EmulatedNetwork
from pannier.attention.pace import Pace, PacedDevice
from pannier.attention.past import DrawnCache
from pannier.attention.worker import AttentionWorker
from pannier.ops.kv_cache import KVCache
from pannier.ops.native import cpu_isa
from pannier.runtime.config import AttentionConfig
from pannier.runtime.kernels import log_kernels
from pannier.runtime.machine import kv_memory, native_dtypes, open_device, read_bandwidth
from pannier.runtime.service import in_thread, run_service
from pannier.runtime.worker_service import DataContext, Facts, Worker, WorkerService
from pannier.wire import Dtype
from pannier.wire import messages as m

log = structlog.get_logger()


def run(config: AttentionConfig) -> int:
    """Serve until told to stop; the process's exit code."""
    return run_service(AttentionService(config))


class AttentionService(WorkerService):
    """One attention worker."""

    role = "attention"

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self._config = config

    async def prepare(self, context: DataContext) -> tuple[Worker, Facts]:
        """Bind, then measure the device. Raises `DeviceError`, `PortBusy`."""
        config = self._config
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        device = open_device(config.device)
        pace, network = Pace.of(config), EmulatedNetwork.of(config)
        paced = None if pace is None else PacedDevice(pace)
        cache = DrawnCache if config.emulate_past else KVCache
        stretch = None if paced is None else paced.launch
        worker = AttentionWorker(
            context,
            config.name,
            AttentionCore(device, cache, stretch, strict=config.dtype_strict, tracer=self.tracer),
            config.listen,
            self.sockets.gateway,
            config.spin_us,
            self.sockets.links,
            config.listen_tcp,
            network=network,
            device=paced,
        )
        try:
            facts = await in_thread(
                attention_facts, device, config.memory, worker.endpoint, pace, config.emulate_dtypes, network
            )
            facts = msgspec.structs.replace(facts, door=worker.door, tcp=worker.tcp)
        except BaseException:
            worker.close()  # a context doesn't end before its sockets
            raise
        return worker, Facts(attention=facts)


def attention_facts(
    device: torch.device,
    memory: int | None,
    endpoint: str,
    pace: Pace | None = None,
    only: Sequence[str] | None = None,
    network: EmulatedNetwork | None = None,
) -> m.AttentionFacts:
    """What a worker on this device brings; `memory` None is a share of what is free. Raises `DeviceError`.

    With `only` it computes these of its dtypes natively, and float32.
    """
    log_kernels(device, "decode rows take several times as long")
    fewer = "" if only is None else f"natively {', '.join(only)}"
    emulated = ", ".join(str(each) for each in (pace, fewer, network) if each)
    if emulated:
        log.warning("the device or its network is emulated: no figure is their own", emulated=emulated)
    return m.AttentionFacts(
        device=f"{device} (emulated: {emulated})" if emulated else str(device),
        memory_bytes=kv_memory(device, memory),
        bandwidth=read_bandwidth(device) * (1.0 if pace is None else pace.rate),
        dtypes=tuple(d for d in kv_dtypes(device) if only is None or _stays(d, only)),
        endpoint=endpoint,
    )


def _stays(dtype: Dtype, only: Sequence[str]) -> bool:
    """Whether a device that computes `only` these natively reads it; 8 bits are converted on all of them."""
    return dtype.has_scales or dtype.name.lower() in ("float32", *only)


def kv_dtypes(device: torch.device) -> tuple[Dtype, ...]:
    """Element types of K and V that the operator reads as fast as memory gives them; arithmetic is in float32."""
    isa = cpu_isa().name if device.type == "cpu" else None
    if isa is None:
        return native_dtypes(device)
    halves = [Dtype.FLOAT16] * (isa != "generic")  # which widens them bit by bit
    return (Dtype.FLOAT32, Dtype.BFLOAT16, *halves, Dtype.INT8, Dtype.FLOAT8_E4M3)
