"""linear_ce with most of the dX product left out: an option for drafters that have learned.

The head is reordered so that probability mass gathers in few tiles of 64 columns. A tile in which
no row of a block of 128 holds more than a bound of mass is not multiplied; its mass times the mean
of its head rows stands in for it. The error that remains is bounded per row and returned. Formulas
and figures: docs/kernels.md. Letters: N rows, C rows of a chunk, H hidden, V vocabulary, K tiles.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_offline.kernels.frozen_head import Chunk, FrozenHeadLoss, run_loss
from dflash_offline.kernels.head_rows import check_head, check_labels, row_options
from dflash_offline.kernels.linear_ce import TILE_COLUMNS, ApartLabel, triton_chunk
from dflash_offline.kernels.linear_ce_torch import torch_chunk
from dflash_offline.kernels.optional_triton import TensorDescriptor, tl, triton, use_triton
from dflash_offline.kernels.reference_loss import LinearCE

# Rows that share one list of tiles, and the tile of the product they make together.
BLOCK_ROWS = 128


class ProductLaunch(NamedTuple):
    """Launch settings of the product over listed tiles."""

    block_n: int
    num_warps: int
    num_stages: int


# H200, 4,096 rows, H 5,120, 27 % of the tiles of V 248,320: 523 TFLOP/s through tensor descriptors,
# 462 through pointers; block_n 256 reaches 503.
PRODUCT_LAUNCH = ProductLaunch(block_n=128, num_warps=8, num_stages=4)


class OrderedHead(NamedTuple):
    """A head [V, H] whose rows are ordered by expected mass, made by `order_head`."""

    weight: Tensor  # [64 K, H], reordered, zero rows at the end
    column_of: Tensor  # [V] int64, token id to column
    token_of: Tensor  # [V] int64, column to token id
    tile_means: Tensor  # [K, H], mean of a tile's rows
    tile_radius: Tensor  # [K] fp32, largest distance of a tile's row from its mean


class SkipReport(NamedTuple):
    """What skipping left out; tensors on the device, so that reading them is the caller's wait."""

    error_bound: Tensor  # [N] fp32, bound of |error of dX_i| before the upstream gradient
    kept_frac: Tensor  # fp32 scalar, share of tiles that were multiplied


def order_head(weight: Tensor, mass: Tensor) -> OrderedHead:
    """Copy the head [V, H] with its rows in descending order of `mass` [V].

    Take mean probabilities of a model that has learned for a while; counts of tokens in the
    training data are a start, at two to three times the error. Ties keep the order of token ids.
    """
    weight = weight.detach()
    vocab_size, hidden = weight.shape
    if mass.shape != (vocab_size,):
        raise ValueError(f"mass is {tuple(mass.shape)}; it must be [{vocab_size}], one a token")
    token_of = torch.sort(mass.to(weight.device), descending=True, stable=True).indices
    column_of = torch.empty_like(token_of)
    column_of[token_of] = torch.arange(vocab_size, device=weight.device)
    num_tiles = -(-vocab_size // TILE_COLUMNS)
    ordered = weight.new_zeros(num_tiles * TILE_COLUMNS, hidden)
    ordered[:vocab_size] = weight[token_of]
    means = weight.new_empty(num_tiles, hidden)
    radius = torch.empty(num_tiles, dtype=torch.float32, device=weight.device)
    for tile in range(num_tiles):
        rows = ordered[tile * TILE_COLUMNS : min((tile + 1) * TILE_COLUMNS, vocab_size)].float()
        means[tile] = rows.mean(dim=0)
        radius[tile] = (rows - means[tile].float()).norm(dim=1).max()
    return OrderedHead(ordered, column_of, token_of, means, radius)


@triton.jit(
    do_not_specialize=["num_rows", "num_tiles"], do_not_specialize_on_alignment=["bound_ptr"]
)
def _select_tiles_kernel(
    mass_ptr,
    radius_ptr,
    tiles_ptr,
    counts_ptr,
    bound_ptr,
    stride_mass,
    stride_tiles,
    num_rows,
    num_tiles,
    max_mass,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """List the tiles in which a row of the block has more than max_mass; zero their mass.

    What stays in mass is what the tile means are multiplied with. A row of NaN (a poisoned label)
    has no say in the list.
    """
    block = tl.program_id(0).to(tl.int64)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    offs = tl.arange(0, BLOCK_K)
    count = 0
    bound = tl.zeros([BLOCK_M], tl.float32)
    mask = (rows < num_rows)[:, None]
    for start in range(0, num_tiles, BLOCK_K):
        tiles = start + offs
        # Rows of mass are padded to 64 columns, so that loads need no bound and stay wide.
        at = mass_ptr + rows[:, None] * stride_mass + tiles[None, :]
        mass = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        mass = tl.where((tiles < num_tiles)[None, :], mass, 0.0)
        known = tl.where(mass == mass, mass, 0.0)
        is_kept = tl.max(known, axis=0) > max_mass
        kept = is_kept.to(tl.int32)
        place = count + tl.cumsum(kept, axis=0) - kept
        tl.store(tiles_ptr + block * stride_tiles + place, tiles, mask=is_kept)
        count += tl.sum(kept)
        radius = tl.load(radius_ptr + tiles, mask=tiles < num_tiles, other=0.0)
        skipped = tl.where(is_kept[None, :], 0.0, mass)
        bound += tl.sum(skipped * radius[None, :], axis=1)
        tl.store(at, skipped.to(mass_ptr.dtype.element_ty), mask=mask)
    tl.store(counts_ptr + block, count)
    tl.store(bound_ptr + rows, bound, mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["labels_ptr"])
def _listed_product_kernel(
    dz_desc,
    weight_desc,
    weight_ptr,
    tiles_ptr,
    counts_ptr,
    labels_ptr,
    label_grad_ptr,
    dx_ptr,
    stride_w,
    stride_tiles,
    stride_dx,
    num_rows,
    hidden,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE: tl.constexpr,
):
    """dX_i += label_grad_i W[label_i] + sum over the block's listed tiles of dz W, in fp32."""
    pid = tl.program_id(0)
    num_n = tl.cdiv(hidden, BLOCK_N)
    block = pid // num_n
    first_col = (pid % num_n) * BLOCK_N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    count = tl.load(counts_ptr + block)
    for i in range(count):
        first = tl.load(tiles_ptr + block * stride_tiles + i) * TILE
        a = dz_desc.load([block * BLOCK_M, first])
        b = weight_desc.load([first, first_col])
        acc = tl.dot(a, b, acc, input_precision="ieee")

    rows = block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = first_col + tl.arange(0, BLOCK_N)
    mask = (rows < num_rows)[:, None] & (cols < hidden)[None, :]
    # A poisoned label has a gradient of NaN, and any row of the head will do.
    label = tl.maximum(tl.load(labels_ptr + rows, mask=rows < num_rows, other=0), 0)
    label_grad = tl.load(label_grad_ptr + rows, mask=rows < num_rows, other=0.0)
    w_at = weight_ptr + label[:, None] * stride_w + cols[None, :]
    acc += label_grad[:, None] * tl.load(w_at, mask=mask, other=0.0).to(tl.float32)
    dx_at = dx_ptr + rows[:, None] * stride_dx + cols[None, :]
    acc += tl.load(dx_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx_at, acc.to(dx_ptr.dtype.element_ty), mask=mask)


@dataclass(kw_only=True)
class SkippingCE(FrozenHeadLoss):
    """linear_ce_skip over one batch: labels are columns, and so is argmax."""

    head: OrderedHead
    labels: Tensor  # [N]
    max_tile_mass: float
    kind: type = LinearCE
    bound: Tensor = field(init=False)  # [N] fp32
    counts: Tensor = field(init=False)  # [blocks] int32, tiles kept

    def take_memory(self) -> None:
        super().take_memory()
        device, num_rows = self.x.device, self.x.shape[0]
        self.bound = torch.zeros(num_rows, dtype=torch.float32, device=device)
        num_blocks = -(-num_rows // BLOCK_ROWS)
        self.counts = torch.zeros(num_blocks, dtype=torch.int32, device=device)

    @property
    def weight(self) -> Tensor:
        """The head [V, H] without the rows that fill its last tile."""
        return self.head.weight[: self.head.token_of.shape[0]]

    def blocks(self, chunk: Chunk) -> Tensor:
        """Return the chunk's part of counts; chunks are cut at multiples of a block."""
        start = chunk.rows.start // BLOCK_ROWS
        return self.counts[start : start + -(-chunk.size // BLOCK_ROWS)]

    def _logits_of(self, chunk: Chunk) -> Tensor:
        return chunk.buffer("logits", self.weight.shape[0], self.x.dtype)

    def _apart(self, chunk: Chunk) -> ApartLabel | None:
        if self.dx is None:
            return None
        mass = chunk.buffer("mass", self.head.tile_means.shape[0], self.x.dtype)
        return ApartLabel(chunk.vector("label_grad"), mass=mass)

    def logits(self, chunk: Chunk) -> None:
        torch.mm(self.x[chunk.rows], self.weight.T, out=self._logits_of(chunk))

    def row_pass(self, chunk: Chunk) -> None:
        x, labels = self.x[chunk.rows], self.labels[chunk.rows]
        logits, out, apart = self._logits_of(chunk), self.results(chunk), self._apart(chunk)
        if not self.as_triton:
            torch_chunk(x, self.weight, labels, logits, out, self.options)
            return
        triton_chunk(x, self.weight, labels, logits, out, self.options, apart)
        if apart:
            self._select(chunk, apart.mass)

    def _tiles_of(self, chunk: Chunk) -> Tensor:
        """Return the lists of kept tiles, [blocks, K]; a chunk has more rows than blocks."""
        tiles = chunk.buffer("tiles", self.head.tile_means.shape[0], torch.int32)
        return tiles[: self.blocks(chunk).shape[0]]

    def _select(self, chunk: Chunk, mass: Tensor) -> None:
        counts, tiles = self.blocks(chunk), self._tiles_of(chunk)
        _select_tiles_kernel[(counts.shape[0],)](
            mass,
            self.head.tile_radius,
            tiles,
            counts,
            self.bound[chunk.rows],
            mass.stride(0),
            tiles.stride(0),
            chunk.size,
            tiles.shape[1],
            self.max_tile_mass,
            BLOCK_M=BLOCK_ROWS,
            BLOCK_K=TILE_COLUMNS,
            num_warps=16,
        )

    def gradient(self, chunk: Chunk) -> None:
        if not self.as_triton:
            self._torch_gradient(chunk)
            return
        head, dx, counts, tiles = (
            self.head,
            self.dx[chunk.rows],
            self.blocks(chunk),
            self._tiles_of(chunk),
        )
        logits, (label_grad, mass, *_) = self._logits_of(chunk), self._apart(chunk)
        torch.mm(mass, head.tile_means, out=dx)
        launch, hidden = PRODUCT_LAUNCH, dx.shape[1]
        _listed_product_kernel[(counts.shape[0] * triton.cdiv(hidden, launch.block_n),)](
            TensorDescriptor.from_tensor(logits, [BLOCK_ROWS, TILE_COLUMNS]),
            TensorDescriptor.from_tensor(head.weight, [TILE_COLUMNS, launch.block_n]),
            head.weight,
            tiles,
            counts,
            self.labels[chunk.rows],
            label_grad,
            dx,
            head.weight.stride(0),
            tiles.stride(0),
            dx.stride(0),
            chunk.size,
            hidden,
            BLOCK_M=BLOCK_ROWS,
            BLOCK_N=launch.block_n,
            TILE=TILE_COLUMNS,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )

    def _torch_gradient(self, chunk: Chunk) -> None:
        """Same in plain PyTorch: what runs on a CPU. It multiplies zeros."""
        head, logits, counts = self.head, self._logits_of(chunk), self.blocks(chunk)
        column = self.labels[chunk.rows].clamp(0, logits.shape[1] - 1)[:, None]
        label_grad = logits.gather(1, column)
        logits.scatter_(1, column, 0)
        num_tiles = head.tile_means.shape[0]
        dz = torch.nn.functional.pad(logits, (0, num_tiles * TILE_COLUMNS - logits.shape[1]))
        mass = dz.view(chunk.size, num_tiles, TILE_COLUMNS).sum(dim=2)  # [C, K]
        for block in range(counts.shape[0]):
            rows = slice(block * BLOCK_ROWS, (block + 1) * BLOCK_ROWS)
            is_kept = mass[rows].nan_to_num(0).amax(dim=0) > self.max_tile_mass  # [K]
            counts[block] = is_kept.sum()
            mass[rows].masked_fill_(is_kept, 0)
            dz[rows].masked_fill_(~is_kept.repeat_interleave(TILE_COLUMNS), 0)
        self.bound[chunk.rows] = (mass.float() * head.tile_radius).sum(dim=1)
        label_part = label_grad * head.weight[column[:, 0]]
        self.dx[chunk.rows] = dz @ head.weight + mass @ head.tile_means + label_part


def linear_ce_skip(
    x: Tensor,
    head: OrderedHead,
    labels: Tensor,
    *,
    max_tile_mass: float = 1e-3,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_rows: int = 4096,
    implementation: str | None = None,
) -> tuple[LinearCE, SkipReport]:
    """Return linear_ce's results, with an approximate gradient, and what was left out of it.

    All outputs but the gradient are those of linear_ce (equal logits may be ranked in the order of
    columns instead of token ids). The gradient leaves out tiles of 64 columns in which no row of
    128 has more than `max_tile_mass` of probability, and puts their mean row in their place.

    Args:
        x: [N, H] rows, as in linear_ce.
        head: the reordered head.
        labels: [N] int64 token ids, as in linear_ce.
        max_tile_mass: probability, above 0; 1e-3 keeps 4 to 44 % of the tiles of a model that has
            learned, at an error of dX of 0.3 to 0.5 % where the head is ordered by probabilities.
        logit_scale, softcap, implementation: as in linear_ce.
        chunk_rows: as in linear_ce, rounded up to a multiple of 128, so that the size of chunks
            does not change which tiles are kept.

    Raises:
        ValueError: shapes, dtypes or an implementation that do not go together.
    """
    as_triton = use_triton(x, implementation)
    check_head(x, head.weight, as_triton=as_triton)
    labels = check_labels(labels, num_rows=x.shape[0])
    vocab_size = head.token_of.shape[0]
    is_known = (labels >= 0) & (labels < vocab_size)
    columns = torch.where(is_known, head.column_of[labels.clamp(0, vocab_size - 1)], -1)
    options = row_options(x, logit_scale=logit_scale, softcap=softcap)
    loss = SkippingCE(
        x=x,
        head=head,
        labels=columns,
        options=options,
        as_triton=as_triton,
        max_tile_mass=max_tile_mass,
    )
    # Two chunks that met inside a block would write to one list of tiles.
    results = run_loss(loss, chunk_rows=-(-chunk_rows // BLOCK_ROWS) * BLOCK_ROWS)
    # Of an empty batch nothing is kept.
    kept_frac = loss.counts.sum() / max(1, loss.counts.shape[0] * head.tile_means.shape[0])
    return (
        results._replace(argmax=head.token_of[results.argmax]),
        SkipReport(error_bound=loss.bound, kept_frac=kept_frac),
    )
