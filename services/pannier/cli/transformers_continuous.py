"""transformers' continuous batching, set as well as its documentation and this machine allow.

Its paged attention has no kernel for CPUs: every query of a batch is multiplied with the stored tokens of all requests
in it, and a mask drops what belongs to others. So a step's attention grows with the square of its requests, and how
many of them are best depends on model and lengths. It is tried.
"""

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from pannier.cli.load import Ask

if TYPE_CHECKING:
    from transformers.generation.continuous_batching import ContinuousBatchingManager
    from transformers.generation.continuous_batching.requests import GenerationOutput

PAGE_SIZE = 32
SPARE_PAGES = 8
LOOK_S = 1.0


@dataclass(frozen=True)
class Setting:
    """What is tried: its names are those of transformers."""

    attn_implementation: str
    max_batch_tokens: int
    max_requests_per_batch: int


CANDIDATES = (
    Setting("sdpa", 256, 8),
    Setting("sdpa", 256, 64),
    Setting("sdpa", 1024, 64),
    Setting("paged|eager", 128, 16),
)


class Continuous:
    """Runs its first load, the warm-up, with every candidate, and all later ones with the fastest."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._setting: Setting | None = None
        self.settings: dict[str, Any] = {}

    def run(self, asks: list[Ask]) -> list[list[float]]:
        """When each request's tokens came."""
        if self._setting is None:
            tried = {each: max(times[-1] for times in self._run(each, asks)) for each in CANDIDATES}
            self._setting = min(tried, key=lambda each: tried[each])
            self.settings = {
                **asdict(self._setting),
                "page_size": PAGE_SIZE,
                "num_blocks": "as the load needs",
                "warm_up_s": {" ".join(map(str, asdict(each).values())): round(s, 2) for each, s in tried.items()},
            }
        return self._run(self._setting, asks)

    def _run(self, setting: Setting, asks: list[Ask]) -> list[list[float]]:
        self._model.set_attn_implementation(setting.attn_implementation)
        opened = self._model.continuous_batching_context_manager(  # type: ignore[operator]
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=_config(setting, asks),
        )
        with opened as manager:  # starting it is not measured
            started = time.perf_counter()
            numbers = {
                manager.add_request(ask.prompt, max_new_tokens=ask.output, record_timestamps=True): number
                for number, ask in enumerate(asks)
            }
            arrivals: list[list[float]] = [[] for _ in asks]
            for _ in asks:
                result = _next_result(manager)
                assert result.timestamps is not None
                assert len(result.timestamps) == len(result.generated_tokens)
                arrivals[numbers[result.request_id]] = [each - started for each in result.timestamps]
        return arrivals


def _config(setting: Setting, asks: list[Ask]) -> ContinuousBatchingConfig:
    """Room for all requests at once, so that none is put off or evicted for want of it.

    Nothing is shared among random prompts. There is neither flash attention nor a graph on a CPU, and compiling
    (`default_compile_level`) makes it slower.
    """
    return ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=sum(-(-(len(ask.prompt) + ask.output) // PAGE_SIZE) for ask in asks) + SPARE_PAGES,
        safety_margin=0.0,
        max_batch_tokens=setting.max_batch_tokens,
        max_requests_per_batch=setting.max_requests_per_batch,
        allow_block_sharing=False,
    )


def _next_result(manager: "ContinuousBatchingManager") -> "GenerationOutput":
    """The next request that is done. Raises `RuntimeError` when it failed, or none can come any more."""
    while (result := manager.get_result(timeout=LOOK_S)) is None:
        if not manager.is_running():
            raise RuntimeError("transformers' generation has ended; what it wrote above says why")
    if result.error is not None:
        raise RuntimeError(f"request {result.request_id} failed: {result.error}")
    return result
