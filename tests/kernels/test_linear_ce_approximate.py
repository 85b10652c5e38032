"""linear_ce_skip and linear_ce_fp8: outputs that stay exact, errors that stay in their bounds."""

import pytest
import torch

from dflash_offline.kernels import frozen_head, head_rows, linear_ce_skip
from dflash_offline.kernels import linear_ce_fp8 as linear_ce_fp8_module
from dflash_offline.kernels.head_rows import empty_results, row_options
from dflash_offline.kernels.linear_ce import ApartLabel, triton_chunk
from dflash_offline.kernels.linear_ce_fp8 import linear_ce_fp8, quantize_head
from dflash_offline.kernels.linear_ce_skip import ProductLaunch, order_head
from dflash_offline.kernels.logit_chunks import chunk_buffer, release_buffers
from dflash_offline.kernels.optional_triton import HAS_TRITON
from dflash_offline.kernels.reference_loss import LinearCE, head_logits
from dflash_offline.kernels.reference_loss import linear_ce as reference_ce

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = [
    pytest.param("reference", torch.float64, 1e-12, id="torch-fp64"),
    pytest.param(
        "triton",
        torch.float32,
        2e-5,
        id="triton-fp32",
        marks=pytest.mark.skipif(not HAS_TRITON, reason="needs triton; install it"),
    ),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Let a row take several steps, and settle the first float64 exp of the process."""
    monkeypatch.setattr(head_rows, "DEFAULT_ROW_LAUNCH", head_rows.RowLaunch(128, 32, 4))
    monkeypatch.setattr(head_rows, "ROW_LAUNCH", {})
    # Two chunks at a time on a GPU, however small.
    monkeypatch.setattr(frozen_head, "SMALL_CHUNK_ROWS", 0)
    monkeypatch.setattr(linear_ce_skip, "PRODUCT_LAUNCH", ProductLaunch(32, 4, 2))
    monkeypatch.setattr(linear_ce_skip, "BLOCK_ROWS", 16)
    torch.ones(1 << 16, dtype=torch.float64).exp()
    yield
    release_buffers()


def problem(rows, hidden, columns, *, dtype, scale=4.0, seed=0):
    """Rows whose logits are peaked, so that there is something to leave out."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, hidden, dtype=torch.float64, generator=generator)
    weight = torch.randn(columns, hidden, dtype=torch.float64, generator=generator)
    weight += torch.randn(hidden, dtype=torch.float64, generator=generator)
    weight *= scale * hidden**-0.5
    labels = torch.randint(0, columns, (rows,), generator=generator)
    return x.to(DEVICE, dtype), weight.to(DEVICE, dtype), labels.to(DEVICE)


def exact_run(x, weight, labels, **options):
    rows = x.double().requires_grad_()
    result = reference_ce(rows, weight.double(), labels, **options)
    return result, torch.autograd.grad(result.nll.sum(), rows)[0]


@pytest.mark.parametrize(
    "options", [{}, {"logit_scale": 0.5, "softcap": 8.0}], ids=["", "soft-cap"]
)
@pytest.mark.parametrize("max_tile_mass", [1e-30, 1e-4, 0.15])
@pytest.mark.parametrize(("implementation", "dtype", "tolerance"), WAYS)
def test_linear_ce_skip(implementation, dtype, tolerance, max_tile_mass, options):
    # 321 columns are five tiles of 64 and one column, 20 rows a block of 16 and a ragged one.
    x, weight, labels = problem(20, 64, 321, dtype=dtype)
    mass = torch.softmax(head_logits(x, weight, **options), dim=1).mean(dim=0)
    head = order_head(weight, mass)
    rows = x.clone().requires_grad_()
    result, report = linear_ce_skip.linear_ce_skip(
        rows,
        head,
        labels,
        max_tile_mass=max_tile_mass,
        implementation=implementation,
        chunk_rows=10,
        **options,
    )
    expected, exact = exact_run(x, weight, labels, **options)
    for name in ("nll", "lse", "entropy", "label_prob"):
        torch.testing.assert_close(
            getattr(result, name).double(), getattr(expected, name), rtol=tolerance, atol=tolerance
        )
    assert torch.equal(result.argmax, expected.argmax)
    assert torch.equal(result.rank, expected.rank)
    (grad,) = torch.autograd.grad(result.nll.sum(), rows)
    error = (grad.double() - exact).norm(dim=1)
    slack = tolerance * (exact.norm(dim=1) + weight.double().norm(dim=1).max())
    assert bool((error <= report.error_bound.double() * (1 + 1e-5) + slack).all())
    if max_tile_mass == 0.15:
        assert 0 < report.kept_frac < 1
        assert report.error_bound.max() > 0
    if max_tile_mass == 1e-30:
        assert error.max() < 5 * slack.max()


@pytest.mark.parametrize(("implementation", "dtype", "tolerance"), WAYS)
def test_report_of_what_is_skipped(implementation, dtype, tolerance):
    x, weight, labels = problem(20, 64, 321, dtype=dtype)
    head = order_head(weight, torch.softmax(head_logits(x, weight), dim=1).mean(dim=0))
    _, report = linear_ce_skip.linear_ce_skip(
        x.clone().requires_grad_(),
        head,
        labels,
        max_tile_mass=0.15,
        implementation=implementation,
    )
    p = torch.softmax(head_logits(x.double(), head.weight[:321].double()), dim=1)
    p.scatter_(1, head.column_of[labels][:, None], 0)
    mass = torch.nn.functional.pad(p, (0, 63)).view(20, 6, 64).sum(dim=2)
    is_kept = torch.stack([rows.amax(dim=0) > 0.15 for rows in mass.split(16)])
    skipped = mass.masked_fill(is_kept.repeat_interleave(16, 0)[:20], 0)
    torch.testing.assert_close(
        report.kept_frac.double(), is_kept.double().mean(), rtol=1e-6, atol=0
    )
    bound = (skipped * head.tile_radius).sum(dim=1)
    torch.testing.assert_close(report.error_bound.double(), bound, rtol=1e-4, atol=tolerance)


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton; install it")
def test_lists_that_take_several_steps():
    # 66 tiles, of which a step looks at 64; those that are kept lie on both sides.
    x, weight, labels = problem(3, 16, 4200, dtype=torch.float32)
    head = order_head(weight, torch.ones(4200))
    # What is not listed is tile 30, which then counts twice.
    device = torch.device(DEVICE)
    chunk_buffer("tiles 0", 3, 66, dtype=torch.int32, device=device).fill_(30)
    runs = []
    for implementation in ("triton", "reference"):
        rows = x.clone().requires_grad_()
        result, report = linear_ce_skip.linear_ce_skip(
            rows, head, labels, max_tile_mass=0.005, implementation=implementation
        )
        runs.append((*report, *torch.autograd.grad(result.nll.sum(), rows)))
    p = torch.softmax(head_logits(x, weight), dim=1).scatter(1, labels[:, None], 0)
    mass = torch.nn.functional.pad(p, (0, 24)).view(3, 66, 64).sum(dim=2).amax(dim=0)
    assert bool((mass[64:] > 0.005).any())
    assert 0 < runs[0][1] < 1
    torch.testing.assert_close(*runs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk_rows", [100, 200])
def test_blocks_do_not_depend_on_chunks(monkeypatch, chunk_rows):
    """A chunk that ended inside a block would share its list of tiles with the next."""
    monkeypatch.setattr(linear_ce_skip, "BLOCK_ROWS", 128)
    x, weight, labels = problem(300, 16, 321, dtype=torch.float64)
    head = order_head(weight, torch.softmax(head_logits(x, weight), dim=1).mean(dim=0))
    runs = []
    for rows in (4096, chunk_rows):
        given = x.clone().requires_grad_()
        result, report = linear_ce_skip.linear_ce_skip(
            given, head, labels, max_tile_mass=0.5, chunk_rows=rows, implementation="reference"
        )
        runs.append((*report, *torch.autograd.grad(result.nll.sum(), given)))
    assert 0 < runs[0][1] < 1
    torch.testing.assert_close(runs[0], runs[1])


def test_skip_of_an_empty_batch():
    x, weight, labels = problem(1, 16, 70, dtype=torch.float64)
    head = order_head(weight, torch.ones(70))
    result, report = linear_ce_skip.linear_ce_skip(
        x[:0].requires_grad_(), head, labels[:0], implementation="reference"
    )
    assert (result.nll.shape, report.error_bound.shape) == ((0,), (0,))
    assert report.kept_frac == 0


def test_means_stand_in_for_what_is_skipped():
    """Leaving the mass of skipped tiles out instead would cost several times as much."""
    x, weight, labels = problem(64, 64, 1024, dtype=torch.float64, scale=2.0)
    mass = torch.softmax(head_logits(x, weight), dim=1).mean(dim=0)
    _, exact = exact_run(x, weight, labels)
    errors = []
    for head in (order_head(weight, mass), None):
        if head is None:
            head = order_head(weight, mass)
            head = head._replace(tile_means=torch.zeros_like(head.tile_means))
        rows = x.clone().requires_grad_()
        result, report = linear_ce_skip.linear_ce_skip(
            rows, head, labels, max_tile_mass=0.2, implementation="reference"
        )
        assert report.kept_frac < 0.9
        (grad,) = torch.autograd.grad(result.nll.sum(), rows)
        errors.append((grad - exact).norm())
    assert errors[0] < 0.6 * errors[1]


@pytest.mark.parametrize(("implementation", "dtype", "tolerance"), WAYS)
def test_skip_poisons_only_its_row(implementation, dtype, tolerance):
    x, weight, labels = problem(4, 64, 130, dtype=dtype)
    labels[1], labels[3] = -1, 130
    head = order_head(weight, torch.arange(130.0))
    rows = x.clone().requires_grad_()
    result, _ = linear_ce_skip.linear_ce_skip(rows, head, labels, implementation=implementation)
    (grad,) = torch.autograd.grad(result.nll.sum(), rows)
    assert result.nll.isnan().tolist() == [False, True, False, True]
    assert grad.isnan().all(dim=1).tolist() == [False, True, False, True]
    assert not bool(grad[::2].isnan().any())


def test_order_head_is_a_permutation():
    _, weight, _ = problem(1, 8, 70, dtype=torch.float32)
    head = order_head(weight, torch.tensor([1.0, 3.0, 2.0] + 67 * [0.0]))
    assert head.token_of[:4].tolist() == [1, 2, 0, 3]
    assert torch.equal(head.column_of[head.token_of], torch.arange(70, device=DEVICE))
    assert torch.equal(head.weight[:70], weight[head.token_of])
    assert head.weight.shape[0] == 128
    assert torch.equal(head.weight[70:], torch.zeros_like(head.weight[70:]))
    torch.testing.assert_close(head.tile_means[1], weight[head.token_of[64:]].mean(dim=0))
    with pytest.raises(ValueError, match="one a token"):
        order_head(weight, torch.ones(69))


@pytest.mark.parametrize("quantize_gradient", [False, True])
def test_linear_ce_fp8(quantize_gradient):
    x, weight, labels = problem(32, 64, 1001, dtype=torch.float32, scale=1.0)
    labels[3] = -1
    head = quantize_head(weight, quantize_gradient=quantize_gradient)
    rows = x.clone().requires_grad_()
    result = linear_ce_fp8(rows, head, labels, chunk_rows=20, implementation="reference")
    good = labels >= 0
    expected, exact = exact_run(x[good], weight, labels[good])
    (grad,) = torch.autograd.grad(result.nll.sum(), rows)
    assert bool(result.nll[3].isnan() & grad[3].isnan().all())
    # Four significant bits in both operands: 4 % of a logit's spread, here 1.4.
    assert (result.nll[good].double() - expected.nll).abs().max() < 0.2
    assert (grad[good].double() - exact).norm() < 0.05 * exact.norm()


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton; install it")
@pytest.mark.parametrize(
    "options", [{}, {"logit_scale": 0.5}, {"logit_scale": 2.0, "softcap": 4.0}], ids=str
)
def test_a_gradient_apart_is_the_gradient(options):
    """Rows over their scales and the label's entry are together what the row pass leaves."""
    x, weight, labels = problem(3, 32, 129, dtype=torch.float32)
    given = {"logit_scale": 1.0, "softcap": None} | options
    options = row_options(x.clone().requires_grad_(), **given)
    room = torch.full((4, 3, 192), float("nan"), device=DEVICE)
    logits, again, scaled = room[:3, :, :129]
    label_grad, row_scale = room[3, 0, :3], room[3, 1, :3]
    logits.copy_(x @ weight.T)
    again.copy_(logits)
    # One of them the largest, by far.
    labels[0] = logits[0].argmax()
    triton_chunk(x, weight, labels, logits, empty_results(LinearCE, x), options)
    apart = ApartLabel(label_grad, scaled=scaled, row_scale=row_scale)
    triton_chunk(x, weight, labels, again, empty_results(LinearCE, x), options, apart)
    largest = scaled.amax(dim=1)
    assert bool((largest <= 448 * 1.0001).all())
    if given["softcap"] is None:
        torch.testing.assert_close(largest, torch.full_like(largest, 448))
    together = scaled * row_scale[:, None]
    assert bool((together.gather(1, labels[:, None]) == 0).all())
    together.scatter_(1, labels[:, None], label_grad[:, None])
    torch.testing.assert_close(together, logits, rtol=1e-5, atol=1e-8)


def test_the_head_is_quantised_by_parts(monkeypatch):
    _, weight, _ = problem(1, 64, 1001, dtype=torch.float32)
    whole = quantize_head(weight)
    sizes = []
    real = linear_ce_fp8_module.quantize_rows

    def counted(x):
        sizes.append(x.numel())
        return real(x)

    monkeypatch.setattr(linear_ce_fp8_module, "quantize_rows", counted)
    monkeypatch.setattr(linear_ce_fp8_module, "PART_ROWS", 300)
    monkeypatch.setattr(linear_ce_fp8_module, "PART_CHANNELS", 16)
    for part, wanted in zip(quantize_head(weight), whole, strict=True):
        assert torch.equal(part.float(), wanted.float())
    assert max(sizes) == 300 * 64
    assert sum(sizes) == 2 * weight.numel()


def test_fp8_width():
    with pytest.raises(ValueError, match="multiple of 16"):
        quantize_head(torch.zeros(10, 24))


@pytest.mark.gpu
class TestOnGpu:
    """bf16 at sizes and with settings as in training."""

    @pytest.fixture(autouse=True)
    def real_settings(self, monkeypatch):
        monkeypatch.undo()

    @pytest.mark.parametrize("softcap", [None, 20.0])
    def test_linear_ce_skip(self, softcap):
        x, weight, labels = problem(700, 1024, 32_001, dtype=torch.bfloat16)
        head = order_head(weight, torch.softmax((x @ weight.T).float(), dim=1).mean(dim=0))
        _, exact = exact_run(x, weight, labels, softcap=softcap)
        rows = x.clone().requires_grad_()
        grads = []
        for _ in range(3):
            result, report = linear_ce_skip.linear_ce_skip(
                rows, head, labels, softcap=softcap, chunk_rows=256
            )
            grads.append(torch.autograd.grad(result.nll.sum(), rows)[0])
        error = (grads[0].double() - exact).norm(dim=1)
        assert bool((error <= report.error_bound + 0.02 * exact.norm(dim=1)).all())
        assert report.kept_frac < 1
        assert all(torch.equal(grads[0], grad) for grad in grads)

    @pytest.mark.parametrize("quantize_gradient", [False, True])
    @pytest.mark.parametrize("options", [{}, {"softcap": 20.0, "logit_scale": 0.5}], ids=str)
    def test_linear_ce_fp8(self, quantize_gradient, options):
        x, weight, labels = problem(700, 1024, 32_001, dtype=torch.bfloat16, scale=1.0)
        _, exact = exact_run(x, weight, labels, **options)
        rows = x.clone().requires_grad_()
        head = quantize_head(weight, quantize_gradient=quantize_gradient)
        result = linear_ce_fp8(rows, head, labels, chunk_rows=256, **options)
        (grad,) = torch.autograd.grad(result.nll.sum(), rows)
        assert (grad.double() - exact).norm() < 0.05 * exact.norm()
