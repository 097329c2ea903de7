"""What is known about devices."""

import pytest
import torch

from pannier.runtime.errors import DeviceError
from pannier.runtime.host import host_cores, host_memory
from pannier.runtime.machine import kv_memory, native_dtypes, open_device, read_bandwidth
from pannier.wire import Dtype

CPU = torch.device("cpu")


def test_the_host_has_memory_and_cores() -> None:
    memory = host_memory()
    assert 0 < memory.free <= memory.total
    assert host_cores() >= 1


def test_float32_is_native_everywhere_and_first() -> None:
    assert native_dtypes(CPU)[0] is Dtype.FLOAT32


def test_bandwidth_is_of_a_real_memory() -> None:
    """Between a slow single core and the best server, in bytes per second."""
    assert 5e8 < read_bandwidth(CPU) < 5e12


def test_a_device_that_is_not_there_is_refused() -> None:
    """The sentence says what there is."""
    with pytest.raises(DeviceError, match=r"no device cuda:63; this machine has cpu"):
        open_device("cuda:63")


def test_kv_memory_is_what_was_asked_for_or_a_share() -> None:
    free = host_memory().free
    assert kv_memory(CPU, 1 << 20) == 1 << 20
    assert 0 < kv_memory(CPU, None) < free


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"less than the .* MiB wanted for KV blocks"):
        kv_memory(CPU, 1 << 50)
