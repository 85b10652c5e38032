"""Chat rendering: which tokens are the assistant's, under templates of many habits."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from dflash_offline.common import chat
from dflash_offline.common.chat import ChatOptions
from dflash_offline.common.errors import BadInput
from dflash_offline.common.store import LossMask

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot|>", "[INST]", "[/INST]"]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}"
    "<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The tag closes before the end of turn, which the target writes all the same.
TAGGED_SHORT = TAGGED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
# Qwen3's habits: old reasoning is dropped, the last turn gets an empty block.
THINKING = (
    "{% set last = (messages | map(attribute='role') | list | length) - 1 %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% set answer = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n')"
    " if '</think>' in m.content else '' %}"
    "{% if loop.index0 == last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ answer }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
# R1's habits: the opening tag stands in the generation prompt.
OPENS_IN_HEADER = THINKING.replace("assistant\n{% if enable", "assistant\n<think>\n{% if enable")
INST = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}</s>"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)
# Refuses a conversation that ends with the user unless it is asked for a generation prompt.
PICKY = "{% if messages[-1].role == 'user' and not add_generation_prompt %}"
PICKY += "{{ raise_exception('no') }}{% endif %}" + CHATML
REWRITING = CHATML.replace("{{ m.content }}", "{{ m.content | upper | replace('O', '0') }}")
TAGGED_REWRITING = TAGGED.replace("{{ m.content }}", "{{ m.content | upper | replace('O', '0') }}")
# Harmony's habits: a channel between the header and the text, of special tokens too.
CHANNELS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<|eot|>final:{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TURNS = [
    {"role": "user", "content": "Hi you"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long!"},
]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    bytes_only = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        eos_token="</s>",
        bos_token="<s>",
        additional_special_tokens=SPECIAL[2:],
    )


def marked(tokenizer, template: str, messages, *, bits: int, **arguments) -> list[str]:
    """Return the runs of tokens that carry any of `bits`, as texts."""
    tokenizer.chat_template = template
    options = ChatOptions(chat_template_args=arguments.pop("template_args", {}))
    ids, mask = chat.render_conversation(tokenizer, messages, options, **arguments)
    assert ids.dtype == np.int32
    assert mask.dtype == np.uint8
    assert ids.shape == mask.shape
    steps = np.diff(np.concatenate([[0], (mask & bits != 0).astype(int), [0]]))
    runs = zip(np.flatnonzero(steps == 1), np.flatnonzero(steps == -1), strict=True)
    return [tokenizer.decode(ids[a:b]) for a, b in runs]


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_end|>"),
        (TAGGED, "<|im_end|>"),
        (TAGGED_SHORT, "<|im_end|>"),
        (PICKY, "<|im_end|>"),
        (INST, "</s>"),
    ],
    ids=["chatml", "tagged", "tag-before-end", "picky", "inst"],
)
def test_spans_have_content_and_end_of_turn(tokenizer, template: str, end: str):
    space = " " if template == INST else ""
    expected = [f"{space}Hello.{end}", f"{space}So long!{end}"]
    assert marked(tokenizer, template, TURNS, bits=LossMask.SUPERVISED) == expected
    assert marked(tokenizer, template, TURNS, bits=LossMask.END_OF_TURN) == [end, end]
    assert marked(tokenizer, template, TURNS, bits=LossMask.LAST_TURN) == expected[1:]
    assert marked(tokenizer, template, TURNS, bits=LossMask.TEMPLATE) == []


def test_template_without_end_of_turn(tokenizer):
    """The line feed that the template adds is not what the assistant wrote."""
    assert marked(tokenizer, PLAIN, TURNS, bits=LossMask.END_OF_TURN) == []
    assert marked(tokenizer, PLAIN, TURNS, bits=LossMask.TEMPLATE) == ["\n", "\n"]
    assert marked(tokenizer, PLAIN, TURNS, bits=LossMask.ASSISTANT) == ["Hello.\n", "So long!\n"]


def test_empty_think_block_is_the_templates(tokenizer):
    block = "<think>\n\n</think>\n\n"
    assert marked(tokenizer, THINKING, TURNS, bits=LossMask.TEMPLATE) == [block]
    written = marked(tokenizer, THINKING, TURNS, bits=LossMask.SUPERVISED)
    assert written == ["Hello.<|im_end|>", f"{block}So long!<|im_end|>"]


@pytest.mark.parametrize("block", ["<think>\n\n</think>\n\n", "\n</think>\n\n"])
def test_empty_think_block_that_the_target_wrote(tokenizer, block: str):
    """As without thinking; the opening tag may have stood in its prompt."""
    said = [*TURNS[:3], {**TURNS[3], "content": f"{block}So long!"}]
    assert marked(tokenizer, THINKING, said, bits=LossMask.TEMPLATE) == []
    written = marked(tokenizer, THINKING, said, bits=LossMask.SUPERVISED)
    assert written[-1] == "<think>\n\n</think>\n\nSo long!<|im_end|>"


def test_special_token_inside_an_answer_is_not_its_end(tokenizer):
    said = [TURNS[0], {**TURNS[1], "content": "Hel<|eot|>lo."}, *TURNS[2:]]
    assert marked(tokenizer, PLAIN, said, bits=LossMask.END_OF_TURN) == []
    written = marked(tokenizer, PLAIN, said, bits=LossMask.ASSISTANT)
    assert written == ["Hel<|eot|>lo.\n", "So long!\n"]


def test_think_block_of_the_generation_prompt_is_header(tokenizer):
    arguments = {"template_args": {"enable_thinking": False}}
    written = marked(tokenizer, THINKING, TURNS, bits=LossMask.SUPERVISED, **arguments)
    assert written == ["Hello.<|im_end|>", "So long!<|im_end|>"]
    assert marked(tokenizer, THINKING, TURNS, bits=LossMask.TEMPLATE, **arguments) == []


@pytest.mark.parametrize("opening", ["<think>", ""], ids=["opens-in-content", "opens-in-header"])
def test_reasoning(tokenizer, opening: str):
    """Only the last turn keeps its reasoning; a generated answer may lack the opening tag."""
    template = THINKING if opening else OPENS_IN_HEADER
    said = [{**m} for m in TURNS]
    for message in said[1::2]:
        message["content"] = f"{opening}\nhm\n</think>\n\n{message['content']}"
    thought = "<think>\nhm\n</think>" if opening else "hm\n</think>"
    assert marked(tokenizer, template, said, bits=LossMask.REASONING) == [thought]
    written = marked(tokenizer, template, said, bits=LossMask.SUPERVISED)
    assert written == ["Hello.<|im_end|>", f"{thought}\n\nSo long!<|im_end|>"]
    assert marked(tokenizer, template, said, bits=LossMask.TEMPLATE) == []


@pytest.mark.parametrize("template", [CHATML, TAGGED, PLAIN], ids=["chatml", "tagged", "plain"])
def test_cut_answer_has_no_end_of_turn(tokenizer, template: str):
    written = marked(tokenizer, template, TURNS, bits=LossMask.SUPERVISED, cut_last_turn=True)
    assert written[-1] == "So long!"
    ids, _ = chat.render_conversation(tokenizer, TURNS, ChatOptions(), cut_last_turn=True)
    assert tokenizer.decode(ids).endswith("So long!")


def test_cut_answer_that_repeats_its_reasoning(tokenizer):
    thought = "<think>\n{{ m.reasoning_content }}\n</think>\n\n{{ m.content }}"
    template = CHATML.replace("{{ m.content }}", thought)
    said = [{**m, "content": "Yes.", "reasoning_content": "Yes."} for m in TURNS[:2]]
    written = marked(tokenizer, template, said, bits=LossMask.SUPERVISED, cut_last_turn=True)
    assert written == ["<think>\nYes.\n</think>\n\nYes."]


@pytest.mark.parametrize("template", [CHATML, THINKING, INST], ids=["chatml", "thinking", "inst"])
def test_rendered_text_has_the_mask_of_its_messages(tokenizer, template: str):
    tokenizer.chat_template = template
    text = tokenizer.apply_chat_template(TURNS, tokenize=False)
    ids, mask = chat.render_text(tokenizer, text, ChatOptions())
    expected_ids, expected_mask = chat.render_conversation(tokenizer, TURNS, ChatOptions())
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(mask, expected_mask)


def test_rendered_text_needs_a_special_end(tokenizer):
    tokenizer.chat_template = PLAIN
    with pytest.raises(BadInput, match="give messages"):
        chat.render_text(tokenizer, "User: hi", ChatOptions())


def test_text_that_cannot_be_found_is_refused(tokenizer):
    # Prefixes alone would still find it, so they are broken too.
    tokenizer.chat_template = "{{ messages | length }}" + REWRITING
    with pytest.raises(BadInput, match=r"messages\[1\].*cannot be found"):
        chat.render_conversation(tokenizer, TURNS, ChatOptions())


@pytest.mark.parametrize("template", [REWRITING, TAGGED_REWRITING], ids=["prefixes", "tagged"])
def test_changed_text_is_found_by_its_place(tokenizer, template: str):
    expected = ["HELL0.<|im_end|>", "S0 L0NG!<|im_end|>"]
    assert marked(tokenizer, template, TURNS, bits=LossMask.SUPERVISED) == expected
    assert marked(tokenizer, template, TURNS, bits=LossMask.END_OF_TURN) == ["<|im_end|>"] * 2
    with pytest.raises(BadInput, match="cut answer"):
        marked(tokenizer, template, TURNS, bits=LossMask.SUPERVISED, cut_last_turn=True)


def test_marks_outside_the_generation_prompt_are_the_targets(tokenizer):
    """The target opens its channel itself, so the drafter learns to."""
    written = marked(tokenizer, CHANNELS, TURNS, bits=LossMask.SUPERVISED)
    assert written == ["<|eot|>final:Hello.<|im_end|>", "<|eot|>final:So long!<|im_end|>"]
    assert marked(tokenizer, CHANNELS, TURNS, bits=LossMask.TEMPLATE) == []


def test_inconsistent_prefixes_fall_back_to_the_text(tokenizer):
    template = "{{ messages | length }}" + CHATML
    expected = ["Hello.<|im_end|>", "So long!<|im_end|>"]
    assert marked(tokenizer, template, TURNS, bits=LossMask.SUPERVISED) == expected


@pytest.mark.parametrize("prefix", ["", "{{ messages | length }}"], ids=["header", "no-header"])
def test_words_of_others_are_not_the_assistants(tokenizer, prefix: str):
    """Who repeats what was said before is found behind it, whatever the header has lost."""
    tokenizer.chat_template = prefix + THINKING
    said = ["Today is 4 May.", "Say 4", "4", "4?", "4"]
    roles = ["system", *["user", "assistant"] * 2]
    talk = [{"role": r, "content": c} for r, c in zip(roles, said, strict=True)]
    options = ChatOptions(chat_template_args={"enable_thinking": False})
    ids, mask = chat.render_conversation(tokenizer, talk, options)
    first = tokenizer.decode(ids[: np.flatnonzero(mask & LossMask.SUPERVISED)[0]])
    assert first.endswith("Say 4<|im_end|>\n<|im_start|>assistant\n")


def test_lost_reasoning_is_not_found_in_a_later_turn(tokenizer):
    same = "<think>\nhm\n</think>\n\nYes."
    talk = [{**m, "content": same} if m["role"] == "assistant" else m for m in TURNS]
    for arguments in ({}, {"template_args": {"enable_thinking": False}}):
        written = marked(tokenizer, THINKING, talk, bits=LossMask.SUPERVISED, **arguments)
        assert written == ["Yes.<|im_end|>", f"{same}<|im_end|>"]


@pytest.mark.parametrize("reasoning", ["", "hm"])
def test_turn_without_text_of_its_own(tokenizer, reasoning: str):
    """A call, or nothing at all, though the template takes its reasoning away later."""
    call = "{% if m.tool_calls %}<call>{{ m.tool_calls[0].name }}</call>{% endif %}<|im_end|>\n"
    template = THINKING.replace("<|im_end|>\n{% endfor", f"{call}{{% endfor")
    content = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    # The last turn has the same, which is not to be taken for the first one's.
    last = {**TURNS[3], "content": f"{content}So long!"}
    calling = {"role": "assistant", "content": content, "tool_calls": [{"name": "f"}]}
    for first, expected in ((calling, "<call>f</call>"), ({**calling, "tool_calls": None}, "")):
        talk = [TURNS[0], first, {"role": "tool", "content": "So long!"}, TURNS[2], last]
        written = marked(tokenizer, template, talk, bits=LossMask.END_OF_TURN)
        assert len(written) == 2
        written = marked(tokenizer, template, talk, bits=LossMask.SUPERVISED)
        assert written[0] == f"{expected}<|im_end|>"
        assert written[1].endswith("So long!<|im_end|>")


def test_refused_conversation(tokenizer):
    tokenizer.chat_template = INST
    with pytest.raises(BadInput, match="only user and assistant"):
        chat.render_conversation(tokenizer, [{"role": "tool", "content": "x"}], ChatOptions())


def test_template_that_never_ends(tokenizer):
    endless = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"
    tokenizer.chat_template = endless
    with pytest.raises(BadInput, match="the chat template refuses .*recursion"):
        chat.render_conversation(tokenizer, TURNS, ChatOptions())


def test_conversation_without_assistant(tokenizer):
    assert marked(tokenizer, CHATML, TURNS[:1], bits=0xFF) == []


def test_render_prompt_is_a_prefix(tokenizer):
    tokenizer.chat_template = CHATML
    options = ChatOptions(system_prompt="Be brief.")
    prompt = chat.render_prompt(tokenizer, TURNS[:3], options)
    ids, mask = chat.render_conversation(tokenizer, TURNS, options)
    assert ids[: len(prompt)].tolist() == prompt
    assert mask[len(prompt) :].all() == 0  # the final line feed belongs to nobody
    assert mask[len(prompt)] & LossMask.LAST_TURN
    assert "Be brief." in tokenizer.decode(prompt)
    own = [{"role": "system", "content": "Own."}, *TURNS]
    assert "Be brief." not in tokenizer.decode(chat.render_prompt(tokenizer, own, options))


def test_missing_template(tokenizer, tmp_path: Path):
    tokenizer.chat_template = None
    with pytest.raises(BadInput, match="no chat template.*--chat-template"):
        chat.chat_template(tokenizer, ChatOptions())
    with pytest.raises(BadInput, match="--chat-template .*none.jinja"):
        chat.chat_template(tokenizer, ChatOptions(chat_template=tmp_path / "none.jinja"))
    options = ChatOptions(chat_template=tmp_path / "own.jinja")
    windows = b"\xef\xbb\xbf" + CHATML.replace("\n", "\r\n").encode()
    for content in (CHATML.encode(), windows):
        (tmp_path / "own.jinja").write_bytes(content)
        assert chat.chat_template(tokenizer, options) == CHATML


def test_template_arguments():
    given = ("enable_thinking=false", "level=3", "ratio=0.5", "mode=fast", "quoted=[1]", "x=True")
    options = ChatOptions.from_options(chat_template_arg=given)
    expected = {"enable_thinking": False, "level": 3, "ratio": 0.5, "mode": "fast", "quoted": "[1]"}
    # A template takes the text "False" for true.
    assert options.chat_template_args == {**expected, "x": True}
    with pytest.raises(BadInput, match="--chat-template-arg thinking"):
        ChatOptions.from_options(chat_template_arg=("thinking",))


def test_identity_follows_every_chat_option(tokenizer):
    tokenizer.chat_template = CHATML
    plain = chat.chat_identity(tokenizer, ChatOptions())
    variants = [
        ChatOptions(system_prompt="Be brief."),
        ChatOptions(chat_template_args={"add_generation_prompt": False}),
    ]
    identities = [chat.chat_identity(tokenizer, options) for options in variants]
    tokenizer.chat_template = CHATML + " "
    identities.append(chat.chat_identity(tokenizer, ChatOptions()))
    for identity in identities:
        assert sum(identity[key] != plain[key] for key in plain) == 1
    with pytest.raises(BadInput, match="enable_thinkng is a name that the chat template does not"):
        chat.chat_identity(tokenizer, ChatOptions(chat_template_args={"enable_thinkng": False}))


def test_stop_token_ids(tokenizer):
    eos = tokenizer.eos_token_id
    assert chat.stop_token_ids(tokenizer, None) == (eos,)
    several = GenerationConfig(eos_token_id=[3, 7])
    assert chat.stop_token_ids(tokenizer, several) == tuple(sorted((3, 7, eos)))
