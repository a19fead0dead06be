"""What the hub refuses is said with what to do about it. No connection is opened."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from draftloop import LLM, SamplingParams
from draftloop.errors import CapacityError, ConfigError, RequestError
from draftloop.models.resolve import resolve_model
from draftloop.train.files import write_file
from helpers import tiny_model

ANSWER = httpx.Response(403, request=httpx.Request("GET", "http://localhost/model"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GatedRepoError("no", response=ANSWER), "model 'org/model' is gated; accept its terms on the hub and log in"),
        (RepositoryNotFoundError("no", response=ANSWER), "the hub has no model 'org/model'; check the spelling"),
        (RevisionNotFoundError("no", response=ANSWER), "the hub has no model 'org/model'; check the revision"),
        (httpx.ConnectError("no route"), "neither a local folder nor in the hub's cache, and cannot be fetched"),
    ],
)
def test_why_the_hub_gives_nothing(error, message, monkeypatch):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    with pytest.raises(ConfigError, match=message):
        resolve_model("org/model")


def test_pickled_weights_alone_are_not_fetched(monkeypatch):
    files = SimpleNamespace(siblings=[SimpleNamespace(rfilename="pytorch_model.bin")])
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: files)
    with pytest.raises(ConfigError, match="has no safetensors weights on the hub; choose one that has, or use"):
        resolve_model("org/model")


def test_a_full_disk_is_said_with_what_is_kept(tmp_path):
    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CapacityError, match=r"No space left .*; 3 shards are kept\. Make room and run the same again"):
        write_file(tmp_path / "shard", full, kept="3 shards are kept")
    assert list(tmp_path.iterdir()) == []


def test_an_llm_that_is_closed_says_so():
    llm = LLM(tiny_model(), max_model_len=64, max_num_seqs=1, enforce_eager=True)
    llm.close()
    with pytest.raises(RequestError, match="this LLM is closed; make another"):
        llm.generate([[1, 2]], SamplingParams(max_tokens=1))
