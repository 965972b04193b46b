from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from made_stories import GRADES, cut, kept

from gradeloom.schemas.errors import InputError
from gradeloom.schemas.rows import digest
from gradeloom.tasks.release.export import export_beir


def test_beir_reads_the_export_as_it_was_released(tmp_path: Path) -> None:
    from beir.datasets.data_loader import GenericDataLoader

    texts = ['<b> "quoted"\n', "tab\t | and \u2028 line\r\n", "日本語 🙂", "plain"]
    stories = [kept(0, query_id='id "with" quotes'), kept(1, query='a "query"\nin two lines', texts=texts)]
    target = export_beir(cut(tmp_path, stories).path, tmp_path / "new" / "beir", split="train")

    corpus, queries, qrels = GenericDataLoader(data_folder=str(target)).load(split="train")
    ids = [digest("row1", str(g), text) for g, text in zip(GRADES, texts, strict=True)]
    assert queries == {'id "with" quotes': "what is thing 0?", "q1": 'a "query"\nin two lines'}
    assert qrels["q1"] == dict(zip(ids, GRADES, strict=True))
    assert list(qrels) == ['id "with" quotes', "q1"]
    assert [corpus[i] for i in ids] == [{"title": "", "text": text} for text in texts]
    assert len(corpus) == 8


def test_the_files_are_plain(standing: Path, tmp_path: Path) -> None:
    target = export_beir(standing / "made" / "0.1.0", tmp_path / "beir")
    assert sorted(str(p.relative_to(target)) for p in target.rglob("*")) == [
        "corpus.jsonl", "qrels", "qrels/test.tsv", "queries.jsonl",
    ]  # fmt: skip
    first_id = digest("row0", "3", "passage of level 3 about thing 0")
    lines = (target / "qrels" / "test.tsv").read_text().splitlines()
    assert lines[:2] == ["query-id\tcorpus-id\tscore", f"q0\t{first_id}\t3"]
    assert len(lines) == 13
    assert (target / "queries.jsonl").read_text().splitlines()[0] == '{"_id":"q0","text":"what is thing 0?"}'


def test_an_empty_target_is_taken_and_another_refused(standing: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    export_beir(standing / "made" / "0.1.0", tmp_path / "empty")
    with pytest.raises(InputError, match=r"empty: exists already; expected a new or empty folder"):
        export_beir(standing / "made" / "0.1.0", tmp_path / "empty")
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match=r"file: exists already"):
        export_beir(standing / "made" / "0.1.0", tmp_path / "file")
    with pytest.raises(InputError, match=r"file/below: cannot be written"):
        export_beir(standing / "made" / "0.1.0", tmp_path / "file" / "below")


def test_a_release_that_cannot_be_read_leaves_no_export(copied: Path, tmp_path: Path) -> None:
    (copied / "qrels" / "train-00000.parquet").write_bytes(b"PAR1 no PAR1")
    with pytest.raises(InputError, match=r"qrels/train-00000\.parquet, field 'bytes': 12 bytes"):
        export_beir(copied, tmp_path / "beir")
    shutil.rmtree(copied)
    with pytest.raises(InputError, match="no release here"):
        export_beir(copied, tmp_path / "beir")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_ids_that_a_tsv_file_cannot_hold_are_refused(tmp_path: Path) -> None:
    folder = cut(tmp_path, [kept(0), kept(1, query_id="a\tb")]).path
    with pytest.raises(InputError, match=r"qrels/.*, row 5, field 'query-id': 'a\\tb' holds a tab"):
        export_beir(folder, tmp_path / "beir")
    assert not (tmp_path / "beir").exists()
    with pytest.raises(InputError, match="unknown split 'eval'"):
        export_beir(folder, tmp_path / "beir", split="eval")


@pytest.mark.parametrize("table", ["corpus", "queries", "qrels"])
def test_a_release_that_lacks_a_file_is_not_exported(standing: Path, tmp_path: Path, table: str) -> None:
    release = shutil.copytree(standing / "made" / "0.1.0", tmp_path / "copy")
    next((release / table).iterdir()).unlink()
    with pytest.raises(InputError, match=r"listed in the manifest, but missing"):
        export_beir(release, tmp_path / "beir")
    assert not (tmp_path / "beir").exists()
