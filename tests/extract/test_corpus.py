"""Rows of every format as tokens and masks; what is refused, and what is counted."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from dflash_offline.common.chat import ChatOptions
from dflash_offline.common.errors import BadInput
from dflash_offline.common.store import LossMask, supervised
from dflash_offline.common.target import load_tokenizer
from dflash_offline.extract import corpus
from dflash_offline.extract.corpus import CorpusReader
from dflash_offline.extract.rows import Row, read_rows
from dflash_offline.extract.token_rows import TokenRow

ASKED = {"role": "user", "content": "Hi"}
SAID = {"role": "assistant", "content": "Hello."}
MESSAGES = {"messages": [ASKED, SAID]}


@pytest.fixture
def reader(tiny_target: Path) -> CorpusReader:
    tokenizer = load_tokenizer(tiny_target)
    return CorpusReader(
        tokenizer=tokenizer, options=ChatOptions(), vocab_size=len(tokenizer), max_length=64
    )


def rows_of(*values: dict) -> list[Row]:
    return [
        Row(source="set", address=f"set.jsonl row {i + 1}", number=i, values=v)
        for i, v in enumerate(values)
    ]


def supervised_text(reader: CorpusReader, row: TokenRow) -> str:
    return reader.tokenizer.decode(row.tokens[supervised(row.mask)])


@pytest.mark.parametrize(
    "values",
    [
        MESSAGES,
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "bard", "value": "Hello."}]},
        {"conversations": [ASKED, SAID]},
        {"turns": ["Hi"], "answers": ["Hello."]},
        {"prompt": [ASKED], "completion": [SAID]},
        {
            "messages": [
                ASKED,
                {"role": "assistant", "content": [{"type": "text", "text": "Hello."}]},
            ]
        },
    ],
    ids=["openai", "sharegpt", "bard", "roles", "turns", "conversational-completion", "parts"],
)
def test_conversations_of_every_format(reader: CorpusReader, values: dict):
    (row,), _ = reader.convert(rows_of(values))
    assert supervised_text(reader, row) == "Hello.<|im_end|>"
    assert row.mask[supervised(row.mask)].tolist() == [
        *[LossMask.ASSISTANT | LossMask.LAST_TURN] * len("Hello."),
        LossMask.END_OF_TURN | LossMask.LAST_TURN,
    ]


@pytest.mark.parametrize(
    "values",
    [
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]},
        MESSAGES,
        {"turns": ["Hi"], "answers": ["Hello."]},
        {"prompt": [ASKED], "completion": [SAID]},
    ],
    ids=["sharegpt", "openai", "turns", "conversational-completion"],
)
def test_system_message_beside_a_conversation(reader: CorpusReader, values: dict):
    """As ShareGPT files have it; one inside the conversation comes first."""
    (row, bare), _ = reader.convert(rows_of({**values, "system": "Be brief."}, values))
    text = reader.tokenizer.decode(row.tokens)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n" + reader.tokenizer.decode(
        bare.tokens
    )
    assert supervised_text(reader, row) == "Hello.<|im_end|>"
    own = {"messages": [{"role": "system", "content": "Be kind."}, ASKED, SAID]}
    (row,), _ = reader.convert(rows_of({**own, "system": "Be brief."}))
    assert "Be brief." not in reader.tokenizer.decode(row.tokens)


def test_rendered_text(reader: CorpusReader):
    text = reader.tokenizer.apply_chat_template(MESSAGES["messages"], tokenize=False)
    (rendered, plain), _ = reader.convert(rows_of({"text": text}, MESSAGES))
    np.testing.assert_array_equal(rendered.tokens, plain.tokens)
    np.testing.assert_array_equal(rendered.mask, plain.mask)


def test_completion_is_used_as_it_is(reader: CorpusReader):
    (row,), _ = reader.convert(rows_of({"prompt": "One, two,", "completion": " three."}))
    assert reader.tokenizer.decode(row.tokens) == "One, two, three."
    assert reader.tokenizer.decode(row.tokens[row.mask == LossMask.OTHER]) == " three."


def test_token_that_begins_in_the_prompt_is_the_prompts(reader: CorpusReader):
    letters = {letter: i for i, letter in enumerate("abcdx")}
    words = Tokenizer(models.BPE({**letters, "ab": 5}, [("a", "b")]))
    reader = replace(reader, tokenizer=PreTrainedTokenizerFast(tokenizer_object=words))
    (row,), _ = reader.convert(rows_of({"prompt": "xa", "completion": "bcd"}))
    assert row.tokens.tolist() == [4, 5, 2, 3]
    assert row.mask.tolist() == [0, 0, LossMask.OTHER, LossMask.OTHER]


def test_last_id_of_the_vocabulary_and_the_first_beyond(reader: CorpusReader):
    reader = replace(reader, vocab_size=7)
    (row,), _ = reader.convert(rows_of({"input_ids": [5, 6], "loss_mask": [1, 1]}))
    assert row.tokens.tolist() == [5, 6]
    with pytest.raises(BadInput, match="token id 7 is beyond the target's vocabulary of 7"):
        reader.convert(rows_of({"input_ids": [5, 7], "loss_mask": [1, 1]}))


@pytest.mark.parametrize("drop", [False, True], ids=["truncate", "skip"])
def test_row_of_just_the_length_allowed_is_kept_whole(reader: CorpusReader, drop: bool):
    reader = replace(reader, max_length=3, drop_overlong=drop)
    (row,), report = reader.convert(rows_of({"input_ids": [5, 6, 7], "loss_mask": [1, 1, 1]}))
    assert row.tokens.tolist() == [5, 6, 7]
    assert (row.is_truncated, report.num_truncated) == (False, 0)


def test_token_ids_are_not_touched(reader: CorpusReader):
    """The mask of token t is stored at t: nothing is shifted here, or anywhere else."""
    (row,), _ = reader.convert(
        rows_of({"input_ids": [9, 8, 7, 6, 5], "loss_mask": [0, 0, 0, 1, 1]})
    )
    assert row.tokens.tolist() == [9, 8, 7, 6, 5]
    assert row.mask.tolist() == [0, 0, 0, LossMask.OTHER, LossMask.OTHER]
    assert row.tokens.dtype == np.int32


def test_cut_answer_is_supervised_without_end_of_turn(reader: CorpusReader):
    (row,), _ = reader.convert(rows_of({**MESSAGES, "finish_reason": "length"}))
    assert supervised_text(reader, row) == "Hello."
    assert reader.tokenizer.decode(row.tokens).endswith("Hello.")


def with_own_template(reader: CorpusReader, folder: Path, template: str) -> CorpusReader:
    (folder / "own.jinja").write_text(template)
    options = ChatOptions(chat_template=folder / "own.jinja")
    return replace(reader, options=options, max_length=1024)


@pytest.mark.parametrize("as_text", [False, True], ids=["list", "text"])
def test_tools_are_told_to_the_assistant(reader: CorpusReader, tmp_path: Path, as_text: bool):
    """Without the nulls that a table gives a call for the arguments of other calls."""
    reader = with_own_template(
        reader,
        tmp_path,
        "{{ tools|tojson }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if m.tool_calls %}{{ m.tool_calls|tojson }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    calls = [[{"function": {"name": "f", "arguments": {key: "x"}}}] for key in ("city", "day")]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    said = [
        {
            "messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": each}],
            "tools": json.dumps(tools) if as_text else tools,
        }
        for each in calls
    ]
    write_rows(tmp_path / "a.parquet", said)
    kept, _ = reader.read([str(tmp_path / "a.parquet")])
    texts = [reader.tokenizer.decode(row.tokens) for row in kept]
    assert all(text.startswith("[{") and '"object"' in text for text in texts)
    assert ['"city"' in text for text in texts] == [True, False]
    assert not any("null" in text for text in texts)


@pytest.mark.parametrize("wrap", [lambda call: {"type": "function", "function": call}, dict])
def test_arguments_of_calls_are_mappings_to_the_template(reader, tmp_path, wrap):
    """Also where they are JSON text, as in OpenAI's form; what is no JSON mapping is left alone."""
    reader = with_own_template(
        reader,
        tmp_path,
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or () %}{{ (c.function or c).arguments|tojson }}{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    given = ({"city": "Rom"}, '{"city": "Rom"}', "in Rom", "[1]")
    calls = [wrap({"name": "f", "arguments": each}) for each in given]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    (row,), _ = reader.convert(rows_of({"messages": [ASKED, said]}))
    text = reader.tokenizer.decode(row.tokens)
    assert '{"city": "Rom"}{"city": "Rom"}"in Rom""[1]"<|im_end|>' in text


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_under_any_name_reaches_the_template(reader, tmp_path, name):
    reader = with_own_template(
        reader,
        tmp_path,
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    (row,), _ = reader.convert(rows_of({"messages": [ASKED, SAID | {name: "Hm."}]}))
    assert supervised_text(reader, row) == "<think>Hm.</think>Hello.<|im_end|>"
    assert (row.mask & LossMask.REASONING).any()


def test_names_of_repeated_ids_are_their_own(reader: CorpusReader):
    said = [{**MESSAGES, "id": name} for name in ("a", "a", "a#2", "a", "a#2")]
    rows, _ = reader.convert(rows_of(*said))
    assert [row.id for row in rows] == ["a", "a#3", "a#2", "a#4", "a#2#2"]


def test_rendered_answers_to_one_question_are_one_conversation(reader: CorpusReader):
    """Whatever the answer and what follows it: they share their fate when some are held out."""
    begun = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ends = ("Hello.<|im_end|>\n", "Hey!<|im_end|>\n", f"Hey.<|im_end|>\n{begun}Again.<|im_end|>\n")
    texts = [begun + end for end in ends]
    rows, _ = reader.convert(
        rows_of(*({"text": t} for t in [*texts, texts[0].replace("Hi", "Ho")]))
    )
    assert [row.conversation == rows[0].conversation for row in rows] == [True, True, True, False]


def test_ids_sources_licences(reader: CorpusReader):
    named = {**MESSAGES, "id": "a", "source": "chat", "license": "MIT"}
    rows, _ = reader.convert(rows_of(named, MESSAGES, {**named, "licence": "CC0"}))
    assert [row.id for row in rows] == ["a", "set:1", "a#2"]
    assert [row.source for row in rows] == ["chat", "set", "chat"]
    assert [row.licence for row in rows] == ["MIT", "", "CC0"]
    assert len({row.conversation for row in rows}) == 1


@pytest.mark.parametrize("drop", [False, True], ids=["truncate", "skip"])
def test_overlong_rows(reader: CorpusReader, drop: bool):
    long = {"messages": [ASKED, {"role": "assistant", "content": "na " * 40}]}
    reader = CorpusReader(
        tokenizer=reader.tokenizer,
        options=reader.options,
        vocab_size=reader.vocab_size,
        max_length=50,
        drop_overlong=drop,
    )
    rows, report = reader.convert(rows_of(long, MESSAGES))
    if drop:
        assert len(rows) == 1
        assert report.skipped == {corpus.TOO_LONG: 1}
        assert "set.jsonl row 1" in report.examples[corpus.TOO_LONG]
    else:
        assert [len(row.tokens) for row in rows] == [50, len(rows[1].tokens)]
        assert [row.is_truncated for row in rows] == [True, False]
        assert report.num_truncated == 1
        # Ids and mask are cut together, inside the assistant's text.
        assert len(rows[0].mask) == 50
        assert rows[0].mask[-1] == LossMask.ASSISTANT | LossMask.LAST_TURN


def test_unusable_rows_are_counted(reader: CorpusReader):
    rows, report = reader.convert(
        rows_of(
            MESSAGES,
            {"turns": ["No answer"]},
            {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 0]},
            {"input_ids": [], "loss_mask": []},
            {"input_ids": [1, 2], "loss_mask": [0, 0]},
        )
    )
    assert len(rows) == 1
    assert report.skipped == {corpus.NO_ASSISTANT: 1, corpus.NO_PAIR: 3}
    assert report.num_rows == 5
    assert "1 skipped (no assistant turn; first: set.jsonl row 2)" in report.sentence()


@pytest.mark.parametrize(
    "line",
    [
        r'{"turns": ["a\ud83d"], "answers": ["b"]}',
        r'{"messages": [{"role": "assistant", "content": [{"type": "text", "text": "\ude00"}]}]}',
        r'{"prompt": "a", "completion": "\ud83d\ud83d"}',
        r'{"id": "x\ud83d", "turns": ["a"], "answers": ["b"]}',
        r'{"source": "\ud83d", "input_ids": [1, 2], "loss_mask": [1, 1]}',
    ],
    ids=["question", "part", "completion", "id", "source"],
)
def test_text_that_is_not_unicode(reader: CorpusReader, line: str):
    """As a cut-off emoji in JSON: one row is skipped, not the run ended."""
    whole = json.loads(r'{"turns": ["\ud83d\ude00"], "answers": ["b\ud83d\ude00"]}')
    rows, report = reader.convert(rows_of(whole, json.loads(line)))
    assert len(rows) == 1
    assert report.skipped == {corpus.NOT_RENDERED: 1}
    assert "set.jsonl row 2: half of a surrogate pair" in report.examples[corpus.NOT_RENDERED]


def test_num_samples_counts_kept_rows(reader: CorpusReader):
    rows, report = reader.convert(rows_of({"turns": ["?"]}, MESSAGES, MESSAGES, MESSAGES), 2)
    assert [row.id for row in rows] == ["set:1", "set:2"]
    assert report.num_rows == 3


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], "no rows"),
        ([{"turns": ["a"]}, {"turns": ["b"]}], "no assistant turn.*dflash-generate"),
        ([{"input_ids": [1, 2], "loss_mask": [0, 0]}], "nothing to train on"),
    ],
    ids=["empty", "prompts-only", "zero-masks"],
)
def test_nothing_kept_is_an_error(reader: CorpusReader, values: list[dict], words: str):
    with pytest.raises(BadInput, match=words):
        reader.convert(rows_of(*values))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"messages": "Hi"}, "messages is a str"),
        ({"messages": ["Hi"]}, r"messages\[0\] is a str"),
        (
            {"messages": [ASKED, {"role": "assistant", "content": 4}]},
            r"messages\[1\].content is a int",
        ),
        ({"messages": [{"content": "x"}]}, r"messages\[0\].role is missing"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, r"messages\[0\].role is 'wizard'"),
        (
            {"conversations": [{"from": "gpt", "value": None}]},
            r"conversations\[0\].value is missing",
        ),
        ({"turns": [1]}, r"turns\[0\] is a int"),
        ({"turns": ["a"], "answers": []}, None),
        ({"turns": ["a"], "answers": ["b", "c"]}, "answers has 2 entries"),
        ({"prompt": 1, "completion": "x"}, "prompt is a int"),
        ({"text": 5}, "text is a int"),
        ({"input_ids": [1, 2]}, "without loss_mask"),
        ({"input_ids": [1, "2"], "loss_mask": [1, 1]}, r"input_ids\[1\] is a str"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "2 entries and loss_mask 1"),
        ({"input_ids": [-1, 2], "loss_mask": [1, 1]}, r"input_ids\[0\] is -1"),
        ({"input_ids": [5, 2**32], "loss_mask": [1, 1]}, r"input_ids\[1\] is 4294967296"),
        ({"input_ids": [5, 2**70], "loss_mask": [1, 1]}, r"input_ids\[1\] is"),
        ({"input_ids": [5, 6], "loss_mask": [-100, 1]}, r"loss_mask\[0\] is -100.*0 to 1"),
        ({"input_ids": [1, 99999], "loss_mask": [1, 1]}, "99999 is beyond"),
        ({"question": "Hi"}, "has the columns question"),
        ({**MESSAGES, "tools": ["f"]}, "tools is no list of tools"),
        ({**MESSAGES, "tools": "f"}, "tools is no list of tools"),
        ({**MESSAGES, "system": ["x"]}, "system is a list"),
    ],
)
def test_wrong_types_name_row_and_field(reader: CorpusReader, values: dict, words: str | None):
    rows = rows_of(MESSAGES, values)
    if words is None:
        assert reader.convert(rows)[1].num_kept == 1
        return
    with pytest.raises(BadInput, match=f"set.jsonl row 2.*{words}"):
        reader.convert(rows)


def write_rows(path: Path, rows: list[dict]) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(rows)
        new = pa.ipc.new_stream if "stream" in path.name else pa.ipc.new_file
        with new(path, table.schema) as sink:
            sink.write_table(table)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in rows).encode()))
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(r) for r in rows) + "\n\n")
    else:
        path.write_text(json.dumps(rows))


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet", "a.arrow", "stream.arrow"]
)
def test_files_of_every_kind(tmp_path: Path, name: str):
    expected = [{**MESSAGES, "id": str(i)} for i in range(3)]
    write_rows(tmp_path / name, expected)
    rows = list(read_rows(str(tmp_path / name)))
    assert [row.values for row in rows] == expected
    assert rows[1].address == f"{tmp_path / name} row 2"
    assert rows[1].source == name.split(".")[0]
    assert [row.values for row in read_rows(str(tmp_path))] == expected


def test_folder_that_datasets_saved(tmp_path: Path):
    """As `Dataset.save_to_disk` leaves it, after `map` left a copy of its own beside the rows."""
    folder = tmp_path / "train"
    folder.mkdir()
    rows = [{"input_ids": [1, 2, i], "loss_mask": [0, 1, 1], "seq_len": 3} for i in range(4)]
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (rows[:2], rows[2:]), strict=True):
        write_rows(folder / name, part)
    write_rows(folder / "cache-01.arrow", rows)
    (folder / "dataset_info.json").write_text('{"features": {}}')
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    assert [row.values for row in read_rows(str(folder))] == rows
    (folder / "state.json").write_text("{}")
    with pytest.raises(BadInput, match="train has a state.json that names no files"):
        list(read_rows(str(folder)))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(BadInput, match=r"several splits \(train\); give the folder of one"):
        list(read_rows(str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.jsonl", None, "does not exist"),
        ("a.txt", "x", "unknown ending"),
        ("a.jsonl", '{"a": 1}\n{"b"\n', "line 2 is not JSON"),
        ("b.jsonl", "[1]\n", "row 1 is a list"),
        ("c.jsonl", "[" * 99999, "line 1 is not JSON .*recursion"),
        ("c.json", "[" * 99999, "is not JSON .*recursion"),
        ("a.json", "{", "is not JSON"),
        ("b.json", '{"a": 1}', "holds a dict"),
        ("a.parquet", "PAR1 no", "cannot be read"),
        ("a.jsonl.gz", "no gzip", "cannot be read"),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, content: str | None, words: str):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(BadInput, match=f"--data .*{words}"):
        list(read_rows(str(tmp_path / name)))


def test_damaged_gzip_is_bad_input(tmp_path: Path):
    content = bytearray(gzip.compress("".join(f'{{"a": {i}}}\n' for i in range(9999)).encode()))
    content[60:80] = bytes(20)
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(BadInput, match="--data .*a.jsonl.gz cannot be read"):
        list(read_rows(str(tmp_path / "a.jsonl.gz")))


def test_name_that_no_file_can_have():
    with pytest.raises(BadInput, match="--data x+ cannot be read"):
        list(read_rows("x" * 5000))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_byte_order_mark_is_no_content(tmp_path: Path, name: str):
    write_rows(tmp_path / name, [MESSAGES])
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (tmp_path / name).read_bytes())
    assert [row.values for row in read_rows(str(tmp_path / name))] == [MESSAGES]
