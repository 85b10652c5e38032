"""Conversations as tokens: the chat template, its options and identity, and the rendered result.

Where the assistant's turns stand in the text, and the mask bits of their tokens, is
common/turns.py. Letter: T tokens.
"""

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedTokenizerBase

from dflash_offline.common.errors import BadInput
from dflash_offline.common.turns import (
    Message,
    Span,
    Turn,
    find_rendered_turns,
    find_turns,
    loss_mask,
    without_empty_reasoning,
)

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


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
        """Read the command line spellings; `k=v` becomes true, false, a number or a string.

        Raises:
            BadInput: a file that cannot be read, or an argument of another form.
        """
        file = chat_template and chat_template.expanduser()
        if file is not None:
            # Later it would only be a reason to leave a row out.
            _template_in(file)
        return cls(
            chat_template=file,
            chat_template_args=dict(_template_argument(each) for each in chat_template_arg),
            system_prompt=system_prompt,
        )

    def with_system(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages that begin with the system prompt, where they have none of their own."""
        if self.system_prompt is None or (messages and messages[0]["role"] == "system"):
            return list(messages)
        return [{"role": "system", "content": self.system_prompt}, *messages]


def _template_argument(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise BadInput(
            f"--chat-template-arg {text} is not name=value; allowed values are true, false, a "
            "number or a string, as in enable_thinking=false"
        )
    try:
        # As Python writes them too: a template takes the text False for true.
        typed = json.loads(value.lower() if value in ("True", "False") else value)
    except ValueError:
        return name, value
    return name, typed if isinstance(typed, bool | int | float) else value


def chat_template(tokenizer: PreTrainedTokenizerBase, options: ChatOptions) -> str:
    """Return the template's text.

    Raises:
        BadInput: the tokenizer has none and no file is given, or the file cannot be read.
    """
    if options.chat_template is not None:
        return _template_in(options.chat_template)
    try:
        return tokenizer.get_chat_template()
    except ValueError as problem:
        raise BadInput(
            "the target's tokenizer has no chat template; give one with --chat-template FILE, or "
            "use rendered text or token ids as data"
        ) from problem


def _template_in(file: Path) -> str:
    try:
        # A byte order mark would stand in every rendered text.
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        raise BadInput(
            f"--chat-template {file} cannot be read ({problem}); give a text file with a Jinja "
            "template"
        ) from problem


def chat_identity(tokenizer: PreTrainedTokenizerBase, options: ChatOptions) -> dict[str, str]:
    """Return the flat fields that two stores must share for their tokens to mean the same.

    Raises:
        BadInput: no template, or an argument that it does not read.
    """
    template = chat_template(tokenizer, options)
    for name in options.chat_template_args:
        # A misspelt name would have no effect at all.
        if not re.search(rf"\b{name}\b", template):
            raise BadInput(
                f"--chat-template-arg {name} is a name that the chat template does not read; "
                "correct it, or leave it out"
            )
    return {
        "chat_template_sha256": _sha256(template),
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
    tools: Sequence[Mapping[str, Any]] = (),
    cut_last_turn: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids (int32 [T]) and loss mask (uint8 [T], `LossMask` bits) of a conversation.

    Args:
        tokenizer: the target's; needs character offsets.
        messages: `{"role", "content"}` mappings in order.
        options: chat options.
        tools: described to the assistant, where the template does so.
        cut_last_turn: the last assistant message was cut by a token limit: the target never wrote
            its end of turn, so everything after its content is left off.

    Raises:
        BadInput: the template refuses the conversation, or what the assistant wrote in one of its
            messages cannot be found in the rendered text.
    """
    renderer = _Renderer(tokenizer, options, tools)
    text = renderer.text(messages)
    turns = find_turns(text, messages, render=renderer.text, tagged=renderer.tagged(messages, text))
    if cut_last_turn and turns:
        end = turns[-1].content_end
        if end == turns[-1].start:
            raise BadInput(
                "the chat template changes the text of the cut answer, whose end is not found again"
            )
        text, turns[-1] = text[:end], replace(turns[-1], end=end)
    return _masked(tokenizer, text, turns)


def render_text(
    tokenizer: PreTrainedTokenizerBase, text: str, options: ChatOptions
) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids (int32 [T]) and loss mask (uint8 [T]) of an already rendered conversation.

    Turns are found by the header and the end of turn that the chat template writes.

    Raises:
        BadInput: the template marks the ends of turns with no special token.
    """
    header, end = _turn_marks(tokenizer, options)
    turns = find_rendered_turns(text, header=header, end=end)
    return _masked(tokenizer, text, turns)


def _masked(
    tokenizer: PreTrainedTokenizerBase, text: str, turns: Sequence[Turn]
) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids and loss mask of a text, given the assistant's turns in it."""
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = np.asarray(encoding["input_ids"], np.int32)
    offsets = np.asarray(encoding["offset_mapping"], np.int64).reshape(-1, 2)
    specials = np.isin(ids, _special_ids(tokenizer))
    return ids, loss_mask(text, turns, offsets=offsets, specials=specials)


def _turn_marks(tokenizer: PreTrainedTokenizerBase, options: ChatOptions) -> tuple[str, str]:
    """Return an assistant's header and its end of turn, from a conversation of known words."""
    words = ("Ask-one", "Say-one", "Ask-two", "Say-two")
    roles = ("user", "assistant") * 2
    probe = [{"role": r, "content": w} for r, w in zip(roles, words, strict=True)]
    renderer = _Renderer(tokenizer, options)
    text, asked = renderer.text(probe), renderer.text(probe[:3])
    prompt = renderer.text(probe[:3], True)
    spans = [(text.index(word), text.index(word) + len(word)) for word in words]
    header = text[spans[2][1] : spans[3][0]].rstrip(" ")
    if prompt.startswith(asked) and len(prompt) > len(asked):
        header = without_empty_reasoning(prompt[len(asked) :])
    after = text[spans[1][1] : spans[2][0]]
    names = tokenizer.convert_ids_to_tokens(_special_ids(tokenizer))
    ends = [after.index(name) + len(name) for name in names if name in after]
    if not ends:
        raise BadInput(
            "rendered text needs a chat template that ends turns with a special token; give "
            "messages instead"
        )
    return header, after[: min(ends)]


class _Renderer:
    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: ChatOptions,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._tools = list(tools) or None
        self._template = chat_template(tokenizer, options)

    def text(self, messages: Sequence[Message], generation_prompt: bool = False) -> str:
        messages = self._options.with_system(messages)
        if not messages:
            raise BadInput("the conversation has no messages; give at least one")
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tools=self._tools,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self._options.chat_template_args,
            )
        # The last where a macro calls itself for ever, as for some descriptions of tools.
        except (TemplateError, TypeError, KeyError, RecursionError) as problem:
            raise BadInput(f"the chat template refuses the conversation: {problem}") from problem

    def tagged(self, messages: Sequence[Message], text: str) -> list[Span] | None:
        """Return the spans of `text` inside generation tags; None for a template without."""
        if not _GENERATION_TAG.search(self._template):
            return None
        encoding = self._tokenizer.apply_chat_template(
            self._options.with_system(messages),
            tools=self._tools,
            chat_template=self._template,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self._options.chat_template_args,
        )
        offsets = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)[
            "offset_mapping"
        ]
        steps = np.diff(np.asarray([0, *encoding["assistant_masks"], 0]))
        runs = zip(np.flatnonzero(steps == 1), np.flatnonzero(steps == -1), strict=True)
        return [(offsets[first][0], offsets[stop - 1][1]) for first, stop in runs]


@functools.lru_cache(maxsize=8)
def _special_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    added = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    return sorted({*tokenizer.all_special_ids, *added})
