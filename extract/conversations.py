"""What a row says: a conversation, a prompt with its completion, rendered text, or token ids.

Formats are told apart by the columns they have. A value of the wrong type is bad input that names
file, row and field; what this project cannot use is for the caller to count.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_offline.common.errors import BadInput
from dflash_offline.common.prompts import ASSISTANTS
from dflash_offline.extract.rows import Row

Message = dict[str, Any]

_ROLES = {
    "human": "user",
    **ASSISTANTS,
    "function": "tool",
    "observation": "tool",
    "function_call": "assistant",
}
# What engines and other trainers call `reasoning_content`, the name that most templates read.
_REASONING_NAMES = ("reasoning", "thinking")
_KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")
_FORMATS = "messages, conversations, turns, prompt and completion, text, or input_ids and loss_mask"


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages for the chat template.

    Attributes:
        is_cut: a token limit cut the last assistant message; it has no end of turn.
        tools: what the assistant was told that it may call.
    """

    messages: tuple[Message, ...]
    is_cut: bool = False
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Text after which another text follows; used as it is, without a template."""

    prompt: str
    completion: str


@dataclass(frozen=True, kw_only=True)
class RenderedText:
    """A conversation that has been through the target's chat template."""

    text: str


@dataclass(frozen=True, kw_only=True)
class TokenIds:
    """Token ids with the tokens to train on; int32 [T] and bool [T]."""

    ids: np.ndarray
    mask: np.ndarray


Content = Conversation | Completion | RenderedText | TokenIds


def parse_row(row: Row) -> Content:
    """Return what a row holds.

    Raises:
        BadInput: no known columns, or a value of the wrong type; names address and field.
    """
    values = row.values
    if values.get("input_ids") is not None:
        return _token_ids(row)
    if values.get("messages") is not None:
        return _conversation(row, "messages", role="role", content="content")
    if values.get("conversations") is not None:
        first: Any = next(iter(_list_of(row, "conversations")), {})
        if isinstance(first, dict) and "from" in first:
            return _conversation(row, "conversations", role="from", content="value")
        return _conversation(row, "conversations", role="role", content="content")
    if values.get("turns") is not None:
        return _turns(row)
    if values.get("prompt") is not None and values.get("completion") is not None:
        return _prompt_completion(row)
    if values.get("text") is not None:
        return RenderedText(text=_text_of(row, "text", values["text"]))
    if values.get("prompt") is not None:
        return _told(row, _as_messages(row, "prompt"))
    raise BadInput(
        f"--data {row.address} has the columns {', '.join(sorted(values)) or 'none'}; rename them: "
        f"a row has {_FORMATS}"
    )


def first_user_text(content: Content, before: np.ndarray) -> str:
    """Return the text by which conversations are told apart when some are held out.

    Args:
        before: token ids up to the first supervised one, where no roles are known.
    """
    if isinstance(content, Conversation):
        users = [m for m in content.messages if m["role"] == "user"]
        return users[0]["content"] if users else ""
    if isinstance(content, Completion):
        return content.prompt
    return ",".join(map(str, before))


def _conversation(row: Row, field: str, *, role: str, content: str) -> Conversation:
    return _told(row, _messages(row, field, role=role, content=content))


def _messages(row: Row, field: str, *, role: str, content: str) -> list[Message]:
    messages = []
    for i, given in enumerate(_list_of(row, field)):
        where = f"{field}[{i}]"
        if not isinstance(given, dict):
            raise _wrong_type(row, where, given, f"a mapping with {role} and {content}")
        name = given.get(role)
        if not isinstance(name, str):
            raise _wrong_type(row, f"{where}.{role}", name, "a text")
        known = _ROLES.get(name.lower(), name.lower())
        if known not in _KNOWN_ROLES:
            allowed = ", ".join((*_KNOWN_ROLES, *_ROLES))
            raise BadInput(
                f"--data {row.address}: {where}.{role} is {name!r}; allowed are {allowed}"
            )
        rest = {k: v for k, v in given.items() if k not in (role, content) and v is not None}
        if isinstance(calls := rest.get("tool_calls"), list):
            rest["tool_calls"] = [_read_call(call) for call in calls]
        for name in _REASONING_NAMES:
            if isinstance(rest.get(name), str):
                rest.setdefault("reasoning_content", rest[name])
        text = _content_of(row, f"{where}.{content}", given | rest)
        messages.append({"role": known, "content": text, **rest})
    return messages


def _read_call(call: Any) -> Any:
    """Return a call of a tool with its arguments as a mapping, which templates expect.

    OpenAI's form has them as one text of JSON; engines that serve a model read it as this does.
    """
    if not isinstance(call, dict):
        return call
    if isinstance(inner := call.get("function"), dict):
        return {**call, "function": _read_call(inner)}
    try:
        arguments = json.loads(call["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return call
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call


def _told(row: Row, messages: Sequence[Message]) -> Conversation:
    """Return a conversation with what the row says beside its messages."""
    system = row.values.get("system")
    if system and (not messages or messages[0]["role"] not in ("system", "developer")):
        messages = [{"role": "system", "content": _text_of(row, "system", system)}, *messages]
    return Conversation(messages=tuple(messages), is_cut=_is_cut(row), tools=_tools_of(row))


def _tools_of(row: Row) -> tuple[dict[str, Any], ...]:
    value = row.values.get("tools") or []
    if isinstance(value, str):
        # As tables of one type a column keep them.
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not (isinstance(value, list) and all(isinstance(each, dict) for each in value)):
        raise BadInput(
            f"--data {row.address}: tools is no list of tools; mappings with type and function are "
            "allowed, also as one text of JSON"
        )
    return tuple(value)


def _content_of(row: Row, where: str, message: dict[str, Any]) -> str:
    value = message.get(where.rpartition(".")[2])
    if isinstance(value, str):
        return value
    if value is None and (message.get("tool_calls") or message.get("reasoning_content")):
        return ""
    if isinstance(value, list):
        for k, part in enumerate(value):
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else None
                if isinstance(kind, str) and kind != "text":
                    raise BadInput(
                        f"--data {row.address}: {where}[{k}] is of type {kind}; allowed are parts "
                        "of text alone, so leave the row out"
                    )
                raise _wrong_type(row, f"{where}[{k}]", part, "a part with a text")
        # Templates of text models print a list as it is.
        return "".join(part["text"] for part in value)
    raise _wrong_type(row, where, value, "a text")


def _turns(row: Row) -> Conversation:
    questions = [_text_of(row, f"turns[{i}]", t) for i, t in enumerate(_list_of(row, "turns"))]
    given = row.values.get("answers")
    answers = [] if given is None else _list_of(row, "answers")
    if answers and len(answers) != len(questions):
        raise BadInput(
            f"--data {row.address}: answers has {len(answers)} entries and turns {len(questions)}; "
            "one answer a turn is allowed"
        )
    messages: list[Message] = []
    for i, question in enumerate(questions):
        messages.append({"role": "user", "content": question})
        if answers:
            answer = _text_of(row, f"answers[{i}]", answers[i])
            messages.append({"role": "assistant", "content": answer})
    return _told(row, messages)


def _prompt_completion(row: Row) -> Content:
    prompt, completion = row.values["prompt"], row.values["completion"]
    if isinstance(prompt, list) or isinstance(completion, list):
        return _told(row, (*_as_messages(row, "prompt"), *_as_messages(row, "completion")))
    return Completion(
        prompt=_text_of(row, "prompt", prompt),
        completion=_text_of(row, "completion", completion),
    )


def _as_messages(row: Row, field: str) -> tuple[Message, ...]:
    value = row.values[field]
    if isinstance(value, str):
        role = "assistant" if field == "completion" else "user"
        return ({"role": role, "content": value},)
    return tuple(_messages(row, field, role="role", content="content"))


def _token_ids(row: Row) -> TokenIds:
    if row.values.get("loss_mask") is None:
        raise BadInput(
            f"--data {row.address}: input_ids stands without loss_mask; give a mask of the same "
            "length, 1 where a token is trained on"
        )
    ids = _integers(row, "input_ids", most=np.iinfo(np.int32).max)
    # Anything else is a habit of other programs, such as labels that are -100 where not trained on.
    mask = _integers(row, "loss_mask", most=1)
    if len(ids) != len(mask):
        raise BadInput(
            f"--data {row.address}: input_ids has {len(ids)} entries and loss_mask {len(mask)}; "
            "they must be equal"
        )
    return TokenIds(ids=ids, mask=mask != 0)


def _integers(row: Row, field: str, *, most: int) -> np.ndarray:
    values = _list_of(row, field)
    for i, value in enumerate(values):
        if not isinstance(value, int):
            raise _wrong_type(row, f"{field}[{i}]", value, "a whole number")
        if not 0 <= value <= most:
            raise BadInput(
                f"--data {row.address}: {field}[{i}] is {value}; allowed are 0 to {most}"
            )
    return np.asarray(values, np.int32)


def _list_of(row: Row, field: str) -> Sequence[Any]:
    value = row.values[field]
    if not isinstance(value, list):
        raise _wrong_type(row, field, value, "a list")
    return value


def _text_of(row: Row, field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong_type(row, field, value, "a text")
    return value


def _is_cut(row: Row) -> bool:
    return row.values.get("finish_reason") == "length"


def _wrong_type(row: Row, field: str, value: Any, allowed: str) -> BadInput:
    given = "missing" if value is None else f"a {type(value).__name__}"
    return BadInput(f"--data {row.address}: {field} is {given}; {allowed} is allowed")
