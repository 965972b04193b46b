"""Evaluation against graded judgements for sentence-transformers' trainer."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.evaluation import SentenceEvaluator

from gradeloom.schemas.errors import InputError
from gradeloom.schemas.retriever import EncoderConfig
from gradeloom.tasks.collection import Collection, Qrels
from gradeloom.tasks.encoder import encoder_of
from gradeloom.tasks.evaluate.measures import measure
from gradeloom.tasks.evaluate.search import dense_run


class GradedRetrievalEvaluator(SentenceEvaluator):
    """Searches a corpus exhaustively and measures the ranking against graded judgements.

    sentence-transformers' own InformationRetrievalEvaluator knows relevant and irrelevant only; this one
    takes grades, as nDCG needs them. Works with any SentenceTransformer.

    Args:
        queries: id -> text.
        corpus: id -> text.
        qrels: query id -> passage id -> grade. A query without judgements is not searched, judgements of a
            query that is not in `queries` do not count.
        name: stands before every measure, `<name>_nDCG@10`.
        measures: see `gradeloom.tasks.evaluate.measures`; the first is `primary_metric`.
        binary_at: grades from here are relevant to measures that know no grades.
        gain_offset: taken off every grade to get its gain.
        pool: re-rank each query's judged passages instead of searching all.
        exclude: passages left out of a query's ranking.
        depth: passages per query.
        config: prompts, token limits and batch size; default: the model's own prompts and limit.
        write_csv: add a line to `graded_retrieval_evaluation_<name>_results.csv` where the trainer says.

    Raises:
        InputError: no query is judged, or a measure is unknown.
    """

    def __init__(
        self,
        queries: Mapping[str, str],
        corpus: Mapping[str, str],
        qrels: Qrels,
        name: str = "",
        *,
        measures: Sequence[str] = ("nDCG@10",),
        binary_at: float = 1,
        gain_offset: float = 0,
        pool: bool = False,
        exclude: Qrels | None = None,
        depth: int = 1000,
        config: EncoderConfig | None = None,
        write_csv: bool = True,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        judged = {query: grades for query, grades in qrels.items() if grades and query in queries}
        if not judged:
            raise InputError("expected judgements of at least one of the queries", field="qrels")
        measure({}, {}, measures)  # an unknown one is told of before the training, not in the midst of it
        self.collection = Collection(name or "collection", dict(queries), corpus, judged, {}, {})
        self.name = name
        self.measures = tuple(measures)
        self.options = {"binary_at": binary_at, "gain_offset": gain_offset}
        self.search: dict[str, Any] = {"k": depth, "pool": pool, "exclude": exclude}
        self.config = config
        self.write_csv = write_csv
        self.primary_metric = f"{name}_{self.measures[0]}" if name else self.measures[0]

    @property
    def description(self) -> str:
        return "Graded Retrieval"

    def __call__(  # type: ignore[override]
        self, model: SentenceTransformer, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        """The means over queries, `<name>_<measure>` -> value.

        Args:
            model: as it is now.
            output_path: folder for the CSV.
            epoch: of the training; -1 without.
            steps: of the epoch; -1 without.
        """
        training = model.training
        model.eval()
        try:
            encoder = encoder_of(model, self.config or _own_limit(model))
            run = dense_run(encoder, self.collection, **self.search)
        finally:
            model.train(training)
        values = measure(run, self.collection.qrels, self.measures, **self.options)
        means = {name: sum(found.values()) / len(found) for name, found in values.items()}
        if output_path is not None and self.write_csv:
            self._add_line(Path(output_path), epoch, steps, means)
        metrics: dict[str, float] = self.prefix_name_to_metrics(means, self.name)
        self.primary_metric = f"{self.name}_{self.measures[0]}" if self.name else self.measures[0]
        self.store_metrics_in_model_card_data(model, metrics, epoch, steps)
        return metrics

    def _add_line(self, folder: Path, epoch: int, steps: int, means: Mapping[str, float]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        parts = ["graded_retrieval_evaluation", *([self.name] if self.name else []), "results.csv"]
        path = folder / "_".join(parts)
        new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(["epoch", "steps", *means])
            writer.writerow([epoch, steps, *means.values()])

    def get_config_dict(self) -> dict[str, Any]:
        """For the model's card."""
        return {"measures": list(self.measures), **self.options, "pool": self.search["pool"]}


def _own_limit(model: SentenceTransformer) -> EncoderConfig:
    """Texts are cut where the model cuts them."""
    limit = model.max_seq_length
    return (
        EncoderConfig(query_tokens=limit, passage_tokens=limit) if isinstance(limit, int) else EncoderConfig()
    )
