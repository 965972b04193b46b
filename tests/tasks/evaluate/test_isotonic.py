from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.isotonic import IsotonicRegression

from gradeloom.schemas.calibration import FileIdentity, IsotonicMapping, LabelFileJudge
from gradeloom.schemas.errors import InputError
from gradeloom.tasks.collection import Qrels, read_qrels
from gradeloom.tasks.evaluate.calibration import Human, JudgeLabels, agreement, human_labels, rounded
from gradeloom.tasks.evaluate.isotonic import apply_isotonic, fit_isotonic, read_isotonic

JUDGE = LabelFileJudge(name="judge", labels=FileIdentity(name="labels.txt", sha256="00"))


def people(path: Path, text: str) -> Human:
    path.write_text(text)
    return human_labels(path, read_qrels(path))


def labels(expected: Qrels) -> JudgeLabels:
    return JudgeLabels(rounded(expected), expected)


@pytest.fixture
def fitted(tmp_path: Path) -> tuple[Human, IsotonicMapping]:
    human = people(tmp_path / "qrels.txt", "a 0 p 0\na 0 r 2\na 0 s 1\na 0 t 3\n")
    said = labels({"a": {"p": 0.5, "r": 1.0, "s": 1.5, "t": 2.5, "unjudged": 3.0}})
    return human, fit_isotonic(human, said, judge=JUDGE, domain="toys")


def test_violators_are_pooled(fitted: tuple[Human, IsotonicMapping]) -> None:
    _, mapping = fitted
    assert mapping.expected == (0.5, 1.0, 1.5, 2.5)
    assert mapping.human == (0.0, 1.5, 1.5, 3.0)  # 2 and 1 stand the wrong way round: their mean
    assert (mapping.domain, mapping.judge, len(mapping.fitted_pairs)) == ("toys", JUDGE, 4)
    values = apply_isotonic(mapping, {"b": {"p": 0.0, "r": 0.75, "s": 2.0, "t": 3.0}})
    assert values == {"b": {"p": 0.0, "r": 0.75, "s": 2.25, "t": 3.0}}


def test_it_is_refused_on_what_it_was_fitted_on(
    fitted: tuple[Human, IsotonicMapping], tmp_path: Path
) -> None:
    human, mapping = fitted
    with pytest.raises(InputError, match=r"fitted on these very judgements \(qrels\.txt\)"):
        apply_isotonic(mapping, {"z": {"z": 1.0}}, human=human)
    with pytest.raises(InputError, match=r"fitted on 1 of these pairs \(in qrels\.txt\)"):
        apply_isotonic(mapping, {"a": {"p": 1.0, "other": 1.0}})
    copy = tmp_path / "copy.txt.gz"
    copy.write_bytes(gzip.compress(b"a 0 t 3\na 0 p 0\n"))
    with pytest.raises(InputError, match="fitted on 2 of these pairs"):
        apply_isotonic(
            mapping, {"a": {"t": 2.0, "p": 1.0}}, human=human_labels(copy, read_qrels(copy))
        )  # fmt: skip


def test_there_must_be_expected_grades(tmp_path: Path) -> None:
    human = people(tmp_path / "qrels.txt", "a 0 p 0\n")
    with pytest.raises(InputError, match=r"--fit-isotonic.*there are none"):
        fit_isotonic(human, JudgeLabels({"a": {"p": 1}}), judge=JUDGE, domain=None)


def test_it_is_what_scikit_learn_fits_and_brings_values_nearer(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def sample(path: Path, prefix: str) -> tuple[Human, JudgeLabels]:
        grades = rng.integers(0, 4, 400)
        human = people(path, "".join(f"{prefix}{i % 20} 0 {i} {grade}\n" for i, grade in enumerate(grades)))
        values = np.clip(0.4 * grades + 0.3 * rng.normal(size=400), 0, 3)  # a judge that is too strict
        expected: Qrels = {}
        for i, value in enumerate(values):
            expected.setdefault(f"{prefix}{i % 20}", {})[str(i)] = float(value)
        return human, labels(expected)

    human, said = sample(tmp_path / "one.txt", "q")
    other, others = sample(tmp_path / "other.txt", "r")
    mapping = fit_isotonic(human, said, judge=JUDGE, domain=None)
    mapped = apply_isotonic(mapping, others.expected, human=other)
    pairs = [(said.expected[q][p], g) for q, grades in human.grades.items() for p, g in grades.items()]
    reference = IsotonicRegression(out_of_bounds="clip").fit(*zip(*pairs, strict=True))
    for query, values in others.expected.items():
        predicted = reference.predict(list(values.values()))
        assert list(mapped[query].values()) == pytest.approx(predicted, abs=1e-6)
    before = agreement(other.grades, others, resamples=2)
    after = agreement(other.grades, labels(mapped), resamples=2)
    assert before.expected is not None
    assert after.expected is not None
    assert after.expected.rmse < 0.7 * before.expected.rmse
    assert (after.quadratic_kappa.value or 0) > (before.quadratic_kappa.value or 0)


def test_a_stored_mapping_is_read_again(fitted: tuple[Human, IsotonicMapping], tmp_path: Path) -> None:
    _, mapping = fitted
    path = tmp_path / "mapping.json"
    path.write_text(mapping.model_dump_json())
    assert read_isotonic(path) == mapping


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"human": [0.0, 2.0, 1.0, 3.0]}, "must ascend"),
        ({"human": [0.0]}, "must have one length"),
        ({"expected": [0.0, "x", 1.0, 3.0]}, r"field 'expected\.1'"),
        ({"kind": "calibration"}, r"field 'kind': is no isotonic mapping"),
        ({"format": 2}, "field 'format'"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(
    change: dict[str, object], message: str, fitted: tuple[Human, IsotonicMapping], tmp_path: Path
) -> None:
    path = tmp_path / "mapping.json"
    path.write_text(json.dumps(json.loads(fitted[1].model_dump_json()) | change))
    with pytest.raises(InputError, match=message):
        read_isotonic(path)


def test_a_mapping_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_isotonic(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(InputError, match="is no isotonic mapping"):
        read_isotonic(tmp_path / "bad.json")
