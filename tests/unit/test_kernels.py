"""Whoever runs operators says in which form."""

import pytest
import torch
from structlog.testing import capture_logs

from pannier.ops.gpu import GpuForm
from pannier.ops.native import CpuIsa
from pannier.runtime import kernels


@pytest.mark.parametrize(
    ("isa", "said"),
    [
        (CpuIsa("avx2", "it is"), {"event": "compiled attention", "form": "avx2", "reason": "it is"}),
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


@pytest.mark.parametrize("form", ["triton", "torch"])
def test_so_is_the_form_on_a_gpu(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's operators put together are what is left without Triton."""
    monkeypatch.setattr(kernels, "gpu_form", lambda _: GpuForm(form, "so it is"))
    with capture_logs() as logs:
        kernels.log_kernels(torch.device("cuda"), "time")
    said = {"event": "no compiled attention", "lost": "time"} if form == "torch" else {"event": "compiled attention"}
    rest = {"log_level": "warning"} if form == "torch" else {"log_level": "info", "form": form}
    assert logs == [{**said, "reason": "so it is", **rest}]
