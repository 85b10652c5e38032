"""The gradient of a step: the same under any split, and what it learns."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dflash_offline.common.topk import TopK
from dflash_offline.kernels.reference_loss import head_logits
from dflash_offline.train.loop import train_step
from dflash_offline.train.loss_spec import DECAY, DPACE, parse_loss
from dflash_offline.train.noise import noise_key, row_keys
from dflash_offline.train.objective import Objective, dpace_weights, objective_of
from dflash_offline.train.optimizer import Optimizer
from dflash_offline.train.phase_clock import PhaseClock
from dflash_offline.train.step import accumulate, run_pass
from dflash_offline.train.stream import assemble, cut_into_passes

VOCAB = 53  # of the toy


def gradients(
    toy, groups, objective, *, with_final: bool | None = None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the normalised gradient of groups of documents, one pass each, and the sums."""
    toy.drafter.zero_grad()
    if with_final is None:
        with_final = objective.needs_teacher
    options = toy.options(with_final=with_final)
    passes = [assemble(group, options) for group in groups]
    totals = accumulate(toy.drafter, toy.head, objective, passes)
    named = toy.drafter.named_parameters()
    return {name: p.grad / totals[1].to(toy.dtype) for name, p in named}, totals


def assert_same(first, second, tolerance):
    assert first.keys() == second.keys()
    for name, value in first.items():
        error = (second[name] - value).norm() / value.norm()
        assert error < tolerance, f"{name}: {error:.1e}"


def with_final(document, seed: int):
    """Give a document the target's final states."""
    generator = torch.Generator().manual_seed(seed)
    length = len(document.anchored.tokens)
    final = torch.randn(length, 32, generator=generator).bfloat16()
    return dataclasses.replace(document, final=final)


@pytest.mark.parametrize(
    ("loss", "labels"),
    [
        ("decay", "data"),
        ("dpace", "data"),
        ("dpace", "teacher"),
        ("kl", "data"),
        ("rkl=0.5,tv=0.5,ce=0.1", "teacher"),
        ("dpace=0.3,kl=0.9,ce=0.1", "data"),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["fp64", "fp32"]
)
@pytest.mark.parametrize("layout", ["1+N", "anchor-first"])
def test_gradient_does_not_depend_on_the_split(toy_maker, loss, labels, dtype, tolerance, layout):
    toy = toy_maker(dtype, sample_from_anchor=layout == "anchor-first")
    documents = [with_final(toy.document(n, seed=n), n) for n in (19, 9, 24, 6)]
    objective = objective_of(parse_loss(loss), labels=labels, block_size=4)
    whole, totals = gradients(toy, [documents], objective)
    splits = {
        "one pass a document": [[each] for each in documents],
        "two packs": [documents[:3], documents[3:]],
        "another order": [list(reversed(documents))],
        "passes of 48 rows": list(cut_into_passes(documents, toy.layout, 48)),
        "passes of 5 anchors": list(cut_into_passes(documents, toy.layout, 20)),
        "one anchor a pass": list(cut_into_passes(documents, toy.layout, 4)),
    }
    assert len(splits["passes of 48 rows"]) == 4
    assert len(splits["one anchor a pass"]) == int(totals[2])
    assert len(list(cut_into_passes(documents[1::2], toy.layout, 28))) == 1, "a pass of 7 anchors"
    for name, groups in splits.items():
        split, split_totals = gradients(toy, groups, objective)
        torch.testing.assert_close(split_totals, totals, rtol=tolerance, atol=0, msg=name)
        assert_same(whole, split, tolerance)


def test_gradient_in_bfloat16_does_not_depend_on_the_split(toy_maker):
    """Rows are rounded, each by itself; what is summed over rows is fp32, for every parameter."""
    toy = toy_maker(torch.float32)
    for parameter in toy.drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)
    head = toy.head.to("cpu", torch.bfloat16)
    documents = [toy.document(n, seed=n) for n in (19, 9, 24, 6)]
    found = []
    for groups in ([documents], [[each] for each in documents]):
        for parameter in toy.drafter.parameters():
            parameter.grad.zero_()
        passes = [assemble(group, toy.options()) for group in groups]
        accumulate(toy.drafter, head, Objective(loss=DECAY, gamma=2.0), passes)
        found.append({name: p.grad.clone() for name, p in toy.drafter.named_parameters()})
    # A gradient in bfloat16 would be 2e-3 off.
    assert_same(*found, 1e-5)


def test_accumulation_adds_ranks_and_parts(toy_maker):
    # What two ranks hold, and what two parts of an accumulation window leave, adds up.
    toy = toy_maker()
    documents = [toy.document(n, seed=n) for n in (12, 17, 8)]
    objective = Objective(loss=DPACE, gamma=2.0)
    whole, totals = gradients(toy, [documents], objective)
    parts = [gradients(toy, [part], objective) for part in (documents[:1], documents[1:])]
    joined = {
        name: sum(grads[name] * sums[1] for grads, sums in parts) / totals[1] for name in whole
    }
    assert_same(whole, joined, 1e-12)
    assert not totals.requires_grad


def test_a_step_divides_by_its_weights_and_leaves_none_of_what_is_not_finite(toy_maker):
    toy = toy_maker()
    document = toy.document(20)
    objective = Objective(loss=DPACE, gamma=2.0)
    gradient, totals = gradients(toy, [[document]], objective)
    length = torch.linalg.vector_norm(torch.cat([each.flatten() for each in gradient.values()]))
    optimizer = Optimizer(toy.drafter, weight_decay=0.0, betas=(0.9, 0.95))
    setup = SimpleNamespace(
        drafter=toy.drafter,
        head=toy.head,
        objective=objective,
        sharding=None,
        config=SimpleNamespace(clip=1.0),
    )

    def step(given) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        passes = SimpleNamespace(passes=[given])
        return train_step(setup, optimizer, passes, lr=0.0, clock=PhaseClock(torch.device("cpu")))

    given = toy.given([document])
    for _ in range(2):
        sums, norm, skipped = step(given)
        torch.testing.assert_close(sums, totals)
        torch.testing.assert_close(norm, length)
        assert skipped == 0
    sums, norm, skipped = step(
        dataclasses.replace(given, features=torch.full_like(given.features, float("nan")))
    )
    assert skipped == 1
    assert norm.isnan()
    assert not sums.any()


def test_local_denominators_would_differ(toy_maker):
    # The guard of the tests above: a mean of means is another gradient.
    toy = toy_maker()
    documents = [toy.document(n, seed=n) for n in (12, 40)]
    objective = Objective(loss=DECAY, gamma=2.0)
    whole, _ = gradients(toy, [documents], objective)
    parts = [gradients(toy, [[each]], objective)[0] for each in documents]
    name = "fc.weight"
    mean = (parts[0][name] + parts[1][name]) / 2
    assert (mean - whole[name]).norm() / whole[name].norm() > 1e-2


def test_noise_does_not_depend_on_the_split(toy_maker):
    toy = toy_maker()
    documents = []
    for n in (19, 9, 24):
        document = toy.document(n, seed=n)
        key = noise_key(seed=1, epoch=2, occurrence=0, sample_id=str(n))
        anchored = dataclasses.replace(document.anchored, noise_key=key)
        documents.append(dataclasses.replace(document, anchored=anchored))
    keys = [row_keys(each.anchored.noise_key, each.anchored.num_context) for each in documents]
    assert toy.given(documents).tables.noise_keys.tolist() == np.concatenate(keys).tolist()
    objective = Objective(loss=DECAY, gamma=2.0, noise=0.3)
    whole, totals = gradients(toy, [documents], objective)
    for groups in ([documents[2:], documents[:2]], list(cut_into_passes(documents, toy.layout, 8))):
        split, split_totals = gradients(toy, groups, objective)
        torch.testing.assert_close(split_totals, totals, rtol=1e-10, atol=0)
        assert_same(whole, split, 1e-10)
    silent, _ = gradients(toy, [documents], dataclasses.replace(objective, noise=0.0))
    assert (silent["fc.weight"] - whole["fc.weight"]).norm() > 0.01 * whole["fc.weight"].norm()


def test_noise_is_another_one_each_time():
    names = {"seed": 1, "epoch": 0, "occurrence": 0, "sample_id": "a"}
    first = row_keys(noise_key(**names), 9)
    assert len(set(first.tolist())) == 9
    for name, value in (("seed", 2), ("epoch", 1), ("occurrence", 1), ("sample_id", "b")):
        assert not set(first) & set(row_keys(noise_key(**names | {name: value}), 9))
    assert row_keys(noise_key(**names), 5).tolist() == first[:5].tolist()


def test_loss_equals_the_written_sum(toy_maker):
    toy = toy_maker()
    document = toy.document(12, prompt=4)
    given = toy.given([document])
    sums = run_pass(toy.drafter, toy.head, Objective(loss=DECAY, gamma=2.0), given)
    tables = given.tables
    hidden = toy.drafter(given.features, toy.head.embeddings(tables.block_tokens), tables)
    logs = (hidden @ toy.head.weight.T).log_softmax(-1).view(-1, 4, toy.head.weight.shape[0])
    loss = weight = accepted = 0.0
    for row, anchor in enumerate(document.anchored.anchors):
        right = True
        for slot in (1, 2, 3):
            if anchor + slot >= 12:
                break
            label = int(document.anchored.tokens[anchor + slot])
            factor = torch.exp(torch.tensor(-(slot - 1) / 2.0, dtype=torch.float64))
            loss -= factor * logs[row, slot, label]
            weight += factor
            right = right and int(logs[row, slot].argmax()) == label
            accepted += right
    torch.testing.assert_close(sums.loss, loss)
    torch.testing.assert_close(sums.weight, weight)
    assert int(sums.accepted.sum()) == accepted


def test_target_scales_reach_embeddings_and_logits(toy_maker):
    toy = toy_maker()
    given = toy.given([toy.document(12)])
    objective = Objective(loss=DECAY, gamma=2.0)
    scaled = dataclasses.replace(toy.head, logit_scale=0.25, softcap=3.0, embedding_scale=2.0)
    sums = run_pass(toy.drafter, scaled, objective, given)
    rows, labels = given.tables.label_rows, given.tables.labels[given.tables.label_rows]
    embeddings = 2.0 * toy.head.embed[given.tables.block_tokens]
    hidden = toy.drafter(given.features, embeddings, given.tables)[rows]
    logits = 3.0 * torch.tanh(0.25 * hidden @ toy.head.weight.T / 3.0)
    nll = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    weights = torch.exp(-((rows % 4) - 1).double() / 2.0)
    torch.testing.assert_close(sums.loss, (weights * nll).sum())


def test_teacher_labels_are_the_targets_best_tokens(toy_maker):
    toy = toy_maker()
    document = toy.document(14, prompt=4)
    document = with_final(document, 1)
    final = document.final
    given = toy.given([document], with_final=True)
    best = (final.double() @ toy.head.weight.T).argmax(-1)
    # The token at position p is what the head says of the state at p - 1.
    expected = [
        int(best[anchor + slot - 1])
        for anchor in document.anchored.anchors
        for slot in (1, 2, 3)
        if anchor + slot < 14
    ]
    assert toy.head.best_tokens(given.final).tolist() == expected
    objective = Objective(loss=DECAY, gamma=2.0)
    with_teacher = run_pass(
        toy.drafter, toy.head, dataclasses.replace(objective, teacher_labels=True), given
    )
    from_data = run_pass(toy.drafter, toy.head, objective, given)
    assert with_teacher.weight == from_data.weight
    assert with_teacher.loss != from_data.loss


def test_divergences_equal_the_written_sums(toy_maker):
    toy = toy_maker()
    head = dataclasses.replace(toy.head, logit_scale=0.5, softcap=3.0)
    document = with_final(toy.document(12, prompt=4), 2)
    given = toy.given([document], with_final=True)
    spec = parse_loss("decay=2,kl=0.7,rkl=0.2,tv=0.4,ce=0.1")
    sums = {
        labels: run_pass(
            toy.drafter, head, objective_of(spec, labels=labels, block_size=4), given
        ).loss
        for labels in ("data", "teacher")
    }

    def log_probabilities(states):
        logits = 3.0 * torch.tanh(0.5 * states @ head.weight.T / 3.0)
        return logits.log_softmax(-1)

    rows = given.tables.label_rows
    embeddings = head.embeddings(given.tables.block_tokens)
    p = log_probabilities(toy.drafter(given.features, embeddings, given.tables)[rows])
    q = log_probabilities(given.final)
    weights = torch.exp(-((rows % 4) - 1).double() / 2.0)
    divergence = (
        0.7 * (q.exp() * (q - p)).sum(-1)
        + 0.2 * (p.exp() * (p - q)).sum(-1)
        + 0.4 * 0.5 * (p.exp() - q.exp()).abs().sum(-1)
    )
    for labels, ids in (("data", given.tables.labels[rows]), ("teacher", q.argmax(-1))):
        nll = -p.gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(sums[labels], (weights * (divergence + 0.1 * nll)).sum())
        # D-PACE weighs by the label's chance where nothing else asks for a label.
        objective = objective_of(parse_loss("dpace=0.3,kl"), labels=labels, block_size=4)
        grids = torch.zeros(2, given.tables.num_anchors * 4, dtype=nll.dtype)
        grids[:, rows] = torch.stack([nll, (q.exp() * (q - p)).sum(-1)]).detach()
        nll_AP, kl_AP = grids.view(2, -1, 4)[:, :, 1:]
        weights_AP = dpace_weights(nll_AP, given.tables.label_grid(given.tables.labels) >= 0, 0.3)
        found = run_pass(toy.drafter, head, objective, given)
        torch.testing.assert_close(found.weight, weights_AP.sum())
        torch.testing.assert_close(found.loss.detach(), (weights_AP * kl_AP).sum())


def with_best_tokens(toy, document, k: int):
    """Replace a document's final states by the k best tokens that they predict."""
    head = toy.head
    logits = head_logits(
        document.final.double(),
        head.weight.double(),
        logit_scale=head.logit_scale,
        softcap=head.softcap,
    )
    logprobs = logits.log_softmax(-1)
    best, ids = logprobs.topk(k)
    topk = TopK(ids=ids.int().numpy(), logprobs=best.float().numpy())
    anchored = dataclasses.replace(document.anchored, topk=topk)
    return dataclasses.replace(document, final=None, anchored=anchored)


@pytest.mark.parametrize("layout", ["1+N", "anchor-first"])
@pytest.mark.parametrize("labels", ["data", "teacher"])
@pytest.mark.parametrize("loss", ["kl", "dpace,kl=0.9,ce=0.1", "dpace=0.3,kl", "dpace"])
def test_all_of_a_teachers_tokens_are_the_teacher(toy_maker, loss, labels, layout):
    toy = toy_maker(sample_from_anchor=layout == "anchor-first")
    documents = [with_final(toy.document(n, seed=n), n) for n in (19, 9)]
    objective = objective_of(parse_loss(loss), labels=labels, block_size=4)
    whole, totals = gradients(toy, [documents], objective)
    listed = [with_best_tokens(toy, each, VOCAB) for each in documents]
    assert all(each.final is None for each in listed)
    for groups in ([listed], list(cut_into_passes(listed, toy.layout, 8))):
        found, found_totals = gradients(toy, groups, objective, with_final=False)
        # Log-probabilities are kept in single precision.
        torch.testing.assert_close(found_totals, totals, rtol=1e-5, atol=1e-5)
        assert_same(whole, found, 1e-5)
    few = [with_best_tokens(toy, each, 3) for each in documents]
    if "kl" in loss:
        assert gradients(toy, [few], objective, with_final=False)[1][0] < totals[0]


def test_scales_of_the_target_reach_its_best_tokens(toy_maker):
    toy = toy_maker()
    toy.head = dataclasses.replace(toy.head, logit_scale=0.5, softcap=3.0)
    document = with_final(toy.document(12, prompt=4), 2)
    objective = objective_of(parse_loss("kl=0.9,ce=0.1"), labels="data", block_size=4)
    whole, _ = gradients(toy, [[document]], objective)
    listed = with_best_tokens(toy, document, VOCAB)
    found, _ = gradients(toy, [[listed]], objective, with_final=False)
    assert_same(whole, found, 1e-5)


@pytest.mark.parametrize("loss", ["kl", "dpace,kl"])
def test_hits_are_counted_against_the_teachers_best_tokens(toy_maker, loss):
    # Whether or not the loss itself needs labels.
    toy = toy_maker()
    document = with_final(toy.document(20, prompt=4), 3)
    given = toy.given([document], with_final=True)
    objective = objective_of(parse_loss(loss), labels="teacher", block_size=4)
    rows = given.tables.label_rows
    embeddings = toy.head.embeddings(given.tables.block_tokens)
    hidden = toy.drafter(given.features, embeddings, given.tables)[rows].detach()
    # A teacher that the drafter agrees with at every other anchor.
    agrees = rows // 4 % 2 == 0
    given = dataclasses.replace(given, final=torch.where(agrees[:, None], hidden, -hidden))
    sums = run_pass(toy.drafter, toy.head, objective, given)
    first = agrees[rows % 4 == 1]
    assert 0 < first.sum() < len(first)
    assert sums.accepted[0] == first.sum()


def test_a_factor_of_cross_entropy_alone(toy_maker):
    toy = toy_maker()
    given = toy.given([toy.document(20, prompt=4)])
    losses = [
        run_pass(
            toy.drafter,
            toy.head,
            objective_of(parse_loss(text), labels="data", block_size=4),
            given,
        ).loss
        for text in ("ce", "ce=0.25")
    ]
    torch.testing.assert_close(losses[1], 0.25 * losses[0])


def train_on(toy, document, steps: int) -> None:
    optimizer = Optimizer(toy.drafter, weight_decay=0.0, betas=(0.9, 0.95))
    given = assemble([document], toy.options())
    objective = Objective(loss=DECAY, gamma=4.0)
    for _ in range(steps):
        optimizer.zero_grad()
        totals = accumulate(toy.drafter, toy.head, objective, [given])
        optimizer.step(lr=3e-3, weight_sum=totals[1], clip=1.0)


@torch.no_grad()
def accepted_by_decoding(toy, document, *, shift: int) -> list[int]:
    """Decode along a document in blocks and count what agrees, plus one; stops near its end."""
    tokens, size = document.anchored.tokens, toy.layout.block_size
    features = document.features.values.transpose(0, 1).flatten(1).to(toy.dtype)
    cache, done, start, accepted = toy.drafter.new_cache(), 0, 3, []
    while start + size + 1 < len(tokens):
        ids = torch.full((size,), toy.config.mask_token_id)
        ids[0] = int(tokens[start])
        hidden = toy.drafter.draft(cache, features[done:start], toy.head.embeddings(ids), start)
        best = (hidden @ toy.head.weight.T).argmax(-1)[toy.layout.first_slot :].tolist()
        right = 0
        while right < len(best) and best[right] == int(tokens[start + 1 + right + shift]):
            right += 1
        accepted.append(right + 1)
        done, start = start, start + right + 1
    return accepted


@pytest.mark.parametrize("layout", ["1+N", "anchor-first"])
def test_an_overfitted_drafter_accepts_whole_blocks(toy_maker, layout):
    toy = toy_maker(torch.float32, sample_from_anchor=layout == "anchor-first")
    document = toy.document(16, prompt=2, seed=4)
    # No token twice: equal neighbours would hide a shift.
    tokens = np.random.default_rng(4).permutation(52)[:16].astype(np.int32)
    anchored = dataclasses.replace(document.anchored, tokens=tokens)
    document = dataclasses.replace(document, anchored=anchored)
    train_on(toy, document, 80)
    whole = toy.layout.num_predictions + 1
    assert set(accepted_by_decoding(toy, document, shift=0)) == {whole}
    assert set(accepted_by_decoding(toy, document, shift=1)) == {1}
