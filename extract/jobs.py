"""Conversations to be written by the target: questions in, answers added turn by turn."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from dflash_offline.common.errors import BadInput
from dflash_offline.common.prompts import NOT_UNICODE, is_unicode
from dflash_offline.extract.conversations import (
    Completion,
    Conversation,
    Message,
    RenderedText,
    TokenIds,
    parse_row,
)
from dflash_offline.extract.rows import Row, read_rows
from dflash_offline.extract.token_rows import digest

_OTHERS = {
    Completion: "a prompt with its completion",
    RenderedText: "rendered text",
    TokenIds: "token ids",
}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the target wrote; `finish_reason` is `stop` or `length`."""

    text: str
    finish_reason: str
    num_tokens: int
    reasoning: str = ""


@dataclass(kw_only=True)
class Job:
    """One conversation to be written.

    Attributes:
        key: digest of the prompt, and number of the answer.
        opening: system messages before the first question.
        questions: the user's turns.
        messages: what has been said so far.
        finish_reason: of the last answer; None while turns are left.
    """

    key: str
    id: str
    source: str
    licence: str
    opening: tuple[Message, ...]
    questions: tuple[Message, ...]
    messages: list[Message] = field(default_factory=list)
    num_answered: int = 0
    num_tokens: int = 0
    finish_reason: str | None = None

    def ask(self) -> list[Message]:
        """Return the messages whose answer comes next."""
        return [*self.opening, *self.messages, self.questions[self.num_answered]]

    def take(self, answer: Answer) -> None:
        """Add an answer; a cut one ends the conversation, for nothing can follow it."""
        said = {"role": "assistant", "content": answer.text}
        if answer.reasoning:
            said["reasoning_content"] = answer.reasoning
        self.messages += [self.questions[self.num_answered], said]
        self.num_answered += 1
        self.num_tokens += answer.num_tokens
        if answer.finish_reason != "stop" or self.num_answered == len(self.questions):
            self.finish_reason = answer.finish_reason

    def end(self) -> None:
        """Leave out the questions that are left: the context has no room for more answers."""
        self.finish_reason = "context"

    def seed(self, seed: int) -> int:
        """Return the seed of the next answer: its own, whatever is decoded beside it."""
        text = f"{seed} {self.key} {self.num_answered}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    def row(self) -> dict[str, Any]:
        """Return the finished row, as dflash-extract reads it."""
        licence = {"licence": self.licence} if self.licence else {}
        return {
            "id": self.id,
            "source": self.source,
            **licence,
            "messages": [*self.opening, *self.messages],
            "finish_reason": self.finish_reason,
        }


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """What was read: conversations to be written, and addresses of unusable rows by reason.

    `num_told_of_tools` of the prompts are answered without the tools that they describe.
    """

    jobs: list[Job]
    unusable: dict[str, list[str]]
    num_told_of_tools: int

    def lines(self) -> list[str]:
        """Return what was left out, a line for each reason."""
        lines = [
            f"rows left out: {len(rows)} ({reason}; first: --data {rows[0]})"
            for reason, rows in self.unusable.items()
        ]
        if self.num_told_of_tools:
            lines.append(
                f"tools left out of {self.num_told_of_tools} rows, which are answered without"
            )
        return lines


def read_jobs(specs: Sequence[str], num_prompts: int | None, num_answers: int) -> Prompts:
    """Return the conversations to be written, in the order of the data.

    Args:
        specs: `--data` values.
        num_prompts: rows to use; all when None.
        num_answers: conversations to write for each.

    Raises:
        BadInput: a row that is no conversation, or none with a question that can be answered.
    """
    rows = chain.from_iterable(map(read_rows, specs))
    seen: Counter[str] = Counter()
    unusable: dict[str, list[str]] = {}
    jobs: list[Job] = []
    num_told_of_tools = 0
    for row in rows:
        if num_prompts is not None and len(jobs) == num_prompts * num_answers:
            break
        content = _conversation(row)
        if reason := _why_unusable(row, content):
            unusable.setdefault(reason, []).append(row.address)
            continue
        num_told_of_tools += bool(content.tools)
        questions = tuple(m for m in content.messages if m["role"] == "user")
        opening = tuple(m for m in content.messages if m["role"] in ("system", "developer"))
        key = digest(json.dumps([*opening, *questions], default=str).encode())
        seen[key] += 1
        repeat = f"x{seen[key]}" if seen[key] > 1 else ""
        jobs += [
            Job(
                key=f"{key}{repeat}-{number}",
                id=f"{row.id}#{number}" if num_answers > 1 else row.id,
                source=row.named_source,
                licence=row.licence,
                opening=opening,
                questions=questions,
            )
            for number in range(num_answers)
        ]
    prompts = Prompts(jobs=jobs, unusable=unusable, num_told_of_tools=num_told_of_tools)
    if not jobs:
        why = "; ".join(prompts.lines()) or "--data holds no rows"
        raise BadInput(f"{why}; give a file with at least one prompt")
    return prompts


def _conversation(row: Row) -> Conversation:
    content = parse_row(row)
    if not isinstance(content, Conversation):
        raise BadInput(
            f"--data {row.address} is no conversation but {_OTHERS[type(content)]}; to be answered "
            "a row needs messages, conversations, turns, or a prompt alone"
        )
    return content


def _why_unusable(row: Row, content: Conversation) -> str:
    """Return why a conversation cannot be written by the target, nothing where it can."""
    roles = {message["role"] for message in content.messages}
    if not is_unicode(row.values):
        return NOT_UNICODE
    if "tool" in roles:
        return "results of tools, which cannot be written anew"
    return "" if "user" in roles else "no turn of the user to answer"
