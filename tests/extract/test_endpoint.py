"""What a chat server may reply, and a run that ends while answers are on their way."""

import json
import threading
from pathlib import Path

import pytest

from dflash_offline.common.chat import ChatOptions
from dflash_offline.common.errors import BadInput
from dflash_offline.extract.endpoint import Endpoint, _first_choice, check_url
from dflash_offline.extract.generate_config import GenerateConfig
from dflash_offline.extract.jobs import Job
from dflash_offline.extract.server_answers import ServerAnswers

MESSAGE = {"content": "fine"}


@pytest.mark.parametrize(
    "reply",
    [
        b"<html>",
        b'{"error": "boom"}',
        b'{"choices": null}',
        b'{"choices": [{"message": null}]}',
        b"[1]",
        b'{"choices": [{"message": {"content": "a"}}], "usage": "none"}',
    ],
)
def test_reply_that_is_no_completion(reply: bytes):
    with pytest.raises(ValueError, match="no chat completion but"):
        _first_choice(reply)


@pytest.mark.parametrize(
    "message",
    [{"content": ["a"]}, {"content": "\ud83d"}, {"content": "a", "reasoning_content": ["b"]}],
)
def test_answer_that_is_no_text(message: dict):
    with pytest.raises(ValueError, match="no text"):
        _first_choice(json.dumps({"choices": [{"message": message}]}).encode())


@pytest.mark.parametrize("usage", [None, {}, {"completion_tokens": None}])
def test_usage_may_be_missing(usage: dict | None):
    reply = {"choices": [{"message": MESSAGE}], "usage": usage}
    assert _first_choice(json.dumps(reply).encode())["completion_tokens"] == 0


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_kept_by_either_name(name: str):
    reply = {"choices": [{"message": {**MESSAGE, name: "hm"}}]}
    message = _first_choice(json.dumps(reply).encode())["message"]
    assert message == {"content": "fine", "reasoning_content": "hm"}


@pytest.mark.parametrize(
    "url", ["localhost:8000/v1", "host/v1", "ftp://x/v1", "http://[a/v1", "http:///v1"]
)
def test_what_is_no_address(url: str):
    with pytest.raises(BadInput, match="--endpoint .* is no address of a server"):
        check_url(url)


def test_nobody_waits_for_answers_on_their_way(monkeypatch: pytest.MonkeyPatch):
    """One refused request ends the run, though another takes long; nothing more is begun."""
    begun, release = [], threading.Event()

    def complete(self: Endpoint, messages: list[dict], seed: int) -> dict:
        begun.append(messages[-1]["content"])
        if begun[-1] == "bad":
            raise BadInput("refused")
        release.wait(30)
        return {"message": {**MESSAGE, "reasoning_content": ""}, "completion_tokens": 1}

    monkeypatch.setattr(Endpoint, "complete", complete)
    config = GenerateConfig(
        target="t", data=(), out=Path("a"), endpoint="http://host/v1", concurrency=2
    )
    jobs = [
        Job(
            key=q,
            id=q,
            source="",
            licence="",
            opening=(),
            questions=({"role": "user", "content": q},),
        )
        for q in ("slow", "bad", "later")
    ]
    with pytest.raises(BadInput, match="prompt bad: refused"):
        next(ServerAnswers(config, ChatOptions()).answer(jobs, None))
    waiting = [thread for thread in threading.enumerate() if thread.name == "answer"]
    assert all(thread.daemon for thread in waiting)
    release.set()
    for thread in waiting:
        thread.join(30)
    assert sorted(begun) in (["bad", "slow"], ["bad", "later", "slow"])
