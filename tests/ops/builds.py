"""The builds of the operators' C++ that this machine can run."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pannier.ops import native
from pannier.ops.chunk_attention import cpu as chunk_cpu
from pannier.ops.paged_attention import cpu as paged_cpu

TORCH = "torch"


def _runs(name: str) -> bool:
    try:
        native.choose(name, native.cpu_flags(), native.available())
    except ValueError:
        return False
    return True


RUNNABLE = [name for name in native.NEEDS if _runs(name)]
every_build = pytest.mark.parametrize("name", RUNNABLE)
"""Once with each; a test that asks for none is reported as skipped."""
every_form = pytest.mark.parametrize("name", [*RUNNABLE, TORCH])
"""Once with each, and once with what is there without any."""


@contextmanager
def operators_of(name: str) -> Iterator[None]:
    """The attention operators, on CPU, in that build or in torch's form."""
    built = None if name == TORCH else native.load(name)
    with pytest.MonkeyPatch.context() as patched:
        for form in (chunk_cpu, paged_cpu):
            patched.setattr(form, "library", lambda: built)
        yield
