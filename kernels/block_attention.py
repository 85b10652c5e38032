"""Attention of anchored blocks to the context before their anchor and to themselves.

Plain PyTorch twin: `reference.block_attention`. Kernels: `attention_kernels`; tables:
`attention_tables`. docs/kernels.md, "Block attention", has formulas, tiling and measurements.

Letters: T context tokens, A anchors, B block size, N = A * B rows, Hq and Hkv heads, R = Hq / Hkv,
D head dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_offline.kernels import attention_kernels, reference
from dflash_offline.kernels.attention_launch import Launch, RowTile, launches_of, power_of_two
from dflash_offline.kernels.attention_tables import BlockTables, build_tables
from dflash_offline.kernels.optional_triton import (
    HAS_GLUON,
    TensorDescriptor,
    is_interpreted,
    use_triton,
)

if HAS_GLUON:
    from dflash_offline.kernels import (
        attention_hopper,
        attention_hopper_backward,
        attention_hopper_context,
    )

__all__ = ["BlockTables", "block_attention", "build_tables", "table_sizes", "warm_up"]

HEAD_DIMS, MAX_DIM_4_BYTES, MAX_RATIO = (64, 96, 128, 256), 128, 16
LOG2_E = math.log2(math.e)
MAX_ROWS = 128


def table_sizes(q: Tensor, *, num_kv_heads: int, block_size: int) -> dict[str, tuple[int, ...]]:
    """Name the group and tile sizes that `build_tables` can prepare for queries like `q`."""
    launches = launches_of(q, block_size)
    ratio = q.shape[1] // num_kv_heads
    rows = (launches.fwd.rows, launches.dq.rows)
    groups = {RowTile.of(r, ratio, block_size).anchors for r in rows}
    tokens = launches.dkv.tokens
    k_ctx = torch.empty(1, num_kv_heads, q.shape[2], device="meta")
    if HAS_GLUON and attention_hopper_context.is_supported(q, k_ctx):
        tokens = attention_hopper_context.TOKENS
    return {"group_sizes": tuple(sorted(groups)), "tile_sizes": (tokens,)}


@dataclass(frozen=True, kw_only=True)
class Call:
    """What one call of the op fixes beside its tensors."""

    tables: BlockTables
    window: int  # 0 for none
    causal: bool
    scale: float

    def constants(self, q: Tensor, k: Tensor, launch: Launch) -> dict:
        """Return what every kernel is compiled for: model and tile, never a run-time size."""
        heads, dim = q.shape[1:]
        return {
            "STRIDE_Q": q.stride(0),
            "HQ": heads,
            "HKV": k.shape[1],
            "R": heads // k.shape[1],
            "B": self.tables.block_size,
            "D": dim,
            "WINDOW": self.window,
            "BLOCK_M": launch.rows,
            "BLOCK_N": launch.tokens,
            "BLOCK_D": power_of_two(dim),
            "PRECISION": "ieee" if q.element_size() == 4 else "tf32",
            "num_warps": launch.warps,
            "num_stages": launch.stages,
        }


def _group_constants(call: Call, q, k_ctx, v_ctx, k_own, v_own, launch: Launch) -> dict:
    """Return what the two kernels that work on groups are compiled for."""
    constants = call.constants(q, k_ctx, launch)
    tile = RowTile.of(launch.rows, constants["R"], constants["B"])
    return constants | {
        "STRIDE_K": k_ctx.stride(0),
        "STRIDE_V": v_ctx.stride(0),
        "STRIDE_KO": k_own.stride(0),
        "STRIDE_VO": v_own.stride(0),
        "SLOTS": tile.slots,
        "CHUNKS": tile.chunks,
        "CAUSAL": call.causal,
        "BLOCK_C": max(16, power_of_two(tile.anchors * constants["B"])),
        "TMA": _copy_engine(launch, constants["D"]),
    }


def _copy_engine(launch: Launch, *sizes: int) -> bool:
    """Say whether a tile is loaded by the copy engine, whose boxes are powers of two."""
    return launch.tma and all(size == power_of_two(size) for size in sizes)


def _token_source(x: Tensor, launch: Launch):
    """Return what a kernel loads tiles of context tokens from [T, Hkv, D]."""
    if not _copy_engine(launch, x.shape[2]):
        return x
    if not x.shape[0]:
        # The copy engine knows no empty tensor; no tile of this one is loaded.
        x = x.new_zeros(1, *x.shape[1:])
    shape = [x.shape[0], x.shape[1] * x.shape[2]]
    return TensorDescriptor(x, shape, [x.stride(0), 1], [launch.tokens, x.shape[2]])


def _row_source(x: Tensor, launch: Launch, ratio: int):
    """Return what a kernel loads tiles of rows from [N, Hq, D]."""
    if not _copy_engine(launch, x.shape[2], ratio):
        return x
    box = [launch.rows // ratio, ratio, x.shape[2]]
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box)


def _forward(call: Call, q, k_ctx, v_ctx, k_own, v_own) -> tuple[Tensor, Tensor]:
    tables = call.tables
    launch = launches_of(q, tables.block_size).fwd
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    # The padding is for tiles of the third kernel that run over the last row.
    num_lse = q.shape[0] * q.shape[1] + MAX_ROWS
    lse = torch.empty(num_lse, dtype=torch.float32, device=q.device)
    constants = _group_constants(call, q, k_ctx, v_ctx, k_own, v_own, launch)
    groups = tables.groups(RowTile.of(launch.rows, constants["R"], constants["B"]).anchors)
    own_tokens = constants["BLOCK_C"]
    if not groups.shape[0]:
        return out, lse
    if HAS_GLUON and launch.rows == 128 and attention_hopper.is_supported(q, k_ctx, own_tokens):
        attention_hopper.forward(
            (q, k_ctx, v_ctx, k_own, v_own),
            tables,
            groups,
            out,
            lse,
            slots=constants["SLOTS"],
            chunks=constants["CHUNKS"],
            own_tokens=own_tokens,
            window=call.window,
            causal=call.causal,
            scale_log2=call.scale * LOG2_E,
        )
    else:
        grid = (groups.shape[0], k_ctx.shape[1] * constants["CHUNKS"])
        attention_kernels._block_attention_fwd_kernel[grid](
            q,
            _token_source(k_ctx, launch),
            _token_source(v_ctx, launch),
            k_own,
            v_own,
            out,
            lse,
            tables.lo,
            tables.hi,
            groups,
            call.scale * LOG2_E,
            q.shape[0],
            **constants,
        )
    return out, lse


def _backward_q(call: Call, q, k_ctx, v_ctx, k_own, v_own, out, lse, d_out):
    tables = call.tables
    launch = launches_of(q, tables.block_size).dq
    # A launch of PyTorch's makes the device's context current in autograd's thread, where nothing
    # may have run yet; tensor maps cannot be made without.
    delta = torch.zeros_like(lse)
    dq, dk_own, dv_own = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k_own, v_own)
    )
    constants = _group_constants(call, q, k_ctx, v_ctx, k_own, v_own, launch)
    groups = tables.groups(RowTile.of(launch.rows, constants["R"], constants["B"]).anchors)
    own_tokens, chunks = constants["BLOCK_C"], constants["CHUNKS"]
    if not groups.shape[0]:
        return delta, dq, dk_own, dv_own
    if (
        HAS_GLUON
        and launch.rows == 128
        and attention_hopper_backward.is_supported(q, k_ctx, own_tokens=own_tokens, chunks=chunks)
    ):
        attention_hopper_backward.backward_q(
            (q, k_ctx, v_ctx, k_own, v_own),
            tables,
            groups,
            (out, lse, d_out),
            (delta, dq, dk_own, dv_own),
            slots=constants["SLOTS"],
            own_tokens=own_tokens,
            window=call.window,
            causal=call.causal,
            scale=call.scale,
        )
    else:
        attention_kernels._block_attention_bwd_q_kernel[(groups.shape[0], k_ctx.shape[1])](
            q,
            _token_source(k_ctx, launch),
            _token_source(v_ctx, launch),
            k_own,
            v_own,
            out,
            d_out,
            lse,
            delta,
            dq,
            dk_own,
            dv_own,
            tables.lo,
            tables.hi,
            groups,
            call.scale * LOG2_E,
            call.scale,
            q.shape[0],
            **constants,
        )
    return delta, dq, dk_own, dv_own


def _backward_kv(call: Call, q, k_ctx, v_ctx, lse, delta, d_out) -> tuple[Tensor, Tensor]:
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k_ctx, v_ctx))
    if HAS_GLUON and attention_hopper_context.is_supported(q, k_ctx):
        attention_hopper_context.backward_kv(
            (q, k_ctx, v_ctx),
            call.tables,
            d_out,
            lse,
            delta,
            dk,
            dv,
            window=call.window,
            scale=call.scale,
        )
        return dk, dv
    launch = launches_of(q, call.tables.block_size).dkv
    tiles = call.tables.tiles(launch.tokens)
    if tiles.shape[0]:
        constants = call.constants(q, k_ctx, launch)
        attention_kernels._block_attention_bwd_kv_kernel[(tiles.shape[0], k_ctx.shape[1])](
            _row_source(q, launch, constants["R"]),
            k_ctx,
            v_ctx,
            _row_source(d_out, launch, constants["R"]),
            lse,
            delta,
            dk,
            dv,
            call.tables.hi,
            tiles,
            call.scale * LOG2_E,
            call.scale,
            q.shape[0],
            STRIDE_K=k_ctx.stride(0),
            STRIDE_V=v_ctx.stride(0),
            SLOTS=launch.rows // constants["R"],
            TMA=_copy_engine(launch, constants["D"], constants["R"]),
            **constants,
        )
    return dk, dv


class _BlockAttention(torch.autograd.Function):
    """Keeps inputs, output and lse; probabilities are computed again in backward."""

    @staticmethod
    def forward(ctx, q, k_ctx, v_ctx, k_own, v_own, call):
        out, lse = _forward(call, q, k_ctx, v_ctx, k_own, v_own)
        ctx.save_for_backward(q, k_ctx, v_ctx, k_own, v_own, out, lse)
        ctx.call = call
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        q, k_ctx, v_ctx, k_own, v_own, out, lse = ctx.saved_tensors
        d_out = d_out.contiguous()
        delta, dq, dk_own, dv_own = _backward_q(
            ctx.call, q, k_ctx, v_ctx, k_own, v_own, out, lse, d_out
        )
        dk_ctx, dv_ctx = _backward_kv(ctx.call, q, k_ctx, v_ctx, lse, delta, d_out)
        return dq, dk_ctx, dv_ctx, dk_own, dv_own, None


def block_attention(
    q: Tensor,
    k_ctx: Tensor,
    v_ctx: Tensor,
    k_own: Tensor,
    v_own: Tensor,
    tables: BlockTables,
    *,
    window: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Attend from every block to the context before its anchor and to itself.

    Row (j, k), slot k of anchor j, stands at row j * B + k and at position hi[j] + k. It sees
    context token t iff lo[j] <= t < hi[j] and, with a window, hi[j] + k - t < window; and slot k'
    of its own block iff (k' <= k if causal) and, with a window, k - k' < window.

    Args:
        q: [N, Hq, D], N = A * B rows, anchor-major.
        k_ctx, v_ctx: [T, Hkv, D]; Hq is 1 to 16 times Hkv.
        k_own, v_own: [N, Hkv, D]
        tables: `build_tables(...)` on the device of `q`.
        window: tokens that a row reaches back, itself included; None for all.
        causal: whether a slot sees only the slots up to itself in its own block.
        scale: of the scores; D ** -0.5 by default.
        implementation: "reference" or "triton"; by default Triton on CUDA.

    Returns:
        [N, Hq, D] in the dtype of `q`; differentiable in q and all keys and values. The kernels
        take bfloat16, float16 and, slowly and to dimension 128, float32; heads of 64, 96, 128, 256.

    Raises:
        ValueError: shapes that do not fit together, or that the kernels do not have.
    """
    _check_shapes(q, k_ctx, v_ctx, k_own, v_own, tables, window)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not scale > 0:
        raise ValueError(f"scale is {scale}; it must be positive")
    if not use_triton(q, implementation):
        return reference.block_attention(
            q, k_ctx, v_ctx, k_own, v_own, tables, window=window, causal=causal, scale=scale
        )
    _check_supported(q, k_ctx, tables)
    call = Call(tables=tables, window=window or 0, causal=causal, scale=scale)
    with torch.cuda.device_of(q):
        return _BlockAttention.apply(*map(_packed, (q, k_ctx, v_ctx, k_own, v_own)), call)


def _packed(x: Tensor) -> Tensor:
    """Copy x unless a row's heads and channels are contiguous; rows may be any distance apart."""
    # The copy engine wants rows at multiples of 16 bytes.
    is_packed = x.stride()[1:] == (x.shape[2], 1) and x.stride(0) % 8 == x.data_ptr() % 16 == 0
    return x if is_packed else x.clone(memory_format=torch.contiguous_format)


def _check_shapes(q, k_ctx, v_ctx, k_own, v_own, tables: BlockTables, window) -> None:
    rows, heads, dim = q.shape
    kv_heads = k_ctx.shape[1]
    wanted = {"k_ctx": (tables.num_ctx, kv_heads, dim), "k_own": (rows, kv_heads, dim)}
    wanted |= {"v_ctx": wanted["k_ctx"], "v_own": wanted["k_own"]}
    given = {"k_ctx": k_ctx, "v_ctx": v_ctx, "k_own": k_own, "v_own": v_own}
    for name, shape in wanted.items():
        if tuple(given[name].shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(given[name].shape)}, must be {shape} for q {q.shape} "
                f"and {tables.num_ctx} context tokens"
            )
    if rows != tables.num_anchors * tables.block_size:
        raise ValueError(
            f"q has {rows} rows, must have {tables.num_anchors} anchors x {tables.block_size} slots"
        )
    if heads % kv_heads or not 1 <= heads // kv_heads <= MAX_RATIO:
        raise ValueError(f"{heads} query heads on {kv_heads}: must be 1 to 16 for each")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, must be at least 1, or None for no window")


def _check_supported(q: Tensor, k_ctx: Tensor, tables: BlockTables) -> None:
    remedy = "pass implementation='reference'"
    if q.shape[-1] not in HEAD_DIMS and not is_interpreted():
        raise ValueError(f"head dimension is {q.shape[-1]}, kernels have {HEAD_DIMS}; {remedy}")
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or k_ctx.dtype != q.dtype:
        raise ValueError(
            f"q is {q.dtype} and k_ctx {k_ctx.dtype}; kernels need both in bfloat16, float16 or "
            f"float32; {remedy}"
        )
    if q.dtype == torch.float32 and q.shape[-1] > MAX_DIM_4_BYTES:
        raise ValueError(f"float32 kernels go to head dimension 128, not {q.shape[-1]}; {remedy}")
    if tables.lo.device != q.device:
        raise ValueError(f"tables are on {tables.lo.device}, q on {q.device}; use tables.to(...)")


def warm_up(
    *, num_q_heads: int, num_kv_heads: int, head_dim: int, block_size: int, windows=(None,),
    causal: bool = False, dtype=torch.bfloat16, device="cuda",
) -> None:  # fmt: skip
    """Compile the kernels of a model for its windows, from one thread, before the first step."""
    rows = 2 * block_size
    tables = build_tables([0, 0], [1, 200], block_size=block_size, num_ctx=256).to(device)
    shapes = [(rows, num_q_heads), (256, num_kv_heads), (256, num_kv_heads)]
    shapes += [(rows, num_kv_heads), (rows, num_kv_heads)]
    for window in windows:
        inputs = [
            torch.zeros(*shape, head_dim, dtype=dtype, device=device, requires_grad=True)
            for shape in shapes
        ]
        out = block_attention(*inputs, tables, window=window, causal=causal)
        out.backward(torch.zeros_like(out))
