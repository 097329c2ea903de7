"""Random messages of every kind, derived from their types."""

import types
from typing import Any, get_args

import msgspec
from hypothesis import strategies as st
from msgspec import inspect as kinds

from pannier import wire
from pannier.wire import Dtype, lay_out
from pannier.wire.messages import Message

DIRECTIONS: dict[str, types.UnionType] = {
    name: union for name, union in vars(wire).items() if isinstance(union, types.UnionType) and name != "Buffer"
}
MESSAGES: list[type[Message]] = sorted(Message.__subclasses__(), key=lambda kind: kind.__name__)

layouts = st.lists(
    st.tuples(st.sampled_from(Dtype), st.lists(st.integers(0, 5), max_size=3).map(tuple)), min_size=1, max_size=4
).map(lay_out)


def direction_of(kind: type[Message]) -> Any:
    """A union that a message may travel in."""
    return next(union for union in DIRECTIONS.values() if kind in get_args(union))


def messages(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Messages of one kind with legal values, parts laid out as they must be."""
    info = kinds.type_info(kind)
    assert isinstance(info, kinds.StructType)
    return _struct(info)


def _struct(info: kinds.StructType) -> st.SearchStrategy[Any]:
    fields = {field.name: layouts if field.name == "parts" else values(field.type) for field in info.fields}
    return st.builds(info.cls, **fields)


def values(info: kinds.Type) -> st.SearchStrategy[Any]:
    """Values of one field."""
    match info:
        case kinds.IntType():
            low = info.ge if info.ge is not None else -(2**63)
            high = info.lt - 1 if info.lt is not None else info.le if info.le is not None else 2**63 - 1
            return st.integers(low, high)
        case kinds.FloatType():
            least = info.ge if info.ge is not None else info.gt
            return st.floats(least, info.le, allow_nan=False, exclude_min=info.gt is not None)
        case kinds.TupleType():
            return st.tuples(*[values(item) for item in info.item_types])
        case kinds.StrType():
            return st.text(max_size=8)
        case kinds.BytesType():
            return st.binary(max_size=8)
        case kinds.BoolType():
            return st.booleans()
        case kinds.NoneType():
            return st.none()
        case kinds.EnumType():
            return st.sampled_from(list(info.cls))
        case kinds.StructType():
            return _struct(info)
        case kinds.VarTupleType():
            return st.lists(values(info.item_type), max_size=3).map(tuple)
        case kinds.UnionType():
            return st.one_of([values(member) for member in info.types])
        case kinds.DictType():
            return st.dictionaries(values(info.key_type), values(info.value_type), max_size=3)
        case kinds.AnyType():
            return st.one_of(st.none(), st.integers(-5, 5), st.text(max_size=5), st.lists(st.booleans(), max_size=2))
    raise NotImplementedError(f"no values for {info}")


def header(message: Message) -> list[Any]:
    """The header of a message as plain lists, to be spoilt."""
    plain: list[Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    return plain
