"""Plain TCP between a compute and an attention worker: frames, a first message that says who dials, nothing blocks."""

from pannier.net.tcp.addresses import parse
from pannier.net.tcp.errors import CannotTalk
from pannier.net.tcp.listener import Hello, Listener, dial
from pannier.net.tcp.reader import Allocate, Record
from pannier.net.tcp.stream import Stream
from pannier.net.tcp.streams import Streams

__all__ = ["Allocate", "CannotTalk", "Hello", "Listener", "Record", "Stream", "Streams", "dial", "parse"]
