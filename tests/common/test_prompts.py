"""Prompt files: every shape gives the user's turns, and a bad row is named."""

import json
from pathlib import Path

import pytest

from dflash_offline.common.errors import BadInput
from dflash_offline.common.prompts import Prompt, read_prompts

ROWS = {
    "turns": ({"turns": ["a", "b"]}, Prompt(id="0", turns=("a", "b"))),
    "system": ({"turns": ["a"], "system": "s"}, Prompt(id="0", turns=("a",), system="s")),
    "prompt": ({"prompt": "a", "completion": "x", "id": 7}, Prompt(id="7", turns=("a",))),
    "messages": (
        {
            "question_id": "q1",
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "x"},
                {"role": "user", "content": "b"},
            ],
        },
        Prompt(id="q1", turns=("a", "b"), system="s"),
    ),
    "sharegpt": (
        {
            "conversations": [
                {"from": "human", "value": "a"},
                {"from": "gpt", "value": "x"},
            ]
        },
        Prompt(id="0", turns=("a",)),
    ),
    "sharegpt-others": (
        {
            "conversations": [
                {"from": "Human", "value": "a"},
                {"from": "bard", "value": "x"},
                {"from": "user", "value": "b"},
                {"from": "chatgpt", "value": "x"},
            ]
        },
        Prompt(id="0", turns=("a", "b")),
    ),
    "sharegpt-system": (
        {"conversations": [{"from": "human", "value": "a"}], "system": "s"},
        Prompt(id="0", turns=("a",), system="s"),
    ),
}


def write(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("shape", ROWS)
def test_read_prompts(shape: str, tmp_path: Path) -> None:
    row, expected = ROWS[shape]
    assert read_prompts(write(tmp_path / "a.jsonl", [row])) == [expected]
    (tmp_path / "a.json").write_text(json.dumps([row]))
    assert read_prompts(tmp_path / "a.json") == [expected]


def test_limit_and_blank_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"turns": [str(i)]} for i in range(5)])
    path.write_text(path.read_text().replace("\n", "\n\n") + "not JSON, never reached\n")
    prompts = read_prompts(path, 3)
    assert [prompt.turns for prompt in prompts] == [("0",), ("1",), ("2",)]
    assert [prompt.id for prompt in prompts] == ["0", "1", "2"]


def test_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    """Other programs leave separators of Unicode in texts, and put a mark before the first row."""
    row = json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False) + "\r\n"
    (tmp_path / "a.jsonl").write_bytes(f"\ufeff{row}{row}".encode())
    assert [p.turns for p in read_prompts(tmp_path / "a.jsonl")] == [("a\u2028b\x85c",)] * 2


def test_messages() -> None:
    prompt = Prompt(id="0", turns=("a", "b"), system="s")
    assert prompt.messages([]) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
    ]
    assert prompt.messages(["x"])[-3:] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "b"},
    ]


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ([1], "is a list"),
        ({"turns": []}, "no list of texts"),
        ({"turns": [1]}, "no list of texts"),
        ({"text": "a"}, "no list of texts"),
        ({"prompt": 3}, "no list of texts"),
        ({"messages": "a"}, "is a str"),
        ({"messages": ["a"]}, "holds a str"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "'tool'"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "role"),
        ({"messages": [{"role": "user", "content": None}]}, "content is no text"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no user turn"),
        ({"turns": ["a"], "system": 4}, "system is a int"),
        ({"turns": ["a\ud83d"]}, "surrogate"),
    ],
)
def test_bad_row(row, word: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"turns": ["fine"]}, row])
    with pytest.raises(BadInput, match=word) as problem:
        read_prompts(path)
    assert "line 2" in str(problem.value)


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("a.jsonl", None, "cannot be read"),
        ("a.jsonl", b"", "holds no prompt"),
        ("a.jsonl", b'\n{"turns" 3}', r"line 2 is not JSON \(Expecting ':' delimiter\);"),
        ("a.json", b'[\n{"turns" 3}]', r"is not JSON \(Expecting ':' delimiter: line 2 column 10"),
        ("a.jsonl", b"{", "not JSON"),
        ("a.jsonl", b"\xff\xfe", "cannot be read"),
        ("a.json", b'{"turns": ["a"]}', "not a list"),
        ("a.json", b"[", "not JSON"),
    ],
)
def test_bad_file(name: str, content: bytes | None, word: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=word):
        read_prompts(tmp_path / name)
