"""A compute worker as a process."""

from collections.abc import Callable

import structlog
import torch

from pannier.compute.emulated_device import StepTime
from pannier.compute.link import LocalAttention
from pannier.compute.load import Loaded, load_model
from pannier.compute.stage_link import StageLink
from pannier.compute.worker import ComputeWorker
from pannier.net.shm import CannotShare, functions
from pannier.runtime.config import ComputeConfig, LinkKind
from pannier.runtime.model_source import ModelSource, resolve
from pannier.runtime.service import in_thread, run_service
from pannier.runtime.worker_service import DataContext, Facts, Worker, WorkerService
from pannier.slicer import WHOLE, SlicedModel, Stage
from pannier.wire import messages as m
from pannier.wire.tensors import WIRE_DTYPES

log = structlog.get_logger()

MakeLocal = Callable[[], tuple[LocalAttention, m.AttentionFacts]]


def run(config: ComputeConfig, local: MakeLocal | None = None) -> int:
    """Run until told to stop; the process's exit code.

    With `local`, attention runs in this process too; it is made after the weights have taken their memory.
    """
    return run_service(ComputeService(config, local))


class ComputeService(WorkerService):
    """One compute worker."""

    role = "compute"

    def __init__(self, config: ComputeConfig, local: MakeLocal | None = None) -> None:
        super().__init__(config)
        self._config = config
        self._local = local

    async def prepare(self, context: DataContext) -> tuple[Worker, Facts]:
        """Load and slice the model. Raises `ModelError`, `DeviceError`."""
        config = self._config
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        check_link(config.link)
        source = resolve(config.model)
        loaded = await in_thread(load_model, config, source)
        core, attention = await in_thread(self._local) if self._local is not None else (None, None)
        stage = Stage(config.stage, config.stages)
        stage_link = None if stage == WHOLE else StageLink(context, config.listen, self.sockets.links)
        worker = ComputeWorker(
            context,
            config.name,
            loaded.model,
            num_lanes(config),
            self.sockets.gateway,
            core,
            config.link,
            config.spin_us,
            config.flows,
            self.sockets.links,
            stage=stage,
            stage_link=stage_link,
            step_time=StepTime.of(config),
            timeline=config.timeline,
            strict=config.dtype_strict,
            tracer=self.tracer,
        )
        endpoint = "" if stage_link is None else stage_link.endpoint
        return worker, Facts(compute_facts(config, source, loaded, endpoint), attention)


def check_link(link: LinkKind) -> None:
    """Say once if there can be no shared memory with anybody. Raises `CannotShare` if nothing else is wanted."""
    try:
        functions()
    except CannotShare as error:
        if link == "shm":
            raise
        if link == "auto":
            log.warning("no shared memory: links within this host use sockets", reason=str(error))


def num_lanes(config: ComputeConfig) -> int:
    """Lanes of a worker: as many again for every further stage, which would wait for the others without."""
    return config.lanes * config.stages


def compute_facts(config: ComputeConfig, source: ModelSource, loaded: Loaded, endpoint: str) -> m.ComputeFacts:
    """The model's geometry and how it runs here; `endpoint` is where the stage before this one comes in."""
    model = loaded.model
    step_time = StepTime.of(config)
    slower = "" if step_time is None else f"{step_time}, results mean nothing"
    fewer = "" if config.emulate_dtypes is None else f"natively {', '.join(config.emulate_dtypes)}"
    emulated = ", ".join(filter(None, (slower, fewer)))
    if emulated:
        log.warning("the device is emulated: no figure is its own", emulated=emulated)
    return m.ComputeFacts(
        model=source.name,
        digest=source.digest,
        device=f"{model.device} (emulated: {emulated})" if emulated else str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        wire_dtype=WIRE_DTYPES[model.dtype],
        lanes=num_lanes(config),
        calls=tuple(
            m.CallGeometry(c.q_heads, c.kv_heads, c.k_size, c.v_size, c.scale, c.window, c.softcap) for c in model.calls
        ),
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        weight_bytes=model.weight_bytes,
        dtypes=tuple(m.DtypeChoice(role, choice.dtype, choice.reason) for role, choice in loaded.dtypes.items()),
        stage=None if config.stages == 1 else _stage_facts(config, model, endpoint),
    )


def _stage_facts(config: ComputeConfig, model: SlicedModel, endpoint: str) -> m.StageFacts:
    calls = m.CallRange(model.span.start, min(model.span.stop, len(model.calls)))
    return m.StageFacts(config.stage, config.stages, calls, endpoint)
