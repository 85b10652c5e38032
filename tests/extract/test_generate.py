"""dflash-generate: answers are the target's own, whatever the batch; resume; settings; servers."""

import json
import os
import signal
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_offline.common.cache import open_cache
from dflash_offline.common.chat import ChatOptions, render_prompt
from dflash_offline.common.checkpoint_files import Checkpoint, find_checkpoint
from dflash_offline.common.store import LossMask, supervised
from dflash_offline.common.target import Target, load_target, load_tokenizer
from dflash_offline.extract import local_answers
from dflash_offline.extract.batch_decode import Decoded, Sampling, _choose, decode_batch
from dflash_offline.extract.cli import main as extract_command
from dflash_offline.extract.generate_cli import main as generate_command


@torch.inference_mode()
def greedy_alone(target: Target, prompt: list[int], stop: int, limit: int) -> list[int]:
    """Greedy decoding without a cache, a batch or padding."""
    tokens: list[int] = []
    while len(tokens) < limit:
        ids = torch.tensor([[*prompt, *tokens]])
        best = int(target.causal(input_ids=ids, use_cache=False).logits[0, -1].argmax())
        if best == stop:
            break
        tokens.append(best)
    return tokens


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3", "qwen3.5-hybrid"])
def test_batched_greedy_is_greedy(family: str, make_target):
    target = load_target(make_target(family), dtype=torch.float32, device="cpu", head=True)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 250, n).tolist() for n in (3, 11, 1, 24, 7)]
    alone = [greedy_alone(target, prompt, -1, 12) for prompt in prompts]
    # A token that some rows reach early, so that they leave the batch while others go on.
    stop = alone[1][3]
    expected = [greedy_alone(target, prompt, stop, 12) for prompt in prompts]
    decoded = decode_batch(
        target, prompts, [0] * 5, stop_ids=[stop], sampling=Sampling(max_new_tokens=12)
    )
    assert [each.tokens for each in decoded] == expected
    assert [each.is_cut for each in decoded] == [len(t) == 12 for t in expected]
    assert len({len(t) for t in expected}) > 1


def test_sampled_answers_depend_on_their_seed_alone(make_target):
    target = load_target(make_target("qwen3"), dtype=torch.float32, device="cpu", head=True)
    prompts = [[7, 8, 9], [10] * 9, [11, 12]]
    sampling = Sampling(max_new_tokens=10, temperature=1.5, top_p=0.9)

    def sample(chosen: list[int]) -> list[list[int]]:
        batch, seeds = [prompts[i] for i in chosen], [100 + i for i in chosen]
        decoded = decode_batch(target, batch, seeds, stop_ids=[], sampling=sampling)
        return [each.tokens for each in decoded]

    together = sample([0, 1, 2])
    assert together == [sample([i])[0] for i in range(3)]
    assert together[::-1] == sample([2, 1, 0])
    again = decode_batch(target, prompts, [5, 6, 7], stop_ids=[], sampling=sampling)
    assert together != [each.tokens for each in again]


def test_sampling_follows_the_distribution():
    logits = torch.tensor([[0.1, 0.5, 0.25, 0.15]]).log().repeat(20000, 1)
    draws = torch.rand(20000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for top_p, expected in ((1.0, [0.1, 0.5, 0.25, 0.15]), (0.6, [0, 2 / 3, 1 / 3, 0])):
        sampling = Sampling(max_new_tokens=1, temperature=1.0, top_p=top_p)
        chosen = _choose(logits, draws, sampling)
        found = torch.bincount(chosen, minlength=4) / 20000
        # Three standard deviations of a share of 20,000 draws.
        torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=0.011)
    certain = Sampling(max_new_tokens=1, temperature=1.0, top_p=1e-9)
    assert (_choose(logits, draws, certain) == 1).all()
    # Draws at both ends of their range stay among the tokens that have any probability.
    ends = torch.tensor([0.0, np.nextafter(1.0, 0.0)], dtype=torch.float64)
    edges = torch.full((2, 6), -torch.inf)
    edges[:, 1:5] = logits[:2]
    for top_p, expected in ((1.0, [1, 4]), (0.8, [2, 4]), (0.7, [2, 3])):
        sampling = Sampling(max_new_tokens=1, temperature=1.0, top_p=top_p)
        assert _choose(edges, ends, sampling).tolist() == expected


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"id": "one", "source": "facts", "turns": ["What is one?"]},
        {"id": "two", "turns": ["First?", "And then?"]},
        {
            "conversations": [
                {"from": "human", "value": "Hi"},
                {"from": "gpt", "value": "old answer"},
            ]
        },
        {
            "messages": [
                {"role": "system", "content": "Be odd."},
                {"role": "user", "content": "Yes?"},
            ]
        },
        {"prompt": "Just so"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_in(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_of_every_prompt_format(make_target, prompts, run, tmp_path):
    folder, out = make_target("qwen3"), tmp_path / "answers.jsonl"
    args = ("--target", folder, "--data", prompts, "--out", out, "--max-new-tokens", 8)
    assert run(generate_command, *args, "--dtype", "float32") == 0
    rows = rows_in(out)
    assert [row["id"] for row in rows] == ["one", "two", "prompts:2", "prompts:3", "prompts:4"]
    assert [row["source"] for row in rows] == ["facts", *["prompts"] * 4]
    assert {row["target"] for row in rows} == {str(folder)}
    roles = [[m["role"] for m in row["messages"]] for row in rows]
    assert roles[0] == roles[2] == roles[4] == ["user", "assistant"]
    assert roles[3] == ["system", "user", "assistant"]
    assert "old answer" not in out.read_text()
    # A cut answer ends the conversation; this target hardly ever stops by itself.
    expected = "stop" if len(roles[1]) == 4 else "length"
    assert rows[1]["finish_reason"] == expected
    target = load_target(folder, dtype=torch.float32, device="cpu", head=True)
    tokenizer = load_tokenizer(folder)
    for row in rows[:1]:
        prompt = render_prompt(tokenizer, row["messages"][:1], ChatOptions())
        alone = greedy_alone(target, prompt, tokenizer.eos_token_id, 8)
        assert row["messages"][1]["content"] == tokenizer.decode(alone).removesuffix("\ufffd")


def test_prompts_are_rendered_twice(make_target, prompts, run, tmp_path, monkeypatch):
    """To be measured, all of them, and to be answered."""
    rendered: Counter[str] = Counter()
    render = local_answers.render_prompt

    def counted(tokenizer, messages, options):
        rendered[str(messages)] += 1
        return render(tokenizer, messages, options)

    monkeypatch.setattr(local_answers, "render_prompt", counted)
    args = ("--target", make_target("qwen3"), "--data", prompts, "--max-new-tokens", 6)
    assert run(generate_command, *args, "--out", tmp_path / "answers.jsonl") == 0
    assert set(rendered.values()) == {2}


def test_answer_is_whole(make_target, prompts, run, tmp_path, monkeypatch):
    """With the special tokens inside, and without the half of a character at a cut end."""
    folder, out = make_target("qwen3"), tmp_path / "answers.jsonl"
    tokens = load_tokenizer(folder)("<|mask|>hm<|mask|>Oh \u00e9")["input_ids"]

    def decode(_target: Target, prompts: list, *_args: object, **_options: object) -> list[Decoded]:
        return [Decoded(tokens=tokens[:-1], is_cut=True) for _ in prompts]

    monkeypatch.setattr(local_answers, "decode_batch", decode)
    args = ("--target", folder, "--data", prompts, "--out", out, "--num-samples", 1)
    assert run(generate_command, *args, "--max-new-tokens", 8) == 0
    assert rows_in(out)[0]["messages"][-1]["content"] == "<|mask|>hm<|mask|>Oh "


def test_extract_reads_answers(make_target, prompts, run, tmp_path):
    """Cut answers are supervised without an end of turn that the target did not write."""
    folder, out = make_target("qwen3"), tmp_path / "answers.jsonl"
    args = ("--target", folder, "--data", prompts, "--out", out, "--max-new-tokens", 8)
    assert run(generate_command, *args) == 0
    args = ("--target", folder, "--data", out, "--out", tmp_path / "store", "--layers", "0,1")
    assert run(extract_command, *args) == 0
    cache = open_cache(str(tmp_path / "store"))
    for row in rows_in(out):
        document = cache[row["id"]]
        assert supervised(document.loss_mask).any()
        ends = (document.loss_mask & LossMask.END_OF_TURN != 0)[-2:].any()
        assert ends == (row["finish_reason"] == "stop")


def test_resume_goes_on_and_repairs_a_cut_row(make_target, prompts, run, tmp_path, monkeypatch):
    out, whole = tmp_path / "answers.jsonl", tmp_path / "whole.jsonl"
    args = ("--target", make_target("qwen3"), "--data", prompts, "--max-new-tokens", 6)
    args = (*args, "--num-answers", 2, "--temperature", 1.0)
    assert run(generate_command, *args, "--out", whole) == 0
    expected = rows_in(whole)
    assert len(expected) == 10
    assert [row["id"] for row in expected[:2]] == ["one#0", "one#1"]
    assert expected[0]["messages"] != expected[1]["messages"]
    lines = whole.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:4]) + lines[4][:30])
    asked = []
    answer_once = local_answers.LocalAnswers._answer_once

    def counted(self, target, jobs, *rest):
        asked.extend(job.id for job in jobs)
        answer_once(self, target, jobs, *rest)

    monkeypatch.setattr(local_answers.LocalAnswers, "_answer_once", counted)
    assert run(generate_command, *args, "--out", out) == 0
    assert rows_in(out) == expected
    assert set(asked) == {row["id"] for row in expected[4:]}
    asked.clear()
    assert run(generate_command, *args, "--out", out) == 0
    assert not asked
    # More answers to the same prompts are added; those that are there stay.
    assert run(generate_command, *args, "--num-answers", 3, "--out", out) == 0
    assert rows_in(out)[:10] == expected
    assert len(rows_in(out)) == 15


def test_signal_keeps_finished_batches(make_target, prompts, run, tmp_path, monkeypatch, capsys):
    out, whole = tmp_path / "answers.jsonl", tmp_path / "whole.jsonl"
    args = ("--target", make_target("qwen3"), "--data", prompts, "--max-new-tokens", 6)
    args = (*args, "--batch-tokens", 60)  # one conversation a batch
    assert run(generate_command, *args, "--out", whole) == 0
    answer_once = local_answers.LocalAnswers._answer_once
    calls = []

    def interrupted(self, target, jobs, *rest):
        calls.append(len(jobs))
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        answer_once(self, target, jobs, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(local_answers.LocalAnswers, "_answer_once", interrupted)
        assert run(generate_command, *args, "--out", out) == 3
    assert "SIGTERM" in capsys.readouterr().err
    assert set(calls) == {1}
    assert rows_in(out) == rows_in(whole)[: len(rows_in(out))] != []
    assert run(generate_command, *args, "--out", out) == 0
    assert rows_in(out) == rows_in(whole)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("--temperature", 0.5), "--temperature is 0.5 but"),
        (("--max-new-tokens", 7), "--max-new-tokens is 7 but"),
        (("--system-prompt", "Hm."), "--system-prompt is 'Hm.'"),
        (("--chat-template-arg", "deep=false"), "--chat-template-arg is"),
        (("--chat-template-arg", "deeep=false"), "deeep is a name that the chat template does not"),
        (("--seed", 3), "--seed is 3 but"),
        (("--dtype", "bfloat16"), "--dtype is 'bfloat16' but"),
        (("--target-revision", "v2"), "--target-revision v2 is for a hub id"),
        (("--top-p", 0.9), "--top-p 0.9 has no effect at --temperature 0"),
        (("--num-answers", 2), "--num-answers 2 at --temperature 0 would be the same answer"),
        (("--api-key", "key"), "--api-key is for a server"),
        (("--out", "s3://bucket/answers.jsonl"), "--out s3:/bucket/answers.jsonl is an address"),
    ],
)
def test_other_settings_are_refused(make_target, prompts, run, tmp_path, capsys, change, words):
    out = tmp_path / "answers.jsonl"
    args = ("--target", make_target("qwen3"), "--data", prompts, "--out", out)
    assert run(generate_command, *args, "--max-new-tokens", 3) == 0
    before = out.read_bytes()
    assert run(generate_command, *args, "--max-new-tokens", 3, *change) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert out.read_bytes() == before


def test_another_revision_is_refused(make_target, prompts, run, tmp_path, capsys, monkeypatch):
    """Of a hub id, for which a folder stands here."""

    def found(target: str, _revision: str | None = None, **options: bool) -> Checkpoint:
        return find_checkpoint(target, **options)

    monkeypatch.setattr("dflash_offline.common.target.find_checkpoint", found)
    args = ("--target", make_target("qwen3"), "--data", prompts, "--out", tmp_path / "a.jsonl")
    args = (*args, "--max-new-tokens", 3)
    assert run(generate_command, *args) == 0
    assert run(generate_command, *args, "--target-revision", "v2") == 2
    assert "--target-revision is 'v2' but" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no rows"),
        ('{"text": "x"}\n', "row 1 is no conversation but rendered text"),
        ('{"prompt": "x", "completion": "y"}\n', "a prompt with its completion; to be answered a"),
        ('{"question": "x"}\n', "has the columns question; rename them: a row has messages"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}\n', "is of type image;"),
        ('{"turns": ["x"]}\n{"turns": 3\n', "line 2 is not JSON (Expecting ',' delimiter); one"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}\n', "no turn of the user"),
        ('{"turns": [3]}\n', r"turns[0] is a int"),
        ('{"turns": ["\\ud83d"]}\n', "half of a surrogate pair is no character; first: --data"),
        ('{"turns": ["' + "long " * 120 + '"]}\n', "above the target's context of 512"),
    ],
    ids=lambda value: value[:40],
)
def test_bad_prompts(make_target, run, tmp_path, capsys, content, words):
    data, out = tmp_path / "data.jsonl", tmp_path / "answers.jsonl"
    data.write_text(content)
    args = ("--target", make_target("qwen3"), "--data", data, "--out", out)
    assert run(generate_command, *args, "--max-new-tokens", 4) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert not out.exists() or out.read_bytes() == b""


def test_rows_without_a_question_are_left_out(make_target, run, tmp_path, capsys):
    """As ShareGPT has them; the others are answered, and --num-samples counts those."""
    data, out = tmp_path / "data.jsonl", tmp_path / "answers.jsonl"
    asked, said = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}
    found = [asked, said, {"from": "tool", "value": "3"}]
    rows = [[], [said], [asked, said], found, [asked], [asked]]
    tools = [{"type": "function", "function": {"name": "add"}}]
    lines = [json.dumps({"conversations": row, "tools": tools}) + "\n" for row in rows]
    data.write_text("".join(lines))
    args = ("--target", make_target("qwen3"), "--data", data, "--out", out, "--num-samples", 2)
    assert run(generate_command, *args, "--max-new-tokens", 3) == 0
    assert [row["id"] for row in rows_in(out)] == ["data:2", "data:4"]
    printed = " ".join(capsys.readouterr().err.split())
    assert "rows left out: 2 (no turn of the user to answer; first: --data" in printed
    assert "rows left out: 1 (results of tools, which cannot be written anew; first:" in printed
    assert "tools left out of 2 rows, which are answered without" in printed


def test_long_prompt_is_refused_before_others_are_answered(
    make_target, run, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("dflash_offline.extract.local_answers.load_target", None)
    data, out = tmp_path / "data.jsonl", tmp_path / "answers.jsonl"
    data.write_text('{"turns": ["Hi"]}\n' * 5 + '{"turns": ["' + "long " * 120 + '"]}\n')
    args = ("--target", make_target("qwen3"), "--data", data, "--out", out, "--batch-tokens", 64)
    assert run(generate_command, *args, "--max-new-tokens", 4) == 2
    assert "tokens of prompt data:5 is above" in capsys.readouterr().err.splitlines()[-1]
    assert out.read_bytes() == b""


def test_conversation_ends_where_the_context_is_full(make_target, run, tmp_path, monkeypatch):
    """What its answers leave no room for is known only then, and other rows go on."""
    data, out = tmp_path / "data.jsonl", tmp_path / "answers.jsonl"
    rows = [["Hi", "long " * 90, "And then?"], ["Hi", "And then?"]]
    data.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in rows))
    target = make_target("qwen3")
    args = ("--target", target, "--data", data, "--out", out, "--max-new-tokens", 40)
    tokens = load_tokenizer(target)("Well.")["input_ids"]

    def decode(_target: Target, prompts: list, *_args: object, **_options: object) -> list[Decoded]:
        assert all(len(prompt) + 40 <= 512 for prompt in prompts)
        return [Decoded(tokens=tokens, is_cut=False) for _ in prompts]

    monkeypatch.setattr(local_answers, "decode_batch", decode)
    assert run(generate_command, *args) == 0
    found = [(len(row["messages"]), row["finish_reason"]) for row in rows_in(out)]
    assert found == [(2, "context"), (4, "stop")]


@pytest.mark.parametrize("content", ['{"a": 1}\n', '[{"prompt": "Hi"}]'], ids=["line", "no end"])
def test_foreign_file_is_left_alone(make_target, prompts, run, tmp_path, capsys, content):
    out = tmp_path / "notes.jsonl"
    out.write_text(content)
    args = ("--target", make_target("qwen3"), "--data", prompts, "--out", out)
    assert run(generate_command, *args) == 2
    assert "line 1 is not an answer of this command" in capsys.readouterr().err
    assert out.read_text() == content


class FakeServer(ThreadingHTTPServer):
    """Repeats the last question; fails as often as it is told to."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict] = []
        self.failures = 0
        self.status = 503

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body["authorization"] = self.headers.get("Authorization")
        body["path"] = self.path
        self.server.requests.append(body)
        if self.server.failures > 0:
            self.server.failures -= 1
            self.reply(self.server.status, {"error": "busy"})
            return
        text = "You said: " + body["messages"][-1]["content"]
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        self.reply(200, {"choices": [choice], "usage": {"completion_tokens": 5}})

    def reply(self, status: int, body: dict) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_args: object) -> None:
        """Stay quiet."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with FakeServer() as fake:
        thread = threading.Thread(target=fake.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield fake
        fake.shutdown()
        thread.join()


def test_endpoint(server: FakeServer, prompts, run, tmp_path):
    out = tmp_path / "answers.jsonl"
    args = ("--target", "the-model", "--endpoint", server.url, "--data", prompts, "--out", out)
    args = (*args, "--api-key", "s3cret", "--system-prompt", "Be brief.")
    options = ("--chat-template-arg", "enable_thinking=false", "--temperature", 0.7)
    assert run(generate_command, *args, *options) == 0
    rows = {row["id"]: row for row in rows_in(out)}
    assert len(rows) == 5
    said = [m["content"] for m in rows["two"]["messages"]]
    assert said == ["First?", "You said: First?", "And then?", "You said: And then?"]
    first = server.requests[0]
    assert first["path"] == "/v1/chat/completions"
    assert first["authorization"] == "Bearer s3cret"
    assert first["model"] == "the-model"
    assert first["temperature"] == 0.7
    assert first["chat_template_kwargs"] == {"enable_thinking": False}
    systems = {r["messages"][0]["content"] for r in server.requests}
    assert systems == {"Be brief.", "Be odd."}
    assert "s3cret" not in out.read_text()
    asked = len(server.requests)
    assert run(generate_command, *args, *options) == 0
    assert len(server.requests) == asked


def test_endpoint_that_fails(server: FakeServer, prompts, run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("dflash_offline.extract.endpoint.time.sleep", lambda _s: None)
    out = tmp_path / "answers.jsonl"
    args = ("--target", "m", "--endpoint", server.url, "--data", prompts, "--out", out)
    args = (*args, "--concurrency", 1)
    server.failures = 3
    assert run(generate_command, *args, "--num-samples", 1) == 0
    server.failures = 1000
    assert run(generate_command, *args) == 3
    assert "fails after 6 attempts (503" in capsys.readouterr().err
    server.status = 404
    assert run(generate_command, *args) == 2
    assert "refuses the request: 404" in capsys.readouterr().err
    server.failures = 0
    assert run(generate_command, *args) == 0
    assert len(rows_in(out)) == 5


@pytest.mark.parametrize(
    "option",
    [
        ("--chat-template", "own.jinja"),
        ("--target-revision", "v2"),
        ("--dtype", "bfloat16"),
        ("--trust-remote-code",),
    ],
    ids=lambda option: option[0],
)
def test_options_that_do_not_reach_a_server(
    option, server: FakeServer, prompts, run, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    args = ("--target", "m", "--endpoint", server.url, "--data", prompts, "--out", "answers.jsonl")
    assert run(generate_command, *args, *option) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {option[0]} ")
    assert "does not reach the server" in error
    assert not server.requests
