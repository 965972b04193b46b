"""List-wise losses over graded labels: pure functions, and a sentence-transformers loss over them.

All functions take logits Z (B, N), the scores of B queries against N passages, and labels: (B, N), or
(B, K) with N = B * K, where query i's own passages are the columns i*K .. i*K+K-1 and every other query's
passage has label 0. A mask (B, N) says what takes part. A label that is NaN takes no part: of (B, N) labels
that entry, of (B, K) labels that passage, for any query. A query without anything that takes part counts
for nothing. They return one scalar, in float32 or better.

The sources are "Beyond Contrastive Learning: Synthetic Data Enables List-wise Training with Multiple
Levels of Relevance" (SyCL, EMNLP 2025, arXiv 2503.23239) and what follows from its loss, below.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import CachedLossMixin, has_static_embedding_input
from sentence_transformers.sentence_transformer.modules import Normalize
from sentence_transformers.util import all_gather, get_rank, get_world_size
from torch import Tensor, nn

from gradeloom.schemas.errors import InputError
from gradeloom.schemas.retriever import LossTerm
from gradeloom.tasks.train.in_batch import own_lists, taking_part, text_digests

SMALLEST_SINGULAR = 1e-7
"""Singular values below this share of the largest get zero subgradient."""

# --- the distributions ----------------------------------------------------------------------


def expanded(labels: Tensor, passages: int) -> Tensor:
    """Labels (B, K) as (B, N): own passages on the diagonal blocks, 0 elsewhere. (B, N) stay as they are.

    Raises:
        ValueError: the labels fit neither way.
    """
    queries, width = labels.shape
    if width == passages:
        return labels
    if width * queries != passages:
        raise ValueError(
            f"labels ({queries}, {width}) for {passages} passages: expected ({queries}, {passages}), or "
            f"({queries}, K) with {queries} * K = {passages}"
        )
    own = own_lists(queries, passages, labels.device)
    return labels.repeat(1, queries).masked_fill(~own, 0.0)


def softmax(values: Tensor, mask: Tensor) -> Tensor:
    """Row-wise softmax over what the mask lets in; a row without anything is 0 everywhere."""
    lowest = torch.finfo(values.dtype).min
    inside: Tensor = torch.softmax(values.masked_fill(~mask, lowest), dim=1) * mask
    return inside


def log_softmax(values: Tensor, mask: Tensor) -> Tensor:
    """Its logarithm, and 0 for what the mask leaves out."""
    lowest = torch.finfo(values.dtype).min
    return torch.log_softmax(values.masked_fill(~mask, lowest), dim=1).masked_fill(~mask, 0.0)


def targets(
    labels: Tensor, mask: Tensor, label_temperature: float = 1.0, target_mass: float | None = None
) -> Tensor:
    """Q = row-softmax(labels / tau), (B, N).

    With tau = 1, as published, the mass of a grade depends on the batch: labels 3, 2, 1, 0 and K = 4 give
    level 3 .22 at B = 16, .071 at B = 64 and .019 at B = 256, since every passage of another query takes
    its part.

    Args:
        labels: (B, N), without NaN.
        mask: (B, N).
        label_temperature: tau.
        target_mass: takes tau's place: per row, tau is such that the passages of the highest grade have
            this mass together. Where they have more even with equal targets (tau without bound), those.
    """
    if target_mass is None:
        return softmax(labels / label_temperature, mask)
    gaps = labels.masked_fill(~mask, -torch.inf).amax(1, keepdim=True) - labels
    return softmax(-gaps * _sharpness(gaps, mask, target_mass), mask)


def _sharpness(gaps: Tensor, mask: Tensor, mass: float) -> Tensor:
    """1 / tau >= 0, (B, 1), that gives the n passages of a row's highest grade together this mass.

    With gaps g to the highest grade that is where log sum e^(-g / tau) over the others is
    log (n (1 - mass) / mass). The left side is convex in 1 / tau and falls, so that Newton's steps from 0
    never go too far.
    """
    rest = mask & (gaps > 0)
    count = (mask & (gaps == 0)).sum(1, keepdim=True)
    wanted = (count * (1 - mass) / mass).to(gaps.dtype).log()
    sharpness = torch.zeros_like(wanted)
    for _ in range(100):
        exponents = (-sharpness * gaps).masked_fill(~rest, -torch.inf)
        slope = (softmax(exponents, rest) * gaps.masked_fill(~rest, 0.0)).sum(1, keepdim=True)
        step = (exponents.logsumexp(1, keepdim=True) - wanted) / slope
        step = torch.where(rest.any(1, keepdim=True), step, torch.zeros_like(step))
        before, sharpness = sharpness, (sharpness + step).clamp(min=0)
        if bool(((sharpness - before).abs() <= 1e-6 * sharpness).all()):
            break
    return sharpness


def _prepared(
    logits: Tensor, labels: Tensor, mask: Tensor | None, *, own: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels and mask (B', N), in float32 or better, of the B' queries for which anything takes part.

    Args:
        logits: (B, N).
        labels: (B, N) or (B, K).
        mask: (B, N) or None.
        own: with labels (B, K), only a query's own passages take part.
    """
    queries, passages = logits.shape
    if mask is not None and mask.shape != logits.shape:
        raise ValueError(
            f"mask {tuple(mask.shape)} for logits {tuple(logits.shape)}: expected the same shape"
        )
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = labels.to(logits)
    there = ~labels.isnan()
    if labels.shape[1] != passages:
        labels = expanded(labels, passages)
        there = there.flatten() & there.any(1, keepdim=True)
        if own:
            there = there & own_lists(queries, passages, logits.device)
    if mask is not None:
        there = there & mask.to(there.device, torch.bool)
    logits = logits.masked_fill(~there, 0.0)  # whatever stands there, also NaN
    labels = labels.masked_fill(~there, 0.0)
    rows = there.any(1)
    if bool(rows.all()) or not bool(rows.any()):  # in the latter case every distribution is 0 everywhere
        return logits, labels, there
    return logits[rows], labels[rows], there[rows]


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Mixed precision multiplies matrices in 16 bits; at a temperature of .05 that is an error of .05."""
    return torch.autocast(device.type, enabled=False)


# --- the losses -----------------------------------------------------------------------------


def gaussian_wasserstein(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    label_temperature: float = 1.0,
    mask: Tensor | None = None,
    *,
    target_mass: float | None = None,
) -> Tensor:
    r"""Squared 2-Wasserstein distance between Gaussians fitted to the batch's predictions and targets.

    P = row-softmax(Z / T) and Q = row-softmax(Y / tau), their B rows taken as samples in N dimensions:

        L = |mean P - mean Q|^2 + tr Cov P + tr Cov Q - 2 tr (Cov P . Cov Q)^(1/2)

    with unbiased covariances. The last trace is the nuclear norm of A = Pc Qc^T / (B - 1), Pc and Qc being
    P and Q less their means, so the singular values of a (B, B) matrix are all it takes. With A = U S V^T and
    R = U V^T the gradient with respect to Pc is 2 (Pc - R Qc) / (B - 1); singular values of (nearly) 0 add
    nothing to R.

    It follows that L = |mean P - mean Q|^2 + min over orthogonal R of |Pc - R Qc|^2 / (B - 1): the match is
    up to a rotation *across queries*, and rows of P that change places leave L as it is (for B = 4 scored
    perfectly, L is 0 before and after). The loss needs a retriever that knows right lists from wrong ones
    already. `aligned` is the same with R = identity. B = 1 gives |p - q|^2.

    Source: SyCL (arXiv 2503.23239), section 3; the reference takes eigenvalues of A A^T instead.

    Args:
        logits: Z (B, N).
        labels: Y (B, N) or (B, K).
        temperature: T, of the predictions.
        label_temperature: tau, of the targets; 1 as published.
        mask: (B, N), what takes part.
        target_mass: see `targets`.

    Returns:
        A scalar >= 0 (up to rounding), with finite gradients for every B >= 1.
    """
    p, q = _distributions(logits, labels, temperature, label_temperature, mask, target_mass)
    # In float32 the singular values of repeated rows come out above 1e-7 of the largest, and what belongs to
    # them is noise: a tenth of the gradient at B = 64 with three different rows.
    wide = p.dtype if p.device.type == "mps" else torch.float64
    mean, pc, qc, divisor = _centred(p.to(wide), q.to(wide))
    with _no_autocast(p.device):
        # A loss that is not a number is for the trainer to see, not for the decomposition to fail on.
        singular = torch.linalg.svdvals((pc @ qc.T).nan_to_num())
    nuclear = singular[singular > SMALLEST_SINGULAR * singular.amax()].sum()
    loss: Tensor = mean + (pc.square().sum() + qc.square().sum() - 2 * nuclear) / divisor
    return loss.to(p.dtype)


def aligned(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    label_temperature: float = 1.0,
    mask: Tensor | None = None,
    *,
    target_mass: float | None = None,
) -> Tensor:
    """`gaussian_wasserstein` with every query held to its own targets (R = identity).

        L = |mean P - mean Q|^2 + |Pc - Qc|^2 / (B - 1)

    the row-wise squared error of the two distributions: for large B the mean over queries of |p - q|^2,
    exactly (sum over queries of |p - q|^2 - |mean P - mean Q|^2) / (B - 1). Never below
    `gaussian_wasserstein`, and equal to it where Pc Qc^T is symmetric without negative eigenvalues. B = 1
    gives |p - q|^2. Arguments as there.
    """
    p, q = _distributions(logits, labels, temperature, label_temperature, mask, target_mass)
    mean, p, q, divisor = _centred(p, q)
    return mean + (p - q).square().sum() / divisor


def _distributions(
    logits: Tensor,
    labels: Tensor,
    temperature: float,
    label_temperature: float,
    mask: Tensor | None,
    target_mass: float | None,
) -> tuple[Tensor, Tensor]:
    logits, labels, mask = _prepared(logits, labels, mask)
    return softmax(logits / temperature, mask), targets(labels, mask, label_temperature, target_mass)


def _centred(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Squared distance of the means; both less their means; what to divide sums of squares by."""
    mean_p, mean_q = p.mean(0), q.mean(0)
    return (mean_p - mean_q).square().sum(), p - mean_p, q - mean_q, max(len(p) - 1, 1)


def ordinal(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    label_temperature: float = 1.0,
    mask: Tensor | None = None,
    *,
    power: float = 2.0,
    target_mass: float | None = None,
    whole_batch: bool = False,
) -> Tensor:
    """Wasserstein distance of each query's own distributions over the grades, on the line of the grades.

    A list sorted by grade, y_(1) <= ... <= y_(K), p = softmax(z / T) and q = softmax(y / tau):

        C_j = sum over k <= j of (p_(k) - q_(k));   L = mean over queries of sum over j < K of
        |C_j|^r (y_(j+1) - y_(j))

    r = 1 is W1 (grades 3, 2, 1, 0, uniform p and tau = 1 give 0.993); r = 2 has a gradient at 0. Passages of
    one grade are one point, so ties need no order; grades may be real numbers.

    Args:
        logits: (B, N), or (B, K) for lists alone.
        labels: (B, K); or as the logits, then a row is a list.
        temperature: T.
        label_temperature: tau.
        mask: as the logits, what takes part.
        power: r >= 1.
        target_mass: see `targets`.
        whole_batch: both softmaxes are over the whole batch: other queries' passages belong to every list,
            with grade 0.
    """
    if power < 1:
        raise ValueError(f"power {power}: expected 1 or more")
    logits, labels, mask = _prepared(logits, labels, mask, own=not whole_batch)
    p = softmax(logits / temperature, mask)
    q = targets(labels, mask, label_temperature, target_mass)
    filled = labels.masked_fill(~mask, torch.inf)  # what takes no part comes last and has no mass
    order = filled.argsort(dim=1, stable=True)
    grades, there = filled.gather(1, order), mask.gather(1, order)
    excess = (p - q).gather(1, order).cumsum(1)[:, :-1]
    gaps = torch.where(there[:, 1:], grades[:, 1:] - grades[:, :-1], torch.zeros_like(grades[:, 1:]))
    each: Tensor = (excess.abs() ** power * gaps).sum(1)
    return each.mean()


def kl(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    label_temperature: float = 1.0,
    mask: Tensor | None = None,
    *,
    target_mass: float | None = None,
) -> Tensor:
    """Mean over queries of KL(Q | P), with the gradient of ListNet's cross-entropy (Cao et al. 2007).

    Arguments as for `gaussian_wasserstein`.
    """
    logits, labels, mask = _prepared(logits, labels, mask)
    q = targets(labels, mask, label_temperature, target_mass)
    return (torch.xlogy(q, q) - q * log_softmax(logits / temperature, mask)).sum(1).mean()


def infonce(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    *,
    positives: Literal["grade", "top"] = "grade",
    positive_grade: float = 2.0,
) -> Tensor:
    """InfoNCE (van den Oord et al. 2018), every positive on its own against all negatives.

    The mean over all positives j of all queries of -log [e^(z_j/T) / (e^(z_j/T) + sum over negatives
    e^(z/T))]. Negatives are what takes part and is no positive: the query's lower grades and other
    queries' passages. Without any positive it is 0.

    Args:
        logits: (B, N).
        labels: (B, N) or (B, K).
        temperature: T.
        mask: (B, N).
        positives: `grade`, labels >= positive_grade; `top`, a row's highest. Never a label of 0 or less: 0 is
            what other queries' passages have.
        positive_grade: see there.
    """
    logits, labels, mask = _prepared(logits, labels, mask)
    if positives == "top":
        chosen = labels == labels.masked_fill(~mask, -torch.inf).amax(1, keepdim=True)
    else:
        chosen = labels >= positive_grade
    positive = mask & chosen & (labels > 0)
    scaled = logits / temperature
    lowest = torch.finfo(scaled.dtype).min
    negatives = scaled.masked_fill(~mask | positive, lowest).logsumexp(1, keepdim=True)
    each = torch.logaddexp(scaled, negatives) - scaled
    return torch.where(positive, each, torch.zeros_like(each)).sum() / positive.sum().clamp(min=1)


def weighted_loss(
    logits: Tensor,
    labels: Tensor,
    terms: Sequence[LossTerm],
    mask: Tensor | None = None,
    *,
    normalised: bool = True,
) -> Tensor:
    """The weighted sum of several losses, as a configuration names them.

    Args:
        logits: (B, N), N = B * K, query i's own passages being i*K .. i*K+K-1.
        labels: (B, K) or (B, N).
        terms: kinds with weights and settings.
        mask: (B, N).
        normalised: the logits are cosines; then a term without temperature takes 0.05, else 1.
    """
    queries, passages = logits.shape
    if passages % queries:
        raise ValueError(f"{passages} passages for {queries} queries: expected K for each")
    total = logits.new_zeros((), dtype=torch.promote_types(logits.dtype, torch.float32))
    own = own_lists(queries, passages, logits.device)
    for term in terms:
        temperature = term.temperature_for(normalised)
        taking = mask if not term.own_list else own if mask is None else own & mask
        to_labels: dict[str, Any] = {
            "label_temperature": term.label_temperature,
            "target_mass": term.target_mass,
        }
        if term.kind == "infonce":
            value = infonce(
                logits, labels, temperature, taking,
                positives=term.positives, positive_grade=term.positive_grade,
            )  # fmt: skip
        elif term.kind == "ordinal":
            value = ordinal(
                logits, labels, temperature, mask=taking, power=term.power, whole_batch=True, **to_labels
            )  # what `taking` lets in
        else:
            function = {"gaussian": gaussian_wasserstein, "aligned": aligned, "kl": kl}[term.kind]
            value = function(logits, labels, temperature, mask=taking, **to_labels)
        total = total + term.weight * value
    return total


# --- in sentence-transformers ---------------------------------------------------------------


class GradedListLoss(CachedLossMixin, nn.Module):
    """Trains a sentence-transformers model on queries with K graded passages each.

    The data set's columns are a query, K passages, and a label that is a list of K numbers; NaN for a
    passage that is absent. Who is another query's passage to whom is said by `taking_part`: absent passages
    and texts that are known to the query are not, and a text that stands in the batch twice is so once.

    Args:
        model: its similarity (cosine or dot) gives the logits.
        terms: the losses that are summed; the default is `LossTerm()`.
        chunk: embed so many texts at once and cache the gradients of the embeddings (GradCache, Gao et al.
            2021), so that the batch is bound by the embeddings' memory alone; equal to not doing so.
        gather: under torch.distributed, one loss over the queries of all devices. Its gradient is scaled for
            the averaging that DistributedDataParallel does. All devices need batches of one size.

    Raises:
        InputError: the model scores by something else, or `chunk` is asked of one that cannot be chunked.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        terms: Sequence[LossTerm] = (LossTerm(),),
        *,
        chunk: int | None = None,
        gather: bool = False,
    ) -> None:
        super().__init__()
        if model.similarity_fn_name not in ("cosine", "dot"):
            raise InputError(
                f"the model scores by {model.similarity_fn_name}; expected cosine or dot product"
            )
        if chunk is not None and has_static_embedding_input(model):
            raise InputError("a batch of static embeddings cannot be cut into chunks", field="training.chunk")
        self.model = model
        self.terms = tuple(terms)
        self.chunk = chunk
        self.gather = gather
        self.mini_batch_size = chunk or 0
        self.uses_gradient_cache = chunk is not None
        self.cosine = model.similarity_fn_name == "cosine"
        self.normalised = self.cosine or any(isinstance(module, Normalize) for module in model.modules())

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor) -> Tensor:
        """The loss of a batch.

        Args:
            sentence_features: of the query, then of the K passages.
            labels: (B, K).

        Raises:
            ValueError: as many labels a query as there are passage columns are expected.
        """
        features = list(sentence_features)
        if labels.ndim != 2 or labels.shape[1] != len(features) - 1:
            raise ValueError(
                f"labels of shape {tuple(labels.shape)} for {len(features) - 1} passage columns: expected "
                "one list of numbers a query, a number for every passage column"
            )
        # Before the model sees them, which may change them.
        texts = torch.stack(
            [text_digests(feature, column) for column, feature in enumerate(features)], dim=1
        )  # (B, 1 + K)
        if self.chunk is not None:
            said: Any = (labels, texts)  # handed on to calculate_loss as it is
            return self.forward_cached(features, said)
        columns = [self.model(feature)["sentence_embedding"] for feature in features]
        return self._loss(columns, labels, texts)

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Any = None, *, with_backward: bool = False
    ) -> Tensor:
        """The loss from embeddings in chunks; see CachedLossMixin."""
        loss = self._loss([torch.cat(column) for column in reps], *labels)
        if with_backward:
            torch.autograd.backward(loss)
            loss = loss.detach()
        return loss

    def _loss(self, columns: list[Tensor], labels: Tensor, texts: Tensor) -> Tensor:
        vectors = torch.stack(columns, dim=1)  # (B, 1 + K, d)
        vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
        if self.cosine:
            vectors = F.normalize(vectors, dim=-1)
        ranks = get_world_size() if self.gather else 1
        if ranks > 1:
            labels, texts = all_gather(labels.contiguous()), all_gather(texts.contiguous())
            others = all_gather(vectors.detach().contiguous()).chunk(ranks)
            vectors = torch.cat([vectors if rank == get_rank() else part for rank, part in enumerate(others)])
        queries, passages = vectors[:, 0], vectors[:, 1:].flatten(0, 1)
        mask = taking_part(labels, texts)
        with _no_autocast(vectors.device):
            loss = weighted_loss(queries @ passages.T, labels, self.terms, mask, normalised=self.normalised)
        # Every device has the gradient on its own embeddings alone; averaging divides their sum.
        return loss + (ranks - 1) * (loss - loss.detach())

    def get_config_dict(self) -> dict[str, Any]:
        """For the model's card."""
        return {
            "terms": [term.model_dump(mode="json") for term in self.terms],
            "chunk": self.chunk,
            "gather": self.gather,
        }

    @property
    def citation(self) -> str:
        """For the model's card."""
        return SYCL if self.chunk is None else SYCL + GRADCACHE


SYCL = """
@inproceedings{esfandiarpoor-etal-2025-beyond,
    title = "Beyond Contrastive Learning: Synthetic Data Enables List-wise Training with Multiple Levels of
             Relevance",
    author = "Esfandiarpoor, Reza and Zerveas, George and Zhang, Ruochen and Mgonzo, Macton and
              Eickhoff, Carsten and Bach, Stephen",
    booktitle = "Findings of the Association for Computational Linguistics: EMNLP 2025",
    year = "2025",
    url = "https://aclanthology.org/2025.findings-emnlp.1245/",
    pages = "22860--22882",
}
"""
GRADCACHE = """
@misc{gao2021scaling,
    title = "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
    author = "Gao, Luyu and Zhang, Yunyi and Han, Jiawei and Callan, Jamie",
    year = "2021",
    eprint = "2101.06983",
    archivePrefix = "arXiv",
}
"""
