"""The losses against hand-computed values, other implementations, and what the formulas imply."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import ot
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradeloom.schemas.retriever import LossTerm
from gradeloom.tasks.train.in_batch import own_lists
from gradeloom.tasks.train.losses import (
    aligned,
    expanded,
    gaussian_wasserstein,
    infonce,
    kl,
    ordinal,
    softmax,
    targets,
    weighted_loss,
)

Loss = Callable[..., Tensor]
LOSSES: tuple[Loss, ...] = (gaussian_wasserstein, aligned, ordinal, kl, infonce)
GRADES = torch.tensor([3.0, 2.0, 1.0, 0.0], dtype=torch.float64)


def logits(queries: int, passages: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(queries, passages, generator=generator, dtype=torch.float64)


def graded(queries: int) -> Tensor:
    """Labels (B, 4)."""
    return GRADES.repeat(queries, 1)


def distributions(z: Tensor, labels: Tensor) -> tuple[np.ndarray, np.ndarray]:
    return (
        torch.softmax(z, 1).numpy(),
        torch.softmax(expanded(labels, z.shape[1]), 1).numpy(),
    )


def by_optimal_transport(z: Tensor, labels: Tensor, monkeypatch: pytest.MonkeyPatch) -> float:
    """Squared W2 by POT; its matrix roots want covariances of full rank, hence a ridge of 1e-12.

    Rounding can still bring an eigenvalue to -1e-18, of which POT takes the root; that is 0 here.
    """

    def root(a: np.ndarray) -> np.ndarray:
        values, vectors = np.linalg.eigh(a)
        return (vectors * np.sqrt(values.clip(0))) @ vectors.T

    monkeypatch.setattr(ot.backend.NumpyBackend, "sqrtm", lambda _, a: root(a))
    p, q = distributions(z, labels)
    ridge = 1e-12 * np.eye(z.shape[1])
    distance = ot.gaussian.bures_wasserstein_distance(
        p.mean(0), q.mean(0), np.cov(p, rowvar=False) + ridge, np.cov(q, rowvar=False) + ridge
    )
    return float(distance) ** 2


def by_covariances(z: Tensor, labels: Tensor) -> float:
    """Squared W2 without any matrix root: tr (Cov P Cov Q)^(1/2) is the sum of the roots of the N x N
    product's eigenvalues, which are real and not negative."""
    p, q = distributions(z, labels)
    cov_p, cov_q = np.cov(p, rowvar=False), np.cov(q, rowvar=False)
    roots = np.sqrt(scipy.linalg.eigvals(cov_p @ cov_q).real.clip(0)).sum()
    mean = np.square(p.mean(0) - q.mean(0)).sum()
    return float(mean + np.trace(cov_p) + np.trace(cov_q) - 2 * roots)


def by_eigenvalues(z: Tensor, labels: Tensor) -> float:
    """As the reference computes it: complex eigenvalues of A A^T, 1e-15 under the root."""
    p, q = (torch.from_numpy(x) for x in distributions(z, labels))
    pc, qc, n = p - p.mean(0), q - q.mean(0), len(p) - 1
    a = pc @ qc.T / n
    roots = torch.linalg.eigvals(a @ a.T).add(1e-15).sqrt().real.sum()
    mean = (p.mean(0) - q.mean(0)).square().sum()
    return float(mean + pc.square().sum() / n + qc.square().sum() / n - 2 * roots)


# --- values -------------------------------------------------------------------------------------


def test_gaussian_by_hand() -> None:
    """Two queries, one passage each: p rows (a, 1-a) and (1-a, a), q rows (b, 1-b) and (1-b, b).

    The means are equal; Pc has rows +-(a - 1/2)(1, -1), so tr Cov P = 4 (a - 1/2)^2, the nuclear norm is
    4 |a - 1/2| |b - 1/2|, and L = 4 (|a - 1/2| - |b - 1/2|)^2.
    """
    z = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    labels = torch.tensor([[3.0], [3.0]], dtype=torch.float64)
    a, b = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-3))
    assert gaussian_wasserstein(z, labels).item() == pytest.approx(4 * (a - b) ** 2, abs=1e-12)
    # Turned round, the queries find each other's passages: no worse to it, but to `aligned`.
    turned = z.flip(0)
    assert gaussian_wasserstein(turned, labels).item() == pytest.approx(4 * (a - b) ** 2, abs=1e-12)
    assert aligned(turned, labels).item() == pytest.approx(4 * (a + b - 1) ** 2, abs=1e-12)


@pytest.mark.parametrize(("queries", "passages"), [(2, 4), (16, 64)])
def test_gaussian_is_what_optimal_transport_says(
    queries: int, passages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    z = logits(queries, passages)
    labels = GRADES[: passages // queries].repeat(queries, 1)
    found = gaussian_wasserstein(z, labels).item()
    # The ridge moves the root of every zero eigenvalue by up to 1e-6.
    assert found == pytest.approx(by_optimal_transport(z, labels, monkeypatch), abs=3e-5)
    assert found == pytest.approx(by_eigenvalues(z, labels), abs=2e-6)
    assert found == pytest.approx(by_covariances(z, labels), abs=2e-6)


def test_one_query_is_the_squared_distance() -> None:
    z = logits(1, 4)
    p, q = distributions(z, graded(1))
    assert gaussian_wasserstein(z, graded(1)).item() == pytest.approx(float(((p - q) ** 2).sum()), abs=1e-12)


def test_ordinal_by_hand() -> None:
    """Grades 3, 2, 1, 0, uniform p, tau = 1, r = 1: sum over j of |j/4 - sum of the j smallest q| = 0.993."""
    z = torch.zeros(1, 4, dtype=torch.float64)
    q = torch.softmax(GRADES, 0).flip(0).cumsum(0)
    expected = sum(abs((j + 1) / 4 - q[j].item()) for j in range(3))
    assert expected == pytest.approx(0.993, abs=5e-4)
    assert ordinal(z, graded(1), power=1.0).item() == pytest.approx(expected, abs=1e-12)


def test_ordinal_is_of_the_own_list_or_of_the_whole_batch() -> None:
    """B = 2, K = 2, labels 1, 0, all logits equal, r = 1. Own list: p = (1/2, 1/2), q = (e, 1) / (e + 1), one
    gap of 1, so |1/2 - 1 / (e + 1)|. Whole batch: three passages of grade 0, so |3/4 - 3 / (e + 3)|.
    """
    z, labels = torch.zeros(2, 4, dtype=torch.float64), torch.tensor([[1.0, 0.0]] * 2, dtype=torch.float64)
    own = ordinal(z, labels, power=1.0).item()
    assert own == pytest.approx(1 / 2 - 1 / (math.e + 1), abs=1e-12)
    whole = ordinal(z, labels, power=1.0, whole_batch=True).item()
    assert whole == pytest.approx(3 / 4 - 3 / (math.e + 3), abs=1e-12)
    assert ordinal(z, expanded(labels, 4), power=1.0).item() == pytest.approx(whole, abs=1e-12)


def test_ordinal_with_real_valued_grades() -> None:
    """Grades 2.5, 0.5, 0, uniform p: r-th powers of what q lacks below each gap, times gaps of .5 and 2."""
    grades = torch.tensor([[2.5, 0.5, 0.0]], dtype=torch.float64)
    q = torch.softmax(grades, 1)[0]
    expected = (1 / 3 - q[2]) ** 2 * 0.5 + (2 / 3 - q[2] - q[1]) ** 2 * 2
    assert ordinal(torch.zeros_like(grades), grades).item() == pytest.approx(expected.item(), abs=1e-12)


def test_ties_have_no_order() -> None:
    labels = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64)
    one = torch.tensor([[2.0, 0.0, 1.0]], dtype=torch.float64)
    other = one[:, [1, 0, 2]]
    assert ordinal(one, labels).item() == pytest.approx(ordinal(other, labels).item(), abs=1e-15)


def test_kl_by_hand() -> None:
    q = torch.softmax(GRADES, 0)
    expected = (q * (q.log() - math.log(1 / 4))).sum().item()
    assert kl(torch.zeros(1, 4), graded(1)).item() == pytest.approx(expected, abs=1e-6)


def test_kl_has_the_gradient_of_the_cross_entropy() -> None:
    z = logits(3, 12).requires_grad_()
    kl(z, graded(3), 0.5).backward()  # type: ignore[no-untyped-call]
    q = torch.softmax(expanded(graded(3), 12), 1)
    p = torch.softmax(z.detach() / 0.5, 1)
    assert z.grad is not None
    assert torch.allclose(z.grad, (p - q) / 0.5 / 3, atol=1e-12)


def test_infonce_by_hand() -> None:
    """Two queries of a positive and a negative: each against the three others."""
    z = torch.tensor([[1.0, 0.0, 0.5, 0.0], [0.0, 0.0, 2.0, 1.0]], dtype=torch.float64)
    labels = torch.tensor([[3.0, 0.0], [2.0, 1.0]], dtype=torch.float64)
    e = math.exp
    first = -math.log(e(1) / (e(1) + e(0) + e(0.5) + e(0)))
    second = -math.log(e(2) / (e(2) + e(0) + e(0) + e(1)))
    assert infonce(z, labels).item() == pytest.approx((first + second) / 2, abs=1e-12)


def test_infonce_positives_do_not_compete() -> None:
    """Grades 3 and 2 are positives: each against 1 and 0 alone. `top` takes 3 alone, against all."""
    z = torch.zeros(1, 4, dtype=torch.float64)
    assert infonce(z, graded(1)).item() == pytest.approx(math.log(3), abs=1e-12)
    assert infonce(z, graded(1), positives="top").item() == pytest.approx(math.log(4), abs=1e-12)


def test_infonce_without_positives_is_zero() -> None:
    z = logits(2, 4).requires_grad_()
    loss = infonce(z, torch.zeros(2, 2))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0
    assert z.grad is not None
    assert z.grad.abs().max() == 0


# --- what follows from the formula --------------------------------------------------------------


def test_swapped_rows_are_the_same_to_gaussian() -> None:
    """Four queries that give their targets exactly: L = 0, and L = 0 still where every query is scored with
    another one's list; `aligned` goes from 0 to 0.583 at B = 4, labels 3, 2, 1, 0."""
    exact = expanded(graded(4), 16)
    swapped = exact.roll(1, 0)
    assert gaussian_wasserstein(exact, graded(4)).item() == pytest.approx(0, abs=1e-12)
    assert gaussian_wasserstein(swapped, graded(4)).item() == pytest.approx(0, abs=1e-12)
    assert aligned(exact, graded(4)).item() == pytest.approx(0, abs=1e-12)
    p, q = distributions(swapped, graded(4))
    assert aligned(swapped, graded(4)).item() == pytest.approx(((p - q) ** 2).sum() / 3, abs=1e-12)
    assert aligned(swapped, graded(4)).item() == pytest.approx(0.583, abs=5e-4)


@pytest.mark.parametrize(("batch", "mass"), [(16, 0.220), (64, 0.071), (256, 0.019)])
def test_targets_depend_on_the_batch(batch: int, mass: float) -> None:
    """Level 3 of labels 3, 2, 1, 0 gets .22 of the mass at B = 16, .071 at B = 64 and .019 at B = 256; with
    label temperature .4 it gets .89 at B = 16; `target_mass` gives what is asked for at any B."""
    labels = expanded(graded(batch), 4 * batch)
    mask = torch.ones_like(labels, dtype=torch.bool)
    assert targets(labels, mask)[0, 0].item() == pytest.approx(mass, abs=5e-4)
    top = targets(labels, mask, target_mass=0.6).gather(1, torch.arange(batch)[:, None] * 4)
    assert top.flatten().tolist() == pytest.approx([0.6] * batch, abs=1e-6)
    if batch == 16:
        assert targets(labels, mask, 0.4)[0, 0].item() == pytest.approx(0.89, abs=5e-3)


@given(
    st.lists(st.lists(st.floats(-1, 4), min_size=1, max_size=6), min_size=1, max_size=4),
    st.floats(0.05, 0.95),
)
@settings(max_examples=60, deadline=None)
def test_the_highest_grade_gets_the_target_mass(lists: list[list[float]], mass: float) -> None:
    """Whatever the grades; unless it has more even where all targets are equal."""
    labels = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(one, dtype=torch.float64).mul(100).round() / 100 for one in lists],
        batch_first=True, padding_value=math.nan,
    )  # fmt: skip
    mask = ~labels.isnan()
    q = targets(labels.nan_to_num(), mask, target_mass=mass)
    for one, row, there in zip(labels, q, mask, strict=True):
        top = one[there] == one[there].max()
        found, least = row[there][top].sum().item(), top.double().mean().item()
        assert found == pytest.approx(max(mass, least), abs=1e-5)
        assert row.sum().item() == pytest.approx(1, abs=1e-12)


@given(st.integers(2, 6), st.integers(1, 4), st.integers(0, 2**16))
@settings(max_examples=30, deadline=None)
def test_gaussian_is_never_above_aligned(queries: int, width: int, seed: int) -> None:
    z = 3 * logits(queries, queries * width, seed)
    labels = GRADES[:width].repeat(queries, 1)
    free, held = gaussian_wasserstein(z, labels).item(), aligned(z, labels).item()
    assert -1e-12 <= free <= held + 1e-12


@given(st.integers(1, 5), st.integers(2, 4), st.integers(0, 2**16))
@settings(max_examples=20, deadline=None)
def test_the_order_of_passages_does_not_matter(queries: int, width: int, seed: int) -> None:
    z, labels = (
        logits(queries, queries * width, seed),
        expanded(GRADES[:width].repeat(queries, 1), queries * width),
    )
    order = torch.randperm(queries * width, generator=torch.Generator().manual_seed(seed))
    for loss in LOSSES:
        assert loss(z[:, order], labels[:, order]).item() == pytest.approx(loss(z, labels).item(), abs=1e-9)


# --- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("queries", "passages"), [(1, 4), (3, 12)])
def test_gradients_are_right(loss: Loss, queries: int, passages: int) -> None:
    z = logits(queries, passages).requires_grad_()
    labels = graded(queries)
    assert torch.autograd.gradcheck(lambda x: loss(x, labels, 0.7), (z,))


def test_gradients_of_ragged_weighted_losses_are_right() -> None:
    z = logits(3, 12).requires_grad_()
    labels = graded(3)
    labels[0, 2:] = math.nan
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[1, 8:] = False
    terms = [
        LossTerm(kind=kind, in_batch=inside, target_mass=0.6, temperature=0.5)
        for kind in ("gaussian", "aligned", "ordinal", "kl", "infonce")
        for inside in ("zero", "masked")
    ]
    assert torch.autograd.gradcheck(lambda x: weighted_loss(x, labels, terms, mask), (z,))


@pytest.mark.parametrize("different", [3, 63])
def test_repeated_rows_add_no_noise(different: int) -> None:
    """64 queries with few different rows of P: A has singular values of 0. Float32 gives the gradient of
    float64; with A in float32 it would be off by up to a tenth, by rounding above the threshold of 1e-7."""
    z = logits(different, 256)[torch.arange(64) % different].float()
    gradients = []
    for dtype in (torch.float32, torch.float64):
        x = z.detach().to(dtype, copy=True).requires_grad_()
        gaussian_wasserstein(x, graded(64), 1.0, 0.4).backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        gradients.append(x.grad.double())
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[1].norm()


def test_zero_variance_has_the_gradient_of_the_means() -> None:
    """All rows of P equal: Pc = 0, whatever rotation; what is left of the gradient is that of `aligned`
    without its cross term. Here by difference: the loss is |mean P - mean Q|^2 + tr Cov P + tr Cov Q."""
    x = logits(1, 16).repeat(4, 1).requires_grad_()
    gaussian_wasserstein(x, graded(4)).backward()  # type: ignore[no-untyped-call]
    y = x.detach().clone().requires_grad_()
    q = torch.softmax(expanded(graded(4), 16), 1)
    (torch.softmax(y, 1).mean(0) - q.mean(0)).square().sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert torch.allclose(x.grad, y.grad, atol=1e-12)


def test_mixed_precision_does_not_reach_the_losses() -> None:
    z = logits(4, 16).float()
    plain = gaussian_wasserstein(z, graded(4)).item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gaussian_wasserstein(z, graded(4)).item() == plain


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_that_is_no_number_is_returned_as_such(loss: Loss) -> None:
    z = logits(2, 8)
    z[0, 0] = math.nan
    assert math.isnan(loss(z, graded(2)).item())


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["one query", "repeated rows", "no variance", "all masked", "huge"])
def test_gradients_are_finite(loss: Loss, dtype: torch.dtype, case: str) -> None:
    z, labels = logits(4, 16).to(dtype), graded(4)
    mask = torch.ones(4, 16, dtype=torch.bool)
    if case == "one query":
        z, labels, mask = z[:1, :4], labels[:1], mask[:1, :4]
    elif case == "repeated rows":
        z = z[:1].repeat(4, 1)
    elif case == "no variance":
        z, labels = torch.zeros(4, 16, dtype=dtype), torch.zeros(4, 4)
    elif case == "all masked":
        mask[2] = False
    else:
        z = z * 1e4
    z = z.detach().requires_grad_()
    value = loss(z, labels, mask=mask)
    value.backward()  # type: ignore[no-untyped-call]
    assert value.dtype == torch.float32
    assert math.isfinite(value.item())
    assert z.grad is not None
    assert z.grad.isfinite().all()


# --- masks, ragged lists, options ---------------------------------------------------------------


def test_an_absent_passage_is_as_if_it_were_not_there() -> None:
    z, nan = logits(1, 4), math.nan
    labels = torch.tensor([[3.0, nan, 1.0, 0.0]], dtype=torch.float64)
    there = torch.tensor([0, 2, 3])
    for loss in LOSSES:
        left = loss(z[:, there], labels[:, there]).item()
        assert loss(z, labels).item() == pytest.approx(left, abs=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
def test_an_absent_passage_takes_part_for_no_query(loss: Loss) -> None:
    """Of labels (B, K): it is no other query's passage either, whatever its logits are."""
    z, labels = logits(3, 6), GRADES[:2].repeat(3, 1)
    labels[1, 0] = math.nan
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[:, 2] = False
    expected = loss(z, GRADES[:2].repeat(3, 1), mask=mask).item()
    z[:, 2] = math.nan
    x = z.requires_grad_()
    found = loss(x, labels)
    found.backward()
    assert found.item() == pytest.approx(expected, abs=1e-12)
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert x.grad[:, 2].abs().max() == 0


@pytest.mark.parametrize("loss", LOSSES)
def test_a_query_without_passages_counts_for_nothing(loss: Loss) -> None:
    z, labels = logits(3, 6), GRADES[:2].repeat(3, 1)
    labels[2] = math.nan
    assert loss(z, labels).item() == pytest.approx(loss(z[:2, :4], labels[:2]).item(), abs=1e-12)
    assert loss(z, torch.full_like(labels, math.nan)).item() == 0


def test_masked_softmax() -> None:
    mask = torch.tensor([[True, False, True], [False, False, False]])
    found = softmax(torch.tensor([[0.0, 9.0, 0.0], [1.0, 2.0, 3.0]]), mask)
    assert found.tolist() == [[0.5, 0.0, 0.5], [0.0, 0.0, 0.0]]


def test_labels_that_fit_neither_way() -> None:
    with pytest.raises(ValueError, match=r"labels \(2, 3\) for 8 passages: expected \(2, 8\)"):
        gaussian_wasserstein(logits(2, 8), torch.zeros(2, 3))


def test_masks_and_powers_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"mask \(2, 2\) for logits \(2, 4\)"):
        kl(logits(2, 4), GRADES[:2].repeat(2, 1), mask=torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"power 0.5: expected 1 or more"):
        ordinal(logits(2, 4), GRADES[:2].repeat(2, 1), power=0.5)
    with pytest.raises(ValueError, match="5 passages for 2 queries"):
        weighted_loss(logits(2, 5), torch.zeros(2, 5), [LossTerm()])


def test_nothing_of_grade_0_is_a_positive() -> None:
    """Other queries' passages are 0, too."""
    z, labels = logits(2, 4), torch.tensor([[0.0, -1.0], [1.0, 0.0]])
    only = infonce(z[1:], torch.tensor([[0.0, 0.0, 1.0, 0.0]]), positive_grade=1.0).item()
    assert infonce(z, labels, positives="top").item() == pytest.approx(only, abs=1e-12)
    assert infonce(z, labels, positive_grade=-1.0).item() == pytest.approx(only, abs=1e-12)


def test_terms_are_summed_with_their_weights_and_settings() -> None:
    z, labels = logits(3, 12), graded(3)
    own = own_lists(3, 12)
    terms = [
        LossTerm(kind="gaussian", weight=2, temperature=0.5, label_temperature=1),
        LossTerm(kind="ordinal", power=1, label_temperature=1),
        LossTerm(kind="kl", in_batch="masked", label_temperature=0.3),
        LossTerm(kind="infonce", positives="top", temperature=0.1),
    ]
    expected = (
        2 * gaussian_wasserstein(z, labels, 0.5)
        + ordinal(z, labels, 0.05, mask=own, power=1.0)  # its own list, by default
        + kl(z, labels, 0.05, 0.3, mask=own)
        + infonce(z, labels, 0.1, positives="top")
    )
    assert weighted_loss(z, labels, terms).item() == pytest.approx(expected.item(), abs=1e-9)
    dot = weighted_loss(z, labels, [LossTerm(kind="aligned")], normalised=False)
    assert dot.item() == pytest.approx(aligned(z, labels, 1.0, LossTerm().label_temperature).item(), abs=1e-9)
