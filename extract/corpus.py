"""The corpus as tokens: every row rendered, masked, cut to length, and what became of each counted.

Reading is extract/rows.py, formats extract/conversations.py, the chat template common/chat.py, what
is kept extract/token_rows.py.
Letter: T tokens.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import click
import numpy as np
from transformers import PreTrainedTokenizerBase

from dflash_offline.common import chat
from dflash_offline.common.chat import ChatOptions
from dflash_offline.common.errors import BadInput
from dflash_offline.common.progress import ProgressLine
from dflash_offline.common.prompts import NOT_UNICODE, is_unicode
from dflash_offline.common.store import LossMask, supervised
from dflash_offline.extract.conversations import (
    Completion,
    Content,
    Conversation,
    RenderedText,
    first_user_text,
    parse_row,
)
from dflash_offline.extract.row_journal import RowJournal
from dflash_offline.extract.row_workers import map_rows
from dflash_offline.extract.rows import Row, read_rows
from dflash_offline.extract.token_rows import (
    Skipped,
    TokenRow,
    TokenRows,
    TokenRowsWriter,
    digest,
)

NO_ASSISTANT = "no assistant turn"
TOO_LONG = "longer than --max-length"
NO_PAIR = "no two supervised tokens in a row"
NOT_RENDERED = "cannot be rendered"

_FIRST_ROWS = 1024
_ROWS_A_LINE = 256
_PROGRESS_FIELDS = ("rows", "tokens", "tok/s")


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
        self,
        specs: Sequence[str],
        num_samples: int | None = None,
        *,
        num_workers: int = 1,
        journal: RowJournal | None = None,
    ) -> tuple[TokenRows, CorpusReport]:
        """Read `--data` values in order, up to `num_samples` kept rows.

        Args:
            specs: files, folders or hub ids; see `read_rows`.
            num_samples: kept rows to stop at; all when None.
            num_workers: processes for a corpus of more than a few rows.
            journal: knows what earlier runs made of it, and keeps what this one makes.

        Raises:
            BadInput: nothing to read, a row of the wrong type, or no row kept.
        """
        rows = chain.from_iterable(map(read_rows, specs))
        return self.convert(rows, num_samples, num_workers=num_workers, journal=journal)

    def convert(
        self,
        rows: Iterable[Row],
        num_samples: int | None = None,
        *,
        num_workers: int = 1,
        journal: RowJournal | None = None,
    ) -> tuple[TokenRows, CorpusReport]:
        """Convert rows; see `read`."""
        iterator = iter(rows)
        # Processes take seconds to start, which only a corpus of some size is worth.
        first = map(self.convert_row, islice(iterator, _FIRST_ROWS))
        with TokenRowsWriter() as kept:
            tally = _Tally(kept=kept, num_samples=num_samples)
            if not tally.add_all(first) and (more := next(iterator, None)) is not None:
                self._convert_rest(
                    chain([more], iterator),
                    tally,
                    num_workers=num_workers,
                    journal=journal or RowJournal(None),
                )
            report = tally.report()
            _refuse_nothing_kept(report)
            return kept.finish(), report

    def _convert_rest(
        self, rows: Iterator[Row], tally: "_Tally", *, num_workers: int, journal: RowJournal
    ) -> None:
        """Add rows to a tally: those that are known, and what processes make of the others."""
        with journal.opened(), ProgressLine(float("inf"), _PROGRESS_FIELDS) as progress:
            if tally.add_all(journal.known(), progress):
                return
            if journal.num_known:
                click.echo(journal.describe(), err=True)
            tally.start_clock()
            rows = islice(rows, journal.num_known, None)
            if (more := next(rows, None)) is None:
                return
            made = map_rows(self.convert_row, chain([more], rows), num_workers=num_workers)
            with closing(made), closing(journal.keep(made)) as kept:
                tally.add_all(kept, progress)

    def convert_row(self, row: Row) -> TokenRow | Skipped:
        """Return what a row becomes.

        Raises:
            BadInput: a value of the wrong type; names address and field.
        """
        if not is_unicode(row.values):
            example = f"{row.address}: {NOT_UNICODE}"
            return Skipped(reason=NOT_RENDERED, example=example)
        content = parse_row(row)
        if isinstance(content, Conversation) and not _has_assistant(content):
            return Skipped(reason=NO_ASSISTANT, example=row.address)
        try:
            tokens, mask = self._tokens_of(content)
        except BadInput as problem:
            return Skipped(reason=NOT_RENDERED, example=f"{row.address}: {problem}")
        if len(tokens) and tokens.max() >= self.vocab_size:
            raise BadInput(
                f"--data {row.address}: token id {tokens.max()} is beyond the target's vocabulary "
                f"of {self.vocab_size}; was it made with another tokenizer?"
            )
        is_too_long = len(tokens) > self.max_length
        if is_too_long and self.drop_overlong:
            return Skipped(reason=TOO_LONG, example=f"{row.address} has {len(tokens)} tokens")
        tokens, mask = tokens[: self.max_length], mask[: self.max_length]
        wanted = supervised(mask)
        if not (wanted[1:] & wanted[:-1]).any():
            return Skipped(reason=NO_PAIR, example=row.address)
        return TokenRow(
            id=row.id,
            source=row.named_source,
            licence=row.licence,
            conversation=digest(first_user_text(content, tokens[: np.argmax(wanted)]).encode()),
            tokens=tokens,
            mask=mask,
            is_truncated=is_too_long,
        )

    def _tokens_of(self, content: Content) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(content, Conversation):
            return chat.render_conversation(
                self.tokenizer,
                content.messages,
                self.options,
                tools=content.tools,
                cut_last_turn=content.is_cut,
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
    kept: TokenRowsWriter
    num_samples: int | None
    num_rows: int = 0
    num_kept: int = 0
    num_truncated: int = 0
    num_tokens: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    known_tokens: int = 0

    def add_all(
        self,
        converted: Iterable[TokenRow | Skipped],
        progress: ProgressLine | None = None,
    ) -> bool:
        """Count and keep rows; return whether `num_samples` are kept."""
        for each in converted:
            self.num_rows += 1
            if isinstance(each, Skipped):
                self.skipped[each.reason] += 1
                self.examples.setdefault(each.reason, f"first: {each.example}")
            else:
                self.num_kept += 1
                self.num_truncated += each.is_truncated
                self.num_tokens += len(each.tokens)
                self.kept.append(each)
                if self.num_kept == self.num_samples:
                    return True
            if progress is not None and self.num_rows % _ROWS_A_LINE == 0:
                progress.update(self.num_rows, self._progress_values())
        return False

    def start_clock(self) -> None:
        """Leave what there is by now out of the speed."""
        self.began, self.known_tokens = time.monotonic(), self.num_tokens

    def _progress_values(self) -> dict[str, str]:
        speed = (self.num_tokens - self.known_tokens) / max(time.monotonic() - self.began, 1e-9)
        values = (f"{self.num_rows:,}", f"{self.num_tokens:,}", f"{speed:,.0f}")
        return dict(zip(_PROGRESS_FIELDS, values, strict=True))

    def report(self) -> CorpusReport:
        """Return what became of the rows."""
        return CorpusReport(
            num_rows=self.num_rows,
            num_kept=self.num_kept,
            num_truncated=self.num_truncated,
            skipped=dict(self.skipped),
            examples=self.examples,
        )


def _has_assistant(content: Conversation) -> bool:
    return any(message["role"] == "assistant" for message in content.messages)


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
