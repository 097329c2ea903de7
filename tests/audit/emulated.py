"""A processor without bfloat16, as torch sees it (the caller sets what it may use): what float32 gains, and the bound.

Prints {"gain", "bound", "fallbacks"} of a prompt, in which arithmetic counts.
"""

import json
import time
from typing import Any

import torch

from pannier.audit import Device, Workload, audit
from pannier.audit.clock import Clock
from tests.audit.conftest import llama

SIZES: dict[str, Any] = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2}
OLD = Device("an old processor", "cpu", ("float32",), 40e9)


def main() -> None:
    """Audit a model in bfloat16, then in float32."""
    torch.set_num_threads(1)
    Clock.now = staticmethod(time.thread_time)
    work = Workload(steps=1)
    found, fixed = (audit(llama(dtype, **SIZES), work, device=OLD) for dtype in (torch.bfloat16, torch.float32))
    gain = 1 - fixed.recording.step_s("prefill") / found.recording.step_s("prefill")
    bound = found.fixes[0].amounts["prefill"].gain
    how = str(found.findings[0].site.how)
    print(json.dumps({"gain": gain, "bound": bound, "how": how, "fallbacks": found.fallbacks}))  # noqa: T201


if __name__ == "__main__":
    main()
