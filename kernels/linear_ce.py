"""Cross-entropy through a frozen vocabulary head, in two matrix products and one pass over the logits.

Logits of one chunk of rows are made in a kept buffer, turned into their own gradient in place, and
multiplied back to dX, all in the forward pass; backward scales rows of dX by the upstream gradient.
The label's logit is taken in fp32 and its gradient is -(S - e_y) / S, so that 16-bit logits cost no
accuracy. Formulas and figures: docs/kernels.md. Letters: N rows, C rows of a chunk, H hidden,
V vocabulary.
"""

import torch
from torch import Tensor

from dflash_offline.kernels.logit_chunks import chunk_bounds, chunk_buffer, full_precision_sums
from dflash_offline.kernels.reference_loss import LinearCE, accumulate_dtype

# The plain PyTorch row pass works on blocks of rows that stay in a CPU's cache (4 MB of fp32).
CPU_BLOCK_ELEMENTS = 1 << 20


def _empty_results(num_rows: int, *, dtype: torch.dtype, device: torch.device) -> LinearCE:
    def new(kind: torch.dtype) -> Tensor:
        return torch.empty(num_rows, dtype=kind, device=device)

    return LinearCE(
        nll=new(dtype),
        lse=new(dtype),
        argmax=new(torch.int64),
        rank=new(torch.int64),
        entropy=new(dtype),
        label_prob=new(dtype),
    )


def _rank(z: Tensor, z_label: Tensor, column: Tensor) -> Tensor:
    """Count columns ahead of the label; an equal logit is ahead if its column is smaller."""
    ahead = torch.count_nonzero(z > z_label, dim=1)
    # The label itself is one of the equals; only rows with more than that need their columns looked at.
    equal = torch.count_nonzero(z == z_label, dim=1)
    for row in torch.nonzero(equal > 1)[:, 0].tolist():
        ahead[row] += torch.count_nonzero(z[row, : int(column[row])] == z_label[row])
    return ahead


def _torch_rows(
    z: Tensor,
    z_label: Tensor,
    labels: Tensor,
    out: LinearCE,
    *,
    with_grad: bool,
    logit_scale: float,
    softcap: float | None,
) -> None:
    """Fill `out` from raw logits z [R, V] in the accumulation dtype and leave dz in z."""
    num_columns = z.shape[1]
    valid = (labels >= 0) & (labels < num_columns)
    column = labels.clamp(0, num_columns - 1)[:, None]
    z.scatter_(1, column, z_label[:, None])
    if logit_scale != 1.0:
        z.mul_(logit_scale)
    slope = None
    if softcap is not None:
        z.div_(softcap).tanh_()
        slope = 1 - z * z  # [R, V]
        z.mul_(softcap)

    label_logit = z.gather(1, column)
    top, argmax = z.max(dim=1, keepdim=True)
    out.argmax.copy_(argmax[:, 0])
    out.rank.copy_(torch.where(valid, _rank(z, label_logit, column), num_columns))

    z.sub_(top)
    e = z.exp()  # [R, V]
    weighted = torch.linalg.vecdot(e, z)
    e_label = e.gather(1, column)
    e.scatter_(1, column, 0)
    others = e.sum(dim=1, keepdim=True)
    total = others + e_label
    log_total = total.log()
    # log1p keeps the loss of a row whose label has almost all of the mass.
    nll = torch.where(
        label_logit == top, torch.log1p(others / e_label), log_total + (top - label_logit)
    )
    out.lse.copy_((log_total + top)[:, 0])
    out.entropy.copy_(log_total[:, 0] - weighted / total[:, 0])
    out.nll.copy_(torch.where(valid, nll[:, 0], float("nan")))
    out.label_prob.copy_(torch.where(valid, (e_label / total)[:, 0], float("nan")))
    if with_grad:
        torch.mul(e, logit_scale / total, out=z)
        z.scatter_(1, column, -logit_scale * others / total)
        if slope is not None:
            z.mul_(slope)
        if not bool(valid.all()):
            z.masked_fill_(~valid[:, None], float("nan"))


def _torch_chunk(
    x: Tensor, weight: Tensor, labels: Tensor, logits: Tensor, out: LinearCE, **options
) -> None:
    """Run the row pass over one chunk of raw logits [C, V], in blocks that stay in cache."""
    dtype = accumulate_dtype(x.dtype)
    column = labels.clamp(0, weight.shape[0] - 1)
    if logits.dtype == dtype:
        z_label = logits.gather(1, column[:, None])[:, 0]
    else:
        z_label = torch.linalg.vecdot(x.to(dtype), weight[column].to(dtype))
    block = max(1, CPU_BLOCK_ELEMENTS // weight.shape[0])
    for start in range(0, x.shape[0], block):
        rows = slice(start, start + block)
        z = logits[rows].to(dtype)
        _torch_rows(z, z_label[rows], labels[rows], LinearCE(*(o[rows] for o in out)), **options)
        if options["with_grad"] and z.dtype != logits.dtype:
            logits[rows] = z


class _LinearCE(torch.autograd.Function):
    """Saves dX [N, H], made in forward for an upstream gradient of one."""

    @staticmethod
    def forward(ctx, x, weight, labels, with_grad, logit_scale, softcap, chunk_rows):
        num_rows, num_columns = x.shape[0], weight.shape[0]
        out = _empty_results(num_rows, dtype=accumulate_dtype(x.dtype), device=x.device)
        dx = torch.empty_like(x) if with_grad else None
        bounds = chunk_bounds(num_rows, chunk_rows)
        rows = bounds[0][1] if bounds else 0
        buffer = chunk_buffer("logits", rows, num_columns, dtype=x.dtype, device=x.device)
        with full_precision_sums():
            for start, end in bounds:
                logits = buffer[: end - start]
                torch.mm(x[start:end], weight.T, out=logits)
                _torch_chunk(
                    x[start:end],
                    weight,
                    labels[start:end],
                    logits,
                    LinearCE(*(o[start:end] for o in out)),
                    with_grad=with_grad,
                    logit_scale=logit_scale,
                    softcap=softcap,
                )
                if with_grad:
                    torch.mm(logits, weight, out=dx[start:end])
        ctx.mark_non_differentiable(*out[1:])
        ctx.save_for_backward(dx)
        return tuple(out)

    @staticmethod
    def backward(ctx, grad_nll, *_unused):
        (dx,) = ctx.saved_tensors
        factor = grad_nll[:, None]
        # A row that is masked out after the loss keeps a zero gradient even where it is poisoned.
        grad = torch.where(factor == 0, 0, dx * factor).to(dx.dtype)
        return grad, None, None, None, None, None, None


def linear_ce(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_rows: int = 4096,
    vocab_size: int | None = None,
) -> LinearCE:
    """Return cross-entropy and row statistics through a frozen head.

    Equal to `F.cross_entropy(cap(logit_scale * x @ weight.T), labels, reduction="none")` with
    `cap(z) = softcap * tanh(z / softcap)`, and differentiable with respect to x alone. Any upstream
    gradient per row is allowed (weights, masks, a common denominator). An empty batch gives an
    empty nll whose sum is a zero attached to the graph.

    Args:
        x: [N, H] rows, normalised as the head expects them; fp32 or fp64 on a CPU, bf16 on a GPU.
        weight: [V, H] head, same dtype; gets no gradient.
        labels: [N] int64 columns; a row with any other value is poisoned (see LinearCE).
        logit_scale: factor on the logits, before the soft-cap.
        softcap: bound of the tanh soft-cap, or None.
        chunk_rows: most rows whose logits exist at a time; changes the result by rounding only.
        vocab_size: rows of weight that take part, where it is padded beyond the vocabulary.

    Returns:
        LinearCE, six tensors [N].

    Raises:
        ValueError: shapes or dtypes that do not go together.
    """
    weight = weight[:vocab_size].detach()
    _check(x, weight, labels)
    with_grad = x.requires_grad and torch.is_grad_enabled()
    return LinearCE(
        *_LinearCE.apply(x, weight, labels, with_grad, logit_scale, softcap, chunk_rows)
    )


def _check(x: Tensor, weight: Tensor, labels: Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}; they must be [N, H] and [V, H]"
        )
    if x.dtype != weight.dtype:
        raise ValueError(f"x is {x.dtype} and weight {weight.dtype}; convert one of them")
    if labels.shape != x.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(
            f"labels are {labels.dtype} {tuple(labels.shape)}; they must be int64 [{x.shape[0]}]"
        )
