"""linear_ce: values and gradients against float64, rows that break other losses, its promises."""

import subprocess
import sys

import pytest
import torch

from dflash_offline.kernels import frozen_head, head_rows, logit_chunks
from dflash_offline.kernels.linear_ce import linear_ce, warm_up
from dflash_offline.kernels.logit_chunks import chunk_bounds, chunk_buffer, release_buffers
from dflash_offline.kernels.optional_triton import HAS_TRITON, triton
from dflash_offline.kernels.reference_loss import linear_ce as reference_ce

# NaN and infinity are what poisoned rows and padding are made of.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = [
    pytest.param("reference", torch.float64, 1e-12, id="torch-fp64"),
    pytest.param("reference", torch.float32, 5e-6, id="torch-fp32"),
    pytest.param(
        "triton",
        torch.float32,
        5e-6,
        id="triton-fp32",
        marks=pytest.mark.skipif(not HAS_TRITON, reason="needs triton; install it"),
    ),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Let a row take several steps, start from buffers full of NaN, and settle the first exp.

    The first float64 exp of a process that runs on two threads can be off by 1e-9 (MKL).
    """
    monkeypatch.setattr(head_rows, "DEFAULT_ROW_LAUNCH", head_rows.RowLaunch(128, 32, 4))
    monkeypatch.setattr(head_rows, "ROW_LAUNCH", {})
    # Two chunks at a time on a GPU, however small.
    monkeypatch.setattr(frozen_head, "SMALL_CHUNK_ROWS", 0)
    real = frozen_head.Chunk.buffer
    seen = []

    def poisoned(chunk, name, columns, dtype):
        buffer = real(chunk, name, columns, dtype)
        if not any(chunk is other and name == used for other, used in seen):
            seen.append((chunk, name))
            buffer.fill_(float("nan"))
        return buffer

    monkeypatch.setattr(frozen_head.Chunk, "buffer", poisoned)
    torch.ones(1 << 16, dtype=torch.float64).exp()
    yield
    release_buffers()


def problem(rows, hidden, columns, *, dtype, seed=0, scale=1.0):
    """Random rows, head and labels; logits have a standard deviation of about `scale`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, hidden, dtype=torch.float64, generator=generator)
    weight = torch.randn(columns, hidden, dtype=torch.float64, generator=generator)
    weight *= scale * hidden**-0.5
    labels = torch.randint(0, columns, (rows,), generator=generator)
    upstream = torch.randn(rows, dtype=torch.float64, generator=generator)
    return x.to(DEVICE, dtype), weight.to(DEVICE, dtype), labels.to(DEVICE), upstream.to(DEVICE)


def both(x, weight, labels, upstream, *, implementation, **options):
    """Run linear_ce and its float64 definition; return results and gradients of both."""
    ours, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    result = linear_ce(ours, weight, labels, implementation=implementation, **options)
    expected = reference_ce(exact, weight.double(), labels, **options)
    (result.nll * upstream.to(result.nll.dtype)).sum().backward()
    (expected.nll * upstream).sum().backward()
    return result, expected, ours.grad, exact.grad


def check(result, expected, grad, expected_grad, *, tolerance):
    for name in ("nll", "lse", "entropy", "label_prob"):
        torch.testing.assert_close(
            getattr(result, name).double(),
            getattr(expected, name),
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    assert torch.equal(result.argmax, expected.argmax)
    assert torch.equal(result.rank, expected.rank)
    error = (grad.double() - expected_grad).norm(dim=1)
    assert bool((error <= 4 * tolerance * (expected_grad.norm(dim=1) + 1e-30)).all())


# V of 7 is less than a tile, 128 a tile, 129 a tile and one column, 257 two tiles and one.
@pytest.mark.parametrize("columns", [7, 128, 129, 257])
@pytest.mark.parametrize(("implementation", "dtype", "tolerance"), WAYS)
def test_linear_ce(implementation, dtype, tolerance, columns):
    inputs = problem(4, 63, columns, dtype=dtype)
    check(*both(*inputs, implementation=implementation), tolerance=tolerance)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"logit_scale": 0.25}, id="scale"),
        pytest.param({"logit_scale": 2.0, "softcap": 3.0}, id="scale and soft-cap"),
        pytest.param({"logit_scale": 2, "softcap": 3}, id="whole numbers"),
        pytest.param({"vocab_size": 251}, id="padded head"),
        pytest.param({"chunk_rows": 4}, id="ragged chunks"),
    ],
)
@pytest.mark.parametrize(("implementation", "dtype", "tolerance"), WAYS)
def test_linear_ce_options(implementation, dtype, tolerance, options):
    x, weight, labels, upstream = problem(4, 32, 257, dtype=dtype)
    labels = labels.clamp(max=250)
    results = both(x, weight, labels, upstream, implementation=implementation, **options)
    check(*results, tolerance=tolerance)


def logits_of(name: str, columns: int):
    """Logits [N, V] and labels that other losses get wrong."""
    base = torch.linspace(-2, 2, columns, dtype=torch.float64).repeat(3, 1)
    labels = torch.tensor([0, columns // 2, columns - 1])
    at = (torch.arange(3), labels)
    if name == "label has all of the mass":
        base[at] = torch.tensor([10.0, 30.0, 60.0], dtype=torch.float64)
    elif name == "label has none of the mass":
        base[at] = -80
    elif name == "large offset up":
        base += 1e4
    elif name == "large offset down":
        base -= 1e4
    elif name == "all equal":
        base[:] = 0
    elif name == "all equal and negative":
        base[:] = -3
    elif name == "two equal maxima around the label":
        base[:, 3] = base[:, columns - 2] = base[1, labels[1]] = 5
    return base, labels


@pytest.mark.parametrize(
    "name",
    [
        "label has all of the mass",
        "label has none of the mass",
        "large offset up",
        "large offset down",
        "all equal",
        "all equal and negative",
        "two equal maxima around the label",
    ],
)
@pytest.mark.parametrize(("implementation", "dtype", "tolerance"), WAYS)
def test_adversarial_rows(implementation, dtype, tolerance, name):
    # One column more than a tile. The head is the identity, so that logits are the rows of x.
    logits, labels = logits_of(name, 129)
    x = logits.to(DEVICE, dtype)
    weight = torch.eye(129, dtype=dtype, device=DEVICE)
    upstream = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64, device=DEVICE)
    labels = labels.to(DEVICE)
    result, expected, grad, _ = both(x, weight, labels, upstream, implementation=implementation)
    # What is left beside the label, without a subtraction from one.
    others = x.double().scatter(1, labels[:, None], float("-inf"))
    others_lse = torch.logsumexp(others, dim=1)
    label_logit = x.double().gather(1, labels[:, None])[:, 0]
    nll = torch.logaddexp(others_lse - label_logit, torch.zeros_like(label_logit))
    nll = torch.where(nll < 1e-8, (others_lse - label_logit).exp(), nll)
    p = torch.softmax(x.double(), dim=1).scatter(1, labels[:, None], 0)
    expected_grad = p.scatter(1, labels[:, None], -p.sum(dim=1, keepdim=True)) * upstream[:, None]
    check(result, expected, grad, expected_grad, tolerance=tolerance)
    # Relative: a loss of 1e-20 is a loss of 1e-20.
    torch.testing.assert_close(result.nll.double(), nll, rtol=20 * tolerance, atol=1e-30)


@pytest.mark.parametrize(("implementation", "dtype", "tolerance"), WAYS)
@pytest.mark.parametrize("bad", [[0], [3], [0, 1, 2, 3]], ids=["first", "last", "all"])
def test_bad_labels_are_poisoned(implementation, dtype, tolerance, bad):
    x, weight, labels, _ = problem(4, 32, 129, dtype=dtype)
    labels[bad] = torch.tensor([-1, 129, 1 << 40, -100])[: len(bad)].to(DEVICE)
    x.requires_grad_()
    result = linear_ce(x, weight, labels, implementation=implementation)
    good = [row for row in range(4) if row not in bad]
    assert bool(result.nll[bad].isnan().all())
    assert bool(result.label_prob[bad].isnan().all())
    assert not bool(result.nll[good].isnan().any())
    assert bool((result.rank[bad] == 129).all())
    assert not bool(result.lse.isnan().any() or result.entropy.isnan().any())

    (grad,) = torch.autograd.grad(result.nll.sum(), x, retain_graph=True)
    assert bool(grad[bad].isnan().all())
    assert not bool(grad[good].isnan().any())
    # Masked out after the loss, they leave nothing behind.
    is_valid = (labels >= 0) & (labels < 129)
    (grad,) = torch.autograd.grad(torch.where(is_valid, result.nll, 0).sum(), x)
    assert bool((grad[bad] == 0).all())
    assert not bool(grad.isnan().any())


@pytest.mark.parametrize(("implementation", "dtype", "tolerance"), WAYS)
def test_upstream_gradients(implementation, dtype, tolerance):
    x, weight, labels, _ = problem(6, 32, 129, dtype=dtype)
    x.requires_grad_()
    result = linear_ce(x, weight, labels, implementation=implementation)
    (unit,) = torch.autograd.grad(result.nll.sum(), x, retain_graph=True)
    factors = torch.tensor([0.0, -1.5, 1e-8, 1.0, 3.0, 0.0], dtype=result.nll.dtype, device=DEVICE)
    strided = torch.stack((factors, factors + 7), dim=1)[:, 0]
    for upstream in (factors, strided, factors[:1].expand(6) + 2, factors[3:4].expand(6)):
        (grad,) = torch.autograd.grad(result.nll, x, upstream, retain_graph=True)
        torch.testing.assert_close(grad, unit * upstream[:, None])
    assert bool((torch.autograd.grad(result.nll, x, factors)[0][[0, 5]] == 0).all())


@pytest.mark.parametrize(("implementation", "dtype", "tolerance"), WAYS)
def test_inputs_that_are_views(implementation, dtype, tolerance):
    x, weight, labels, upstream = problem(4, 32, 129, dtype=dtype)
    wide = torch.cat((x, x), dim=1)[:, :32]
    strided = torch.stack((labels, labels + 1), dim=1)[:, 0]
    results = both(wide, weight, strided, upstream, implementation=implementation)
    check(*results, tolerance=tolerance)


@pytest.mark.parametrize(("implementation", "dtype", "tolerance"), WAYS)
def test_empty_batch(implementation, dtype, tolerance):
    x, weight, labels, _ = problem(4, 32, 129, dtype=dtype)
    x.requires_grad_()
    loss = linear_ce(x[:0], weight, labels[:0], implementation=implementation).nll.sum()
    assert loss.item() == 0
    loss.backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize(("implementation", "dtype", "tolerance"), WAYS)
def test_without_gradient_results_are_the_same(implementation, dtype, tolerance):
    x, weight, labels, _ = problem(5, 32, 129, dtype=dtype)
    trained = linear_ce(x.clone().requires_grad_(), weight, labels, implementation=implementation)
    with torch.no_grad():
        evaluated = linear_ce(x.requires_grad_(), weight, labels, implementation=implementation)
    for a, b in zip(trained, evaluated, strict=True):
        assert torch.equal(a, b)
        assert not b.requires_grad


def test_second_derivatives_are_refused():
    """dX does not know that it depends on x: a second derivative would lack a term."""
    x, weight, labels, _ = problem(3, 32, 129, dtype=torch.float64)
    x.requires_grad_()
    loss = linear_ce(x, weight, labels, implementation="reference").nll.square().sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_two_forwards_before_their_backwards():
    x, weight, labels, _ = problem(5, 32, 129, dtype=torch.float64)
    a, b = x.clone().requires_grad_(), (x * 2).requires_grad_()
    losses = [
        linear_ce(rows, weight, labels, implementation="reference").nll.sum() for rows in (a, b)
    ]
    (losses[0] + losses[1]).backward()
    for rows in (a, b):
        exact = rows.detach().clone().requires_grad_()
        reference_ce(exact, weight, labels).nll.sum().backward()
        torch.testing.assert_close(rows.grad, exact.grad)


def test_chunk_size_changes_rounding_only():
    x, weight, labels, _ = problem(300, 16, 65, dtype=torch.float64)
    whole = linear_ce(x, weight, labels, implementation="reference")
    for chunk_rows in (1, 7, 128, 299):
        cut = linear_ce(x, weight, labels, chunk_rows=chunk_rows, implementation="reference")
        torch.testing.assert_close(cut.nll, whole.nll, rtol=1e-13, atol=1e-13)
        assert torch.equal(cut.rank, whole.rank)


@pytest.mark.parametrize("num_rows", [0, 1, 127, 4096, 4097, 10_000])
@pytest.mark.parametrize("chunk_rows", [1, 100, 1024, 4096])
def test_chunk_bounds(num_rows, chunk_rows):
    bounds = chunk_bounds(num_rows, chunk_rows)
    rows = [row for start, end in bounds for row in range(start, end)]
    assert rows == list(range(num_rows))
    assert all(0 < end - start <= chunk_rows for start, end in bounds)
    if num_rows > chunk_rows >= 128:
        sizes = [end - start for start, end in bounds]
        assert len(bounds) <= -(-num_rows // chunk_rows) + 1
        assert all(size % 128 == 0 for size in sizes[:-1])


def test_buffers_are_kept_and_released():
    device = torch.device("cpu")
    first = chunk_buffer("logits", 4, 65, dtype=torch.float32, device=device)
    assert first.stride() == (128, 1)
    again = chunk_buffer("logits", 2, 65, dtype=torch.float32, device=device)
    assert again.data_ptr() == first.data_ptr()
    release_buffers()
    assert not logit_chunks._buffers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w, y: (x[:, :-1], w, y), "must be"),
        (lambda x, w, y: (x.double(), w, y), "convert"),
        (lambda x, w, y: (x, w, y.int()), "int64"),
        (lambda x, w, y: (x, w, y[:-1]), "labels"),
        (lambda x, w, y: (x, w.T.contiguous().T, y), "contiguous"),
    ],
)
def test_inputs_that_do_not_go_together(change, message):
    x, weight, labels, _ = problem(4, 8, 16, dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        linear_ce(*change(x, weight, labels))


@pytest.mark.parametrize("options", [{"logit_scale": 0.0}, {"softcap": -1.0}])
def test_scales_above_zero(options):
    x, weight, labels, _ = problem(4, 8, 16, dtype=torch.float32)
    with pytest.raises(ValueError, match="above 0"):
        linear_ce(x, weight, labels, **options)


def test_unknown_implementation():
    x, weight, labels, _ = problem(4, 8, 16, dtype=torch.float32)
    with pytest.raises(ValueError, match="allowed are"):
        linear_ce(x, weight, labels, implementation="cuda")


def assert_bf16_is_as_good_as_fp32(rows, hidden, columns):
    """Hold the worst row of the gradient against fp32 logits with autograd, both rounded to bf16.

    Rows whose p(label) goes from 1 / V to 0.999997: near certainty, a label logit rounded to bf16
    would cost 30 %, and the fp32 softmax minus one loses digits of its own.
    """
    x, weight, labels, _ = problem(rows, hidden, columns, dtype=torch.float64)
    w_label = weight[labels]
    wanted = torch.linspace(0, torch.tensor(columns).log().item() + 13.2, rows, device=DEVICE)
    x += (
        (wanted - (x * w_label).sum(dim=1))[:, None]
        * w_label
        / w_label.square().sum(dim=1)[:, None]
    )
    x, weight = x.bfloat16(), weight.bfloat16()
    ones = torch.ones(rows, dtype=torch.float64, device=DEVICE)
    result, _, grad, exact = both(x, weight, labels, ones, implementation=None)
    assert result.label_prob.max() > 0.9999

    fp32 = x.float().requires_grad_()
    logits = fp32 @ weight.float().T
    torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    norm = exact.norm(dim=1)
    ours = ((grad.double() - exact).norm(dim=1) / norm).max()
    peer = ((fp32.grad.bfloat16().double() - exact).norm(dim=1) / norm).max()
    assert ours <= 2 * peer


def test_bf16_logits_cost_no_accuracy():
    assert_bf16_is_as_good_as_fp32(64, 128, 4099)


@pytest.mark.slow
def test_without_triton():
    program = """
import sys
sys.modules["triton"] = None
import torch
from dflash_offline.kernels import linear_ce, linear_ce_fp8, linear_ce_skip
from dflash_offline.kernels import linear_kl, linear_kl_topk
x = torch.randn(3, 8, requires_grad=True)
linear_ce.linear_ce(x, torch.randn(9, 8), torch.tensor([0, 4, 8])).nll.sum().backward()
assert x.grad.norm() > 0
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.gpu
class TestOnGpu:
    """bf16 at sizes and with settings as in training."""

    @pytest.fixture(autouse=True)
    def real_settings(self, monkeypatch):
        monkeypatch.undo()
        torch.manual_seed(0)

    def test_bf16_logits_cost_no_accuracy(self):
        assert_bf16_is_as_good_as_fp32(512, 1024, 32_001)

    def test_repeats_are_bitwise_equal(self):
        x, weight, labels, _ = problem(700, 512, 20_011, dtype=torch.bfloat16)
        x.requires_grad_()
        first = None
        for _ in range(100):
            result = linear_ce(x, weight, labels, chunk_rows=256)
            (grad,) = torch.autograd.grad(result.nll.sum(), x)
            values = (*result, grad)
            first = first or values
            assert all(torch.equal(a, b) for a, b in zip(first, values, strict=True))

    @pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
    def test_ragged_steps_compile_and_wait_for_nothing(self, monkeypatch):
        x, weight, labels, _ = problem(1500, 512, 20_011, dtype=torch.bfloat16)
        warm_up(weight, chunk_rows=512)
        compiled = []
        monkeypatch.setattr(
            triton.knobs.runtime, "jit_post_compile_hook", lambda **kwargs: compiled.append(kwargs)
        )
        torch.cuda.set_sync_debug_mode("error")
        try:
            for step in range(100):
                first, rows = step % 13, 1 + step * 14
                part = x[first : first + rows].detach().requires_grad_()
                result = linear_ce(part, weight, labels[first : first + rows], chunk_rows=512)
                (result.nll.sum() / rows).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not compiled

    def test_memory(self):
        rows, hidden, columns, chunk = 4096, 1024, 50_000, 512
        x, weight, labels, _ = problem(rows, hidden, columns, dtype=torch.bfloat16)
        x.requires_grad_()
        release_buffers()
        linear_ce(x, weight, labels, chunk_rows=chunk).nll.sum().backward()
        x.grad = None
        reserved = torch.cuda.memory_reserved()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(5):
            linear_ce(x, weight, labels, chunk_rows=chunk).nll.sum().backward()
            x.grad = None
        logits = chunk * (columns + 64) * 2
        assert before >= logits, "the buffer is kept"
        # dX, its scaled copy, and seven numbers a row.
        assert torch.cuda.max_memory_allocated() - before <= 2 * 2 * rows * hidden + 64 * rows
        assert torch.cuda.memory_reserved() == reserved

    def test_offsets_beyond_32_bits(self):
        # 16,384 rows of 248,320 columns: the last row starts at 4.07e9 elements.
        x, weight, labels, _ = problem(16_384, 64, 248_320, dtype=torch.bfloat16)
        x.requires_grad_()
        whole = linear_ce(x, weight, labels, chunk_rows=16_384)
        (grad,) = torch.autograd.grad(whole.nll.sum(), x)
        last = x[-8:].detach().requires_grad_()
        part = linear_ce(last, weight, labels[-8:])
        (part_grad,) = torch.autograd.grad(part.nll.sum(), last)
        torch.testing.assert_close(whole.nll[-8:], part.nll, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(grad[-8:], part_grad, rtol=2e-2, atol=1e-3)
