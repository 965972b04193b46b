"""Speed of `gaussian_wasserstein`, forward and backward, beside the reference's eigenvalue form.

    python bench/losses.py [--json] [--threads N]

Both see the same logits and labels in one process, in turns; what is printed are medians and their ratio.
The eigenvalue form is the reference's: complex eigenvalues of A A^T in float64, 1e-15 under the root.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from gradeloom.tasks.train.losses import expanded, gaussian_wasserstein

SIZES = ((64, 256), (256, 1024))


def by_eigenvalues(logits: Tensor, labels: Tensor) -> Tensor:
    p = torch.softmax(logits, dim=1).double()
    q = torch.softmax(expanded(labels, logits.shape[1]), dim=1).double()
    mean_p, mean_q, n = p.mean(0), q.mean(0), len(p) - 1
    pc, qc = p - mean_p, q - mean_q
    a = pc @ qc.T / n
    root = torch.linalg.eigvals(a @ a.T).add(1e-15).sqrt().real.sum()
    spread = (pc.square().sum() + qc.square().sum()) / n
    return (mean_p - mean_q).square().sum() + spread - 2 * root


def seconds(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, labels: Tensor) -> float:
    logits = logits.clone().requires_grad_()
    began = time.perf_counter()
    loss(logits, labels).backward()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for queries, passages in SIZES:
        torch.manual_seed(0)
        logits = 4 * torch.randn(queries, passages)
        labels = torch.tensor([3.0, 2, 1, 0]).repeat(queries, 1)
        taken: dict[str, list[float]] = {"svdvals": [], "eigenvalues": []}
        for _ in range(options.repeats + 1):
            taken["svdvals"].append(seconds(gaussian_wasserstein, logits, labels))
            taken["eigenvalues"].append(seconds(by_eigenvalues, logits, labels))
        ours, reference = (statistics.median(times[1:]) for times in taken.values())
        rows.append(
            {
                "queries": queries,
                "passages": passages,
                "svdvals_ms": round(1e3 * ours, 2),
                "eigenvalues_ms": round(1e3 * reference, 2),
                "ratio": round(reference / ours, 1),
            }
        )
    if options.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(
            f"B={row['queries']}, N={row['passages']}: svdvals {row['svdvals_ms']} ms, eigenvalues "
            f"{row['eigenvalues_ms']} ms, {row['ratio']} times as long"
        )


if __name__ == "__main__":
    main()
