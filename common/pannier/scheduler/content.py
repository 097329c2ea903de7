"""What a full block holds, as a short name: equal names mean equal keys and values.

A block's K and V depend on its tokens and on all tokens before it, so its name is a hash of its tokens and of the name
of the block before. The first one stands on a root: who may share, and what computed it.
"""

from hashlib import blake2b

from pannier.scheduler.blocks import Ints

NAME_BYTES = 16
"""128 bits: among 10^12 blocks two are alike by chance once in 10^15 times; and nobody can make two alike."""


def root(namespace: str, salt: str) -> bytes:
    """Where the names of one `namespace` (model, dtype) and `salt` begin."""
    return blake2b(f"{len(namespace)} {namespace}{salt}".encode(), digest_size=NAME_BYTES).digest()


class Contents:
    """The names of a sequence's full blocks, found when they are asked for and kept: tokens are only ever added."""

    __slots__ = ("_names", "_root")

    def __init__(self, root: bytes) -> None:
        self._root = root
        self._names: list[bytes] = []

    def name(self, index: int, tokens: Ints, block_size: int) -> bytes:
        """The name of one of the blocks of these tokens."""
        names = self._names
        for number in range(len(names), index + 1):
            before = names[-1] if names else self._root
            held = tokens[number * block_size : (number + 1) * block_size].tobytes()
            names.append(blake2b(before + held, digest_size=NAME_BYTES).digest())
        return names[index]
