"""What the approximate loss heads do to training: one small model, a few hundred steps with each.

    python tests/benchmarks/bench_loss_training.py --target DIR_OR_GGUF --text FILE [--text FILE]

The model guesses the next token from the last eight, through the target's own frozen head. Prints
the last training loss, the loss on held-out text by the exact head, and on rows of the exactly
trained model the error of the gradient and the share of tiles kept.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from dflash_offline.common.target import load_target, load_tokenizer
from dflash_offline.kernels.linear_ce import linear_ce
from dflash_offline.kernels.linear_ce_fp8 import linear_ce_fp8, quantize_head
from dflash_offline.kernels.linear_ce_skip import linear_ce_skip, order_head

WINDOW, WIDTH, WARM_UP_STEPS = 8, 2048, 20


class Guesser(nn.Module):
    """Two layers over the embeddings of a window of tokens, and a norm."""

    def __init__(self, embedding: Tensor):
        super().__init__()
        hidden = embedding.shape[1]
        self.embed = nn.Embedding.from_pretrained(embedding / embedding.std(), freeze=True)
        self.inner = nn.Linear(WINDOW * hidden, WIDTH)
        self.outer = nn.Linear(WIDTH, hidden)
        self.norm = nn.RMSNorm(hidden)
        nn.init.constant_(self.norm.weight, 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return [N, H] states of windows [N, 8]."""
        embedded = self.embed(tokens)  # [N, 8, H]
        inner = nn.functional.silu(self.inner(embedded.flatten(1)))
        return self.norm(self.outer(inner) + embedded[:, -1])


def windows_of(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Cut ids [T] into windows of eight and the token after; a tenth of them is held out."""
    windows = ids.unfold(0, WINDOW + 1, 1)
    is_held_out = torch.arange(len(windows), device=ids.device) // 512 % 10 == 0
    return windows[~is_held_out], windows[is_held_out]


def train(loss, windows: Tensor, embedding: Tensor, options, *, seed: int) -> tuple[Guesser, float]:
    torch.manual_seed(seed)
    model = Guesser(embedding).to(windows.device)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=options.lr, weight_decay=0.01
    )
    generator = torch.Generator(windows.device).manual_seed(seed)
    for step in range(options.steps):
        for group in optimizer.param_groups:
            ramp = min(1, (step + 1) / WARM_UP_STEPS)
            group["lr"] = options.lr * ramp * (1 - step / (1.1 * options.steps))
        picked = torch.randint(
            len(windows), (options.rows,), device=windows.device, generator=generator
        )
        rows = windows[picked]
        value = loss(model(rows[:, :WINDOW]), rows[:, WINDOW]).mean()
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        optimizer.step()
    return model, float(value.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="Model whose head and tokenizer are used.")
    parser.add_argument("--text", type=Path, action="append", required=True, help="Text files.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=4096, help="Windows a step.")
    parser.add_argument("--lr", type=float, default=2e-3)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    target = load_target(options.target, dtype=torch.float32, device="cpu", head=True)
    weight = target.head_weight().detach().to(device, dtype)
    tokenizer = load_tokenizer(options.target)
    ids = [i for path in options.text for i in tokenizer(path.read_text()).input_ids]
    windows, held_out = windows_of(torch.tensor(ids, device=device))
    held_out = held_out[:16_384]
    print(f"{len(ids)} tokens, head {tuple(weight.shape)}, {device}")

    counts = torch.bincount(windows[:, WINDOW], minlength=weight.shape[0]).float()
    by_counts = order_head(weight, counts)
    fp8 = quantize_head(weight)
    fp8_logits = fp8._replace(by_channel=None, channel_scale=None)

    def exact(x: Tensor, labels: Tensor) -> Tensor:
        return linear_ce(x.to(dtype), weight, labels).nll

    def skipping(head, mass: float):
        return lambda x, y: linear_ce_skip(x.to(dtype), head, y, max_tile_mass=mass)[0].nll

    losses = {
        "linear_ce": exact,
        "linear_ce, another seed": exact,
        "FP8, both products": lambda x, y: linear_ce_fp8(x.to(dtype), fp8, y).nll,
        "FP8, logits only": lambda x, y: linear_ce_fp8(x.to(dtype), fp8_logits, y).nll,
        "skip 1e-3": skipping(by_counts, 1e-3),
        "skip 3e-3": skipping(by_counts, 3e-3),
    }
    embedding = weight.float()
    for name, loss in losses.items():
        model, last = train(loss, windows, embedding, options, seed=int("seed" in name))
        with torch.no_grad():
            nll = exact(model(held_out[:, :WINDOW]), held_out[:, WINDOW]).mean()
        print(f"{name:26s} last loss {last:.4f}, held-out loss {float(nll):.4f}", flush=True)
        if name == "linear_ce":
            trained = model
    report_errors(trained, windows[: options.rows], weight, losses, by_counts)


def report_errors(model, rows: Tensor, weight: Tensor, losses: dict, by_counts) -> None:
    """Print errors of dX on rows of a trained model, for both orders of the head."""
    states = model(rows[:, :WINDOW]).detach().to(weight.dtype)
    labels = rows[:, WINDOW]
    probabilities = torch.zeros(weight.shape[0], device=weight.device)
    for part in states.split(512):
        probabilities += torch.softmax((part @ weight.T).float(), dim=1).sum(dim=0)

    def gradient(loss) -> Tensor:
        x = states.clone().requires_grad_()
        return torch.autograd.grad(loss(x, labels).sum(), x)[0].float()

    exact = gradient(losses["linear_ce"])
    for name in ("FP8, both products", "FP8, logits only"):
        error = (gradient(losses[name]) - exact).norm() / exact.norm()
        print(f"{name}: gradient error {float(error):.4f}")
    for order, head in (
        ("counts", by_counts),
        ("probabilities", order_head(weight, probabilities)),
    ):
        for mass in (1e-2, 3e-3, 1e-3, 3e-4):
            x = states.clone().requires_grad_()
            result, report = linear_ce_skip(x, head, labels, max_tile_mass=mass)
            (grad,) = torch.autograd.grad(result.nll.sum(), x)
            error = (grad.float() - exact).norm() / exact.norm()
            print(
                f"skip {mass:.0e}, ordered by {order}: keeps {float(report.kept_frac):.3f}, "
                f"gradient error {float(error):.4f}"
            )


if __name__ == "__main__":
    main()
