"""The page of numbers: what the JSON files say, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftloop import cli
from draftloop.bench.goals import GOALS, GPU
from draftloop.bench.report import NOT_YET, PAGE, Run, make_page, newest_rows, plain_command, read_runs
from draftloop.errors import ConfigError

NUMBERS = Path(__file__).parents[2] / "docs" / "numbers"
STEP = {
    "model": "llama-3.1-8b",
    "method": "eagle3",
    "drafter": "eagle3-llama-3.1-8b",
    "k": 5,
    "prompt": 512,
    "path": "iteration",
    "metric": "iteration_ms",
    "batch": 1,
    "value": 6.0,
    "floor": 4.0,
    "launches": 1,
    "eager_runs": 0,
}


def run(name: str, *rows: dict[str, Any], date: str = "2027-01-01", dirty: bool = False) -> Run:
    versions = {"torch": "2.11.0", "triton": "3.6.0", "driver": "580"}
    command = f"__main__.py bench latency llama-3.1-8b -sc '{{\"a\": 1}}' --out /somewhere/{name}"
    stamp = {"command": command, "gpu": GPU, "git": "0123456789abcdef", "dirty": dirty, "date": date}
    return Run(name=name, stamp={**stamp, "versions": versions}, rows=[{**STEP, **row} for row in rows])


def page(*runs: Run) -> str:
    return make_page(sorted(runs, key=lambda one: one.age, reverse=True))


def line(text: str, start: str) -> list[str]:
    """The cells of the one line that starts like this."""
    (found,) = [one for one in text.splitlines() if one.startswith(start)]
    return [cell.strip() for cell in found.strip("|").split("|")]


EAGLE = "| EAGLE-3 K=5, iteration | 1 |"


def test_the_page_says_what_the_files_beside_it_say():
    want = make_page(read_runs(NUMBERS))
    assert (NUMBERS / PAGE).read_text(encoding="utf-8") == want, "run `draftloop bench report`"


def test_every_goal_has_a_line_measured_or_not():
    text = page(run("a.json", {}))
    measured, *_ = line(text, EAGLE)[7:]
    assert measured == "**6.00**"
    assert text.count(NOT_YET) == len(GOALS) - 1


def test_a_line_holds_peers_targets_and_the_ratio_to_its_own_floor():
    assert line(page(run("a.json", {})), EAGLE) == [
        "EAGLE-3 K=5, iteration", "1", "7.78", "6.51", "4.42", "5.1", "4.8",
        "**6.00**", "+0.90", "4.000", "1.50", "iteration", "1", "[json](a.json)",
    ]  # fmt: skip
    assert line(page(run("a.json", {"value": 5.1})), EAGLE)[8] == "met"


@pytest.mark.parametrize(
    ("runs", "value"),
    [
        ([run("a.json", {"value": 5.0}), run("b.json", {"value": 6.0}, date="2027-01-02")], "**6.00**"),
        ([run("a.json", {"value": 6.0}), run("b.json", {"value": 5.5})], "**5.50**"),
        ([run("a.json", {"value": 6.0}), run("b.json", {"value": 5.5}, date="2027-01-02", dirty=True)], "**6.00**"),
        ([run("a.json", {"value": 6.0}), run("b.json", {"value": 5.5, "batch": 8}, date="2027-01-02")], "**6.00**"),
        # of the paths the fastest, each by its newest file
        ([run("a.json", {"value": 6.0}), run("b.json", {"value": 5.9, "path": "loop"})], "**5.90**"),
        ([run("a.json", {"value": 6.0}), run("b.json", {"value": 6.1, "path": "loop"})], "**6.00**"),
        # other prompts are another measurement
        ([run("a.json", {"value": 6.0}), run("b.json", {"value": 1.0, "prompt": 16})], "**6.00**"),
        # and so are two GPUs
        (
            [run("a.json", {"value": 6.0}), run("b.json", {"value": 4.0, "path": "loop", "tensor_parallel": 2})],
            "**6.00**",
        ),
    ],
)
def test_the_newest_row_counts(runs, value):
    assert line(page(*runs), EAGLE)[7] == value


def test_start_up_counts_only_with_every_size():
    start = {"metric": "startup_s", "batch": None}
    some = run("b.json", {**start, "value": 5.0, "all_sizes": False}, date="2027-01-02")
    text = page(run("a.json", {**start, "value": 19.0, "all_sizes": True}), some)
    assert line(text, "| start-up")[7] == "**19.00**"
    assert line(page(some), "| start-up")[7] == NOT_YET


def test_latencies_of_requests_that_come_and_go_are_a_table_of_their_own():
    spread = {"p50": 1.0, "p90": 2.0, "p99": 3.0, "num_requests": 64}
    waits = [{"metric": metric, "value": 1.0, **spread} for metric in ("ttft_ms", "tpot_ms")]
    speed = {"metric": "tokens_per_s", "value": 800.4, "num_requests": 64, "acceptance_length": 3.5}
    text = page(run("a.json", speed, *waits))
    assert line(text, "| time to first token, EAGLE-3")[7] == NOT_YET
    assert line(text, "| llama-3.1-8b | eagle3 | 5 | 1 |")[5:] == [
        "800", "3.50", "1.000 / 3.000", "1.000 / 3.000", "[json](a.json)"
    ]  # fmt: skip


def test_phases_are_shown_where_they_were_measured():
    decode = {"metric": "phase_ms", "phase": "draft.decode", "runs": 4.0, "value": 0.3, "floor": 0.2, "chain": False}
    accept = {"metric": "phase_ms", "phase": "accept", "runs": 0.4, "value": None, "floor": None, "chain": False}
    text = page(run("a.json", {"path": "loop", "launches": 0.0156}, decode, accept, {**decode, "batch": 8}))
    assert line(text, "| draft.decode") == ["draft.decode", "4", "0.300", "0.200", "1.50", "1.200"]
    assert line(text, "| accept") == ["accept", "0.4", "-", "-", "-", "-"]
    assert line(text, EAGLE)[12] == "1 per 64"
    assert "Phase by phase" not in page(run("a.json", {}))


def test_sampled_iterations_are_held_against_greedy_ones_of_their_run():
    mix = {"sampling": "all-parameters-half", "batch": 32}
    sampled = {**mix, "metric": "sampled_iteration_ms", "value": 8.5, "greedy": 8.0, "to_greedy": 1.0625}
    older = {**sampled, "to_greedy": 2.0}
    reference = {"sampling": "greedy", "batch": 1, "value": 0.5}
    text = page(run("a.json", {}, sampled, reference), run("b.json", older, date="2026-01-01"))
    cells = line(text, "| llama-3.1-8b | eagle3 | 5 | 32 |")[4:]
    assert cells == ["iteration", "all-parameters-half", "8.00", "8.50", "1.062", "1", "[json](a.json)"]
    assert line(text, EAGLE)[7] == "**6.00**", "what is only held against is no goal's row"


def test_growth_with_the_batch_is_held_against_that_of_the_floor():
    rows = ({}, {"batch": 32, "value": 9.0, "floor": 5.0}, {"batch": 32, "value": 8.0, "floor": 5.0, "path": "loop"})
    text = page(run("a.json", *rows))
    assert line(text, "| llama-3.1-8b, eagle3, K=5 |")[1:] == ["iteration", "3.000", "1.000", "3.00"]


def test_what_the_page_does_not_show_does_not_change_it():
    others = [
        {"metric": "acceptance_length", "value": 2.0},
        {"metric": "tokens_per_s", "value": 9.0, "name": "ngram:4"},
    ]
    assert page(run("a.json", {}), run("b.json", *others, date="2027-01-02")) == page(run("a.json", {}))


def test_where_a_number_comes_from_is_said():
    text = page(run("a.json", {}, dirty=True))
    assert "[a.json](a.json): 2027-01-01, commit 0123456789ab with changes, NVIDIA H200, torch 2.11.0" in text
    assert "`draftloop bench latency llama-3.1-8b -sc '{\"a\": 1}'`" in text
    assert "somewhere" not in text


@pytest.mark.parametrize(
    ("command", "plain"),
    [
        ("__main__.py bench latency m --out /root/a.json --seed 1", "draftloop bench latency m --seed 1"),
        ("draftloop bench latency m --out=/root/a.json --trace t.json", "draftloop bench latency m"),
        ("draftloop bench latency /data/models/m --seed 1", "draftloop bench latency m --seed 1"),
    ],
)
def test_commands_are_shown_without_the_machines_folders(command, plain):
    assert plain_command(command) == plain


def test_other_rows_are_listed_too():
    text = page(run("a.json", {"batch": 16, "eager_runs": 2}))
    cells = line(text, "| llama-3.1-8b | eagle3 | 5 | 16 |")
    assert cells[4:] == ["iteration", "6.00", "4.000", "1.50", "1, 2 eager", "[json](a.json)"]


def test_files_of_other_machines_are_left_out(tmp_path, capsys):
    for name, gpu in (("a.json", GPU), ("b.json", None), ("c.json", "NVIDIA L4")):
        made = run(name, {})
        (tmp_path / name).write_text(json.dumps({**made.stamp, "gpu": gpu, "rows": made.rows}))
    assert [one.name for one in read_runs(tmp_path)] == ["a.json"]
    cli.main(["bench", "report", str(tmp_path)])
    assert capsys.readouterr().out.strip() == str(tmp_path / PAGE)
    assert "**6.00**" in (tmp_path / PAGE).read_text()


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": []}'])
def test_a_file_that_is_no_result_is_named(tmp_path, text):
    (tmp_path / "odd.json").write_text(text)
    with pytest.raises(ConfigError, match=r"odd\.json is no file of numbers"):
        read_runs(tmp_path)


def test_a_file_counts_as_many_rows_as_it_holds():
    rows = newest_rows([run("a.json", {"batch": 1}, {"batch": 8}, {"batch": 8, "value": 1.0})])
    assert [found.row["batch"] for found in rows] == [1, 8]


def test_other_prompts_and_what_changes_results_are_other_measurements():
    """Neither counts for a goal, and each says what it is."""
    runs = run("a.json", {}), run("b.json", {"prompt": 8192, "value": 9.0}), run("c.json", {"path": "loop, fp8 cache"})
    text = page(*runs)
    assert line(text, EAGLE)[13] == "[json](a.json)"
    assert "| iteration, prompts of 8192 | 9.00 |" in text
    assert "| loop, fp8 cache | 6.00 |" in text


# ---- figures in prose -----------------------------------------------------------------------

README = NUMBERS.parents[1] / "README.md"


def cells(text: str) -> list[list[str]]:
    """Of each line of a table, without marks of bold type."""
    return [
        [cell.strip().replace("*", "") for cell in one.strip("|").split("|")]
        for one in text.splitlines()
        if one.startswith("|")
    ]


def test_the_readme_has_the_pages_figures():
    page_rows = {(row[0], row[1]): set(row[2:]) for row in cells((NUMBERS / PAGE).read_text(encoding="utf-8"))}
    section = README.read_text(encoding="utf-8").partition("## How fast a step is")[2].partition("\n## ")[0]
    rows = cells(section)[2:]
    assert len(rows) >= 8
    for what, batch, *figures in rows:
        assert set(figures) - {"-"} <= page_rows[what, batch], f"{what}, {batch}: copy it from {PAGE}"


def test_the_readme_begins_with_what_its_table_says():
    text = README.read_text(encoding="utf-8")
    rows = cells(text.partition("## How fast a step is")[2].partition("\n## ")[0])[2:]
    less = [1 - float(ours) / float(theirs) for _, batch, ours, *peers, _ in rows if batch != "-" for theirs in peers]
    assert f"take [{min(less) * 100:.0f} to {max(less) * 100:.0f} % less time](#how-fast-a-step-is)" in text


def test_speeds_and_ratios_of_drafters_are_those_of_the_files_that_are_named():
    """Rows of README.md; batches of the table in choosing_a_drafter.md."""

    def speeds(name: str) -> list[dict[str, Any]]:
        rows = json.loads((NUMBERS / name).read_text())["rows"]
        return [row for row in rows if row["metric"] == "tokens_per_s"]

    def ratio(row: dict[str, Any], plain: dict[int, float]) -> str:
        return f"{row.get('ratio', row['value'] / plain[row['batch']]):.2f}x"

    plain = {row["batch"]: row["value"] for row in speeds("2026-11-30-h200-load-none.json")}
    section = README.read_text(encoding="utf-8").partition("## What speculation gives")[2].partition("\n## ")[0]
    for _, batch, drafter, length, speed, gain, file in cells(section)[2:]:
        found = speeds(file.rpartition("/")[2].rstrip(")"))
        drafts = int(drafter.split(", ")[1][0]) if ", " in drafter else 0
        (row,) = [row for row in found if row["batch"] == int(batch) and row["k"] == drafts]
        assert length == f"{row['acceptance_length']:.2f}"
        assert speed in (f"{row['value']:.1f}", f"{row['value']:.0f}")
        assert gain == (ratio(row, plain) if drafts else "")

    text = (NUMBERS.parent / "choosing_a_drafter.md").read_text(encoding="utf-8")
    table = cells(text.partition("## Where speculation loses")[2].partition("\n\n(")[0])[2:]
    columns = [
        {row["batch"]: row for row in speeds(f"2026-11-30-h200-load-{k}.json")} for k in ("k1", "k3", "k5", "adaptive")
    ]
    for batch, none, *gains in table:
        assert none == f"{plain[int(batch)]:,.0f}"
        assert gains == [ratio(column[int(batch)], plain) for column in columns]
