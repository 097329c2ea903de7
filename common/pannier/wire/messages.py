"""Every message that crosses a process boundary.

Plain frozen structs, encoded as msgpack arrays; unknown kinds and surplus fields are refused on receipt. A message
whose docstring names parts is followed by one payload frame that holds them (`pannier.wire.parts`).

Numbers that make a frame belong to one moment only:

==========  ===========================================================================================
life        drawn at random when a gateway starts; a frame of another life is dropped and counted
session     of one compute worker, or of all stages of a model, with attention workers; a fence ends it and the next
            one is larger
step        counts up over all lanes of a gateway's life
lane        of one compute worker, from 0
call        attention call of the model, from 0 in graph order
==========  ===========================================================================================
"""

from enum import IntEnum, StrEnum
from typing import Annotated, Any, TypeAlias

import msgspec

from pannier.wire.dtypes import Dtype
from pannier.wire.parts import Part

PROTOCOL = 9
"""Version of this message set; peers with another version are refused at `Hello`."""

MAX_TOP_LOGPROBS = 20

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""A number of things, or the place of one among them: what doesn't fit is refused before anybody counts with it."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True, gc=False):
    """Base of all messages: the class name is the tag on the wire."""


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of what messages are made of."""


# --- geometry and assignment (control) ---------------------------------------------------------------------------


class CallGeometry(Record, frozen=True):
    """One attention call of the model over all its heads; `window` 0 is none, `softcap` 0 is none."""

    q_heads: int
    kv_heads: int
    k_size: int
    v_size: int
    scale: float
    window: int
    softcap: float


class HeadRange(Record, frozen=True):
    """KV heads `start` to `stop` (exclusive) of one call, held by one shard."""

    start: int
    stop: int


class CallRange(Record, frozen=True):
    """Attention calls `start` to `stop` (exclusive) of the model."""

    start: Count
    stop: Count


class StageFacts(Record, frozen=True):
    """Which part of the model a compute worker runs: number `number` of `count` stages, with these attention calls."""

    number: Count
    count: Count
    calls: CallRange
    endpoint: str
    """Where the stage before it reaches it; the first one is reached by the last."""


class DtypeChoice(Record, frozen=True):
    """What element type a role has (`pannier.runtime.dtype_policy`), and why."""

    role: str
    dtype: Dtype
    reason: str


class ComputeFacts(Record, frozen=True):
    """What a compute worker brings: the model's geometry and how it runs it."""

    model: str
    digest: str
    device: str
    dtype: str
    wire_dtype: Dtype
    """The same: links carry it where attention workers compute it too."""
    lanes: int
    calls: tuple[CallGeometry, ...]
    vocab_size: int
    max_model_len: int
    weight_bytes: int
    stage: StageFacts | None = None
    """None: it runs the whole model."""
    dtypes: tuple[DtypeChoice, ...] = ()
    """Of its own roles."""


class AttentionFacts(Record, frozen=True):
    """What an attention worker brings; `endpoint` is where compute workers reach it ("" in their own process).

    Those on its own host find shared memory at `door` ("": it offers none), others plain TCP at `tcp` ("": it offers
    none, since its links are encrypted).
    """

    device: str
    memory_bytes: int
    bandwidth: float
    """Measured read bandwidth in bytes per second."""
    dtypes: tuple[Dtype, ...]
    """What it computes without converting it first."""
    endpoint: str
    door: str = ""
    tcp: str = ""


class Hello(Message, frozen=True):
    """Worker to gateway, first message: who it is and which roles it has (both roles: monolithic)."""

    protocol: int
    name: str
    start: int
    """Drawn at random as the process starts: its successor may have the same name, host and pid (in a container)."""
    pid: int
    host: str
    event_loop: str
    compute: ComputeFacts | None
    attention: AttentionFacts | None
    encrypts_links: bool = False


class Welcome(Message, frozen=True):
    """Gateway to worker: accepted; the worker's data thread dials `data_endpoint`."""

    life: int
    data_endpoint: str
    heartbeat_s: float


class Refused(Message, frozen=True):
    """Gateway to worker: not accepted, and why."""

    reason: str


class Heartbeat(Message, frozen=True):
    """Worker to gateway and back, every `heartbeat_s`: alive; workers add their counters."""

    life: int
    counters: dict[str, float]


class Goodbye(Message, frozen=True):
    """Worker to gateway: leaves on purpose. Gateway to worker: leave."""

    reason: str


# --- data channel between gateway and workers -----------------------------------------------------------------------


class Join(Message, frozen=True):
    """Data thread to gateway: its first message, so that the gateway can address it."""

    life: int


class AttentionAssign(Message, frozen=True):
    """Gateway to attention worker: allocate `num_blocks` blocks for these heads; answered by `Ready`."""

    life: int
    group: int
    shard: int
    calls: tuple[CallGeometry, ...]
    heads: tuple[HeadRange, ...]
    num_blocks: int
    block_size: int
    kv_dtype: Dtype
    wire_dtype: Dtype


class ShardAddress(Record, frozen=True):
    """One attention worker as compute workers see it."""

    name: str
    endpoint: str
    heads: tuple[HeadRange, ...]
    door: str = ""
    tcp: str = ""


class GroupAddress(Record, frozen=True):
    """The shards of one group; together they hold all heads of every call."""

    group: int
    shards: tuple[ShardAddress, ...]


class StageAddress(Record, frozen=True):
    """The compute worker of the next stage; of the first one, where this is the last."""

    name: str
    endpoint: str


class ComputeAssign(Message, frozen=True):
    """Gateway to compute worker: the groups to link to; also starts `session`. Answered by `Ready`."""

    life: int
    session: int
    groups: tuple[GroupAddress, ...]
    max_batch_tokens: int
    block_size: int
    next_stage: StageAddress | None = None
    wire_dtype: Dtype | None = None
    """Of q, k, v and answers on all links; None: its own."""


class Ready(Message, frozen=True):
    """Worker to gateway: what was assigned is in place, a shard of `group`, or without one the links of `session`."""

    life: int
    group: int | None
    session: int
    detail: str
    """How its links run, for the status."""


class SegmentKind(IntEnum):
    """What the rows of a segment do with the stored tokens."""

    DECODE = 0
    """Append the row, then attend to everything stored, itself included."""
    CHUNK = 1
    """Append the rows; attend only to what was stored before (the chunk itself is the compute worker's)."""
    READ = 2
    """Append nothing; attend to what is stored (another group's part of a long sequence)."""


class Segment(Record, frozen=True):
    """Consecutive rows of one sequence in one step.

    `blocks` of the message's block-table part start at `first_block` and hold `num_blocks` numbers. The token at
    index i of those blocks has absolute position `first_position` + i.
    """

    kind: SegmentKind
    group: Count
    first_position: Count
    first_block: Count
    num_blocks: Count
    num_stored: Count
    """Tokens stored in these blocks before this step."""
    query_position: Count
    """Absolute position of the first row."""
    query_start: Count
    """Index of the first row among the message's rows."""
    num_queries: Count

    @property
    def stores(self) -> bool:
        """Whether its rows' K and V are appended."""
        return self.kind is not SegmentKind.READ

    @property
    def answers(self) -> bool:
        """Whether the attention worker owes an answer for its rows (a fresh prompt's first chunk: no)."""
        return self.kind is SegmentKind.DECODE or self.num_stored > 0


class BlockCopy(Record, frozen=True):
    """Copy one whole block of a group before call 0 of the step."""

    group: Count
    source: Count
    target: Count


class Filters(Record, frozen=True):
    """What a draw is made from: the softmax of logits / temperature, cut down in this order.

    top_k most likely tokens (0: all), then those with at least min_p times the best one's probability, then the fewest
    that together reach top_p. Temperature 0 takes the best token, whatever the rest says.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    top_k: Count = 0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0


class Penalties(Record, frozen=True):
    """What tokens that occurred lose: in prompt or output (repetition, a factor), in the output (the others)."""

    repetition: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """Positive logits are divided by it, negative ones multiplied."""
    presence: float = 0.0
    frequency: float = 0.0
    """For every time that a token occurred."""


class Sample(Record, frozen=True):
    """Draw one token from one row's logits. Several samples may name one row."""

    row: Count
    sequence: int
    position: Count
    """Absolute position of the token that is drawn; with `seed` and `index` it fixes the draw."""
    index: Count
    """Which of its request's samples the sequence is."""
    seed: int
    filters: Filters
    top_logprobs: Annotated[int, msgspec.Meta(ge=-1, le=MAX_TOP_LOGPROBS)]
    """-1: no log-probabilities; else the drawn token's and this many of the most likely."""
    state_version: Count
    """Version of the `SamplerState` that the draw needs; 0: none."""
    mask: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]
    """Which of the step's masks says what tokens are allowed; -1: all are."""


class SamplerRules(Record, frozen=True):
    """What changes the logits of a sequence from draw to draw."""

    penalties: Penalties = Penalties()
    logit_bias: tuple[tuple[Count, float], ...] = ()
    """(token, what is added to its logit)."""
    bad_words: tuple[tuple[Count, ...], ...] = ()
    """Token sequences whose last token can't be drawn behind the others."""
    min_tokens: Count = 0
    """Output tokens before which none of `held_tokens` can be drawn."""
    held_tokens: tuple[Count, ...] = ()


class SamplerState(Record, frozen=True):
    """What a draw needs of a sequence's past. The compute worker keeps it, and appends what it draws.

    A state's version is 1 more than its number of output tokens. One that has gone on further than a `Sample` asks for
    (its step is repeated) is cut back to it.
    """

    sequence: int
    rules: SamplerRules
    prompt_tokens: tuple[Count, ...]
    output_tokens: tuple[Count, ...]


class Score(Record, frozen=True):
    """Report how likely given tokens were: row `row` + i scores token `first_token` + i of the step's scored tokens."""

    sequence: int
    row: Count
    num_rows: Count
    position: Count
    """Absolute position of the first token that is scored: one behind its row's."""
    first_token: Count
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)]


class Previous(Record, frozen=True):
    """The token of `row` is the one that sample number `sample` of the lane's preceding step `step` will draw."""

    row: Count
    step: int
    sample: Count


class Step(Message, frozen=True):
    """Gateway to compute worker: one forward pass over one lane's rows.

    Rows are the segments' rows in the order listed. Parts, each of which may be empty: token ids int32 [T], block
    tables int32 [N], scored tokens int32 [S], and masks of allowed tokens int32 [M, W], where token t is bit t % 32 of
    word t // 32.
    """

    life: int
    session: int
    step: int
    lane: Count
    segments: tuple[Segment, ...]
    previous: tuple[Previous, ...]
    samples: tuple[Sample, ...]
    scores: tuple[Score, ...]
    copies: tuple[BlockCopy, ...]
    states: tuple[SamplerState, ...]
    """Of the sequences among its samples that this worker hasn't been told of in this session."""
    parts: tuple[Part, ...]
    traces: tuple[str, ...] = ()
    """W3C's traceparent of each request among its rows that is traced."""


class TopLogprob(Record, frozen=True):
    """A token and its natural-log probability."""

    token: int
    logprob: float


class TokenLogprob(Record, frozen=True):
    """One token of a prompt or an output with its log-probability and the most likely alternatives."""

    token: int
    logprob: float
    top: tuple[TopLogprob, ...]


class Scored(Record, frozen=True):
    """The outcome of one `Score`: its tokens, of which the first is at `position`."""

    sequence: int
    position: int
    tokens: tuple[TokenLogprob, ...]


class Drawn(Record, frozen=True):
    """The outcome of one `Sample`."""

    sequence: int
    token: int
    logprob: float | None
    top: tuple[TopLogprob, ...]


class StepTimes(Record, frozen=True):
    """Seconds of one lane-step.

    Exposed is the part of a wait in which no lane could go on. Compute has none: the lane itself goes on.
    """

    compute_s: float
    """Slices and sampling."""
    attention_s: float
    """As the attention workers report it: of each call, the one that answered last."""
    transfer_s: float
    """What the lane waited for beyond attention: the link, a busy worker, the other lane's slice under way."""
    exposed_attention_s: float
    exposed_transfer_s: float
    total_s: float
    """From its begin to its last acknowledgement, the turns of other lanes included."""


class StepDone(Message, frozen=True):
    """Compute worker to gateway: every write of the step is acknowledged.

    `drawn` in the order of its samples, `scored` in that of its scores.
    """

    life: int
    session: int
    step: int
    lane: Count
    drawn: tuple[Drawn, ...]
    scored: tuple[Scored, ...]
    times: StepTimes


class StageDone(Message, frozen=True):
    """Compute worker to gateway, of a stage before the last one: its writes of the step are acknowledged."""

    life: int
    session: int
    step: int
    lane: Count
    times: StepTimes


class NeedState(Message, frozen=True):
    """Compute worker to gateway: send the step again with the `SamplerState` of these sequences.

    The lane waits for it; what was sent behind it stays.
    """

    life: int
    session: int
    step: int
    lane: Count
    sequences: tuple[int, ...]


class StepFailed(Message, frozen=True):
    """Compute worker to gateway, or attention worker to compute worker: the step can't be done."""

    life: int
    session: int
    step: int
    lane: Count
    reason: str


class LinkLost(Message, frozen=True):
    """Compute worker to gateway: its link to `worker` is gone, or never was there, and this session can't go on.

    Nothing is said of its steps: the next session, which links anew, repeats them.
    """

    life: int
    session: int
    worker: str
    reason: str
    """Where it was, and what the system says of it."""


class AbortStep(Message, frozen=True):
    """Drop a step: gateway to compute worker, which passes it on to the attention workers involved."""

    life: int
    session: int
    step: int
    lane: Count


class StepAborted(Message, frozen=True):
    """Answer to `AbortStep`: nothing of the step will be written any more."""

    life: int
    session: int
    step: int
    lane: Count


class Fence(Message, frozen=True):
    """Gateway to attention worker: end every session of `compute` up to and including `session`."""

    life: int
    compute: str
    session: int


class Fenced(Message, frozen=True):
    """Attention worker to gateway: the fenced sessions can write nothing any more."""

    life: int
    compute: str
    session: int


class NewSession(Message, frozen=True):
    """Gateway to compute worker: the session before was fenced; drop its steps and answer `Ready`."""

    life: int
    session: int


# --- link: compute worker and attention worker ---------------------------------------------------------------------


class BeginStep(Message, frozen=True):
    """Compute worker to attention worker, once per step: what the rows of all calls will mean.

    *Stored rows* count over the segments that store, *query rows* over those that are answered, both in the order
    listed. Parts: block tables int32 [N].
    """

    life: int
    session: int
    step: int
    lane: Count
    segments: tuple[Segment, ...]
    copies: tuple[BlockCopy, ...]
    parts: tuple[Part, ...]
    calls: CallRange | None = None
    """Those that the step makes, of one stage of several, which alone are copied; None: all."""
    traces: tuple[str, ...] = ()
    """As the step's."""


class Piece(Message, frozen=True):
    """Compute worker to attention worker: rows of one call.

    A request has all query rows and the stored rows among them, and is answered by `Answer`; a one-way piece has
    stored rows only, and is answered by `PieceWritten`. Parts: k [N, G, Dk], v [N, G, Dv], and for a request
    q [M, H, Dk] before them; heads are the shard's.
    """

    life: int
    session: int
    step: int
    lane: Count
    call: Count
    first_stored_row: Count
    is_request: bool
    lse_from: Count
    """Query rows from this one on need the log-sum-exp."""
    parts: tuple[Part, ...]


class EndStep(Message, frozen=True):
    """Compute worker to attention worker: the step had `num_pieces` pieces; answered by `StepWritten`."""

    life: int
    session: int
    step: int
    lane: Count
    num_pieces: Count


class Answer(Message, frozen=True):
    """Attention worker to compute worker. Parts: o [M, H, Dv] in the wire dtype, LSE fp32 [M - lse_from, H]."""

    life: int
    session: int
    step: int
    lane: Count
    call: Count
    attention_s: float
    parts: tuple[Part, ...]


class PieceWritten(Message, frozen=True):
    """Attention worker to compute worker: a one-way piece is written; returns its credit."""

    life: int
    session: int
    step: int
    lane: Count
    call: Count


class StepWritten(Message, frozen=True):
    """Attention worker to compute worker: all pieces of the step arrived and are written on the device."""

    life: int
    session: int
    step: int
    lane: Count


# --- from one compute worker to the next --------------------------------------------------------------------------


class Activations(Message, frozen=True):
    """To the next stage: what is alive behind the last slice of this one, of all rows.

    The values are in the order of their names: tensors are the parts, and `sizes` are the others, None for a tensor.
    """

    life: int
    session: int
    step: int
    lane: Count
    sizes: tuple[int | None, ...]
    parts: tuple[Part, ...]


class DrawnTokens(Message, frozen=True):
    """From the last stage to the first: what the step has drawn. Parts: tokens int64 [samples]."""

    life: int
    session: int
    step: int
    lane: Count
    parts: tuple[Part, ...]


# --- clients ---------------------------------------------------------------------------------------------------------


class ChatMessage(Record, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str


class GuideKind(StrEnum):
    """How the shape of an output is said."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    """Lark's notation."""


class Guide(Record, frozen=True):
    """What an output must look like."""

    kind: GuideKind
    text: str


class SamplingParams(Record, frozen=True):
    """How tokens are drawn and when to stop. The gateway checks the ranges, so that its answer can name them."""

    max_tokens: int | None = None
    """None: as many as the model's window leaves."""
    min_tokens: int = 0
    n: int = 1
    """Outputs of one prompt."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    """Token -> what is added to its logit."""
    allowed_tokens: tuple[int, ...] | None = None
    """None: all tokens."""
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    """Number of most likely tokens to report with each token's own log-probability; None: none at all."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    """Whether the stop string is part of the text."""
    ignore_eos: bool = False
    guide: Guide | None = None
    """What each output must look like; None: anything."""


class Generate(Message, frozen=True):
    """Client to gateway: exactly one of `prompt`, `prompt_tokens` and `messages`."""

    request: str
    model: str | None
    prompt: str | None
    prompt_tokens: tuple[int, ...] | None
    messages: tuple[ChatMessage, ...] | None
    params: SamplingParams
    priority: int = 0
    """Smaller goes first, where the gateway goes by priority."""
    deadline_s: float | None = None
    """Seconds after which the request ends with an error; None: never."""
    cache_salt: str | None = None
    """Only requests with the same salt share cached prefixes."""
    traceparent: str | None = None
    """What the request is a part of, in W3C's form; None: nothing that is traced."""


class Cancel(Message, frozen=True):
    """Client to gateway: forget a request; unknown ones are fine."""

    request: str


class Usage(Record, frozen=True):
    """Tokens of one request."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Delta(Message, frozen=True):
    """Gateway to client: new text and tokens of one output of a request."""

    request: str
    index: int
    """Which of its n outputs."""
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    """The next of the prompt's tokens, from its second on: the first follows nothing."""
    finish_reason: str | None
    """stop, length, abort or error."""
    usage: Usage | None
    """With the last delta of the request; tokens of all its outputs."""


class Failed(Message, frozen=True):
    """Gateway to client: the request ends with one clear error."""

    request: str
    code: str
    """invalid, overloaded, unavailable, timeout (its deadline has passed) or internal."""
    param: str | None
    reason: str


class Tokenize(Message, frozen=True):
    """Client to gateway: exactly one of `text` and `messages`, a conversation up to the model's turn."""

    request: str
    text: str | None
    messages: tuple[ChatMessage, ...] | None
    add_special_tokens: bool = True
    """Those that the model wants around a text; a conversation's are its template's."""


class Tokens(Message, frozen=True):
    """Gateway to client: answer to `Tokenize`."""

    request: str
    tokens: tuple[int, ...]


class Detokenize(Message, frozen=True):
    """Client to gateway."""

    request: str
    tokens: tuple[int, ...]


class TokenText(Message, frozen=True):
    """Gateway to client: answer to `Detokenize`."""

    request: str
    text: str
    """Of all tokens together; special ones have none."""
    pieces: tuple[bytes, ...]
    """Of each token by itself, which may be a part of a character in UTF-8; a special one's is its name."""


class GetStatus(Message, frozen=True):
    """Client to gateway."""

    request: str


class Status(Message, frozen=True):
    """Gateway to client: the whole stack as plain data (`pannier status --json`)."""

    request: str
    status: dict[str, Any]
