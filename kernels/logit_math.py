"""Small Triton functions that the row kernels of the loss heads share.

None of them uses libdevice, so that they also run in Triton's interpreter. All work in fp32.
"""

from dflash_offline.kernels.optional_triton import tl, triton


@triton.jit
def dot_rows(a_ptr, b_ptr, length, BLOCK: tl.constexpr):
    """Return the fp32 dot product of two contiguous vectors of `length` elements."""
    offs = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, length, BLOCK):
        mask = start + offs < length
        a = tl.load(a_ptr + start + offs, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + start + offs, mask=mask, other=0.0).to(tl.float32)
        total += a * b
    return tl.sum(total)


@triton.jit
def cap_logits(z, logit_scale, softcap):
    """Return softcap * tanh(logit_scale * z / softcap); infinite logits stay infinite."""
    u = z * logit_scale / softcap
    e = tl.exp(-2.0 * tl.abs(u))
    t = softcap * ((1.0 - e) / (1.0 + e))
    t = tl.where(u < 0.0, -t, t)
    return tl.where(u == float("-inf"), u, t)


@triton.jit
def cap_slope(z, logit_scale, softcap):
    """Return the derivative of cap_logits at the raw logit z, without the factor logit_scale.

    4e / (1 + e)^2 with e = exp(-2|u|) is 1 - tanh(u)^2 without its cancellation.
    """
    e = tl.exp(-2.0 * tl.abs(z * logit_scale / softcap))
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def exp_scaled(x, unit):
    """Return exp(unit * x) by the hardware's exp2, without the care that tl.exp takes of denormals.

    The constant meets unit first, so that it costs one multiplication an element.
    """
    return tl.exp2(x * (unit * 1.4426950408889634))


@triton.jit
def just_below(x):
    """Return the next smaller number, or a tiny negative one below zero."""
    bits = x.to(tl.int32, bitcast=True)
    moved = tl.where(bits > 0, bits - 1, bits + 1)
    return tl.where(x == 0.0, -1.2e-38, moved.to(tl.float32, bitcast=True))


@triton.jit
def log1p(x):
    """Return log(1 + x) for x >= 0, exact to rounding where x is tiny (Kahan's correction)."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def expm1_parts(r):
    """Return (e, f) with e = exp(r) - 1 and f = e - r, exact to rounding for |r| < 0.25 only."""
    g = 0.5 + r * (1 / 6 + r * (1 / 24 + r * (1 / 120 + r * (1 / 720 + r * (1 / 5040)))))
    f = r * r * g
    return r + f, f


@triton.jit
def fold_sum(x, BLOCK: tl.constexpr):
    """Add up runs of eight columns: what one thread loads at a time, so it costs no exchange.

    A running vector over columns then takes an eighth of the registers.
    """
    return tl.sum(tl.reshape(x, [BLOCK // 8, 8]), axis=1)


@triton.jit
def load_pair(
    t_ptr,
    d_ptr,
    cols,
    bound,
    label,
    raw_t_label,
    raw_d_label,
    logit_scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    HAS_LABELS: tl.constexpr,
):
    """Return teacher logits, student logits, difference and raw student logits of cols.

    Columns that hold -inf and 0 give -inf, -inf and 0.
    """
    raw_t = tl.load(t_ptr + cols, mask=cols < bound, other=float("-inf")).to(tl.float32)
    raw_d = tl.load(d_ptr + cols, mask=cols < bound, other=0.0).to(tl.float32)
    if HAS_LABELS:
        raw_t = tl.where(cols == label, raw_t_label, raw_t)
        raw_d = tl.where(cols == label, raw_d_label, raw_d)
    raw_s = raw_t + raw_d
    if HAS_SOFTCAP:
        t = cap_logits(raw_t, logit_scale, softcap)
        s = cap_logits(raw_s, logit_scale, softcap)
        d = tl.where(t == float("-inf"), 0.0, s - t)
    else:
        t = raw_t * logit_scale
        d = raw_d * logit_scale
        s = t + d
    return t, s, d, raw_s
