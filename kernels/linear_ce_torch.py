"""The row pass of linear_ce in plain PyTorch: what runs on a CPU.

Same algorithm as the Triton kernel in linear_ce, formulas in docs/kernels.md. Letters: C rows of a
chunk, R rows of a block of it, V vocabulary.
"""

import torch
from torch import Tensor

from dflash_offline.kernels.head_rows import RowOptions
from dflash_offline.kernels.reference_loss import LinearCE, accumulate_dtype

# Elements of a block of rows: 4 MB of fp32, so that it stays in a CPU's cache.
CPU_BLOCK_ELEMENTS = 1 << 20


def _rank(z: Tensor, z_label: Tensor, column: Tensor) -> Tensor:
    """Count columns ahead of the label; an equal logit is ahead if its column is smaller."""
    # Ones and zeros in z's own dtype: adding them up is several times as fast as counting booleans,
    # and exact below 2^24 columns.
    ones = torch.empty_like(z)
    ahead = torch.gt(z, z_label, out=ones).sum(dim=1).to(torch.int64)
    # The label itself is one of the equals; only rows with more need their columns looked at.
    equal = torch.eq(z, z_label, out=ones).sum(dim=1)
    for row in torch.nonzero(equal > 1)[:, 0].tolist():
        ahead[row] += torch.count_nonzero(z[row, : int(column[row])] == z_label[row])
    return ahead


def _torch_rows(
    z: Tensor,
    z_label: Tensor,
    labels: Tensor,
    out: LinearCE,
    options: RowOptions,
) -> None:
    """Fill `out` from raw logits z [R, V] in the accumulation dtype and leave dz in z."""
    with_grad, logit_scale, softcap = options
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


def torch_chunk(
    x: Tensor, weight: Tensor, labels: Tensor, logits: Tensor, out: LinearCE, options: RowOptions
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
        _torch_rows(z, z_label[rows], labels[rows], LinearCE(*(o[rows] for o in out)), options)
        if options.with_grad and z.dtype != logits.dtype:
            logits[rows] = z
