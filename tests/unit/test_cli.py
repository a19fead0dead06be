"""The command line: options become settings, mistakes become one line and exit code 2."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from draftloop import cli
from draftloop.bench.demo import follow
from draftloop.config import EngineConfig
from draftloop.config.fields import field_docs
from draftloop.errors import ConfigError, RequestError
from draftloop.models import resolve
from draftloop.request import CompletionOutput, RequestOutput, SamplingParams, SpeculationStats


@dataclass
class Row:
    phase: str
    captured: bool
    reason: str
    replays: int
    eager_runs: int


@dataclass
class Report:
    rows: list[Row]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class FakeLLM:
    """Answers with the words "one two three", a word per output."""

    made: list[FakeLLM] = []  # noqa: RUF012
    takes_chats = True

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.streamed: list[tuple[Any, SamplingParams, bool]] = []
        self.closed = False
        self.warmed: list[bool] = []
        self.adapters: set[str | None] = set()
        self.counts_are_new = False

    def reset_prefix_cache(self) -> bool:
        return True

    def generate(
        self, prompt: str, sampling_params: SamplingParams, *, speculation: bool, lora_request: str | None
    ) -> None:
        assert not self.streamed, "warm-up comes first"
        self.adapters.add(lora_request)
        self.warmed.append(speculation)

    def reset_graph_counts(self) -> None:
        self.counts_are_new = True

    @classmethod
    def from_config(cls, config: EngineConfig) -> FakeLLM:
        cls.made.append(cls(config))
        return cls.made[-1]

    def get_tokenizer(self) -> Any:
        return types.SimpleNamespace(chat_template="{{ messages }}")

    def check_chat(self) -> None:
        if not self.takes_chats:
            raise RequestError("it has no chat template")

    def stream(
        self, prompt: Any, sampling_params: SamplingParams, speculation: bool = True, lora_request: str | None = None
    ):
        self.adapters.add(lora_request)
        if prompt == "" or (isinstance(prompt, list) and prompt[-1]["content"] == "too long"):
            raise RequestError("the prompt is too long")
        self.streamed.append(([*prompt] if isinstance(prompt, list) else prompt, sampling_params, speculation))
        stats = SpeculationStats(
            num_spec_tokens=2,
            num_spec_steps=2,
            num_draft_tokens=4,
            num_accepted_draft_tokens=3,
            acceptance_histogram=(0, 1, 1),
        )
        words = ["one", "one two", "one two three"]
        for index, text in enumerate(words):
            output = CompletionOutput(index=0, text=text, token_ids=list(range(index + 1)), finish_reason="stop")
            yield RequestOutput(
                request_id="0",
                prompt=None,
                prompt_token_ids=[1],
                outputs=[output],
                finished=index == 2,
                spec=stats if speculation else None,
            )

    def get_graph_report(self) -> Report:
        return Report([Row("target.verify", True, "", 7, 0), Row("target.prefill", False, "prompts run eager", 0, 2)])

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def llm(monkeypatch):
    module = types.ModuleType("draftloop.engine.llm")
    module.LLM = FakeLLM  # pyrefly: ignore[missing-attribute]
    monkeypatch.setitem(sys.modules, "draftloop.engine.llm", module)
    monkeypatch.setattr(FakeLLM, "made", [])
    monkeypatch.setattr(resolve, "SHIPPED", Path("nothing is shipped"))
    # Other tests of this process listen to the log through its parents.
    monkeypatch.setattr(cli.log, "setup", lambda *options: None)


def test_run_streams_the_answer_then_a_summary(capsys):
    cli.main(["run", "some/model", "--prompt", "Count.", "--max-num-seqs", "3", "--require-graphs", "--seed", "5"])
    out, err = capsys.readouterr()
    assert out == "one two three\n"
    err = " ".join(err.split())
    for word in ("with speculation", "without speculation", "2.50", "answers are the same", "target.verify", "7"):
        assert word in err
    assert "prompts run eager" in err
    (llm,) = FakeLLM.made
    assert llm.closed
    assert (llm.config.model, llm.config.max_num_seqs, llm.config.require_graphs) == ("some/model", 3, True)
    assert llm.config.seed == 5
    assert llm.config.speculation is not None
    assert llm.config.speculation.method == "ngram"
    (messages, sampling, speculation), (_, _, again) = llm.streamed
    assert messages == [{"role": "user", "content": "Count."}]
    assert (sampling.temperature, sampling.max_tokens) == (0, 256)
    assert (speculation, again) == (True, False)


@pytest.mark.parametrize(
    ("arguments", "drafter"),
    [
        ([], "smollm2-135m-eagle3"),
        (["HuggingFaceTB/SmolLM2-135M-Instruct", "--spec-tokens", "2"], "smollm2-135m-eagle3"),
        (["--load-format", "dummy"], None),
        (["some/model"], None),
        (["--spec-method", "ngram", "--spec-tokens", "4"], None),
    ],
)
def test_a_shipped_drafter_drafts_for_its_target(arguments, drafter, monkeypatch, tmp_path):
    (tmp_path / "smollm2-135m-eagle3").mkdir()
    (tmp_path / "smollm2-135m-eagle3" / "config.json").touch()
    monkeypatch.setattr(resolve, "SHIPPED", tmp_path)
    cli.main(["run", *arguments])
    spec = FakeLLM.made[0].config.speculation
    assert spec is not None
    assert (spec.method, spec.model) == (("eagle3", drafter) if drafter else ("ngram", None))
    assert spec.num_speculative_tokens == (3 if drafter and not arguments else 2 if drafter else 4)


@pytest.mark.parametrize("given", [["b=y", "c=z"], ["b=y", "--lora-modules", '{"name": "c", "path": "z"}']])
def test_an_adapter_answers_where_one_is_named(given):
    arguments = ["--enable-lora", "--max-loras", "2", "--lora-modules", *given, "--lora", "c"]
    cli.main(["run", "some/model", "--prompt", "Count.", *arguments])
    (llm,) = FakeLLM.made
    assert llm.config.adapters == {"b": "y", "c": "z"}
    assert llm.adapters == {"c"}


def test_run_as_json(capsys):
    cli.main(["run", "--raw", "-p", "-1, 0,", "-p", "b", "--json", "--temperature", "0.5", "--max-tokens", "9"])
    got = json.loads(capsys.readouterr().out)
    assert got["answers"] == ["one two three"] * 2
    assert got["num_tokens"] == [3, 3]
    assert got["tokens_per_s"] > 0
    assert got["tokens_per_s_without_speculation"] > 0
    assert got["acceptance_length"] == 2.5
    assert got["same_tokens"] is None  # sampled
    assert got["graphs"]["rows"][0]["replays"] == 7
    (llm,) = FakeLLM.made
    assert [prompt for prompt, _, _ in llm.streamed] == ["-1, 0,", "b"] * 2
    assert llm.streamed[0][1].temperature == 0.5


def test_run_without_speculation(capsys):
    cli.main(["run", "--spec-tokens", "0"])
    (llm,) = FakeLLM.made
    assert llm.config.speculation is None
    assert llm.config.max_num_seqs == 1
    assert [speculation for _, _, speculation in llm.streamed] == [False]
    assert "without speculation" in capsys.readouterr().err


def test_engine_is_closed_after_an_error(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["run", "--raw", "-p", ""])
    assert exit_.value.code == 2
    assert capsys.readouterr().err.endswith("\ndraftloop: the prompt is too long\n")
    assert FakeLLM.made[0].closed


def test_chat_keeps_the_conversation(monkeypatch, capsys):
    lines = iter(["hello", "", "too long", "again", "/reset", "new", "/exit", "never"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    cli.main(["chat", "--system", "Be brief."])
    (llm,) = FakeLLM.made
    system, answer = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "one two three"}
    asked = [[m["content"] for m in messages] for messages, _, _ in llm.streamed]
    assert asked == [
        [system["content"], "hello"],
        [system["content"], "hello", answer["content"], "again"],
        [system["content"], "new"],
    ]
    assert "too long" in capsys.readouterr().err


def test_chat_says_once_that_a_model_takes_no_conversations(monkeypatch, capsys):
    """Before anybody has typed a line."""
    monkeypatch.setattr(FakeLLM, "takes_chats", False)
    monkeypatch.setattr("builtins.input", lambda prompt="": pytest.fail("asked for a line"))
    with pytest.raises(SystemExit) as exit_:
        cli.main(["chat"])
    assert exit_.value.code == 2
    assert capsys.readouterr().err.count("it has no chat template") == 1
    assert FakeLLM.made[0].closed


def test_an_interrupt_ends_a_conversation_with_the_status_that_shells_know(monkeypatch):
    def interrupted(prompt: str = "") -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["chat"])
    assert exit_.value.code == 130
    assert FakeLLM.made[0].closed


def test_an_answer_that_failed_is_an_error():
    answer = CompletionOutput(index=0, text="one", token_ids=[1], finish_reason="error")
    failed = RequestOutput(
        request_id="0", prompt="x", prompt_token_ids=[1], outputs=[answer], finished=True, error="its logits are NaN"
    )
    said: list[str] = []
    with pytest.raises(RequestError, match="its logits are NaN"):
        follow([failed], said.append)
    assert said == ["one", "\n"]


@pytest.mark.parametrize("sizes", [["1,8"], ["1", "8"]])
def test_bench_latency(monkeypatch, tmp_path, sizes):
    calls = []
    module = types.ModuleType("draftloop.bench.latency")
    module.run_latency = lambda config, **values: calls.append((config, values))  # pyrefly: ignore
    monkeypatch.setitem(sys.modules, "draftloop.bench.latency", module)
    cli.main(
        ["bench", "latency", "llama-3.1-8b", "--batch-sizes", *sizes, "--out", str(tmp_path), "--max-num-seqs", "2"]
    )
    ((config, values),) = calls
    assert (config.model, config.max_num_seqs, config.speculation) == ("llama-3.1-8b", 8, None)
    assert values == {
        "batch_sizes": (1, 8),
        "prompt_tokens": 512,
        "output_tokens": 128,
        "repeats": 3,
        "out": tmp_path,
        "sampling_mix": "greedy",
        "trace": None,
    }


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["run", "--max-num-seq", "3"], "Did you mean --max-num-seqs?"),
        (["run", "--seed", "x"], 'unable to convert "x" into int'),
        (["run", "--dtype", "fp8"], 'Invalid value "fp8" for --dtype. Choose from: "auto"'),
        (["run", "--temperature", "-1"], "temperature is -1.0; it must be"),
        (["run", "--block-size", "8"], "block_size is 8; it must be 16, 32 or 64"),
        (["run", "--spec-tokens", "33"], "num_speculative_tokens is 33; it must be in [0, 32]"),
        (["run", "-sc", "{"], "--speculative-config is not JSON"),
        (["run", "-sc", "[1]"], "--speculative-config is [1]; it must be a JSON object"),
        (["run", "-sc", '{"metod": "ngram"}'], "unknown speculative_config key 'metod'; did you mean 'method'?"),
        (["run", "--speculative-config", '{"method": "a"}', "--spec-method", "b"], "both name 'method'"),
        (["bench", "latency", "--spec-tokens", "3"], "neither a method nor a model"),
        (["bench", "latency", "--batch-sizes", "1,x"], "'1,x' are not whole numbers"),
        (["bench", "latency", "--batch-sizes", "--repeats", "1"], "--batch-sizes requires at least 1 element"),
        (["compare", "--drafters", ""], "--drafters: give at least one name"),
        (["bench", "soak", "--minutes", "nan"], "--minutes is nan; it must be above 0"),
        (["bench", "soak", "--max-seconds", "3"], "--max-seconds is 3; it must be 30 at least"),
        (["bench", "replicas", "--tolerance", "2"], "--tolerance is 2; it must be in (0, 1)"),
        (["bench", "replicas", "--output-tokens", "1"], "--output-tokens is 1; it must be at least 2"),
        (["bench", "engines", "--steady-steps", "-1"], "--steady-steps is -1; it must be at least 0"),
        (["bench", "engines", "-dp", "1"], "data_parallel_size is 1; this takes several engines"),
        (["bench", "transformers", "--repeats", "0"], "--repeats is 0; it must be at least 1"),
        (["run", "-pp", "2"], "pipeline_parallel_size is 2; it must be 1; raise tensor_parallel_size"),
        (["bench", "latency", "--batch-sizes", "0"], "--batch-sizes is 0; it must be at least 1"),
        (["bench", "latency", "--repeats", "0"], "--repeats is 0; it must be at least 1"),
        (["run", "--lora", "sql"], "--lora is 'sql'; known adapters: none; give --enable-lora"),
        (["train"], "--target requires an argument"),
        (["frob"], 'Unknown command "frob"'),
        (["run", "name", "three", "rivers"], "nothing takes 'three rivers'; quote texts with spaces"),
        (["bench", "structured", "smollm2-135m"], "`draftloop bench structured --help` lists what it takes"),
    ],
)
def test_mistakes_are_one_line_and_start_nothing(argv, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("draftloop: ")
    assert err.count("\n") == 1
    assert FakeLLM.made == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("LOGLEVEL", "INFO", "did you mean 'DRAFTLOOP_LOG_LEVEL'?"),
        ("LOG_LEVEL", "loud", "DRAFTLOOP_LOG_LEVEL is 'LOUD'; it must be one of DEBUG, INFO"),
        ("LOG_FORMAT", "xml", "DRAFTLOOP_LOG_FORMAT is 'xml'; it must be one of text, json"),
        ("POISON", "yes", "DRAFTLOOP_POISON is 'yes'; it must be 0 or 1"),
    ],
)
def test_environment_variables_that_mean_nothing(name, value, message, monkeypatch, capsys):
    monkeypatch.setenv(f"DRAFTLOOP_{name}", value)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["run"])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_short_forms_join_the_json():
    values = {"speculative_config": '{"method": "ngram", "prompt_lookup_max": 3}', "spec_tokens": 5, "seed": 1}
    joined = cli.speculation_from(values)
    assert joined == {"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": 5}
    assert values == {"seed": 1}
    with pytest.raises(ConfigError, match="--spec-tokens and --speculative-config both name"):
        cli.speculation_from({"speculative_config": '{"num_speculative_tokens": 3}', "spec_tokens": 5})


@pytest.mark.parametrize("command", [["run"], ["chat"], ["bench", "latency"]])
def test_every_setting_is_an_option_with_its_docstring(command):
    # a process of its own: the console's width is settled once per process
    ask = [sys.executable, "-m", "draftloop", *command, "--help"]
    done = subprocess.run(ask, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "400"})
    text = " ".join(done.stdout.split())
    for name, doc in field_docs(EngineConfig).items():
        assert f"--{name.replace('_', '-')}" in text
        assert " ".join(doc.split()) in text


def test_version(capsys):
    import draftloop

    cli.main(["--version"])
    assert capsys.readouterr().out.strip() == draftloop.__version__


def test_collect_env_says_what_runs_here_and_keeps_the_key(monkeypatch, capsys):
    import torch

    monkeypatch.setenv("DRAFTLOOP_API_KEY", "secret-key")
    monkeypatch.setenv("DRAFTLOOP_LOG_LEVEL", "WARNING")
    cli.main(["collect-env", "--json"])
    text = capsys.readouterr().out
    found = json.loads(text)
    assert found["packages"]["torch"] == torch.__version__
    assert found["environment"]["DRAFTLOOP_LOG_LEVEL"] == "WARNING"
    assert found["environment"]["DRAFTLOOP_API_KEY"] == "set, not shown"
    assert "secret-key" not in text
    assert any("cudagraph_mode" in section for section in found.values())  # with its reason


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_that_knows_commands_and_options(shell, capsys):
    cli.main(["completion", shell])
    script = capsys.readouterr().out
    for name in ("check-drafter", "collect-env", "max-num-seqs"):
        assert name in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_a_reader_that_has_enough_is_no_mistake():
    """As with `draftloop completion bash | head -1`."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "draftloop", "completion", "bash"], stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")
