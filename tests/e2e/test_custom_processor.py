"""The logits processor that docs/sampling.md shows, as it stands there: it runs as a graph, at every position."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from draftloop.errors import RequestError
from draftloop.request import SamplingParams
from helpers import answers, engine, greedy, oracle, prompts, tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "sampling.md"


@pytest.fixture
def shown(monkeypatch) -> str:
    """Importable name of the module that holds the page's class."""
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "class " in block]
    module = types.ModuleType("shown_in_docs")
    exec(compile(code, str(PAGE), "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return f"{module.__name__}:Only"


def test_the_processor_of_the_page_holds_inside_blocks_and_for_its_own_request_alone(shown):
    spec = {"method": "draft_model", "model": tiny_model(), "num_speculative_tokens": 3}
    llm = engine(speculative_config=spec, logits_processors=(shown,), cudagraph_mode="FULL")
    asked = prompts(3)
    for after in (1, 2, 3, 5):
        arguments = {"only_token": 7, "only_after": after}
        params = [
            greedy(9),
            greedy(9, extra_args=arguments),
            SamplingParams(temperature=1.5, max_tokens=9, seed=1, extra_args=arguments),
        ]
        free, held, drawn = answers(llm.generate(asked, params))
        assert free == oracle(asked[0], 9)
        assert held == [*oracle(asked[1], 9)[:after], *[7] * (9 - after)]
        assert drawn[after:] == [7] * (9 - after)
    report = llm.get_graph_report()
    assert report.replays["accept.constrained"] > 0
    assert not report.eager_runs.get("accept.constrained")


def test_an_argument_that_it_does_not_take_is_refused(shown):
    llm = engine(logits_processors=(shown,), enforce_eager=True)
    with pytest.raises(RequestError, match=r"extra_args has 'only_tokens'.*did you mean 'only_token'"):
        llm.generate([1], greedy(2, extra_args={"only_tokens": 7}))
