"""The Triton kernels of `norm_rope`: RMSNorm with an optional sum, head norm with rotation, SwiGLU.

With h the normalised vector, r = 1 / rms and g = w dy: dx = r (g - h mean(g h)), dw = sum(dy h).
"""

from __future__ import annotations

from dflash_offline.kernels.optional_triton import tl, triton


@triton.jit
def _rms_norm_fwd_kernel(
    x_ptr, residual_ptr, w_ptr, total_ptr, out_ptr, eps,
    H: tl.constexpr, BLOCK_H: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """out = total / rms(total) w with total = x (+ residual, rounded); one program a row."""
    row = tl.cast(tl.program_id(0), tl.int64) * H
    offs = tl.arange(0, BLOCK_H)
    mask = offs < H
    x = tl.load(x_ptr + row + offs, mask=mask, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row + offs, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row + offs, x, mask=mask)
    x = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    w = tl.load(w_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + offs, (x * rstd * w).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_bwd_kernel(
    x_ptr, w_ptr, dy_ptr, d_total_ptr, dx_ptr, partial_ptr, num_rows, eps,
    H: tl.constexpr, BLOCK_H: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """dx of every row, plus the gradient that reached the sum itself; dw of this program's rows."""
    offs = tl.arange(0, BLOCK_H)
    mask = offs < H
    w = tl.load(w_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK_H], tl.float32)
    for i in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(i, tl.int64) * H
        x = tl.load(x_ptr + row + offs, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row + offs, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
        h = x * rstd
        g = w * dy
        dx = rstd * (g - h * (tl.sum(g * h, 0) / H))
        if ADD:
            dx += tl.load(d_total_ptr + row + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dw += dy * h
    tl.store(partial_ptr + tl.program_id(0) * H + offs, dw, mask=mask)


@triton.jit
def _cos_sin(table_ptr, row, half, mask, D: tl.constexpr):
    """Load a row of the table [N, D]: cosines, then sines."""
    cos = tl.load(table_ptr + row * D + half, mask=mask, other=0.0)
    sin = tl.load(table_ptr + row * D + D // 2 + half, mask=mask, other=0.0)
    return cos[None, :], sin[None, :]


@triton.jit
def _norm_rope_fwd_kernel(
    x_ptr, w_ptr, table_ptr, out_ptr, eps,
    STRIDE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """out = rotate(x / rms(x) w) for all heads of one row."""
    row = tl.cast(tl.program_id(0), tl.int64)
    half = tl.arange(0, BLOCK_HALF)
    mask_half = half < D // 2
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    offs = heads * D + half[None, :]
    mask = (heads < HEADS) & mask_half[None, :]
    a = tl.load(x_ptr + row * STRIDE + offs, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + row * STRIDE + offs + D // 2, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        rstd = tl.rsqrt(tl.sum(a * a + b * b, 1) / D + eps)[:, None]
        a *= rstd * tl.load(w_ptr + half, mask=mask_half, other=0.0).to(tl.float32)[None, :]
        b *= (
            rstd * tl.load(w_ptr + half + D // 2, mask=mask_half, other=0.0).to(tl.float32)[None, :]
        )
    cos, sin = _cos_sin(table_ptr, row, half, mask_half, D)
    out = out_ptr + row * (HEADS * D) + offs
    tl.store(out, (a * cos - b * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out + D // 2, (b * cos + a * sin).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _norm_rope_bwd_kernel(
    x_ptr, w_ptr, table_ptr, dy_ptr, dx_ptr, partial_ptr, num_rows, eps,
    STRIDE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Rotate dy back, then the norm's gradient; dw of this program's rows, over all heads."""
    half = tl.arange(0, BLOCK_HALF)
    mask_half = half < D // 2
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    offs = heads * D + half[None, :]
    mask = (heads < HEADS) & mask_half[None, :]
    dw_a = tl.zeros([BLOCK_HEADS, BLOCK_HALF], tl.float32)
    dw_b = tl.zeros([BLOCK_HEADS, BLOCK_HALF], tl.float32)
    for i in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(i, tl.int64)
        cos, sin = _cos_sin(table_ptr, row, half, mask_half, D)
        dy = dy_ptr + row * (HEADS * D) + offs
        left = tl.load(dy, mask=mask, other=0.0).to(tl.float32)
        right = tl.load(dy + D // 2, mask=mask, other=0.0).to(tl.float32)
        ga = left * cos + right * sin
        gb = right * cos - left * sin
        if NORM:
            a = tl.load(x_ptr + row * STRIDE + offs, mask=mask, other=0.0).to(tl.float32)
            b = tl.load(x_ptr + row * STRIDE + offs + D // 2, mask=mask, other=0.0).to(tl.float32)
            rstd = tl.rsqrt(tl.sum(a * a + b * b, 1) / D + eps)[:, None]
            a *= rstd
            b *= rstd
            dw_a += ga * a
            dw_b += gb * b
            ga *= tl.load(w_ptr + half, mask=mask_half, other=0.0).to(tl.float32)[None, :]
            gb *= tl.load(w_ptr + half + D // 2, mask=mask_half, other=0.0).to(tl.float32)[None, :]
            mean = (tl.sum(ga * a + gb * b, 1) / D)[:, None]
            ga = rstd * (ga - a * mean)
            gb = rstd * (gb - b * mean)
        dx = dx_ptr + row * (HEADS * D) + offs
        tl.store(dx, ga.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(dx + D // 2, gb.to(dx_ptr.dtype.element_ty), mask=mask)
    if NORM:
        partial = partial_ptr + tl.program_id(0) * D + half
        tl.store(partial, tl.sum(dw_a, 0), mask=mask_half)
        tl.store(partial + D // 2, tl.sum(dw_b, 0), mask=mask_half)


@triton.jit
def _swiglu_fwd_kernel(gate_ptr, up_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """out = gate / (1 + exp(-gate)) up. Grid (rows, column tiles)."""
    offs_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs_i < WIDTH
    offs = tl.cast(tl.program_id(0), tl.int64) * WIDTH + offs_i
    gate = tl.load(gate_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + offs, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_bwd_kernel(
    gate_ptr, up_ptr, d_out_ptr, d_gate_ptr, d_up_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """With s = sigmoid(gate): d_up = d_out gate s, d_gate = d_out up s (1 + gate (1 - s))."""
    offs_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs_i < WIDTH
    offs = tl.cast(tl.program_id(0), tl.int64) * WIDTH + offs_i
    gate = tl.load(gate_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    d_out = tl.load(d_out_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    d_gate = d_out * up * s * (1 + gate * (1 - s))
    tl.store(d_up_ptr + offs, (d_out * gate * s).to(d_up_ptr.dtype.element_ty), mask=mask)
    tl.store(d_gate_ptr + offs, d_gate.to(d_gate_ptr.dtype.element_ty), mask=mask)
