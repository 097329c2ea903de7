"""Which form the operators take on a GPU is decided once, and said; no GPU is needed to test how."""

import pytest
import torch

from pannier.ops.gpu import GpuForm, choose, uses_triton

WORKS = {"triton": None, "flashinfer": None, "torch": None}
NO_TRITON = {"triton": "triton isn't installed", "flashinfer": "triton isn't installed", "torch": None}


def test_triton_is_taken_where_it_works() -> None:
    """Also where FlashInfer is installed: that one has to be asked for."""
    assert choose(None, WORKS).name == "triton"
    assert choose("", WORKS).name == "triton"


@pytest.mark.parametrize("name", WORKS)
def test_a_named_form_is_taken(name: str) -> None:
    """The reason says who named it."""
    assert choose(name, WORKS) == GpuForm(name, f"PANNIER_GPU_FORM={name}")


def test_without_triton_torch_takes_over_and_the_reason_is_kept() -> None:
    """Whoever logs it can say what is missing."""
    assert choose(None, NO_TRITON) == GpuForm("torch", "triton isn't installed")


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("cuda", "PANNIER_GPU_FORM is 'cuda'; known are triton, flashinfer, torch"),
        ("triton", "PANNIER_GPU_FORM is 'triton', but triton isn't installed"),
        ("flashinfer", "PANNIER_GPU_FORM is 'flashinfer', but triton isn't installed"),
    ],
)
def test_what_is_named_and_cannot_be_is_one_error(named: str, message: str) -> None:
    """Nothing else is taken instead."""
    with pytest.raises(ValueError, match=message):
        choose(named, NO_TRITON)


def test_a_cpu_never_asks() -> None:
    """Nothing of CUDA is looked at for tensors on the CPU."""
    assert not uses_triton(torch.device("cpu"))
