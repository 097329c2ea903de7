"""The builds of the operators' C++ that this machine can run."""

import pytest

from pannier.ops import native


def _runs(name: str) -> bool:
    try:
        native.choose(name, native.cpu_flags(), native.available())
    except ValueError:
        return False
    return True


every_build = pytest.mark.parametrize("name", [name for name in native.NEEDS if _runs(name)])
"""Once with each; a test that asks for none is reported as skipped."""
