"""From stores to passes: background threads read packs ahead and build everything a step needs.

A step is a number of samples; its passes hold at most so many block rows, whole samples where they
fit, or a sample's anchors over several passes, each with the context it needs. How a step is cut
into passes changes sums by rounding only. States travel layer-major, as the store holds them.

Letters: T context tokens, A anchors, B block size, K captured layers, H hidden, M labelled rows.
"""

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

from dflash_offline.common.cache import Cache
from dflash_offline.common.errors import DamagedStore
from dflash_offline.train.anchors import (
    AnchoredDocument,
    BlockLayout,
    PassTables,
    build_pass,
    sample_anchors,
)
from dflash_offline.train.coded_context import CodedContext, coded_context
from dflash_offline.train.documents import LoadedDocument, PackReader, StreamOptions
from dflash_offline.train.noise import noise_key
from dflash_offline.train.order import WINDOW_PACKS, Draw, SampleOrder, StreamState

# With so many passes in page-locked memory beside those that train, no further step is built.
_PASSES_AHEAD = 2
# Seconds between looks at whether there is room for another step.
_LOOK_S = 0.005
# Packs of a store in host memory: the window that is being drawn from, and as many to come.
_HELD_PACKS = 2 * WINDOW_PACKS
# Packs being read, each by up to four threads: what eight cores can decompress.
_PACKS_AT_A_TIME = 2
# Steps that are looked at to find out which packs come next.
_STEPS_KNOWN = 64
# A pass also ends when its context is this many times its most block rows.
CONTEXT_FACTOR = 4


@dataclass(frozen=True, kw_only=True)
class PassInput:
    """One forward and backward: tables and states, on one device."""

    tables: PassTables
    features: torch.Tensor | CodedContext  # [T, K*H]; a tensor once it is on its device
    final: torch.Tensor | None = None  # [M, H], the state whose head output the label row predicts

    def to(self, device: torch.device, dtype: torch.dtype) -> "PassInput":
        """Move to a device, states in the compute dtype."""
        final, features = self.final, self.features
        return PassInput(
            tables=self.tables.to(device),
            features=features.decoded(device, dtype)
            if isinstance(features, CodedContext)
            else features.to(device, dtype),
            final=None if final is None else final.to(device, non_blocking=True).to(dtype),
        )


@dataclass(frozen=True, kw_only=True)
class StepInput:
    """This process's part of one step."""

    passes: list[PassInput]
    state: StreamState  # after the step
    num_samples: int
    num_skipped: int  # samples without a possible anchor
    num_damaged: int = 0  # samples that could not be read
    num_bytes: float = 0.0  # read since the step before, as stored
    damage: tuple[str, ...] = ()  # what is wrong with packs that no earlier step named
    num_tokens: int  # tokens of the samples
    num_rows: int  # labelled rows


class StepBuilder:
    """Turns the draws of a step into this process's passes; no state but the packs held."""

    def __init__(
        self, caches: Sequence[Cache], options: StreamOptions, wanted: Sequence[Sequence[int]]
    ) -> None:
        self._caches = list(caches)
        self._options = options
        self._readers = [
            PackReader(cache, options, indices)
            for cache, indices in zip(caches, wanted, strict=True)
        ]
        self._bytes_told = 0.0
        self._damaged_packs: set[tuple[int, int]] = set()
        # Packs are read in the order of need, each by several threads.
        self._pool = ThreadPoolExecutor(_PACKS_AT_A_TIME, thread_name_prefix="read-pack")

    @property
    def most_packs(self) -> int:
        """Packs, of all stores, that are worth reading ahead."""
        return _HELD_PACKS * len(self._readers)

    @property
    def bytes_read(self) -> float:
        """Bytes of all packs read so far, as they are stored."""
        return sum(reader.bytes_read for reader in self._readers)

    def packs(self, draws: Sequence[Draw]) -> list[tuple[int, int]]:
        """Return store and pack of every draw."""
        return [(draw.store, self._readers[draw.store].pack_of(draw.index)) for draw in draws]

    def read_ahead(self, packs: Sequence[tuple[int, int]]) -> None:
        """Have packs read, given by store and number in the order of need, and drop all others."""
        for number, reader in enumerate(self._readers):
            reader.hold([pack for store, pack in packs if store == number], self._pool)

    def close(self) -> None:
        """Stop reading."""
        self._pool.shutdown(cancel_futures=True)

    def build(self, draws: Sequence[Draw], state: StreamState) -> StepInput:
        """Anchor and cut samples; those without a possible anchor or states are left out.

        Reads the packs that are not held, and holds no others, unless `read_ahead` came before.
        """
        packs = self.packs(draws)
        if not all(self._readers[store].holds(pack) for store, pack in packs):
            self.read_ahead(list(dict.fromkeys(packs)))
        damage: list[str] = []
        documents = [
            document for draw in draws if (document := self._readable(draw, damage)) is not None
        ]
        kept = [each for each in documents if len(each.anchored.anchors)]
        passes = [
            assemble(group, self._options)
            for group in cut_into_passes(kept, self._options.layout, self._options.rows_per_pass)
        ]
        bytes_before, self._bytes_told = self._bytes_told, self.bytes_read
        return StepInput(
            passes=passes,
            state=state,
            num_samples=len(kept),
            num_skipped=len(documents) - len(kept),
            num_damaged=len(draws) - len(documents),
            num_bytes=self._bytes_told - bytes_before,
            damage=tuple(damage),
            num_tokens=sum(len(each.anchored.tokens) for each in kept),
            num_rows=sum(each.tables.label_rows.shape[0] for each in passes),
        )

    def _readable(self, draw: Draw, damage: list[str]) -> LoadedDocument | None:
        """Return a draw's document; None, with a word in `damage` the first time, if it is lost."""
        try:
            return self._anchored(draw)
        except DamagedStore as problem:
            if not self._options.skip_damaged:
                raise
            pack = draw.store, self._readers[draw.store].pack_of(draw.index)
            if pack not in self._damaged_packs:
                self._damaged_packs.add(pack)
                url = self._caches[draw.store].blobs.url
                damage.append(f"{url}: {problem}")
            return None

    def _anchored(self, draw: Draw) -> LoadedDocument:
        document = self._readers[draw.store].document(draw.index)
        names = {
            "seed": self._options.seed,
            "epoch": draw.epoch,
            "occurrence": draw.occurrence,
            "sample_id": self._caches[draw.store].plan.samples[draw.index].id,
        }
        anchored = replace(
            document.anchored,
            anchors=sample_anchors(
                document.anchored.supervised, num_anchors=self._options.num_anchors, **names
            ),
            noise_key=noise_key(**names),
        )
        return replace(document, anchored=anchored)


class Anchored(Protocol):
    """A sample, whatever goes with its anchors; a dataclass."""

    anchored: AnchoredDocument


AnyAnchored = TypeVar("AnyAnchored", bound=Anchored)


def cut_into_passes(
    documents: Iterable[AnyAnchored], layout: BlockLayout, rows_per_pass: int
) -> Iterator[list[AnyAnchored]]:
    """Group documents so that no pass has more than `rows_per_pass` block rows.

    A document with more rows than that is cut by anchors; the pieces share tokens and features,
    and each brings the context of its own last anchor.
    """
    most_anchors = max(1, rows_per_pass // layout.block_size)
    most_context = CONTEXT_FACTOR * rows_per_pass
    group: list[AnyAnchored] = []
    num_anchors = num_context = 0
    for document in documents:
        for piece in _pieces(document, most_anchors):
            added, context = len(piece.anchored.anchors), piece.anchored.num_context
            too_many = num_anchors + added > most_anchors or num_context + context > most_context
            if group and too_many:
                yield group
                group, num_anchors, num_context = [], 0, 0
            group.append(piece)
            num_anchors += added
            num_context += context
    if group:
        yield group


def assemble(documents: Sequence[LoadedDocument], options: StreamOptions) -> PassInput:
    """Build one pass: tables, and the states of its context."""
    tables = build_pass([each.anchored for each in documents], options.layout, options.table_sizes)
    states = [each.features for each in documents]
    features = coded_context(states, tables.context_lengths, pinned=options.pinned)
    final = _final_rows(documents, tables, options.dtype) if options.with_final else None
    if options.pinned:
        tables = tables.pin_memory()
        final = None if final is None else final.pin_memory()
    return PassInput(tables=tables, features=features, final=final)


def _final_rows(
    documents: Sequence[LoadedDocument], tables: PassTables, dtype: torch.dtype
) -> torch.Tensor:
    """Return the final states [M, H] of the tokens just before the labels."""
    layout = tables.layout
    before = tables.positions_block[tables.label_rows] + int(layout.sample_from_anchor) - 1
    owners = tables.document[tables.label_rows // layout.block_size]
    parts = []
    for number, document in enumerate(documents):
        assert document.final is not None, "the store holds no final state"
        parts.append(document.final[before[owners == number]].to(dtype))
    return torch.cat(parts)


def _pieces(document: AnyAnchored, most_anchors: int) -> Iterator[AnyAnchored]:
    anchors = document.anchored.anchors
    if len(anchors) <= most_anchors:
        yield document
        return
    for first in range(0, len(anchors), most_anchors):
        part = anchors[first : first + most_anchors]
        yield replace(document, anchored=replace(document.anchored, anchors=part))


class Stream:
    """Steps in order, built ahead by one thread; use as a context manager.

    Args:
        order: the samples, the same on every process.
        builder: makes this process's passes.
        state: where to start.
        samples_per_step: samples of every step to come, over all processes; may be endless.
        rank, world_size: this process's place; it takes a contiguous part of every step.
    """

    def __init__(
        self,
        order: SampleOrder,
        builder: StepBuilder,
        *,
        state: StreamState,
        samples_per_step: Iterable[int],
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._order = order
        self._builder = builder
        self._state = state
        self._samples_per_step = samples_per_step
        self._part = (rank, world_size)
        self._queue: queue.Queue[StepInput | BaseException] = queue.Queue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="stream", daemon=True)
        self.wait_s = 0.0  # time that `next` waited, in total

    def __enter__(self) -> "Stream":
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def next(self) -> StepInput:
        """Return the next step's input, waiting for it if it is not built.

        Raises:
            whatever went wrong in the thread, such as `DamagedStore`.
        """
        start = time.perf_counter()
        item = self._queue.get()
        self.wait_s += time.perf_counter() - start
        if isinstance(item, BaseException):
            raise item
        return item

    def _work(self) -> None:
        try:
            for draws, state in self._ahead():
                while self._is_full():
                    if self._stop.wait(_LOOK_S):
                        return
                self._queue.put(self._builder.build(draws, state))
        except BaseException as problem:
            # Raised again by `next`, in the thread that trains.
            self._queue.put(problem)
        finally:
            self._builder.close()

    def _ahead(self) -> Iterator[tuple[list[Draw], StreamState]]:
        """Yield the draws of steps; their packs, and those of steps to come, are being read."""
        parts = self._parts()
        coming: deque[tuple[list[Draw], StreamState]] = deque()
        packs: Counter[tuple[int, int]] = Counter()
        while True:
            while len(packs) < self._builder.most_packs and len(coming) < _STEPS_KNOWN:
                part = next(parts, None)
                if part is None:
                    break
                coming.append(part)
                packs.update(self._builder.packs(part[0]))
            if not coming:
                return
            self._builder.read_ahead(list(packs))
            draws, state = coming.popleft()
            yield draws, state
            packs.subtract(self._builder.packs(draws))
            packs = +packs

    def _parts(self) -> Iterator[tuple[list[Draw], StreamState]]:
        """Yield this process's draws of every step, and the state after it."""
        rank, world = self._part
        state = self._state
        for count in self._samples_per_step:
            draws, state = self._order.take(state, count)
            yield draws[rank * count // world : (rank + 1) * count // world], state

    def _is_full(self) -> bool:
        with self._queue.mutex:
            steps = [each for each in self._queue.queue if isinstance(each, StepInput)]
        return sum(max(1, len(step.passes)) for step in steps) >= _PASSES_AHEAD
