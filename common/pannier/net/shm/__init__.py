"""Shared memory between two processes of one host: rings of messages, and a bell that is rung only for who sleeps."""

from pannier.net.shm.channel import Channel
from pannier.net.shm.compiled import functions
from pannier.net.shm.door import Door, knock
from pannier.net.shm.errors import CannotShare
from pannier.net.shm.memory import Layout
from pannier.net.shm.spin import SPIN_US
from pannier.net.shm.waiting import Waiting

__all__ = ["SPIN_US", "CannotShare", "Channel", "Door", "Layout", "Waiting", "functions", "knock"]
