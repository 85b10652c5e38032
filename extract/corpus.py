"""The corpus as tokens: every row rendered, masked, cut to length, and what became of each counted.

Reading is extract/rows.py, formats extract/conversations.py, the chat template common/chat.py.
Letter: T tokens.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from dflash_offline.common import chat
from dflash_offline.common.chat import ChatOptions
from dflash_offline.common.errors import BadInput
from dflash_offline.common.store import LossMask, supervised
from dflash_offline.extract.conversations import (
    Completion,
    Content,
    Conversation,
    RenderedText,
    first_user_text,
    parse_row,
)
from dflash_offline.extract.rows import Row, read_rows

NO_ASSISTANT = "no assistant turn"
TOO_LONG = "longer than --max-length"
NO_PAIR = "no two supervised tokens in a row"
NOT_RENDERED = "cannot be rendered"


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """One row of the corpus, ready to be planned.

    Attributes:
        tokens: int32 [T].
        mask: uint8 [T] of `LossMask` bits.
        conversation: digest of the first user turn; rows that share it are held out together.
        is_truncated: whether tokens beyond the length limit were cut.
    """

    id: str
    source: str
    licence: str
    conversation: str
    tokens: np.ndarray
    mask: np.ndarray
    is_truncated: bool = False

    def content_hash(self) -> str:
        """Return a digest of tokens and mask."""
        return _digest(self.tokens.tobytes() + self.mask.tobytes())


@dataclass(frozen=True, kw_only=True)
class CorpusReport:
    """What became of the rows.

    Attributes:
        num_rows: rows read.
        num_kept: rows that became samples.
        num_truncated: kept rows that were cut.
        skipped: reason to number of rows.
        examples: reason to the address of its first row, with details.
    """

    num_rows: int
    num_kept: int
    num_truncated: int
    skipped: dict[str, int]
    examples: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "rows": self.num_rows,
            "kept": self.num_kept,
            "truncated": self.num_truncated,
            "skipped": self.skipped,
            "examples": self.examples,
        }

    def sentence(self) -> str:
        """Return one line for people."""
        skipped = [f"{n} skipped ({why}; {self.examples[why]})" for why, n in self.skipped.items()]
        cut = [f"{self.num_truncated} truncated"] if self.num_truncated else []
        return ", ".join([f"{self.num_rows} rows read", f"{self.num_kept} kept", *cut, *skipped])


@dataclass(frozen=True, kw_only=True)
class CorpusReader:
    """Turn rows into tokens.

    Attributes:
        tokenizer: the target's.
        options: chat options.
        vocab_size: ids at or above it are refused.
        max_length: tokens a sample may have.
        drop_overlong: leave longer rows out instead of cutting them.
    """

    tokenizer: PreTrainedTokenizerBase
    options: ChatOptions
    vocab_size: int
    max_length: int
    drop_overlong: bool = False

    def read(
        self, specs: Sequence[str], num_samples: int | None = None
    ) -> tuple[list[TokenRow], CorpusReport]:
        """Read `--data` values in order, up to `num_samples` kept rows.

        Raises:
            BadInput: nothing to read, a row of the wrong type, or no row kept.
        """
        return self.convert(chain.from_iterable(map(read_rows, specs)), num_samples)

    def convert(
        self, rows: Iterable[Row], num_samples: int | None = None
    ) -> tuple[list[TokenRow], CorpusReport]:
        """Convert rows; see `read`."""
        tally = _Tally()
        for row in rows:
            tally.num_rows += 1
            converted = self._convert_row(row, tally)
            if converted is not None:
                tally.kept.append(converted)
            if num_samples is not None and len(tally.kept) >= num_samples:
                break
        report = CorpusReport(
            num_rows=tally.num_rows,
            num_kept=len(tally.kept),
            num_truncated=sum(row.is_truncated for row in tally.kept),
            skipped=dict(tally.skipped),
            examples=tally.examples,
        )
        _refuse_nothing_kept(report)
        return tally.kept, report

    def _convert_row(self, row: Row, tally: "_Tally") -> TokenRow | None:
        content = parse_row(row)
        if isinstance(content, Conversation) and not _has_assistant(content):
            return tally.skip(NO_ASSISTANT, row.address)
        try:
            tokens, mask = self._tokens_of(content)
        except BadInput as problem:
            return tally.skip(NOT_RENDERED, f"{row.address}: {problem}")
        if len(tokens) and tokens.max() >= self.vocab_size:
            raise BadInput(
                f"--data {row.address}: token id {tokens.max()} is beyond the target's vocabulary "
                f"of {self.vocab_size}; was it made with another tokenizer?"
            )
        is_too_long = len(tokens) > self.max_length
        if is_too_long and self.drop_overlong:
            return tally.skip(TOO_LONG, f"{row.address} has {len(tokens)} tokens")
        tokens, mask = tokens[: self.max_length], mask[: self.max_length]
        wanted = supervised(mask)
        if not (wanted[1:] & wanted[:-1]).any():
            return tally.skip(NO_PAIR, row.address)
        return TokenRow(
            id=tally.unique_id(row),
            source=_text(row.values.get("source")) or row.source,
            licence=_text(row.values.get("licence") or row.values.get("license")),
            conversation=_digest(first_user_text(content).encode()),
            tokens=tokens,
            mask=mask,
            is_truncated=is_too_long,
        )

    def _tokens_of(self, content: Content) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(content, Conversation):
            return chat.render_conversation(
                self.tokenizer, content.messages, self.options, cut_last_turn=content.is_cut
            )
        if isinstance(content, Completion):
            return self._completion_tokens(content)
        if isinstance(content, RenderedText):
            return chat.render_text(self.tokenizer, content.text, self.options)
        return content.ids, np.where(content.mask, LossMask.OTHER, 0).astype(np.uint8)

    def _completion_tokens(self, content: Completion) -> tuple[np.ndarray, np.ndarray]:
        encoding = self.tokenizer(
            content.prompt + content.completion,
            add_special_tokens=True,
            return_offsets_mapping=True,
        )
        ids = np.asarray(encoding["input_ids"], np.int32)
        offsets = np.asarray(encoding["offset_mapping"], np.int64).reshape(-1, 2)
        # Special tokens that the tokenizer adds have empty spans: nobody wrote them.
        written = (offsets[:, 0] >= len(content.prompt)) & (offsets[:, 1] > offsets[:, 0])
        return ids, np.where(written, LossMask.OTHER, 0).astype(np.uint8)


@dataclass(kw_only=True)
class _Tally:
    num_rows: int = 0
    kept: list[TokenRow] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    _ids: Counter[str] = field(default_factory=Counter)

    def skip(self, reason: str, example: str) -> None:
        self.skipped[reason] += 1
        self.examples.setdefault(reason, f"first: {example}")

    def unique_id(self, row: Row) -> str:
        """Return the row's own id, or its place; a repeated one gets a count."""
        given = row.values.get("id")
        name = f"{row.source}:{row.number}" if given is None else str(given)
        self._ids[name] += 1
        return name if self._ids[name] == 1 else f"{name}#{self._ids[name]}"


def _has_assistant(content: Conversation) -> bool:
    return any(message["role"] == "assistant" for message in content.messages)


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _refuse_nothing_kept(report: CorpusReport) -> None:
    if report.num_rows == 0:
        raise BadInput("--data holds no rows; give a file with at least one conversation")
    if report.num_kept:
        return
    if report.skipped.get(NO_ASSISTANT) == report.num_rows:
        raise BadInput(
            f"--data has no assistant turn in any of {report.num_rows} rows; write answers to "
            "these prompts with dflash-generate first"
        )
    raise BadInput(
        f"--data leaves nothing to train on: {report.sentence()}; a sample needs two supervised "
        "tokens in a row within --max-length"
    )
