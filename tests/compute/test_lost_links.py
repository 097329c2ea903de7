"""What a compute worker says of its links as a session begins, and when one is lost."""

import pytest

from pannier.compute.link import Link
from pannier.net.errors import NetError
from pannier.slicer import SlicedModel
from pannier.wire import Dtype
from pannier.wire import messages as m

from .rig import BLOCK_SIZE, LIFE, HeldLink, Stack, texts

pytestmark = pytest.mark.timeout(120)


def test_a_session_is_ready_when_all_its_links_are_up(sliced: SlicedModel) -> None:
    """No step comes before, to wait for a connection that may never be."""
    stack = Stack(sliced, shards=(2,), wrap=HeldLink)
    links = [stack.link("a0.0"), stack.link("a0.1")]
    for link in links:
        link.is_up = False
    stack.session += 1
    stack.core.obey(m.NewSession(LIFE, stack.session), [])
    for link in links:
        stack.core.look_at_links()
        stack.take(m.Ready, 0)
        link.is_up = True
    for _ in range(2):
        stack.core.look_at_links()
    stack.take(m.Ready)


def test_a_link_that_is_lost_is_told_once_in_a_session(sliced: SlicedModel) -> None:
    """Idle or not; what the step's other links still answer makes no end of it."""
    stack = Stack(sliced, shards=(2,), wrap=HeldLink)
    (text,) = texts([9])
    stack.send(stack.step().last_chunk(text).made())
    stack.pump()
    stack.link("a0.0").lost = stack.link("a0.1").lost = "cut"
    for _ in range(2):
        stack.core.look_at_links()
    (lost,) = stack.take(m.LinkLost)
    assert lost == m.LinkLost(LIFE, stack.session, "a0.0", "cut")
    stack.link("a0.1").held = False
    stack.pump()
    stack.take(m.LinkLost, 0)


def test_an_address_that_cannot_be_dialled_is_a_lost_link(sliced: SlicedModel) -> None:
    """The next session may have another."""

    def refuse(link: Link) -> Link:
        raise NetError(f"no route to {link.name}")

    stack = Stack(sliced)
    stack.wrap = refuse
    message = m.ComputeAssign(LIFE, 2, tuple(stack.core._groups.values()), 512, BLOCK_SIZE, wire_dtype=Dtype.FLOAT32)
    stack.core.obey(message, [])
    (lost,) = stack.take(m.LinkLost)
    assert lost.reason == "no route to a0.0"
