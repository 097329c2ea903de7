"""The scheduler's step as the message that a compute worker gets."""

from pannier.scheduler import Step
from pannier.wire import Dtype, lay_out, payload_bytes
from pannier.wire import messages as m

MASK_WORD_BYTES = Dtype.INT32.itemsize


def step_message(
    step: Step, *, life: int, session: int, first_lane: int, traces: tuple[str, ...] = ()
) -> tuple[m.Step, bytearray]:
    """The message and its payload. Lanes are the worker's own there, counted from the first of them."""
    mask_words = len(step.masks[0]) // MASK_WORD_BYTES if step.masks else 0
    tensors = [
        ((len(step.token_ids),), step.token_ids.tobytes()),
        ((len(step.blocks),), step.blocks.tobytes()),
        ((len(step.scored_tokens),), step.scored_tokens.tobytes()),
        ((len(step.masks), mask_words), b"".join(step.masks)),
    ]
    parts = lay_out((Dtype.INT32, shape) for shape, _ in tensors)
    payload = bytearray(payload_bytes(parts))
    for part, (_, content) in zip(parts, tensors, strict=True):
        payload[part.offset : part.offset + part.nbytes] = content
    message = m.Step(
        life=life,
        session=session,
        step=step.step,
        lane=step.lane - first_lane,
        segments=step.segments,
        previous=step.previous,
        samples=step.samples,
        scores=step.scores,
        copies=step.copies,
        states=step.states,
        parts=parts,
        traces=traces,
    )
    return message, payload
