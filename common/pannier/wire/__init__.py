"""The wire format: every message between processes, and how it becomes frames. Imports no torch and no sockets."""

from pannier.wire.codec import Buffer, Decoder, encode, encode_header
from pannier.wire.directions import (
    AttentionToCompute,
    ClientToGateway,
    ComputeToAttention,
    GatewayToClient,
    GatewayToWorker,
    GatewayToWorkerData,
    StageToStage,
    WorkerToGateway,
    WorkerToGatewayData,
)
from pannier.wire.dtypes import Dtype
from pannier.wire.errors import WireError
from pannier.wire.parts import ALIGNMENT, Part, lay_out, payload_bytes

__all__ = [
    "ALIGNMENT",
    "AttentionToCompute",
    "Buffer",
    "ClientToGateway",
    "ComputeToAttention",
    "Decoder",
    "Dtype",
    "GatewayToClient",
    "GatewayToWorker",
    "GatewayToWorkerData",
    "Part",
    "StageToStage",
    "WireError",
    "WorkerToGateway",
    "WorkerToGatewayData",
    "encode",
    "encode_header",
    "lay_out",
    "payload_bytes",
]
