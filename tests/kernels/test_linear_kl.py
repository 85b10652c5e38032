"""linear_kl and linear_kl_topk: values and gradients against float64, rows that break others."""

import pytest
import torch

from dflash_offline.kernels import frozen_head, head_rows, linear_kl_topk
from dflash_offline.kernels import linear_kl as linear_kl_module
from dflash_offline.kernels.linear_kl import linear_kl
from dflash_offline.kernels.logit_chunks import release_buffers
from dflash_offline.kernels.optional_triton import HAS_TRITON, triton
from dflash_offline.kernels.reference_loss import linear_kl as reference_kl
from dflash_offline.kernels.reference_loss import linear_kl_topk as reference_topk

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = [
    pytest.param("reference", torch.float64, 1e-12, id="torch-fp64"),
    pytest.param(
        "triton",
        torch.float32,
        5e-6,
        id="triton-fp32",
        marks=pytest.mark.skipif(not HAS_TRITON, reason="needs triton; install it"),
    ),
]
KL = {"kl_weight": 1.0}
REVERSE = {"kl_weight": 0.0, "reverse_kl_weight": 1.0}
TV = {"kl_weight": 0.0, "tv_weight": 1.0}
MIX = {"kl_weight": 0.3, "reverse_kl_weight": 0.2, "tv_weight": 0.4, "ce_weight": 0.6}
MIXES = [
    pytest.param(KL, id="kl"),
    pytest.param(REVERSE, id="reverse kl"),
    pytest.param(TV, id="tv"),
    pytest.param(MIX, id="all four"),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Let a row take several steps, and settle the first float64 exp of the process."""
    tiles = head_rows.RowLaunch(128, 32, 4)
    monkeypatch.setattr(head_rows, "DEFAULT_ROW_LAUNCH", tiles)
    monkeypatch.setattr(head_rows, "ROW_LAUNCH", {})
    # Two chunks at a time on a GPU, however small.
    monkeypatch.setattr(frozen_head, "SMALL_CHUNK_ROWS", 0)
    monkeypatch.setattr(linear_kl_module, "LAUNCH", tiles)
    monkeypatch.setattr(linear_kl_topk, "BLOCK_LISTED", 4)
    torch.ones(1 << 16, dtype=torch.float64).exp()
    yield
    release_buffers()


def problem(rows, hidden, columns, *, dtype, distance=0.5, scale=1.0, seed=0):
    """Student rows, head, teacher rows `distance` away from them, labels and upstream gradient."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    teacher = normal(rows, hidden)
    x = teacher + distance * normal(rows, hidden)
    weight = normal(columns, hidden) * scale * hidden**-0.5
    labels = torch.randint(0, columns, (rows,), generator=generator).to(DEVICE)
    upstream = normal(rows).to(DEVICE)
    return (*(t.to(DEVICE, dtype) for t in (x, weight, teacher)), labels, upstream)


def both(x, weight, teacher, labels, upstream, *, implementation, **options):
    ours, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    result = linear_kl(
        ours, weight, teacher, labels=labels, implementation=implementation, **options
    )
    expected = reference_kl(exact, weight.double(), teacher.double(), labels=labels, **options)
    (result.loss * upstream.to(result.loss.dtype)).sum().backward()
    (expected.loss * upstream).sum().backward()
    return result, expected, ours.grad, exact.grad


def check(result, expected, grad, expected_grad, *, tolerance):
    for name, value, wanted in zip(result._fields, result, expected, strict=True):
        if wanted.dtype == torch.int64:
            assert torch.equal(value, wanted), name
        else:
            torch.testing.assert_close(
                value.double(),
                wanted,
                rtol=2 * tolerance,
                atol=2 * tolerance,
                equal_nan=True,
                msg=lambda text, name=name: f"{name}: {text}",
            )
    error = (grad.double() - expected_grad).norm(dim=1)
    assert bool((error <= 10 * tolerance * (expected_grad.norm(dim=1) + tolerance)).all())


# V of 7 is less than a tile, 129 a tile and one column, 257 two tiles and one.
@pytest.mark.parametrize("columns", [7, 129, 257])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("implementation", "dtype", "tolerance"), WAYS)
def test_linear_kl(implementation, dtype, tolerance, mix, columns):
    inputs = problem(3, 63, columns, dtype=dtype)
    check(*both(*inputs, implementation=implementation, **mix), tolerance=tolerance)


@pytest.mark.parametrize("implementation", ["reference", "triton"] if HAS_TRITON else ["reference"])
def test_the_loss_of_a_label_that_is_almost_certain(implementation):
    _, weight, teacher, labels, _ = problem(3, 32, 129, dtype=torch.float32)
    x, options = 30 * weight[labels], {"labels": labels, **MIX}
    result = linear_kl(x, weight, teacher, implementation=implementation, **options)
    expected = reference_kl(x.double(), weight.double(), teacher.double(), **options)
    assert 0 < float(expected.nll.min()) < 1e-8
    torch.testing.assert_close(result.nll.double(), expected.nll, rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"logit_scale": 0.25}, id="scale"),
        pytest.param({"logit_scale": 2.0, "softcap": 3.0}, id="scale and soft-cap"),
        pytest.param({"vocab_size": 120}, id="padded head"),
        pytest.param({"chunk_rows": 2}, id="ragged chunks"),
    ],
)
@pytest.mark.parametrize(("implementation", "dtype", "tolerance"), WAYS)
def test_linear_kl_options(implementation, dtype, tolerance, options):
    x, weight, teacher, labels, upstream = problem(3, 32, 129, dtype=dtype)
    labels = labels.clamp(max=119)
    results = both(
        x, weight, teacher, labels, upstream, implementation=implementation, **MIX, **options
    )
    check(*results, tolerance=tolerance)


@pytest.mark.parametrize("mix", MIXES[:3])
@pytest.mark.parametrize(("implementation", "dtype", "tolerance"), WAYS)
def test_teacher_equal_to_student_gives_exact_zeros(implementation, dtype, tolerance, mix):
    x, weight, *_ = problem(3, 32, 129, dtype=dtype)
    x.requires_grad_()
    result = linear_kl(x, weight, x.detach().clone(), implementation=implementation, **mix)
    result.loss.sum().backward()
    for value in (result.loss, result.kl, result.reverse_kl, result.tv, x.grad):
        assert bool((value == 0).all())
    assert torch.equal(result.argmax, result.teacher_argmax)


@pytest.mark.parametrize(
    ("name", "student", "teacher"),
    [
        ("one-hot teacher", [0.0, 1.0, 2.0], [0.0, 60.0, 0.0]),
        ("one-hot student", [0.0, 60.0, 0.0], [0.0, 1.0, 2.0]),
        ("one-hot both, apart", [90.0, 0.0, 0.0], [0.0, 0.0, 95.0]),
        ("teacher underflows where the student is", [200.0, 0.0, 0.0], [0.0, 0.0, 200.0]),
        ("large offset", [1e4, 1e4 + 1, 1e4 - 1], [1e4 + 1, 1e4, 1e4 - 1]),
        ("all equal", [3.0, 3.0, 3.0], [-2.0, -2.0, -2.0]),
    ],
)
@pytest.mark.parametrize("mix", MIXES[:3])
@pytest.mark.parametrize(("implementation", "dtype", "tolerance"), WAYS)
def test_adversarial_rows(implementation, dtype, tolerance, mix, name, student, teacher):
    # The head is the identity, so that logits are the rows; one column more than a tile.
    columns = 129
    base = torch.zeros(2, columns, dtype=torch.float64)
    if name == "large offset":
        base += 1e4
    base[0, :3], base[1, :3] = (torch.tensor(v, dtype=torch.float64) for v in (student, teacher))
    x, teacher_x = base.to(DEVICE, dtype).split(1)
    weight = torch.eye(columns, dtype=dtype, device=DEVICE)
    upstream = torch.ones(1, dtype=torch.float64, device=DEVICE)
    results = both(x, weight, teacher_x, None, upstream, implementation=implementation, **mix)
    # Offsets of 1e4 leave fp32 logits four digits after the point.
    if name == "large offset" and dtype == torch.float32:
        tolerance *= 10
    check(*results, tolerance=tolerance)


@pytest.mark.parametrize(("implementation", "dtype", "tolerance"), WAYS)
def test_differences_of_near_equal_probabilities(implementation, dtype, tolerance):
    """p - q by subtraction would leave nothing of divergences of 1e-9 in single precision."""
    x, weight, teacher, _, upstream = problem(3, 32, 129, dtype=dtype, distance=1e-4)
    mix = {"kl_weight": 0.5, "reverse_kl_weight": 0.5}
    result, expected, grad, exact = both(
        x, weight, teacher, None, upstream, implementation=implementation, **mix
    )
    assert expected.kl.max() < 1e-7
    for name in ("kl", "reverse_kl", "tv"):
        wanted = getattr(expected, name)
        torch.testing.assert_close(getattr(result, name).double(), wanted, rtol=0.02, atol=0)
    assert (grad.double() - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize(("implementation", "dtype", "tolerance"), WAYS)
def test_of_equal_maxima_the_first_counts(implementation, dtype, tolerance):
    # One in each of a row's two tiles.
    weight = torch.eye(129, dtype=dtype, device=DEVICE)
    x = torch.zeros(1, 129, dtype=dtype, device=DEVICE)
    x[0, [5, 128]] = 3
    result = linear_kl(x, weight, x.roll(1, dims=1), implementation=implementation)
    assert (result.argmax.item(), result.teacher_argmax.item()) == (5, 0)
    again = linear_kl(x, weight, x, implementation=implementation)
    assert (again.argmax.item(), again.teacher_argmax.item()) == (5, 5)


@pytest.mark.parametrize(("implementation", "dtype", "tolerance"), WAYS)
def test_bad_labels_are_poisoned(implementation, dtype, tolerance):
    x, weight, teacher, labels, _ = problem(4, 32, 129, dtype=dtype)
    labels[[0, 3]] = torch.tensor([-1, 129], device=DEVICE)
    x.requires_grad_()
    result = linear_kl(
        x, weight, teacher, labels=labels, ce_weight=0.5, implementation=implementation
    )
    (grad,) = torch.autograd.grad(result.loss.sum(), x, retain_graph=True)
    for value in (result.loss, result.nll, grad[:, 0]):
        assert value.isnan().tolist() == [True, False, False, True]
    masked = torch.where((labels >= 0) & (labels < 129), result.loss, 0).sum()
    assert bool((torch.autograd.grad(masked, x)[0][[0, 3]] == 0).all())


@pytest.mark.parametrize(("implementation", "dtype", "tolerance"), WAYS)
def test_empty_batch(implementation, dtype, tolerance):
    x, weight, teacher, *_ = problem(2, 32, 129, dtype=dtype)
    x.requires_grad_()
    loss = linear_kl(x[:0], weight, teacher[:0], implementation=implementation).loss.sum()
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(x.grad, torch.zeros_like(x))


def assert_error_is_flat_in_acceptance(rows, hidden, columns):
    """Two buffers of bf16 logits give 28 % at an acceptance of 0.96, where p - q is small."""
    for distance, acceptance in ((1.0, 0.5), (0.1, 0.9), (0.03, 0.96)):
        x, weight, teacher, _, _ = problem(
            rows, hidden, columns, dtype=torch.float64, distance=distance, scale=2.0
        )
        x, weight, teacher = x.bfloat16(), weight.bfloat16(), teacher.bfloat16()
        ones = torch.ones(rows, dtype=torch.float64, device=DEVICE)
        result, _, grad, exact = both(x, weight, teacher, None, ones, implementation=None)
        if distance < 1:
            assert (1 - result.tv).mean() > acceptance
        assert (grad.double() - exact).norm() < 0.02 * exact.norm()


def test_bf16_error_is_flat_in_acceptance():
    assert_error_is_flat_in_acceptance(32, 128, 2003)


def test_ce_needs_labels():
    x, weight, teacher, *_ = problem(2, 8, 16, dtype=torch.float32)
    with pytest.raises(ValueError, match="without labels"):
        linear_kl(x, weight, teacher, ce_weight=1.0)
    with pytest.raises(ValueError, match="shape"):
        linear_kl(x, weight, teacher[:1])


def topk_both(x, weight, ids, logprobs, upstream, *, implementation, **options):
    ours, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    result = linear_kl_topk.linear_kl_topk(
        ours, weight, ids, logprobs, implementation=implementation, **options
    )
    expected = reference_topk(exact, weight.double(), ids, logprobs, **options)
    (result.loss * upstream.to(result.loss.dtype)).sum().backward()
    (expected.loss * upstream).sum().backward()
    return result, expected, ours.grad, exact.grad


@pytest.mark.parametrize("columns", [65, 129])
@pytest.mark.parametrize("k", [1, 5, 65])
@pytest.mark.parametrize("tail", ["lumped", "none"])
@pytest.mark.parametrize(("implementation", "dtype", "tolerance"), WAYS)
def test_linear_kl_topk(implementation, dtype, tolerance, tail, k, columns):
    x, weight, teacher, _, upstream = problem(3, 63, columns, dtype=dtype)
    log_q = torch.log_softmax(teacher.double() @ weight.double().T, dim=1)
    logprobs, ids = log_q.topk(k, dim=1)
    if tail == "none":
        # Q = 0, and with k = 1 a one-hot teacher.
        logprobs = torch.log_softmax(logprobs, dim=1)
    results = topk_both(
        x, weight, ids.int(), logprobs, upstream, implementation=implementation, chunk_rows=2
    )
    check(*results, tolerance=tolerance)


@pytest.mark.parametrize(("implementation", "dtype", "tolerance"), WAYS)
def test_linear_kl_topk_with_softcap(implementation, dtype, tolerance):
    x, weight, teacher, _, upstream = problem(3, 63, 129, dtype=dtype)
    logprobs, ids = torch.log_softmax(teacher.double() @ weight.double().T, dim=1).topk(4)
    options = {"logit_scale": 2.0, "softcap": 3.0, "vocab_size": 127}
    results = topk_both(
        x, weight, ids.clamp(max=126), logprobs, upstream, implementation=implementation, **options
    )
    check(*results, tolerance=tolerance)


@pytest.mark.parametrize(("implementation", "dtype", "tolerance"), WAYS)
def test_topk_of_the_whole_vocabulary_is_kl(implementation, dtype, tolerance):
    x, weight, teacher, _, _ = problem(3, 32, 40, dtype=dtype)
    log_q = torch.log_softmax(teacher.double() @ weight.double().T, dim=1)
    logprobs, ids = log_q.topk(40, dim=1)
    losses = []
    for rows in (x.clone().requires_grad_(), x.clone().requires_grad_()):
        if losses:
            loss = linear_kl(rows, weight, teacher, implementation=implementation).loss
        else:
            loss = linear_kl_topk.linear_kl_topk(
                rows, weight, ids, logprobs, implementation=implementation
            ).loss
        losses.append((loss.detach(), *torch.autograd.grad(loss.sum(), rows)))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e3 * tolerance, atol=20 * tolerance)


@pytest.mark.parametrize(("implementation", "dtype", "tolerance"), WAYS)
def test_topk_of_a_peaked_student(implementation, dtype, tolerance):
    # The student's mass off the list underflows: its log does not.
    x = torch.zeros(1, 129, dtype=dtype, device=DEVICE)
    x[0, 5] = 120
    weight = torch.eye(129, dtype=dtype, device=DEVICE)
    ids = torch.tensor([[5]], device=DEVICE)
    logprobs = torch.tensor([[-0.5]], dtype=torch.float64, device=DEVICE)
    upstream = torch.ones(1, dtype=torch.float64, device=DEVICE)
    results = topk_both(x, weight, ids, logprobs, upstream, implementation=implementation)
    check(*results, tolerance=tolerance)


@pytest.mark.parametrize(("implementation", "dtype", "tolerance"), WAYS)
def test_topk_ids_outside_the_vocabulary_are_poisoned(implementation, dtype, tolerance):
    x, weight, *_ = problem(4, 32, 40, dtype=dtype)
    x.requires_grad_()
    # The last one's lower 32 bits are a column.
    ids = torch.tensor([[1, 40], [2, 3], [-1, 4], [2**32 + 5, 4]], device=DEVICE)
    logprobs = torch.full((4, 2), -1.0, device=DEVICE)
    loss = linear_kl_topk.linear_kl_topk(
        x, weight, ids, logprobs, implementation=implementation
    ).loss
    (grad,) = torch.autograd.grad(loss.sum(), x)
    assert loss.isnan().tolist() == [True, False, True, True]
    assert grad[:, 0].isnan().tolist() == [True, False, True, True]
    with pytest.raises(ValueError, match="k at least 1"):
        linear_kl_topk.linear_kl_topk(x, weight, ids[:2], logprobs, implementation=implementation)


@pytest.mark.gpu
class TestOnGpu:
    """bf16 at sizes and with settings as in training."""

    @pytest.fixture(autouse=True)
    def real_settings(self, monkeypatch):
        monkeypatch.undo()

    def test_bf16_error_is_flat_in_acceptance(self):
        assert_error_is_flat_in_acceptance(256, 1024, 32_001)

    def test_repeats_are_bitwise_equal(self):
        x, weight, teacher, labels, _ = problem(700, 512, 20_011, dtype=torch.bfloat16)
        logprobs, ids = torch.log_softmax((teacher @ weight.T).float(), dim=1).topk(64)
        x.requires_grad_()
        first = None
        for _ in range(100):
            kl = linear_kl(x, weight, teacher, labels=labels, chunk_rows=256, **MIX)
            topk = linear_kl_topk.linear_kl_topk(x, weight, ids, logprobs, chunk_rows=256)
            grads = [torch.autograd.grad(r.loss.sum(), x)[0] for r in (kl, topk)]
            values = (*kl, *topk, *grads)
            first = first or values
            assert all(torch.equal(a, b) for a, b in zip(first, values, strict=True))

    @pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
    def test_ragged_steps_compile_and_wait_for_nothing(self, monkeypatch):
        x, weight, teacher, labels, _ = problem(1500, 512, 20_011, dtype=torch.bfloat16)
        logprobs, ids = torch.log_softmax((teacher @ weight.T).float(), dim=1).topk(64)

        def losses(x, labels, teacher, ids, logprobs):
            kl = linear_kl(x, weight, teacher, labels=labels, chunk_rows=512, **MIX)
            topk = linear_kl_topk.linear_kl_topk(x, weight, ids, logprobs, chunk_rows=512)
            return kl.loss + topk.loss

        head_rows.warm_up_loss(
            lambda x, labels: losses(x, labels, x.detach(), ids[: len(x)], logprobs[: len(x)]),
            weight,
            chunk_rows=512,
        )
        compiled = []
        monkeypatch.setattr(
            triton.knobs.runtime, "jit_post_compile_hook", lambda **kwargs: compiled.append(kwargs)
        )
        torch.cuda.set_sync_debug_mode("error")
        try:
            for step in range(100):
                part = slice(step % 13, step % 13 + 1 + step * 14)
                rows = x[part].detach().requires_grad_()
                losses(
                    rows, labels[part], teacher[part], ids[part], logprobs[part]
                ).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not compiled

    def test_topk_bf16(self):
        x, weight, teacher, _, upstream = problem(256, 1024, 32_001, dtype=torch.bfloat16, scale=3)
        logprobs, ids = torch.log_softmax((teacher @ weight.T).double(), dim=1).topk(64)
        _, _, grad, exact = topk_both(x, weight, ids, logprobs, upstream, implementation=None)
        assert (grad.double() - exact).norm() < 0.005 * exact.norm()
