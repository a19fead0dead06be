"""Text as it grows: whole characters, cut exactly at a stop text."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from draftloop.engine.detokenizer import Detokenizer
from draftloop.errors import RequestError
from draftloop.request import SamplingParams

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = "<|end|>"


@pytest.fixture(scope="module")
def tokenizer() -> SimpleNamespace:
    """One token per byte, and a special one: every character beyond ASCII is several tokens."""
    backend = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(ALPHABET)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([SPECIAL])
    return SimpleNamespace(backend_tokenizer=backend)


def feed(tokenizer: SimpleNamespace, text: str, **params) -> tuple[Detokenizer, list[str], str | None]:
    detokenizer, seen = Detokenizer(tokenizer, SamplingParams(**params)), []
    for token in tokenizer.backend_tokenizer.encode(text).ids:
        stop = detokenizer.add(token)
        seen.append(detokenizer.text)
        if stop is not None:
            return detokenizer, seen, stop
    return detokenizer, seen, None


@pytest.mark.parametrize("text", ["plain", "Grüße, π", "日本語", "👩‍👩‍👧 family", "a\n\tb  c"])
def test_text_grows_by_whole_characters(tokenizer, text):
    detokenizer, seen, _ = feed(tokenizer, text)
    assert detokenizer.text == text
    for part in seen:
        assert text.startswith(part)
        assert "\ufffd" not in part


def test_what_is_left_of_an_unfinished_character_shows_at_the_end_only(tokenizer):
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    for token in tokenizer.backend_tokenizer.encode("a😀").ids[:-1]:
        detokenizer.add(token)
    assert detokenizer.text == "a"
    detokenizer.flush()
    assert detokenizer.text == "a\ufffd"
    detokenizer.flush()
    assert detokenizer.text == "a\ufffd"


@pytest.mark.parametrize(
    ("stop", "text", "left"),
    [
        (("!",), "hey! you", "hey"),
        (("END",), "the END of it", "the "),
        (("ENDS",), "the END of it", None),
        (("b", "abc"), "xabc", "xa"),  # "b" is complete before "abc" is
        (("bc", "abc"), "xabc", "x"),  # both are complete at once: the one that begins first
        (("é",), "café au lait", "caf"),
        (("a",), "a", ""),
    ],
)
def test_a_stop_text_ends_the_text_before_itself(tokenizer, stop, text, left):
    detokenizer, _, found = feed(tokenizer, text, stop=stop)
    assert (found is not None) == (left is not None)
    assert detokenizer.text == (text if left is None else left)
    assert found is None or found in stop


@pytest.mark.parametrize(("skip", "expected"), [(True, "ab"), (False, f"a{SPECIAL}b")])
def test_special_tokens_are_left_out_unless_asked_for(tokenizer, skip, expected):
    detokenizer, _, _ = feed(tokenizer, f"a{SPECIAL}b", skip_special_tokens=skip)
    detokenizer.flush()
    assert detokenizer.text == expected


@pytest.fixture(scope="module")
def byte_fallback() -> SimpleNamespace:
    """Words, and a token for each byte that no word has, as sentencepiece vocabularies know them."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, "▁b": 257}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return SimpleNamespace(backend_tokenizer=backend)


def test_bytes_that_turn_out_to_be_no_text_do_not_take_back_what_was_shown(byte_fallback):
    """A run of bytes decodes as a whole: its line end has been shown when a byte comes that begins no character."""
    detokenizer, seen = Detokenizer(byte_fallback, SamplingParams(stop=("b b",))), []
    ended_by = None
    for token in [256, 0x0A, 0xC5, 0x07, 257, 257, 0x0A, 256]:
        ended_by = ended_by or detokenizer.add(token)
        seen.append(detokenizer.text)
        if ended_by:
            break
    assert seen == ["a", "a\n", "a\n", "a\n", "a\n\ufffd\ufffd b", "a\n\ufffd\ufffd "]
    assert ended_by == "b b"


@given(st.lists(st.sampled_from([0x0A, 0xC3, 0xA9, 0xC5, 0x07, 256, 257]), max_size=8))
@settings(max_examples=60, deadline=None)
def test_any_tokens_make_a_text_that_only_grows(byte_fallback, tokens):
    detokenizer, seen = Detokenizer(byte_fallback, SamplingParams()), [""]
    for token in tokens:
        assert detokenizer.add(token) is None
        seen.append(detokenizer.text)
    detokenizer.flush()
    seen.append(detokenizer.text)
    assert all(after.startswith(before) for before, after in pairwise(seen))
    whole = byte_fallback.backend_tokenizer.decode(tokens)
    assert detokenizer.text == whole or "\ufffd" in whole


def test_without_a_tokenizer_the_text_stays_empty():
    detokenizer = Detokenizer(None, SamplingParams())
    assert detokenizer.add(3) is None
    detokenizer.flush()
    assert detokenizer.text == ""


def test_no_text_is_made_where_none_is_wanted(tokenizer):
    detokenizer, seen, stop = feed(tokenizer, "some text", detokenize=False)
    assert (detokenizer.text, stop, set(seen)) == ("", None, {""})
    with pytest.raises(RequestError, match=r"stop is .*; it must be left out where detokenize is off"):
        SamplingParams(stop=("x",), detokenize=False)


def test_a_stop_text_that_came_too_early_is_text_like_any_other(tokenizer):
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=("ab", "longer")))
    for index, token in enumerate(tokenizer.backend_tokenizer.encode("xab yab").ids):
        stop = detokenizer.add(token, may_stop=index > 3)
        assert (stop is not None) == (index == 6)
    assert detokenizer.text == "xab y"
