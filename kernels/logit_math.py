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
def cap_logits(z, logit_scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return softcap * tanh(logit_scale * z / softcap), or logit_scale * z."""
    z = z * logit_scale
    if HAS_SOFTCAP:
        u = z / softcap
        e = tl.exp(-2.0 * tl.abs(u))
        t = (1.0 - e) / (1.0 + e)
        z = softcap * tl.where(u < 0.0, -t, t)
    return z


@triton.jit
def cap_slope(z, logit_scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return the derivative of cap_logits at the raw logit z.

    4e / (1 + e)^2 with e = exp(-2|u|) is 1 - tanh(u)^2 without its cancellation.
    """
    slope = logit_scale
    if HAS_SOFTCAP:
        e = tl.exp(-2.0 * tl.abs(z * logit_scale / softcap))
        slope = logit_scale * 4.0 * e / ((1.0 + e) * (1.0 + e))
    return slope


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
