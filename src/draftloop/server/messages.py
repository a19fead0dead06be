"""What the API process and the engine process say to each other: msgpack over a pair of sockets."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, Literal

import msgspec

from draftloop.request import Logprobs, SamplingParams, SpeculationStats, TokenSource

# ---- to the engine --------------------------------------------------------------------------


class Add(msgspec.Struct, tag=True, kw_only=True):
    """Run one answer of a request."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    speculation: bool = True
    priority: int = 0
    cache_salt: str | None = None
    lora_request: str | None = None
    traced: bool = False
    """Send `Update.traced`."""


class Abort(msgspec.Struct, tag=True, kw_only=True):
    """Nobody waits for these answers any more."""

    request_ids: list[str]


Question = Literal["graphs", "start_profile", "stop_profile", "reset_prefix_cache"]


class Ask(msgspec.Struct, tag=True, kw_only=True):
    """Send a `Told`; they come in the order of the questions."""

    question: Question
    profile_dir: str | None = None
    """Folder for the trace, by `start_profile`."""


class Call(msgspec.Struct, tag=True, kw_only=True):
    """To all engines that step together: one of them has got a message. See `engine.lockstep`."""

    number: int


class Close(msgspec.Struct, tag=True, kw_only=True):
    """Finish what a drafter writes, and end."""


ToEngine = Add | Abort | Ask | Call | Close

# ---- from the engine ------------------------------------------------------------------------


class Ready(msgspec.Struct, tag=True, kw_only=True):
    """Everything is loaded and captured. Holds what the API must know of the model and the engine."""

    tokenizer: str | None
    """The tokenizer as tokenizer.json; None where prompts must be token ids."""
    chat_template: str | None
    special_tokens: dict[str, str]
    """Such as bos_token, for chat templates."""
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    num_pages: int
    """Cache pages for requests, of all groups of layers."""
    page_size: int
    num_spec_tokens: int
    sampling_defaults: dict[str, Any] = {}
    """Sampling parameters that the model comes with."""
    info: dict[str, Any]
    """What was decided at the start and why, and how long the start took."""


class Failed(msgspec.Struct, tag=True, kw_only=True):
    """The engine could not start, or has met an error that it does not survive. It ends now."""

    message: str
    by_another: bool = False
    """It is, or may be, another engine's end, or silence, that it does not survive."""


class Accepted(msgspec.Struct, tag=True, kw_only=True):
    """The answer is queued."""

    request_id: str
    num_prompt_tokens: int


class Refused(msgspec.Struct, tag=True, kw_only=True):
    """The answer cannot be served as asked for."""

    request_id: str
    message: str


class Ending(msgspec.Struct, kw_only=True):
    """What is known of an answer once it has ended."""

    finish_reason: str
    stop_reason: int | str | None = None
    error: str | None = None
    speculation: SpeculationStats | None = None
    num_cached_tokens: int = 0
    """Tokens of the prompt whose state was found in the prefix cache."""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class TracedToken(msgspec.Struct, array_like=True):
    """A token, where it came from, and the text that it added."""

    token_id: int
    text: str
    source: TokenSource


class Update(msgspec.Struct, array_like=True):
    """What one step gave to one answer."""

    request_id: str
    text: str
    """Whole characters, and nothing that may turn out to belong to a stop text."""
    token_ids: list[int]
    logprobs: list[Logprobs] | None = None
    """One for each of `token_ids`, where asked for."""
    prompt_logprobs: list[Logprobs | None] | None = None
    """One for each token of the prompt, with the first update, where asked for."""
    ending: Ending | None = None
    traced: list[TracedToken] | None = None
    """Where asked for, the tokens whose text is now whole and shown; they may be earlier ones than `token_ids`."""


def merge(updates: list[Update]) -> Update:
    """What several steps gave to one answer, as one update."""
    first, last = updates[0], updates[-1]
    if first is last:
        return first
    return Update(
        request_id=first.request_id,
        text="".join(update.text for update in updates),
        token_ids=[token for update in updates for token in update.token_ids],
        logprobs=None if first.logprobs is None else [one for update in updates for one in update.logprobs or []],
        prompt_logprobs=first.prompt_logprobs,
        ending=last.ending,
        traced=None if first.traced is None else [one for update in updates for one in update.traced or []],
    )


class AdapterCounters(msgspec.Struct, kw_only=True):
    """The part of one adapter's requests."""

    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int


class Counters(msgspec.Struct, kw_only=True):
    """The engine's counters since its start, and what it holds now."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    num_spec_steps: int = 0
    num_steps_without_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    acceptance_histogram: list[int] = []
    """Drafted steps that accepted 0, 1, .. K drafts."""
    by_adapter: dict[str, AdapterCounters] = {}
    steps_by_drafts: list[int] = []
    """Decoding steps that were to verify 0, 1, .. K drafts of each row."""
    num_running: int = 0
    num_waiting: int = 0
    num_compiling: int = 0
    """Of those that wait: for their grammar."""
    num_pages_in_use: int = 0
    num_preemptions: int = 0
    cached_prompt_tokens: int = 0
    """Those of `prompt_tokens` whose state was found in the prefix cache."""

    @property
    def accepted_per_position(self) -> list[int]:
        """Drafted steps that accepted draft i, for i = 1 .. K."""
        return [sum(self.acceptance_histogram[i:]) for i in range(1, len(self.acceptance_histogram))]


def total(parts: list[Any]) -> Any:
    """Sums of several engines' counters, field by field; lists place by place, mappings by key."""
    first = parts[0]
    if isinstance(first, msgspec.Struct):
        names = first.__struct_fields__
        return type(first)(**{name: total([getattr(part, name) for part in parts]) for name in names})
    if isinstance(first, dict):
        keys = dict.fromkeys(key for part in parts for key in part)
        return {key: total([part[key] for part in parts if key in part]) for key in keys}
    if isinstance(first, list):
        return [sum(counts) for counts in zip_longest(*parts, fillvalue=0)]
    return sum(parts)


class Progress(msgspec.Struct, tag=True, kw_only=True):
    """What a step gave, to whom; also says that the engine is alive, where it gave nothing."""

    updates: list[Update]
    counters: Counters
    num_drafts: int = 0
    """That a step is to verify of each row now."""


class Told(msgspec.Struct, tag=True, kw_only=True):
    """What an `Ask` asked for."""

    answer: dict[str, Any] = {}
    error: str | None = None
    """Why it cannot be done."""


FromEngine = Ready | Failed | Accepted | Refused | Progress | Told

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode

_decode_params = msgspec.msgpack.Decoder(SamplingParams).decode


def check_params(params: SamplingParams) -> None:
    """Raises what the other side would raise on reading them: their fields' types are not all checked before."""
    _decode_params(encode(params))
