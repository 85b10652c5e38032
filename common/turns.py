"""Where the assistant's turns stand in a rendered conversation, and the mask bits of their tokens.

Spans are characters of the rendered text. A template's own generation tags are believed; elsewhere
the conversation is rendered up to each turn, with and without it, and where a template rewrites
earlier turns (as those that drop old reasoning do) the message's text is looked for.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_offline.common.errors import BadInput
from dflash_offline.common.store import LossMask

Message = Mapping[str, Any]
Span = tuple[int, int]
# (messages, with generation prompt) to text; raises BadInput where the template refuses.
Render = Callable[[Sequence[Message], bool], str]

_REASONING = re.compile(
    r"<think>.*?(?:</think>|\Z)"
    r"|\[THINK\].*?(?:\[/THINK\]|\Z)"
    r"|<\|channel\|>analysis.*?(?:<\|end\|>|\Z)",
    re.DOTALL,
)
_REASONING_OPENS = ("<think>", "[THINK]")
_REASONING_CLOSES = re.compile(r"</think>|\[/THINK\]")
_EMPTY_REASONING = re.compile(r"<think>\s*</think>\s*|\[THINK\]\s*\[/THINK\]\s*")
_LEADING_REASONING = re.compile(r"\A(<think>.*?</think>|\[THINK\].*?\[/THINK\])\s*", re.DOTALL)
# What a generation prompt may end with and a turn that lost its reasoning has not.
_OPENED_REASONING = re.compile(r"(<think>|\[THINK\])\s*((</think>|\[/THINK\])\s*)?\Z")


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One assistant message in the rendered text.

    Attributes:
        start, end: its characters, header excluded, end of turn included.
        content_end: where the message's own text ends; `start` when the template has changed it.
        has_reasoning: the message itself holds reasoning.
        opens_in_header: the header before it ends with an opening reasoning tag.
    """

    start: int
    end: int
    content_end: int
    has_reasoning: bool
    opens_in_header: bool


def find_turns(
    text: str, messages: Sequence[Message], *, render: Render, tagged: Sequence[Span] | None
) -> list[Turn]:
    """Return the assistant's turns, in order.

    Args:
        text: the whole conversation, rendered.
        messages: its messages.
        render: renders the first messages, with or without generation prompt.
        tagged: what the template's generation tags mark; None when it has none.

    Raises:
        BadInput: what the assistant wrote cannot be found in the text.
    """
    turns: list[Turn] = []
    cursor = 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if tagged is None:
            turn = _by_prefixes(messages, i, render=render, text=text, cursor=cursor)
        else:
            turn = _by_tag(message, tagged, text=text, cursor=cursor)
        if turn is None:
            raise BadInput(
                f"messages[{i}]: the chat template changes the assistant's text so that it cannot "
                "be found again; give a template with {% generation %} tags"
            )
        turns.append(turn)
        cursor = turn.end
    return turns


def find_rendered_turns(text: str, *, header: str, end: str) -> list[Turn]:
    """Return the assistant's turns of a text that was rendered elsewhere.

    Args:
        text: a rendered conversation.
        header: what stands before an assistant's text.
        end: what ends its turn; a last turn without it was cut.
    """
    turns = []
    for match in re.finditer(re.escape(header), text):
        start = match.end()
        found = text.find(end, start)
        content_end = found if found >= 0 else len(text)
        body = text[start:content_end]
        turns.append(
            Turn(
                start=start,
                end=content_end + (len(end) if found >= 0 else 0),
                content_end=content_end,
                has_reasoning=bool(_REASONING.search(_EMPTY_REASONING.sub("", body))),
                opens_in_header=header.rstrip().endswith(_REASONING_OPENS),
            )
        )
    return turns


def without_empty_reasoning(header: str) -> str:
    """Return a generation prompt without the empty reasoning block that it may end with."""
    return _EMPTY_REASONING.sub("", header)


def _by_prefixes(
    messages: Sequence[Message], i: int, *, render: Render, text: str, cursor: int
) -> Turn | None:
    start = _header_end(text, _prefix(messages[:i], True, render=render))
    is_last = i + 1 == len(messages)
    through = text if is_last else _prefix(messages[: i + 1], False, render=render)
    pieces = _pieces(messages[i])
    is_prefix = through is not None and text.startswith(through)
    if start is not None and is_prefix and len(through) >= start:
        span = start, len(through)
        return _turn(text, messages[i], span=span, content=_locate_last(text, pieces, span))
    if start is not None and not pieces[-1] and (end := _rest_end(text, start, through)):
        return _turn(text, messages[i], span=(start, end), content=(start, start))
    search = _behind_others(text, messages[:i], cursor) if start is None else start
    content = _locate(text, pieces, start=search)
    if content is None:
        return None
    start = content[0] if start is None else start
    end = content[1] + _tail_length(text, content[1], through, pieces)
    return _turn(text, messages[i], span=(start, end), content=content)


def _header_end(text: str, header: str | None) -> int | None:
    """Return where a turn starts in `text`; None where its generation prompt is not found."""
    plain = None if header is None else _OPENED_REASONING.sub("", header)
    return next((len(h) for h in (header, plain) if h is not None and text.startswith(h)), None)


def _rest_end(text: str, start: int, through: str | None) -> int | None:
    """Return where a turn ends that has no text of its own, such as a call of a tool.

    Args:
        through: the conversation up to its end, which may have reasoning that `text` has lost.
    """
    if through is None or not through.startswith(text[:start]):
        return None
    rest = _LEADING_REASONING.sub("", through[start:])
    return start + len(rest) if rest and text.startswith(rest, start) else None


def _behind_others(text: str, messages: Sequence[Message], cursor: int) -> int:
    """Return where ends what others said since the assistant's last turn, which ends at `cursor`.

    The assistant may say the same.
    """
    last = max((k for k, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
    for message in messages[last + 1 :]:
        said = _content(message).strip()
        at = text.find(said, cursor)
        cursor = at + len(said) if at >= 0 else cursor
    return cursor


def _prefix(messages: Sequence[Message], generation_prompt: bool, *, render: Render) -> str | None:
    try:
        return render(messages, generation_prompt)
    except BadInput:
        # Some templates refuse a conversation that is empty or does not end with the user.
        return None


def _by_tag(message: Message, tagged: Sequence[Span], *, text: str, cursor: int) -> Turn | None:
    span = next((span for span in tagged if span[0] >= cursor), None)
    if span is None:
        return None
    content = _locate_last(text, _pieces(message), span)
    return _turn(text, message, span=span, content=content)


def _turn(text: str, message: Message, *, span: Span, content: Span) -> Turn:
    written = _content(message)
    reasoning = bool(message.get("reasoning_content") or message.get("reasoning"))
    # A generated answer may lack the opening tag, which stood in its prompt.
    reasoning |= bool(_REASONING.search(written) or _REASONING_CLOSES.search(written))
    return Turn(
        start=span[0],
        end=span[1],
        content_end=content[1],
        has_reasoning=reasoning,
        opens_in_header=text[: span[0]].rstrip().endswith(_REASONING_OPENS),
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


def _locate(text: str, pieces: Sequence[str], *, start: int) -> Span | None:
    """Return the first of the pieces in `text`: what this turn lost, a later one may have."""
    found = [(at, at + len(p)) for p in pieces if p and (at := text.find(p, start)) >= 0]
    return min(found, default=None)


def _locate_last(text: str, pieces: Sequence[str], span: Span) -> Span:
    """Return the content inside a known turn, nothing at its start if the template changed it."""
    for piece in pieces:
        at = text.rfind(piece, *span) if piece else -1
        if at >= 0:
            return at, at + len(piece)
    return span[0], span[0]


def _tail_length(text: str, end: int, through: str | None, pieces: Sequence[str]) -> int:
    """Return how many characters after the content still belong to the turn."""
    if through is None:
        return 0
    for piece in pieces:
        at = through.rfind(piece)
        tail = through[at + len(piece) :] if at >= 0 else ""
        if tail and text.startswith(tail, end):
            return len(tail)
    return 0


def loss_mask(
    text: str, turns: Sequence[Turn], *, offsets: np.ndarray, specials: np.ndarray
) -> np.ndarray:
    """Return the `LossMask` bits, uint8 [T], of the tokens of a rendered conversation.

    Args:
        text: the rendered conversation.
        turns: the assistant's turns in it.
        offsets: int64 [T, 2], first and last-plus-one character of each token.
        specials: bool [T], whether a token is one of the tokenizer's special ones.
    """
    mask = np.zeros(len(offsets), np.uint8)
    for number, turn in enumerate(turns):
        tokens = _mark(mask, turn, text=text, offsets=offsets, specials=specials)
        if number == len(turns) - 1:
            mask[tokens] |= LossMask.LAST_TURN
    return mask


def _mark(
    mask: np.ndarray, turn: Turn, *, text: str, offsets: np.ndarray, specials: np.ndarray
) -> slice:
    """Set the bits of one turn and return its tokens."""
    tokens = _tokens_in(offsets, (turn.start, turn.end))
    mask[tokens] |= LossMask.ASSISTANT
    closing = _closing_token(turn, tokens, offsets=offsets, specials=specials)
    if closing is None:
        after = _tokens_in(offsets, (turn.content_end, turn.end))
        mask[max(after.start, tokens.start) : tokens.stop] |= LossMask.TEMPLATE
    else:
        mask[closing] = LossMask.END_OF_TURN
        mask[closing + 1 : tokens.stop] = 0
        tokens = slice(tokens.start, closing + 1)
    body = text[turn.start : turn.end]
    for start, end in _supplied(turn, body):
        mask[_tokens_in(offsets, (turn.start + start, turn.start + end))] |= LossMask.TEMPLATE
    for start, end in _reasoning(turn, body):
        mask[_tokens_in(offsets, (turn.start + start, turn.start + end))] |= LossMask.REASONING
    return tokens


def _tokens_in(offsets: np.ndarray, span: Span) -> slice:
    """Return the tokens that overlap `span`."""
    first = bisect_left(offsets[:, 1], span[0] + 1)
    return slice(first, max(first, bisect_left(offsets[:, 0], span[1])))


def _closing_token(
    turn: Turn, tokens: slice, *, offsets: np.ndarray, specials: np.ndarray
) -> int | None:
    """Return the end-of-turn token: the last special one after the content."""
    found = np.flatnonzero(specials[tokens])
    if len(found):
        last = tokens.start + int(found[-1])
        return last if offsets[last, 0] >= turn.content_end else None
    following = tokens.stop
    # A template may close its generation tag before the end of turn that the target writes too.
    if following < len(specials) and specials[following] and offsets[following, 0] == turn.end:
        return following
    return None


def _supplied(turn: Turn, body: str) -> list[Span]:
    """Return the parts of a turn that the template wrote and the target never would.

    That is an empty reasoning block. Other marks before the message's text, such as the name of a
    channel, are no part of the generation prompt, so the target writes them itself.
    """
    if turn.has_reasoning or turn.opens_in_header:
        return []
    return [match.span() for match in _EMPTY_REASONING.finditer(body)]


def _reasoning(turn: Turn, body: str) -> list[Span]:
    if turn.opens_in_header:
        closes = _REASONING_CLOSES.search(body)
        return [(0, closes.end() if closes else len(body))]
    return [match.span() for match in _REASONING.finditer(body)]
