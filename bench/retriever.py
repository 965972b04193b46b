"""The claim, in small: do graded lists and a Wasserstein loss make better retrievers than InfoNCE?

    python bench/retriever.py             # every cell: two to three hours on two cores
    python bench/retriever.py --quick     # four losses, one start, two sets: 15 minutes
    python bench/retriever.py --list      # what is done and what is left
    python bench/retriever.py --report    # the tables of what is done
    python bench/retriever.py --record    # keep what is done in bench/retriever-results.json.gz

Training data is the `agreed` release of the recorded lists, the same lists, passages and steps for every
loss (B=16, K=4, five epochs). Two starts: `minilm`, all-MiniLM-L6-v2 as it is, and `weakened`, the same
with its last two layers drawn anew (damaged, not self-supervised). In every cell only the last two
layers learn; what lies below is computed once per text (cached_layers.py). Temperature and label
temperature are chosen per loss and start on LLMJudge-2024-dev alone. Training and search run in bfloat16
where autocast has it (losses and the optimiser's weights stay in float32). Every cell is a file, and a run
that was stopped goes on where it was; what stands on record beside this file is not computed again unless
asked to.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

DATA = Path("../shared/data")
OUT = Path("build/bench-retriever")
RECORD = Path(__file__).with_name("retriever-results.json.gz")
STEPS = {"models": 1, "values": 2}
"""Raised when cells would come out differently for the same words."""

TOKENS = {"query_tokens": 64, "passage_tokens": 128}
LAYERS = 4
"""Lower layers that no cell changes."""

LEARNING_RATE = {"minilm": 2e-5, "weakened": 1e-4}
SEEDS = (0, 1, 2)
MEASURES = ("nDCG@10", "MRR@10", "AP")


def _set(folder: str, corpus: str, qrels: str, **more: Any) -> dict[str, Any]:
    place = DATA / folder
    return {
        "queries": str(place / "queries.jsonl"),
        "corpus": str(place / corpus),
        "qrels": str(place / qrels),
        **more,
    }


SETS = {
    "llmjudge": _set("llmjudge2024_dev_text", "passages.jsonl.gz", "qrels.txt", binary_at=2),
    "dl19": _set("trec_dl2019_passage_text", "passages.jsonl.gz", "qrels.txt", binary_at=2),
    "dl20": _set("trec_dl2020_passage_text", "passages.jsonl.gz", "qrels.txt", binary_at=2),
    "cranfield": _set(
        "cranfield", "corpus.jsonl.gz", "qrels.graded_1to4_best4.txt", binary_at=1,
        exclude=str(DATA / "cranfield/source_docs_code_minus1.txt"),
    ),
    "chorus": _set("chorus_ecommerce_graded", "products.jsonl.gz", "qrels_0to3.txt", binary_at=2),
    "medquad": _set(
        "medquad_liveqa_graded", "passages_all.jsonl.gz", "qrels_all_1to4.txt", binary_at=3, gain_offset=1,
    ),
}  # fmt: skip
DEV = "llmjudge"
MAIN, MORE = ("dl19", "dl20", "cranfield"), ("chorus", "medquad")
TWINS_FILE = DATA / "recorded/twins_dl19.jsonl"
TWINS = "twins of dl19"
"""A set of another kind: source bias on it, not nDCG@10."""

LOSSES = {
    "weakened": ("gaussian", "aligned", "ordinal", "infonce"),
    "minilm": ("gaussian", "aligned", "ordinal", "kl", "infonce", "infonce+gaussian"),
}
CONTROLS = ("shuffled", "binary", "3-against-0", "swapped")

Terms = tuple[tuple[tuple[str, Any], ...], ...]  # of LossTerm's fields; hashable


def terms(*each: Mapping[str, Any]) -> Terms:
    return tuple(tuple(sorted(term.items())) for term in each)


def grid(start: str, loss: str) -> list[Terms]:
    """The settings that the dev set chooses from. Label temperature 1 is as published."""
    if loss == "infonce":
        return [terms({"kind": loss, "temperature": t}) for t in (0.02, 0.05, 0.1)]
    if loss == "infonce+gaussian":  # each with the settings chosen for it alone
        parts = [dict(chosen(start, part)[0]) for part in ("infonce", "gaussian")]
        return [terms(parts[0], {**parts[1], "weight": weight}) for weight in (1.0, 4.0)]
    points = ((0.05, 1.0), (0.05, 0.4), (0.02, 0.4))
    found = [terms({"kind": loss, "temperature": t, "label_temperature": tau}) for t, tau in points]
    if loss == "ordinal":  # alone it sees no other query's passages: that, too, is chosen
        more = {"kind": loss, "temperature": 0.05, "label_temperature": 0.4, "in_batch": "zero"}
        found.append(terms(more))
    return found


# --- cells --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    start: str
    terms: Terms
    seed: int = 0
    labels: str = "as they are"
    epochs: float = 5

    def __str__(self) -> str:
        said = " + ".join(
            " ".join(str(dict(term)[key]) for key in dict(term) if key == "kind")
            + f" (T={dict(term)['temperature']:g}"
            + (f", tau={dict(term)['label_temperature']:g}" if "label_temperature" in dict(term) else "")
            + (f", x{dict(term)['weight']:g}" if "weight" in dict(term) else "")
            + (", whole batch" if "in_batch" in dict(term) else "")
            + ")"
            for term in self.terms
        )
        return f"{self.start} {said} seed {self.seed}" + (
            "" if self.labels == "as they are" else f", labels {self.labels}"
        )


@dataclass(frozen=True)
class Cell:
    """A trained retriever (or a start without training, or BM25) on a set."""

    model: Training | str
    set: str

    def __str__(self) -> str:
        return f"{self.model} on {self.set}"


def path_of(cell: Training | Cell) -> Path:
    kind = "models" if isinstance(cell, Training) else "values"
    facts: list[Any] = [STEPS[kind], TOKENS, LAYERS, LEARNING_RATE, asdict(cell)]
    if isinstance(cell, Cell):
        facts.append(SETS.get(cell.set))
    told = json.dumps(facts, sort_keys=True, default=str)
    return OUT / kind / sha256(told.encode()).hexdigest()[:16]


def done(cell: Training | Cell) -> bool:
    """Whether it was computed, here or for the record."""
    path = path_of(cell)
    return (path / "cell.json").exists() or path.name in record()


def finish(cell: Training | Cell, result: Mapping[str, Any]) -> None:
    """The cell's file, put in place when it is whole."""
    file = path_of(cell) / "cell.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    half = file.with_name(f"cell.{os.getpid()}.tmp")
    half.write_text(json.dumps({"cell": str(cell), **result}), "utf-8")
    half.rename(file)


def result(cell: Cell) -> dict[str, Any]:
    path = path_of(cell)
    if not (path / "cell.json").exists() and path.name in record():
        return record()[path.name]
    found: dict[str, Any] = json.loads((path / "cell.json").read_text("utf-8"))
    return found


def values(cell: Cell, measure: str = "nDCG@10") -> dict[str, float]:
    """Query id -> value."""
    found: dict[str, float] = result(cell)[measure]
    return found


@cache
def record() -> dict[str, dict[str, Any]]:
    """Cells that were computed for the record, by their names: bench/retriever-results.json.gz."""
    if not RECORD.exists():
        return {}
    with gzip.open(RECORD) as file:
        found: dict[str, dict[str, Any]] = json.load(file)
    return found


def write_record() -> None:
    """Every cell of values there is, at nDCG@10 and rounded; same cells, same bytes."""
    kept = dict(record())
    for file in sorted((OUT / "values").glob("*/cell.json")):
        cell = json.loads(file.read_text("utf-8"))
        left_out = {"MRR@10", "AP", "wins", "human", "llm"}
        kept[file.parent.name] = {key: rounded(cell[key]) for key in cell if key not in left_out}
    data = json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()
    RECORD.write_bytes(gzip.compress(data, mtime=0))
    print(f"{RECORD}: {len(kept)} cells")


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return round(value, 6) if isinstance(value, float) else value


def mean(cell: Cell) -> float:
    found = values(cell)
    return sum(found.values()) / len(found)


def chosen(start: str, loss: str) -> Terms:
    """The setting with the highest nDCG@10 on the dev set."""
    return max(grid(start, loss), key=lambda point: mean(Cell(Training(start, point), DEV)))


def dev_value(start: str, loss: str) -> float:
    """nDCG@10 on the dev set with the setting chosen there."""
    return mean(Cell(Training(start, chosen(start, loss)), DEV))


def finalists(start: str) -> tuple[str, ...]:
    """gaussian, infonce, and of the others the best on the dev set."""
    others = [loss for loss in LOSSES[start] if loss not in ("gaussian", "infonce")]
    return "gaussian", "infonce", max(others, key=lambda loss: dev_value(start, loss))


def stages() -> Iterable[tuple[str, list[Cell]]]:
    """Cells in the order they are computed; a stage may ask for the values of those before it."""
    simple = [(s, loss) for s, losses in LOSSES.items() for loss in losses if loss != "infonce+gaussian"]
    yield "untrained", [Cell(m, s) for s in (*MAIN, DEV, *MORE) for m in ("bm25", *LOSSES)]
    for pairs in (simple, [("minilm", "infonce+gaussian")]):
        yield (
            "settings, on the dev set",
            [Cell(Training(start, point), DEV) for start, loss in pairs for point in grid(start, loss)],
        )
    main = [Training(start, chosen(start, loss)) for start, losses in LOSSES.items() for loss in losses]
    yield "main", [Cell(training, name) for training in main for name in MAIN]
    yield "label controls, weakened", controls("weakened")
    best = [(start, loss) for start in LOSSES for loss in finalists(start)]
    yield (
        "finalists elsewhere",
        [Cell(Training(s, chosen(s, loss)), name) for s, loss in best for name in MORE],
    )
    biased = [training for training in main if training.start == "minilm"]
    yield "source bias", [Cell(model, TWINS) for model in ("minilm", *biased)]
    for seed in SEEDS[1:]:
        seeds = [Training(start, chosen(start, loss), seed) for start, loss in best]
        yield f"seed {seed}", [Cell(training, name) for training in seeds for name in MAIN]
    yield "label controls, minilm", controls("minilm")


def controls(start: str) -> list[Cell]:
    trainings = [Training(start, chosen(start, "gaussian"), labels=labels) for labels in CONTROLS]
    return [Cell(training, name) for training in trainings for name in MAIN]


def quick_stages() -> Iterable[tuple[str, list[Cell]]]:
    """One start, two epochs, the default settings."""
    models = ["weakened", *quick_trainings().values()]
    yield "quick", [Cell(model, name) for model in models for name in ("dl19", "cranfield")]


def quick_trainings() -> dict[str, Training]:
    return {loss: Training("weakened", grid("weakened", loss)[1], epochs=2) for loss in LOSSES["weakened"]}


# --- computing a cell ---------------------------------------------------------------------------


@cache
def collection(name: str) -> Any:
    from gradeloom.schemas.retriever import CollectionConfig
    from gradeloom.tasks.collection import read_collection

    files = {key: SETS[name][key] for key in ("queries", "corpus", "qrels")}
    return read_collection(CollectionConfig(**files), name=name)


@cache
def lists() -> Any:
    from gradeloom.schemas.retriever import CollectionConfig
    from gradeloom.tasks.collection import read_collection

    return read_collection(
        CollectionConfig(release="graded-recorded"), releases=OUT / "releases", name="lists"
    )


@cache
def start_model(start: str) -> Any:
    """The start with its lower layers cached; one per process, its upper weights set for each cell."""
    import torch
    from cached_layers import cache_lower_layers

    from gradeloom.schemas.retriever import EncoderConfig
    from gradeloom.tasks.encoder import load_encoder

    encoder = load_encoder(EncoderConfig(**TOKENS, device="cpu"))
    bert = encoder.model[0].model
    if start == "weakened":
        torch.manual_seed(0)
        for layer in bert.encoder.layer[LAYERS:]:
            for part in layer.modules():
                if isinstance(part, torch.nn.Linear):
                    torch.nn.init.normal_(part.weight, std=bert.config.initializer_range)
                    torch.nn.init.zeros_(part.bias)
                elif isinstance(part, torch.nn.LayerNorm):
                    torch.nn.init.ones_(part.weight)
                    torch.nn.init.zeros_(part.bias)
    cache_lower_layers(encoder.model, LAYERS, OUT / "states")
    return encoder, {name: weight.clone() for name, weight in encoder.model.state_dict().items()}


def model_of(model: Training | str) -> Any:
    import torch

    encoder, start = start_model(model if isinstance(model, str) else model.start)
    weights = start if isinstance(model, str) else torch.load(path_of(model) / "upper.pt")
    encoder.model.load_state_dict(weights)
    encoder.model.eval()
    return encoder


def controlled(labels: str) -> tuple[Any, Any, int]:
    """The training lists under a label control: collection, source and passages per list."""
    from gradeloom.schemas.retriever import TrainingSource

    found, more, width = lists(), {}, 4
    draw = random.Random(0)
    qrels = found.qrels
    if labels == "shuffled":
        qrels = {}
        for query, judged in found.qrels.items():
            grades = list(judged.values())
            draw.shuffle(grades)
            qrels[query] = dict(zip(judged, grades, strict=True))
    elif labels == "binary":
        more["map"] = {2: 3, 1: 0}
    elif labels == "3-against-0":
        more, width = {"top": 1, "bottom": 1}, 2
    elif labels == "swapped":  # every query gets the next one's list
        ids = list(found.qrels)
        draw.shuffle(ids)
        qrels = {query: found.qrels[other] for query, other in zip(ids, ids[1:] + ids[:1], strict=True)}
    source = TrainingSource(name="lists", release="graded-recorded", **more)
    return replace(found, qrels=qrels), source, width


def train(cell: Training) -> None:
    """Trains with the product's trainer, data and losses; no checkpoint is kept, a cell is short."""
    import tempfile

    import torch

    from gradeloom.schemas.retriever import LossTerm
    from gradeloom.tasks.train.batches import DistinctQueries, ListCollator, text_limits
    from gradeloom.tasks.train.graded_qrels import mix
    from gradeloom.tasks.train.losses import GradedListLoss
    from gradeloom.tasks.train.trainer import ListTrainer, training_arguments

    found, source, width = controlled(cell.labels)
    data = mix([(source, found)], passages=width, seed=0)
    encoder = model_of(cell.start)
    encoder.model.train()
    with tempfile.TemporaryDirectory(dir=OUT) as folder, text_limits(encoder):
        args = training_arguments(
            output_dir=folder,
            per_device_train_batch_size=16,
            num_train_epochs=cell.epochs,
            learning_rate=LEARNING_RATE[cell.start],
            warmup_steps=0.05,  # a share of the steps
            weight_decay=0.0,
            seed=cell.seed,
            save_strategy="no",
            use_cpu=True,
            bf16=True,
            dataloader_drop_last=True,
            batch_sampler=DistinctQueries,
        )
        trainer = ListTrainer(
            keep=1,
            progress=None,
            model=encoder.model,
            args=args,
            train_dataset=data.dataset(),
            loss=GradedListLoss(encoder.model, [LossTerm(**dict(term)) for term in cell.terms]),
            data_collator=ListCollator(encoder, width),
        )
        trainer.train()
    path_of(cell).mkdir(parents=True, exist_ok=True)
    torch.save(encoder.model.state_dict(), path_of(cell) / "upper.pt")
    finish(cell, {"steps": trainer.state.global_step, "lists": len(data.lists)})


def evaluate(cell: Cell) -> None:
    import torch

    from gradeloom.tasks.collection import read_qrels
    from gradeloom.tasks.evaluate.bm25 import bm25_run
    from gradeloom.tasks.evaluate.measures import measure
    from gradeloom.tasks.evaluate.search import dense_run

    found, settings = collection(cell.set), SETS[cell.set]
    exclude = read_qrels(settings["exclude"]) if "exclude" in settings else None
    if cell.model == "bm25":
        run = bm25_run(found, k=1000, exclude=exclude)
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            run = dense_run(model_of(cell.model), found, k=1000, exclude=exclude)
    options = {key: settings[key] for key in ("binary_at", "gain_offset") if key in settings}
    finish(cell, measure(run, found.qrels, MEASURES, **options))


def measure_bias(cell: Cell) -> None:
    import torch

    from gradeloom.tasks.evaluate.bias import read_twins, source_bias

    twins = read_twins(TWINS_FILE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = source_bias(model_of(cell.model), collection("dl19"), twins, seed=0)
    finish(cell, asdict(found))


def compute(cell: Training | Cell) -> tuple[str, float]:
    began = time.monotonic()
    if isinstance(cell, Training):
        train(cell)
    elif cell.set == TWINS:
        measure_bias(cell)
    else:
        evaluate(cell)
    return str(cell), time.monotonic() - began


# --- preparing and running ----------------------------------------------------------------------


def prepare(sets: Sequence[str]) -> None:
    """The release, and the lower layers' output for every text."""
    if not (OUT / "releases/graded-recorded").exists():
        roots = ("run", "release", "cache")
        command = [
            sys.executable,
            "-m",
            "gradeloom.flows.cli",
            "graded",
            "run",
            "--config",
            "graded-recorded",
        ]
        for root in roots:
            command += ["--set", f"{root}.root={OUT / (root + 's')}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    from cached_layers import fill

    from gradeloom.tasks.evaluate.bias import read_twins

    encoder, _ = start_model("minilm")
    for name in ("lists", *sets):
        found = lists() if name == "lists" else collection(name)
        texts = [(found.passages.values(), TOKENS["passage_tokens"], "passages")]
        texts.append((found.queries.values(), TOKENS["query_tokens"], "queries"))
        for part, tokens, kind in texts:
            began = time.monotonic()
            fill(encoder.model, f"{name}-{kind}", list(part), tokens)
            if time.monotonic() - began > 5:
                print(f"lower layers of {name}: {time.monotonic() - began:.0f} s", flush=True)
    twins = [twin.text for twin in read_twins(TWINS_FILE)]
    fill(encoder.model, "twins", twins, TOKENS["passage_tokens"])


def run(stages: Iterable[tuple[str, list[Cell]]], workers: int) -> None:
    """Stage by stage: the trainings that its missing cells need, then these cells."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_one_thread) as pool:
        for name, cells in stages:
            todo = [cell for cell in dict.fromkeys(cells) if not done(cell)]
            print(f"{name}: {len(cells) - len(todo)} of {len(cells)} cells done", flush=True)
            models = dict.fromkeys(cell.model for cell in todo if isinstance(cell.model, Training))
            for part in ([model for model in models if not done(model)], todo):
                running: set[Future[tuple[str, float]]] = {pool.submit(compute, cell) for cell in part}
                while running:
                    ready, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in ready:
                        said, seconds = future.result()
                        print(f"  {said}: {seconds:.0f} s ({len(running)} left of these)", flush=True)


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


# --- what came out ------------------------------------------------------------------------------


def averaged(start: str, loss: str, name: str, seeds: Sequence[int] = SEEDS) -> dict[str, float]:
    """Per query, the mean over the seeds that are done on every main set."""
    trainings = [Training(start, chosen(start, loss), seed) for seed in seeds]
    whole = [each for each in trainings if all(done(Cell(each, main)) for main in MAIN)]
    found = [values(Cell(each, name)) for each in whole if done(Cell(each, name))]
    return {query: sum(one[query] for one in found) / len(found) for query in found[0]}


def report() -> None:
    try:
        for stage, cells in stages():
            if stage == "main" and not all(map(done, cells)):
                raise FileNotFoundError
    except FileNotFoundError:
        print("nothing to tell before all losses stand on the main sets; what is done: --list")
        return
    for start in LOSSES:
        print(f"\n{start}: nDCG@10 (linear gain), means over seeds per query; {', '.join(MORE)}: seed 0")
        print(_table(start))
        for line in _tests(start):
            print(line)
    print("\nlabel controls of gaussian, seed 0; 3-against-0 has two passages a list, the others four")
    print(_controls())
    print("\nsource bias on the recorded twins (w - 1/2 > 0 and D < 0 favour the language model), seed 0")
    print(_bias())
    print("\nsettings chosen on LLMJudge-2024-dev (25 queries)")
    for start, losses in LOSSES.items():
        for loss in losses:
            points = [Training(start, point) for point in grid(start, loss)]
            told = ", ".join(f"{_settings(p)}: {mean(Cell(p, DEV)):.3f}" for p in points)
            print(f"  {start} {loss}: {told}")


def _settings(training: Training) -> str:
    return str(training).removeprefix(f"{training.start} ").removesuffix(f" seed {training.seed}")


def _table(start: str) -> str:
    names = (*MAIN, *MORE)
    lines = [f"  {'':18}{'seeds':>6}" + "".join(f"{name:>11}" for name in names)]
    for model in ("bm25", start):
        row = "".join(f"{mean(Cell(model, name)):11.3f}" for name in names)
        lines.append(f"  {'untrained' if model == start else model:18}{'':6}{row}")
    for loss in LOSSES[start]:
        each = [Training(start, chosen(start, loss), seed) for seed in SEEDS]
        seeds = sum(all(done(Cell(t, name)) for name in MAIN) for t in each)
        row = "".join(
            f"{_average(averaged(start, loss, name)):11.3f}" if done(Cell(each[0], name)) else f"{'-':>11}"
            for name in names
        )
        lines.append(f"  {loss:18}{seeds:6}{row}")
    return "\n".join(lines)


def _average(found: Mapping[str, float]) -> float:
    return sum(found.values()) / len(found)


def _pooled(per_set: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {f"{name}/{query}": value for name, found in per_set.items() for query, value in found.items()}


def _tests(start: str) -> list[str]:
    """Every loss against InfoNCE and against the untrained start, on the queries of the main sets."""
    from gradeloom.tasks.evaluate.significance import compared

    lines = []
    for against in ("infonce", "untrained"):
        base = _pooled(
            {
                n: values(Cell(start, n)) if against == "untrained" else averaged(start, "infonce", n)
                for n in MAIN
            }
        )
        strata = [key.split("/")[0] for key in base]
        pairs = {}
        for loss in LOSSES[start]:
            if loss != against:
                own = _pooled({name: averaged(start, loss, name) for name in MAIN})
                pairs[loss] = [own[key] for key in base], list(base.values()), strata
        lines.append(f"  against {against}, {len(base)} queries of {', '.join(MAIN)}:")
        lines += [
            f"    {loss:18}{one.difference:+.4f}  p {one.p:.4f}  Holm {one.p_holm:.4f}"
            f"  smallest detectable {one.smallest_detectable:.4f}"
            for loss, one in compared(pairs, permutations=100_000, seed=0).items()
        ]
    return lines


def _controls() -> str:
    lines = [f"  {'':28}" + "".join(f"{name:>11}" for name in MAIN)]
    for start in LOSSES:
        for labels in ("as they are", *CONTROLS):
            training = Training(start, chosen(start, "gaussian"), labels=labels)
            if all(done(Cell(training, name)) for name in MAIN):
                row = "".join(f"{mean(Cell(training, name)):11.3f}" for name in MAIN)
                lines.append(f"  {start + ', ' + labels:28}{row}")
    return "\n".join(lines)


def _bias() -> str:
    lines = [f"  {'':18}{'w - 1/2':>9}{'95 %':>18}{'D (%)':>9}{'95 %':>18}"]
    trained = {loss: Training("minilm", chosen("minilm", loss)) for loss in LOSSES["minilm"]}
    for said, model in {"minilm, untrained": "minilm", **trained}.items():
        cell = Cell(model, TWINS)
        if done(cell):
            found = result(cell)
            w, d = (found[key] for key in ("w_interval", "d_interval"))
            lines.append(
                f"  {said:18}{found['w_minus_half']:9.3f}{f'{w[0]:.3f} to {w[1]:.3f}':>18}"
                f"{found['d']:9.1f}{f'{d[0]:.1f} to {d[1]:.1f}':>18}"
            )
    return "\n".join(lines)


def quick_report() -> None:
    print("\nnDCG@10, weakened start, two epochs, seed 0, default temperatures (indications, not results)")
    names = ("dl19", "cranfield")
    for said, model in {"untrained": "weakened", **quick_trainings()}.items():
        print(f"  {said:12}" + "".join(f"{name:>11} {mean(Cell(model, name)):.3f}" for name in names))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four losses, one start, two sets")
    parser.add_argument("--report", action="store_true", help="tables of what is done, nothing computed")
    parser.add_argument("--list", action="store_true", help="what is done and what is left")
    parser.add_argument("--record", action="store_true", help=f"what is done goes into {RECORD.name}")
    parser.add_argument("--afresh", action="store_true", help="as if nothing stood on record")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="cells at once")
    options = parser.parse_args()
    if options.afresh:
        record().clear()
    if options.list or options.record:
        (listed if options.list else write_record)()
        return
    if not options.report:
        OUT.mkdir(parents=True, exist_ok=True)
        prepare(("dl19", "cranfield") if options.quick else tuple(SETS))
        run(quick_stages() if options.quick else stages(), options.workers)
    (quick_report if options.quick else report)()


def listed() -> None:
    """Stages whose cells depend on values that are still missing are not listed."""
    try:
        for name, cells in stages():
            cells = list(dict.fromkeys(cells))
            print(f"{name}: {sum(map(done, cells))} of {len(cells)}")
    except FileNotFoundError:
        print("(what comes next depends on the cells above)")


if __name__ == "__main__":
    main()
