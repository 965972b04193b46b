"""List-wise losses over graded labels: pure functions, and a sentence-transformers loss over them.

All functions take logits Z (B, N), the scores of B queries against N passages, and labels: (B, N), or
(B, K) with N = B * K, where query i's own passages are the columns i*K .. i*K+K-1 and every other query's
passage has label 0. A mask (B, N) says what takes part; a label that is NaN takes no part. They return one
scalar, computed in float32 or better.

The sources are "Beyond Contrastive Learning: Synthetic Data Enables List-wise Training with Multiple
Levels of Relevance" (SyCL, EMNLP 2025, arXiv 2503.23239) and what follows from its loss, below.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, Literal

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import CachedLossMixin
from sentence_transformers.sentence_transformer.modules import Normalize
from sentence_transformers.util import all_gather
from torch import Tensor, nn

from gradeloom.schemas.retriever import LossTerm

SMALLEST_SINGULAR = 1e-7
"""Singular values below this share of the largest get zero subgradient."""

# --- the distributions ----------------------------------------------------------------------


def own_lists(queries: int, passages: int, device: torch.device | None = None) -> Tensor:
    """Which of N passages are a query's own: (B, N), true on the diagonal blocks of K = N / B."""
    return torch.eye(queries, dtype=torch.bool, device=device).repeat_interleave(passages // queries, dim=1)


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
    return torch.where(
        own, labels.repeat(1, queries), torch.zeros((), dtype=labels.dtype, device=labels.device)
    )


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
            this mass together, or as near to it as a tau in 1e-3 .. 1e3 brings them.
    """
    if target_mass is None:
        return softmax(labels / label_temperature, mask)
    low = torch.full((len(labels), 1), -3.0, dtype=labels.dtype, device=labels.device)  # of log10(tau)
    high = -low
    top = labels == labels.masked_fill(~mask, -torch.inf).amax(1, keepdim=True)
    for _ in range(50):
        middle = (low + high) / 2
        mass = (softmax(labels / 10**middle, mask) * top).sum(1, keepdim=True)
        sharp = mass > target_mass
        low, high = torch.where(sharp, middle, low), torch.where(sharp, high, middle)
    return softmax(labels / 10 ** ((low + high) / 2), mask)


def _prepared(logits: Tensor, labels: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels (B, N) and mask (B, N), in float32 or better, labels without NaN."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.to(dtype)
    labels = expanded(labels.to(logits), logits.shape[1])
    there = ~labels.isnan()
    return logits, labels.nan_to_num(0.0), there if mask is None else there & mask.to(there.device)


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
    P and Q less their means, so the singular values of a (B, B) matrix are all it takes. It follows that
    L = |mean P - mean Q|^2 + min over orthogonal R of |Pc - R Qc|^2 / (B - 1): the match is up to a rotation
    *across queries*, and rows of P that change places leave L as it is (for B = 4 scored perfectly, L is 0
    before and after). The loss needs a retriever that knows right lists from wrong ones already. `aligned`
    is the same with R = identity. B = 1 gives |p - q|^2.

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
    mean, p, q, divisor = _centred(p, q)
    singular = torch.linalg.svdvals(p @ q.T)
    nuclear = singular[singular > SMALLEST_SINGULAR * singular.amax()].sum()
    loss: Tensor = mean + (p.square().sum() + q.square().sum() - 2 * nuclear) / divisor
    return loss


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

    the row-wise squared error of the two distributions; never below `gaussian_wasserstein`, and equal to
    it where Pc Qc^T is symmetric and has no negative eigenvalue. Arguments as there.
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
) -> Tensor:
    """Wasserstein distance of each query's own distributions over the grades, on the line of the grades.

    A list sorted by grade, y_(1) <= ... <= y_(K), p = softmax(z / T) and q = softmax(y / tau):

        C_j = sum over k <= j of (p_(k) - q_(k));   L = mean over queries of sum over j < K of
        |C_j|^r (y_(j+1) - y_(j))

    r = 1 is W1 (grades 3, 2, 1, 0, uniform p and tau = 1 give 0.993); r = 2 has a gradient at 0. Passages of
    one grade are one point, so ties need no order; grades may be real numbers.

    Args:
        logits: (B, N), or (B, K) for lists alone.
        labels: (B, N) or (B, K).
        temperature: T.
        label_temperature: tau.
        mask: what takes part; `own_lists` leaves other queries' passages out.
        power: r >= 1.
        target_mass: see `targets`.
    """
    logits, labels, mask = _prepared(logits, labels, mask)
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
        positives: `grade`, labels >= positive_grade; `top`, those of a row's highest label above 0.
        positive_grade: see there.
    """
    logits, labels, mask = _prepared(logits, labels, mask)
    if positives == "top":
        top = labels.masked_fill(~mask, -torch.inf).amax(1, keepdim=True)
        positive = mask & (labels == top) & (labels > 0)
    else:
        positive = mask & (labels >= positive_grade)
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
        logits: (B, N), N = B * K.
        labels: (B, K) or (B, N).
        terms: kinds with weights and settings.
        mask: (B, N).
        normalised: the logits are cosines; then a term without temperature takes 0.05, else 1.
    """
    total = logits.new_zeros((), dtype=torch.promote_types(logits.dtype, torch.float32))
    own = own_lists(len(logits), logits.shape[1], logits.device)
    for term in terms:
        temperature = term.temperature or (0.05 if normalised else 1.0)
        inside = term.in_batch or ("masked" if term.kind == "ordinal" else "zero")
        taking = mask if inside == "zero" else own if mask is None else own & mask
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
            value = ordinal(logits, labels, temperature, mask=taking, power=term.power, **to_labels)
        else:
            function = {"gaussian": gaussian_wasserstein, "aligned": aligned, "kl": kl}[term.kind]
            value = function(logits, labels, temperature, mask=taking, **to_labels)
        total = total + term.weight * value
    return total


# --- in sentence-transformers ---------------------------------------------------------------


class GradedListLoss(CachedLossMixin, nn.Module):
    """Trains a sentence-transformers model on queries with K graded passages each.

    The data set's columns are a query, K passages, and a label that is a list of K numbers; NaN for a
    passage that is absent. Of a batch, absent passages take no part for any query, and what is the same
    text as one of a query's own passages, or belongs to the same query standing twice, is no other query's
    passage to it.

    Args:
        model: its similarity (cosine or dot) gives the logits.
        terms: the losses that are summed; the default is `LossTerm()`.
        chunk: embed so many texts at once and cache the gradients of the embeddings (GradCache, Gao et al.
            2021), so that the batch is bound by the embeddings' memory alone; equal to not doing so.
        gather: under torch.distributed, one loss over the queries of all devices. Its gradient is scaled for
            the averaging that DistributedDataParallel does.
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
        texts = torch.stack([_digests(feature) for feature in features], dim=1)  # (B, 1 + K)
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
        ranks = torch.distributed.get_world_size() if self.gather and _distributed() else 1
        if ranks > 1:
            labels, texts = all_gather(labels.contiguous()), all_gather(texts.contiguous())
            others = all_gather(vectors.detach().contiguous()).chunk(ranks)
            here = torch.distributed.get_rank()
            vectors = torch.cat([vectors if rank == here else part for rank, part in enumerate(others)])
        queries, passages = vectors[:, 0], vectors[:, 1:].flatten(0, 1)
        mask = taking_part(labels, texts)
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
        return """
@inproceedings{sycl2025,
    title = "Beyond Contrastive Learning: Synthetic Data Enables List-wise Training
             with Multiple Levels of Relevance",
    booktitle = "Proceedings of EMNLP",
    year = "2025",
    url = "https://arxiv.org/abs/2503.23239",
}
"""


def taking_part(labels: Tensor, texts: Tensor) -> Tensor:
    """Which passages of a batch take part for which query: (B, B * K).

    Args:
        labels: (B, K), NaN for an absent passage.
        texts: (B, 1 + K) digests of the query's text and of its passages'.
    """
    queries, width = labels.shape
    there = ~labels.isnan()
    own = own_lists(queries, queries * width, labels.device)
    passages = texts[:, 1:]
    known = (passages[:, :, None] == passages.flatten()[None, None, :]) & there[:, :, None]
    same_query = (texts[:, 0, None] == texts[None, :, 0]).repeat_interleave(width, dim=1)
    return there.flatten()[None, :] & (own | ~(known.any(1) | same_query))


def _digests(feature: dict[str, Tensor]) -> Tensor:
    """A number for every text of a batch, the same for the same tokens however they are padded."""
    ids, mask = feature["input_ids"].cpu(), feature["attention_mask"].cpu().bool()
    numbers = [
        int.from_bytes(blake2b(row[there].numpy().tobytes(), digest_size=8).digest(), "little", signed=True)
        for row, there in zip(ids, mask, strict=True)
    ]
    return torch.tensor(numbers, dtype=torch.int64, device=feature["input_ids"].device)


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
