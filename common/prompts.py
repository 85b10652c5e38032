"""Prompts for a target to answer: the user's turns of each row of a JSONL or JSON file.

Rows are `{"turns": ["…", …]}`, OpenAI `{"messages": [{"role", "content"}]}`, ShareGPT
`{"conversations": [{"from", "value"}]}` or `{"prompt": "…"}`. Answers in a row are left out: the
target writes its own.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_offline.common.errors import BadInput

_SHAPES = '{"turns": […]}, {"messages": […]}, {"conversations": […]} or {"prompt": "…"}'
# What data sets call the assistant.
ASSISTANTS = dict.fromkeys(("gpt", "chatgpt", "bot", "bing", "bard", "model"), "assistant")
_ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    **ASSISTANTS,
    "system": "system",
}
# Of texts that `is_unicode` finds.
NOT_UNICODE = "half of a surrogate pair is no character"
_ID_KEYS = ("id", "question_id", "conversation_id")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What the user says, turn by turn; each turn waits for the answer to the one before."""

    id: str
    turns: tuple[str, ...]
    system: str | None = None

    def messages(self, answers: list[str]) -> list[dict[str, str]]:
        """Return the conversation up to the turn after `answers`, as role and content."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn, answer in zip(self.turns, answers, strict=False):
            messages.append({"role": "user", "content": turn})
            messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": self.turns[len(answers)]})
        return messages


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """Read the first `limit` prompts of a file, all when None.

    Args:
        path: JSONL, or JSON that holds one list.
        limit: most prompts wanted.

    Raises:
        BadInput: no such file, a row of another shape, or no prompt at all; names file and row.
    """
    prompts = []
    for where, row in _rows(Path(path)):
        if limit is not None and len(prompts) == limit:
            break
        prompts.append(_prompt(row, where, number=len(prompts)))
    if not prompts:
        raise BadInput(f"--data {path} holds no prompt; give rows of {_SHAPES}")
    return prompts


def is_unicode(value: Any) -> bool:
    """Say whether every text in a row can be encoded; JSON's escapes can give one that cannot."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
        return True
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return True
    return all(is_unicode(each) for each in value if not isinstance(each, int))


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        raise BadInput(
            f"--data {path} cannot be read ({problem}); give a JSONL or JSON file with rows of "
            f"{_SHAPES}"
        ) from problem
    if path.suffix == ".json":
        rows = _json(text, f"--data {path}", reason_of=str)
        if not isinstance(rows, list):
            raise BadInput(f"--data {path} holds a {type(rows).__name__}, not a list of rows")
        for number, row in enumerate(rows, start=1):
            yield f"--data {path} row {number}", row
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"--data {path} line {number}"
            yield where, _json(line, where)


def reason_of_line(problem: Exception) -> str:
    """Return why a line is not JSON, without the place in it, which JSON calls line 1."""
    return problem.msg if isinstance(problem, json.JSONDecodeError) else str(problem)


def _json(text: str, where: str, reason_of: Callable[[Exception], str] = reason_of_line) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        reason = reason_of(problem)
        raise BadInput(f"{where} is not JSON ({reason}); rows are {_SHAPES}") from problem


def _prompt(row: Any, where: str, *, number: int) -> Prompt:
    if not isinstance(row, Mapping):
        raise BadInput(f"{where} is a {type(row).__name__}; rows are {_SHAPES}")
    if not is_unicode(row):
        raise BadInput(f"{where}: {NOT_UNICODE}; repair or remove it")
    name = next((str(row[key]) for key in _ID_KEYS if row.get(key) is not None), str(number))
    for key in ("messages", "conversations"):
        if key in row:
            prompt = _from_messages(row[key], f"{where}, {key}", name)
            return replace(prompt, system=prompt.system or _system(row.get("system"), where))
    turns = [row["prompt"]] if "prompt" in row else row.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise BadInput(f"{where} has no list of texts to answer; rows are {_SHAPES}")
    return Prompt(id=name, turns=tuple(turns), system=_system(row.get("system"), where))


def _from_messages(messages: Any, where: str, name: str) -> Prompt:
    if not isinstance(messages, list):
        raise BadInput(f"{where} is a {type(messages).__name__}, not a list; rows are {_SHAPES}")
    turns, system = [], None
    for message in messages:
        if not isinstance(message, Mapping):
            raise BadInput(f"{where} holds a {type(message).__name__} where a message belongs")
        given = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        role = _ROLES.get(given.lower()) if isinstance(given, str) else None
        if role is None or not isinstance(content, str):
            raise BadInput(
                f"{where} has a message of role {given!r} whose content is "
                f"{'a text' if isinstance(content, str) else 'no text'}; allowed are texts by "
                f"{', '.join(_ROLES)}"
            )
        if role == "system":
            system = content
        elif role == "user":
            turns.append(content)
    if not turns:
        raise BadInput(f"{where} has no user turn to answer")
    return Prompt(id=name, turns=tuple(turns), system=system)


def _system(value: Any, where: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise BadInput(f"{where}: system is a {type(value).__name__}; it must be a text")
    return value
