"""The sizes of a model: all that its speed and its memory depend on.

Letters are those of the Lamina paper (arXiv 2405.01814v2, table 2): N parameters, d width of all query heads, L calls,
G queries per KV head, e bytes of an element, B rows, l tokens of context.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from pannier.planner.cost import ModelCost
from pannier.wire.messages import CallGeometry

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class CallSize:
    """One attention call: query and KV heads, sizes of a key and a value, and the window, 0 for none."""

    q_heads: int
    kv_heads: int
    k_size: int
    v_size: int
    window: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """A model as a plan sees it, in one dtype throughout."""

    name: str
    parameters: float
    """N: all that are kept in memory."""
    read: float
    """Of these, what every step reads: not the rows of an embedding table that aren't looked up, and no experts."""
    expert: float = 0.0
    """Parameters of all experts that are routed to."""
    experts: int = 0
    """Of one layer."""
    chosen: int = 0
    """Experts of a layer that one row is routed to."""
    calls: tuple[CallSize, ...]
    itemsize: int = 2

    @classmethod
    def dense(
        cls, name: str, *, weights_bytes: float, layers: int, width: int, queries_per_kv: int, head_size: int = 128
    ) -> "ModelSizes":
        """From numbers, as papers give them: equal layers, every weight read in every step, 16 bits."""
        heads = width // head_size
        call = CallSize(heads, heads // queries_per_kv, head_size, head_size)
        return cls(name=name, parameters=weights_bytes / 2, read=weights_bytes / 2, calls=(call,) * layers)

    def in_dtype(self, dtype: str) -> "ModelSizes":
        """The same with elements of another size."""
        return replace(self, itemsize=ITEMSIZE[dtype])

    @property
    def weight_bytes(self) -> float:
        """e N."""
        return self.itemsize * self.parameters

    def read_bytes(self, rows: float) -> float:
        """Weights that a step of B rows reads; of E experts those that any of the rows is routed to.

        If routing is even that is 1 - (1 - k / E)^B of them.
        """
        touched = 1 - (1 - self.chosen / self.experts) ** rows if self.experts else 0.0
        return self.itemsize * (self.read + touched * self.expert)

    @property
    def flops_per_row(self) -> float:
        """2 N: a multiplication and an addition with every weight that works on the row."""
        share = self.chosen / self.experts if self.experts else 0.0
        return 2 * (self.read + share * self.expert)

    @cached_property
    def kv_bytes(self) -> float:
        """K and V of one token: 2 e d L / G where layers are alike."""
        return self.itemsize * sum(call.kv_heads * (call.k_size + call.v_size) for call in self.calls)

    def kv_read_bytes(self, context: float) -> float:
        """What attention reads for one row: the whole context, or of calls with a window only that."""
        if not self._has_windows:
            return self.kv_bytes * context
        return self.itemsize * sum(
            call.kv_heads * (call.k_size + call.v_size) * min(context, call.window or context) for call in self.calls
        )

    @cached_property
    def _has_windows(self) -> bool:
        return any(call.window for call in self.calls)

    @cached_property
    def flops_per_pair(self) -> float:
        """4 d L: q k and p v for one query and one stored token."""
        return 2 * sum(call.q_heads * (call.k_size + call.v_size) for call in self.calls)

    @cached_property
    def sent_bytes(self) -> float:
        """q, k and v of one row, to attention: (1 + 2/G) e d L where layers are alike."""
        return self.kv_bytes + self.itemsize * sum(call.q_heads * call.k_size for call in self.calls)

    @cached_property
    def returned_bytes(self) -> float:
        """The attention output of one row: e d L where layers are alike."""
        return self.itemsize * sum(call.q_heads * call.v_size for call in self.calls)

    @cached_property
    def geometry(self) -> tuple[CallGeometry, ...]:
        """The calls as workers are told of them: what `pannier.scheduler.form_groups` divides."""
        return tuple(
            CallGeometry(call.q_heads, call.kv_heads, call.k_size, call.v_size, 1.0, call.window, 0.0)
            for call in self.calls
        )

    def cost(self, rows: float, context: float) -> ModelCost:
        """For the clock of a simulation: what a step of about so many rows of about such a context costs."""
        return ModelCost(
            weights_bytes=self.read_bytes(rows),
            flops_per_row=self.flops_per_row,
            flops_per_pair=self.flops_per_pair,
            kv_bytes=self.kv_read_bytes(context) / context,
            answered_bytes=self.sent_bytes + self.returned_bytes,
            calls=len(self.calls),
        )
