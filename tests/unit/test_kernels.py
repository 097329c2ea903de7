"""Whoever runs operators says in which form."""

import pytest
import torch
from structlog.testing import capture_logs

from pannier.ops.native import CpuIsa
from pannier.runtime import kernels


@pytest.mark.parametrize(
    ("isa", "said"),
    [
        (CpuIsa("avx2", "it is"), {"event": "compiled attention", "isa": "avx2", "reason": "it is"}),
        (CpuIsa(None, "no compiler"), {"event": "no compiled attention", "lost": "time", "reason": "no compiler"}),
    ],
)
def test_the_build_or_what_is_lost_without_one_is_logged(
    isa: CpuIsa, said: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fallback is a warning."""
    monkeypatch.setattr(kernels, "cpu_isa", lambda: isa)
    with capture_logs() as logs:
        kernels.log_kernels(torch.device("cpu"), "time")
    assert logs == [{**said, "log_level": "info" if isa.name else "warning"}]


def test_on_a_gpu_there_is_nothing_to_say() -> None:
    with capture_logs() as logs:
        kernels.log_kernels(torch.device("cuda"), "time")
    assert not logs
