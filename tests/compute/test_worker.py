"""The step thread over real sockets, against a gateway and an attention worker by hand."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq

from pannier.compute.worker import ComputeWorker
from pannier.net import SocketOptions, bind
from pannier.runtime.threads import DataThread
from pannier.slicer import SlicedModel
from pannier.wire import Decoder, WorkerToGatewayData, encode
from pannier.wire import messages as m

pytestmark = pytest.mark.timeout(60)
PATIENCE_S = 10.0


def until(done: Callable[[], object]) -> None:
    """Wait until something holds."""
    end = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_noise_on_a_link_is_counted_and_survived(sliced: SlicedModel, tmp_path: Path) -> None:
    """What an attention worker sends that is no message ends neither the link nor the process."""
    context = zmq.Context()
    gateway, gateway_at = bind(context, zmq.ROUTER, f"ipc://{tmp_path}/gateway")
    attention, attention_at = bind(context, zmq.ROUTER, f"ipc://{tmp_path}/attention")
    decoder: Decoder[Any] = Decoder(WorkerToGatewayData)
    worker = ComputeWorker(context, "c", sliced, 1, SocketOptions())
    worker.join(m.Welcome(1, gateway_at, 1.0))
    thread = DataThread("compute", worker.loop)
    thread.start()

    def said() -> Any:
        assert gateway.poll(int(PATIENCE_S * 1000))
        return decoder.decode(gateway.recv_multipart()[1:])[0]

    def is_sent(noise: bytes) -> bool:
        try:
            attention.send_multipart([b"c", noise])
        except zmq.ZMQError:
            return False  # it has not dialled yet
        return True

    try:
        assert said() == m.Join(1)
        shard = m.ShardAddress("a", attention_at, ())
        gateway.send_multipart([b"c", *encode(m.ComputeAssign(1, 1, (m.GroupAddress(0, (shard,)),), 64, 16))])
        assert isinstance(said(), m.Ready)
        for noise in (b"", b"noise", b"\xc1" * 100):
            until(partial(is_sent, noise))
        until(lambda: worker.counters().get("refused_frames") == 3)
        gateway.send_multipart([b"c", *encode(m.AbortStep(1, 1, 5, 0))])
        assert said() == m.StepAborted(1, 1, 5, 0)
    finally:
        thread.stop()
        gateway.close()
        attention.close()
        context.term()
