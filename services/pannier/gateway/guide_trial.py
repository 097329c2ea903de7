"""A guide is compiled for the first time in a process of its own, which may come to its end over it.

A chain of 3000 references overflows the native compiler's stack, and `multipleOf` of a large number takes it hours: no
client may do that to the gateway. What the trial has survived is compiled once more in the gateway, in about that time
and on a larger stack.
"""

import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from pannier.gateway.guide_compiler import Compiler, wrong
from pannier.scheduler import Rejected
from pannier.wire.messages import Guide

CPU_S = 2.0
"""Seconds of computing that a guide may take, however busy the machine is."""
STACK_BYTES = 1 << 20
"""Half of the smallest that a thread of the gateway has."""
MEMORY_BYTES = 4 << 30
"""Of addresses, all in all."""


class Tokens(msgspec.Struct):
    """What a compiler is made from."""

    tokenizer_json: str
    num_tokens: int
    end_tokens: list[int]


class Trial:
    """Tries guides, one at a time, in a process that is started for the first one and again after one that ended it."""

    def __init__(self, tokenizer_json: str, num_tokens: int, end_tokens: Sequence[int]) -> None:
        self._tokens = Tokens(tokenizer_json, num_tokens, list(end_tokens))
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, guide: Guide) -> None:
        """Raises `Rejected` if compiling the guide ends the process. Whether it compiles, the compiler says."""
        with self._lock:
            if self._process is None:
                self._process = self._start()
            if self._is_survived(self._process, guide):
                return
            self._end()
            self._process = None
        raise wrong(guide, f"it is too deep, or compiling it takes more than {CPU_S:g} s or too much memory")

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "pannier.gateway.guide_trial"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._end = weakref.finalize(self, _end, process)
        _say(process, self._tokens)
        return process

    def _is_survived(self, process: subprocess.Popen[bytes], guide: Guide) -> bool:
        _say(process, guide)
        assert process.stdout is not None
        return process.stdout.readline() != b""


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


def _say(process: subprocess.Popen[bytes], what: msgspec.Struct) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # then there will be no answer
        process.stdin.write(msgspec.json.encode(what) + b"\n")
        process.stdin.flush()


def _serve() -> None:
    """Compile what comes, line by line, until nobody asks any more."""
    lines = sys.stdin.buffer
    tokens = msgspec.json.decode(lines.readline(), type=Tokens)
    compiler = Compiler(tokens.tokenizer_json, tokens.num_tokens, tokens.end_tokens)
    compiler.warm_up()
    for line in lines:
        guide = msgspec.json.decode(line, type=Guide)
        signal.setitimer(signal.ITIMER_PROF, CPU_S)  # whose signal ends the process
        with suppress(Rejected):
            compiler.compile(guide).compute_bitmask()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(b"\n")
        sys.stdout.buffer.flush()


def main() -> None:
    """The process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its gateway
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    serving = threading.Thread(target=_serve)
    serving.start()
    serving.join()


if __name__ == "__main__":
    main()
