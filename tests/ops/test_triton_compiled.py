"""The Triton kernels compile for GPUs that aren't here, and fit them: what the interpreter can't tell."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton, which the extra `dev` brings"),
]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("capability", "shared_kib", "tensor_cores"), [(75, 64, False), (90, 99, True)])
def test_every_kernel_fits_the_shared_memory_and_the_registers(
    capability: int, shared_kib: int, tensor_cores: bool, tmp_path: Path
) -> None:
    """Turing has 64 KiB for a program; of the others the least is 99. Spilled registers would go to slow memory."""
    said = subprocess.run(
        [sys.executable, "-m", "tests.ops.compiled", str(capability)],
        cwd=ROOT,
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    compiled = json.loads(said.stdout)
    assert len(compiled) > 40
    assert [one for one in compiled if one["shared"] > shared_kib * 1024] == []
    assert [one for one in compiled if one["stack"]] == []
    halves = [one for one in compiled if ".attend" in one["case"] and "float32" not in one["case"]]
    assert {one["tensor_cores"] for one in halves} == {tensor_cores}
