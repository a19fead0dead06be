"""The API as clients see it: a real server, real sockets, OpenAI's own client."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
from servers import EOS, TEMPLATE, K, byte_model, running

from draftloop.engine.llm import LLM
from draftloop.request import SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
RENDERED = "[user]hello[assistant]"


@pytest.fixture(scope="module")
def server():
    drafter = ("--spec-method", "draft_model", "--spec-model", byte_model(), "--spec-tokens", str(K))
    with running(*drafter, "--served-model-name", "tiny", "--served-model-name", "other") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(server, **fields):
    """One completion; its choice."""
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 12, "return_token_ids": True, **fields}
    return server.post(COMPLETIONS, body)["choices"][0]


# ---- the openai client ----------------------------------------------------------------------


def test_openai_client_lists_models_and_gets_the_same_answer_streamed_and_whole(client):
    assert [model.id for model in client.models.list()] == ["tiny", "other"]
    assert client.models.retrieve("other").id == "other"
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_completion_tokens=20)
    assert whole.choices[0].finish_reason in ("length", "stop")
    assert whole.usage.completion_tokens <= 20
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        temperature=0,
        max_completion_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    # all but the last token of what fills pages
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == len(RENDERED) // 16 * 16 - 1
    text = client.completions.create(model="other", prompt=RENDERED, temperature=0, max_tokens=20).choices[0].text
    assert text == whole.choices[0].message.content


def test_openai_client_gets_logprobs_and_several_answers(client):
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=6, logprobs=True, top_logprobs=2, n=2, seed=5
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert len(choice.logprobs.content) == 6
        for token in choice.logprobs.content:
            assert len(token.top_logprobs) == 2
            assert token.logprob <= token.top_logprobs[0].logprob <= 0
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens == len(RENDERED)  # a byte is a token; the prompt counts once


def test_openai_client_raises_what_it_should(client):
    with pytest.raises(openai.NotFoundError, match="there is no model 'nobody'"):
        client.completions.create(model="nobody", prompt="x")
    with pytest.raises(openai.BadRequestError, match="top_p") as caught:
        client.completions.create(model="tiny", prompt="x", top_p=2)
    assert caught.value.param == "top_p"


def test_structured_output_through_the_openai_client(client):
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}, "hot": {"type": "boolean"}},
        "required": ["colour", "hot"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        temperature=0,
        max_tokens=100,
        extra_body={"structured_outputs": {"json": schema, "disable_any_whitespace": True}},
    )
    assert set(json.loads(answer.choices[0].message.content)) == {"colour", "hot"}
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_tool_is_called(client, stream):
    parameters = {
        "type": "object",
        "properties": {"unit": {"$ref": "#/$defs/Unit"}},
        "required": ["unit"],
        "additionalProperties": False,
        "$defs": {"Unit": {"enum": ["celsius", "kelvin"]}},
    }
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, temperature=0, max_tokens=200, tools=tools, tool_choice=choice,
            parallel_tool_calls=False, stream=stream,
        )  # fmt: skip
        if stream:
            chunks = list(answer)
            calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
            reason = chunks[-1].choices[0].finish_reason
        else:
            calls, reason = answer.choices[0].message.tool_calls, answer.choices[0].finish_reason
        assert reason == "tool_calls"
        (call,) = calls
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments)["unit"] in ("celsius", "kelvin")


# ---- streams --------------------------------------------------------------------------------


def test_pieces_of_a_stream_are_whole_characters_and_join_to_the_answer(server):
    body = {"prompt": [3, 1, 4], "temperature": 0, "max_tokens": 100, "return_token_ids": True, "ignore_eos": True}
    whole = server.post(COMPLETIONS, body)["choices"][0]
    pieces = [event["choices"][0] for event in server.stream(COMPLETIONS, body)]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert [token for piece in pieces for token in piece["token_ids"]] == whole["token_ids"]
    assert any(len(piece["token_ids"]) > 1 for piece in pieces)  # speculation gives several at a time
    assert len(whole["token_ids"]) == 100


def test_no_piece_of_a_stream_holds_any_part_of_the_stop_text(server):
    plain = ask(server, max_tokens=60, ignore_eos=True)["text"]
    stop = next(plain[at : at + 4] for at in range(20, 56) if plain.find(plain[at : at + 4]) == at)
    expected = plain[: plain.find(stop)]
    pieces = server.stream(
        COMPLETIONS, {"prompt": "hello", "temperature": 0, "max_tokens": 60, "stop": stop, "ignore_eos": True}
    )
    text = ""
    for piece in pieces:
        text += piece["choices"][0]["text"]
        assert expected.startswith(text)
    assert text == expected
    assert pieces[-1]["choices"][0]["finish_reason"] == "stop"
    assert pieces[-1]["choices"][0]["stop_reason"] == stop


def test_stream_options_say_how_many_tokens_there_are_so_far(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 30, "ignore_eos": True, "stream_options": options}
    for path, prompt in ((COMPLETIONS, {"prompt": "hello"}), (CHAT, {"messages": MESSAGES, "prompt": None})):
        found = server.stream(path, {**body, **prompt, "return_token_ids": True})
        num_tokens = 0
        for event in found[:-1]:
            num_tokens += len(event["choices"][0].get("token_ids", []))
            assert event["usage"]["completion_tokens"] == num_tokens
        assert found[-1]["choices"] == []
        assert found[-1]["usage"]["completion_tokens"] == num_tokens == 30
        assert found[-1]["metrics"]["speculative_decoding"]["num_spec_tokens"] == K
    assert all(
        event["usage"] is None
        for event in server.stream(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})[:-1]
    )
    assert server.refusal(COMPLETIONS, body)[1]["param"] == "stream_options"


# ---- values of requests ---------------------------------------------------------------------


def test_prompts_come_as_texts_or_tokens_one_or_many(server):
    ids = list(server.post("/tokenize", {"prompt": "hello"})["tokens"])
    assert server.post("/detokenize", {"tokens": ids}) == {"prompt": "hello"}
    one = ask(server)["token_ids"]
    for prompt in ("hello", ids, ["hello"], [ids]):
        assert ask(server, prompt=prompt)["token_ids"] == one
    many = server.post(
        COMPLETIONS,
        {"prompt": ["hello", "world", "hello"], "temperature": 0, "max_tokens": 12, "return_token_ids": True},
    )
    assert [choice["index"] for choice in many["choices"]] == [0, 1, 2]
    assert many["choices"][0]["token_ids"] == many["choices"][2]["token_ids"] == one
    count = sum(len(choice["token_ids"]) for choice in many["choices"])
    usage = {"prompt_tokens": 15, "completion_tokens": count, "total_tokens": 15 + count}
    assert many["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": 0}}
    assert "metrics" not in many


def test_b23_a_seed_means_the_same_tokens_on_both_routes_and_in_any_company(server):
    """Seed ignored on one route, or broken by neighbours without one."""
    body = {
        "prompt": RENDERED,
        "temperature": 1,
        "max_tokens": 16,
        "seed": 7,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    company = {**body, "seed": None, "prompt": "others", "max_tokens": 40}

    def tokens(fields, path=COMPLETIONS):
        return server.post(path, fields)["choices"][0]["token_ids"]

    alone = tokens(body)
    assert tokens(body) == alone
    chat = {**body, "prompt": None, "messages": MESSAGES}
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(tokens, company) for _ in range(3)]
        assert pool.submit(tokens, body).result() == alone
        assert tokens(chat, CHAT) == alone
        assert len({tuple(other.result()) for other in others}) == 3
    assert tokens({**body, "seed": 8}) != alone


@pytest.mark.parametrize("mode", ["NONE", "FULL"])
def test_b23_a_seed_means_the_same_tokens_in_python_with_and_without_graphs(server, mode):
    spec = {"method": "draft_model", "model": byte_model(), "num_speculative_tokens": K}
    llm = LLM(byte_model(), device="cpu", cudagraph_mode=mode, speculative_config=spec, max_model_len=512)
    body = {"prompt": RENDERED, "temperature": 1, "top_p": 0.9, "max_tokens": 12, "seed": 7, "ignore_eos": True}
    (output,) = llm.generate(RENDERED, SamplingParams(**{k: v for k, v in body.items() if k != "prompt"}))
    choice = server.post(COMPLETIONS, {**body, "return_token_ids": True})["choices"][0]
    assert output.outputs[0].token_ids == choice["token_ids"]
    llm.close()


def test_b36_exactly_max_tokens_are_delivered_counted_and_measured(server):
    """Usage that counts tokens past the end, or fewer than were asked for."""
    before = server.metrics()
    delivered = 0
    for max_tokens in range(1, 2 * K + 3):
        answer = server.post(
            COMPLETIONS,
            {
                "prompt": "hello",
                "temperature": 0,
                "max_tokens": max_tokens,
                "return_token_ids": True,
                "ignore_eos": True,
            },
        )
        ids = answer["choices"][0]["token_ids"]
        assert len(ids) == answer["usage"]["completion_tokens"] == max_tokens
        assert answer["choices"][0]["finish_reason"] == "length"
        delivered += max_tokens
    after = server.metrics()
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == delivered
    assert after["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"] == 5 * (2 * K + 2)
    name = 'vllm:request_success_total{finished_reason="length"}'
    assert after[name] - before[name] == 2 * K + 2


def test_speculation_can_be_turned_off_for_one_request_and_the_tokens_are_the_same(server):
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 20, "return_token_ids": True}
    drafted = server.post(COMPLETIONS, body)
    plain = server.post(COMPLETIONS, {**body, "speculative": {"enabled": False}})
    assert plain["choices"] == drafted["choices"]
    stats = drafted["metrics"]["speculative_decoding"]
    assert len(stats["acceptance_histogram"]) == stats["num_spec_tokens"] + 1 == K + 1
    assert sum(stats["acceptance_histogram"]) == stats["num_spec_steps"] > 0
    assert stats["draft_acceptance_rate"] == stats["num_accepted_draft_tokens"] / stats["num_draft_tokens"]
    assert "speculative_decoding" not in plain["metrics"]
    for name in ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"):
        assert plain["metrics"][name] > 0


def test_loglikelihoods_as_lm_eval_asks_for_them_are_those_of_transformers(server):
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(byte_model(), dtype=torch.float32)
    prompts = [[5, 9, 200, 31], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    for asked in (0, 3):  # fewer than an echo shows, and more
        (choice,) = server.post(COMPLETIONS, {**body, "prompt": prompts[0], "prompt_logprobs": asked})["choices"]
        found = choice["prompt_logprobs"][1:]
        assert all(max(1, asked) <= len(one) <= asked + 1 for one in found)
        assert all(len(tops) <= 2 for tops in choice["logprobs"]["top_logprobs"][1:])
    choices = server.post(COMPLETIONS, body)["choices"]
    for prompt, choice in zip(prompts, choices, strict=True):
        with torch.no_grad():
            logprobs_TV = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        assert len(found["token_logprobs"]) == len(found["tokens"]) == len(found["text_offset"]) == len(prompt) + 1
        for at, token in enumerate(prompt[1:], 1):
            assert math.isclose(found["token_logprobs"][at], float(logprobs_TV[at - 1, token]), rel_tol=1e-3)
            likeliest = max(found["top_logprobs"][at].values())
            assert math.isclose(likeliest, float(logprobs_TV[at - 1].max()), rel_tol=1e-3)


@pytest.mark.parametrize("cap", range(K + 1))
def test_a_request_may_cap_its_drafts_and_the_tokens_are_the_same(server, cap):
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 20, "return_token_ids": True}
    answer = server.post(COMPLETIONS, {**body, "speculative": {"num_tokens": cap}})
    assert answer["choices"] == server.post(COMPLETIONS, body)["choices"]
    stats = answer["metrics"].get("speculative_decoding", {"acceptance_histogram": [0] * (K + 1)})
    assert not any(stats["acceptance_histogram"][cap + 1 :])
    assert any(stats["acceptance_histogram"][1:]) == (cap > 0)


def test_null_means_not_given_and_bookkeeping_fields_change_nothing(server):
    plain = ask(server)
    assert ask(server, stop=None, logprobs=None, best_of=None, user="me", metadata={"a": "b"}) == plain
    assert ask(server, best_of=1, repetition_penalty=1.0, length_penalty=1.0) == plain


# ---- what else it says ----------------------------------------------------------------------


def test_chats_are_tokenized_as_they_are_served(server):
    found = server.post("/tokenize", {"messages": MESSAGES, "return_token_strs": True})
    assert "".join(found["token_strs"]) == RENDERED
    assert found["count"] == len(RENDERED)
    answer = server.post(CHAT, {"messages": MESSAGES, "temperature": 0, "max_tokens": 2, "return_token_ids": True})
    assert answer["prompt_token_ids"] == found["tokens"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert server.post("/tokenize", {"messages": parts})["tokens"] == found["tokens"]
    info = server.get("/tokenizer_info")
    assert (info["eos_token"], info["chat_template"]) == ("<|end|>", TEMPLATE)


def test_server_info_has_the_coverage_table_and_metrics_count_its_replays(server):
    ask(server)
    info = server.get("/server_info")
    assert info["num_speculative_tokens"] == K
    verify = [row for row in info["graphs"]["rows"] if row["phase"] == "target.verify" and row["captured"]]
    assert sum(row["replays"] for row in verify) > 0
    metrics = server.metrics()
    counted = [value for name, value in metrics.items() if 'graph_replays_total{phase="target.verify"' in name]
    assert sum(counted) >= sum(row["replays"] for row in verify)
    assert server.get("/version")["version"]
    assert server.get("/load") == {"server_load": 0}


def test_an_end_token_ends_an_answer_and_is_counted(server):
    """The end token is delivered as a token, counted, and no text."""
    body = {
        "prompt": "hello",
        "temperature": 0,
        "max_tokens": 5,
        "logit_bias": {str(EOS): 100},
        "return_token_ids": True,
    }
    answer = server.post(COMPLETIONS, body)
    choice = answer["choices"][0]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("", [EOS], "stop")
    assert answer["usage"]["completion_tokens"] == 1
