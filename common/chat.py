"""Conversations as tokens: the chat template and the loss mask of each token.

A template with `{% generation %}` tags says itself what the assistant writes. Elsewhere spans are
found by rendering prefixes of the conversation, and where a template rewrites earlier turns (as
those that drop old reasoning do) by looking for the message's text.
"""

import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedTokenizerBase

from dflash_offline.common.errors import BadInput
from dflash_offline.common.store import LossMask

Message = dict[str, Any]
Span = tuple[int, int]

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REASONING = re.compile(
    r"<think>.*?(?:</think>|\Z)"
    r"|\[THINK\].*?(?:\[/THINK\]|\Z)"
    r"|<\|channel\|>analysis.*?(?:<\|end\|>|\Z)",
    re.DOTALL,
)
_REASONING_CLOSES = re.compile(r"</think>|\[/THINK\]")
_EMPTY_REASONING = re.compile(r"<think>\s*</think>\s*|\[THINK\]\s*\[/THINK\]\s*")


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How conversations are rendered; the same in generation, extraction and evaluation.

    Attributes:
        chat_template: file that replaces the tokenizer's own template.
        chat_template_args: values that the template reads, such as `enable_thinking`.
        system_prompt: system message for conversations that have none.
    """

    chat_template: Path | None = None
    chat_template_args: dict[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None

    @classmethod
    def from_options(
        cls,
        chat_template: Path | None = None,
        chat_template_arg: Sequence[str] = (),
        system_prompt: str | None = None,
    ) -> "ChatOptions":
        """Read the command line spellings; `k=v` becomes true, false, a number or a string."""
        return cls(
            chat_template=chat_template,
            chat_template_args=dict(_template_argument(each) for each in chat_template_arg),
            system_prompt=system_prompt,
        )


def _template_argument(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise BadInput(
            f"--chat-template-arg {text} is not name=value; allowed values are true, false, a "
            "number or a string, as in enable_thinking=false"
        )
    try:
        typed = json.loads(value)
    except ValueError:
        return name, value
    return name, typed if isinstance(typed, bool | int | float) else value


def chat_template(tokenizer: PreTrainedTokenizerBase, options: ChatOptions) -> str:
    """Return the template's text.

    Raises:
        BadInput: the tokenizer has none and no file is given, or the file cannot be read.
    """
    if options.chat_template is not None:
        try:
            return Path(options.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise BadInput(
                f"--chat-template {options.chat_template} cannot be read ({problem}); give a text "
                "file with a Jinja template"
            ) from problem
    try:
        return tokenizer.get_chat_template()
    except ValueError as problem:
        raise BadInput(
            "the target's tokenizer has no chat template; give one with --chat-template FILE, or "
            "use rendered text or token ids as data"
        ) from problem


def chat_identity(tokenizer: PreTrainedTokenizerBase, options: ChatOptions) -> dict[str, str]:
    """Return the flat fields that two stores must share for their tokens to mean the same."""
    return {
        "chat_template_sha256": _sha256(chat_template(tokenizer, options)),
        "chat_template_args": json.dumps(options.chat_template_args, sort_keys=True),
        "system_prompt": options.system_prompt or "",
    }


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of the vocabulary, the merges and everything else that makes token ids."""
    return _sha256(tokenizer.backend_tokenizer.to_str())


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None
) -> tuple[int, ...]:
    """Return the sorted ids at which the target's answer ends."""
    stops = {tokenizer.eos_token_id}
    if generation_config is not None:
        configured = generation_config.eos_token_id
        stops.update(configured if isinstance(configured, list) else [configured])
    return tuple(sorted(stops - {None}))


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], options: ChatOptions
) -> list[int]:
    """Return the token ids after which the target writes its answer to `messages`."""
    text = _Renderer(tokenizer, options).text(messages, generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def render_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    options: ChatOptions,
    *,
    cut_last_turn: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids (int32 [T]) and loss mask (uint8 [T], `LossMask` bits) of a conversation.

    Args:
        tokenizer: the target's; needs character offsets.
        messages: `{"role", "content"}` mappings in order.
        options: chat options.
        cut_last_turn: the last assistant message was cut by a token limit: the target never wrote
            its end of turn, so everything after its content is left off.

    Raises:
        BadInput: the template refuses the conversation, or what the assistant wrote in one of its
            messages cannot be found in the rendered text.
    """
    renderer = _Renderer(tokenizer, options)
    text, turns = renderer.turns(messages)
    if cut_last_turn and turns:
        text = text[: turns[-1].content_end]
        turns[-1].end = min(turns[-1].end, turns[-1].content_end)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = np.asarray(encoding["input_ids"], np.int32)
    offsets = np.asarray(encoding["offset_mapping"], np.int64).reshape(-1, 2)
    mask = np.zeros(len(ids), np.uint8)
    specials = np.isin(ids, _special_ids(tokenizer))
    for turn in turns:
        _mark(mask, turn, text=text, offsets=offsets, specials=specials)
    if turns:
        last = _tokens_in(offsets, (turns[-1].start, turns[-1].end))
        mask[last] |= np.where(mask[last] != 0, LossMask.LAST_TURN, 0).astype(np.uint8)
    return ids, mask


@dataclass(kw_only=True)
class _Turn:
    """Characters `[start, end)` of one assistant message, end of turn included."""

    start: int
    end: int
    content_start: int
    content_end: int
    has_reasoning: bool
    opens_in_header: bool


class _Renderer:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: ChatOptions) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._template = chat_template(tokenizer, options)

    def text(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                self._with_system(messages),
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self._options.chat_template_args,
            )
        except (TemplateError, TypeError, KeyError) as problem:
            raise BadInput(f"the chat template refuses the conversation: {problem}") from problem

    def turns(self, messages: Sequence[Message]) -> tuple[str, list[_Turn]]:
        """Return the rendered conversation and where the assistant's messages stand in it."""
        text = self.text(messages, generation_prompt=False)
        tagged = self._tagged(messages, text)
        turns: list[_Turn] = []
        cursor = 0
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if tagged is None:
                turn = self._by_prefixes(messages, i, text=text, cursor=cursor)
            else:
                turn = _by_tag(message, tagged, text=text, cursor=cursor)
            if turn is None:
                raise BadInput(
                    f"messages[{i}]: the chat template changes the assistant's text so that it "
                    "cannot be found again; give a template with {% generation %} tags"
                )
            turns.append(turn)
            cursor = turn.end
        return text, turns

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        prompt = self._options.system_prompt
        if prompt is None or (messages and messages[0]["role"] == "system"):
            return list(messages)
        return [{"role": "system", "content": prompt}, *messages]

    def _tagged(self, messages: Sequence[Message], text: str) -> list[Span] | None:
        if not _GENERATION_TAG.search(self._template):
            return None
        encoding = self._tokenizer.apply_chat_template(
            self._with_system(messages),
            chat_template=self._template,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self._options.chat_template_args,
        )
        offsets = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)[
            "offset_mapping"
        ]
        flags = np.diff(np.asarray([0, *encoding["assistant_masks"], 0]))
        runs = zip(np.flatnonzero(flags == 1), np.flatnonzero(flags == -1), strict=True)
        return [(offsets[first][0], offsets[stop - 1][1]) for first, stop in runs]

    def _by_prefixes(
        self, messages: Sequence[Message], i: int, *, text: str, cursor: int
    ) -> _Turn | None:
        header = self._prefix(messages[:i], generation_prompt=True)
        through = self._prefix(messages[: i + 1], generation_prompt=False)
        start = len(header) if header is not None and text.startswith(header) else None
        pieces = _pieces(messages[i])
        content = _locate(text, pieces, start=cursor if start is None else start)
        if start is None:
            if content is None:
                return None
            start = content[0]
        if through is not None and text.startswith(through) and len(through) >= start:
            end = len(through)
            content = content if content is not None and content[1] <= end else (start, end)
        elif content is not None:
            end = content[1] + _tail_length(text, content[1], through, pieces)
        else:
            return None
        return _turn(text, messages[i], span=(start, end), content=content)

    def _prefix(self, messages: Sequence[Message], *, generation_prompt: bool) -> str | None:
        if not self._with_system(messages):
            return None
        try:
            return self.text(messages, generation_prompt=generation_prompt)
        except BadInput:
            # Some templates refuse a conversation that does not end with the user.
            return None


def _by_tag(message: Message, tagged: list[Span], *, text: str, cursor: int) -> _Turn | None:
    span = next((span for span in tagged if span[0] >= cursor), None)
    if span is None:
        return None
    content = _locate(text, _pieces(message), start=span[0]) or span
    content = content if content[1] <= span[1] else span
    return _turn(text, message, span=span, content=content)


def _turn(text: str, message: Message, *, span: Span, content: Span) -> _Turn:
    content_text = _content(message)
    reasoning = bool(message.get("reasoning_content") or message.get("reasoning"))
    # A generated answer may lack the opening tag, which stood in its prompt.
    reasoning |= bool(_REASONING.search(content_text) or _REASONING_CLOSES.search(content_text))
    return _Turn(
        start=span[0],
        end=span[1],
        content_start=content[0],
        content_end=content[1],
        has_reasoning=reasoning,
        opens_in_header=text[: span[0]].rstrip().endswith(("<think>", "[THINK]")),
    )


def _content(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content


def _pieces(message: Message) -> list[str]:
    """Return the texts to look for, the likeliest first: whole content, then without reasoning."""
    content = _content(message).strip()
    answer = _REASONING_CLOSES.split(content)[-1].strip()
    return [content] if answer == content else [content, answer]


def _locate(text: str, pieces: list[str], *, start: int) -> Span | None:
    for piece in pieces:
        at = text.find(piece, start) if piece else -1
        if at >= 0:
            return at, at + len(piece)
    return None


def _tail_length(text: str, end: int, through: str | None, pieces: list[str]) -> int:
    """Return how many characters after the content still belong to the turn."""
    if through is None:
        return 0
    for piece in pieces:
        at = through.rfind(piece)
        tail = through[at + len(piece) :] if at >= 0 else ""
        if tail and text.startswith(tail, end):
            return len(tail)
    return 0


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    added = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    return sorted({*tokenizer.all_special_ids, *added})


def _tokens_in(offsets: np.ndarray, span: Span) -> slice:
    """Return the tokens that begin in `span`; the first may begin before it (a merged space)."""
    first = bisect_left(offsets[:, 1], span[0] + 1)
    stop = bisect_left(offsets[:, 0], span[1])
    return slice(first, max(first, stop))


def _mark(
    mask: np.ndarray, turn: _Turn, *, text: str, offsets: np.ndarray, specials: np.ndarray
) -> None:
    tokens = _tokens_in(offsets, (turn.start, turn.end))
    mask[tokens] |= LossMask.ASSISTANT
    closing = _closing_token(turn, tokens, offsets=offsets, specials=specials)
    if closing is None:
        after = _tokens_in(offsets, (turn.content_end, turn.end))
        mask[max(after.start, tokens.start) : tokens.stop] |= LossMask.TEMPLATE
    else:
        mask[closing] = LossMask.END_OF_TURN
        mask[closing + 1 : tokens.stop] = 0
    gap = text[turn.start : turn.content_start]
    if not turn.has_reasoning and gap.strip():
        mask[_tokens_in(offsets, (turn.start, turn.content_start))] |= LossMask.TEMPLATE
    body = text[turn.start : turn.end]
    if not turn.has_reasoning and not turn.opens_in_header:
        for match in _EMPTY_REASONING.finditer(body):
            place = (turn.start + match.start(), turn.start + match.end())
            mask[_tokens_in(offsets, place)] |= LossMask.TEMPLATE
    for start, end in _reasoning(body, opens_in_header=turn.opens_in_header):
        mask[_tokens_in(offsets, (turn.start + start, turn.start + end))] |= LossMask.REASONING


def _closing_token(
    turn: _Turn, tokens: slice, *, offsets: np.ndarray, specials: np.ndarray
) -> int | None:
    """Return the end-of-turn token: the last special one after the content."""
    found = np.flatnonzero(specials[tokens])
    if len(found):
        last = tokens.start + int(found[-1])
        return last if offsets[last, 0] >= turn.content_end else None
    following = tokens.stop
    # A template may close its generation tag before the end of turn that the target writes too.
    if following < len(specials) and specials[following] and tokens.stop > tokens.start:
        return following if offsets[following, 0] == turn.end else None
    return None


def _reasoning(body: str, *, opens_in_header: bool) -> list[Span]:
    if opens_in_header:
        closes = _REASONING_CLOSES.search(body)
        return [(0, closes.end() if closes else len(body))]
    return [match.span() for match in _REASONING.finditer(body)]
