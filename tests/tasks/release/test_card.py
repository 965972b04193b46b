from __future__ import annotations

from html import unescape
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st
from made_stories import facts, some
from markdown_it import MarkdownIt

from gradeloom.schemas.config import Level, ReleaseConfig
from gradeloom.tasks.release.card import _escape, render
from gradeloom.tasks.release.tables import TABLES

RELEASE = ReleaseConfig(name="a_set", version="0.2.0", parent="0.1.0", licence="cc-by-4.0")
SIZES = {table: (1_000 if table in ("lists", "queries") else 4_000, 12_345) for table in TABLES}
QUALITY = {
    "agreement": {
        "grades": [0, 1], "matrix": [[7, 1], [2, 5]], "abstained": [0, 3],
        "agreement": {"0": 0.875, "1": 5 / 7}, "exact": 0.8, "kappa": 0.5946, "quadratic_kappa": None,
    },
    "query_blind": {"accuracy": 0.456, "chance": 0.25, "queries": 10, "passages": 40},
}  # fmt: skip
HTML = MarkdownIt("commonmark", {"html": True}).enable("table")


def card(quality: dict[str, Any] = QUALITY, **changes: Any) -> str:
    return render(RELEASE, facts(some(), **changes), SIZES, quality)


def cells(text: str) -> list[list[str]]:
    """Every table row of the card as a Markdown renderer sees it."""
    found: list[list[str]] = []
    for token in HTML.parse(text):
        if token.type == "tr_open":
            found.append([])
        elif token.type == "inline" and found and token.level > 3:
            found[-1].append("".join(child.content for child in token.children or []))
    return found


def test_the_header_says_what_datasets_and_the_hub_need() -> None:
    _, header, body = card().split("---\n", 2)
    known = yaml.safe_load(header)
    assert [config["config_name"] for config in known["configs"]] == list(TABLES)
    assert known["configs"][0]["default"] is True
    assert known["configs"][0]["data_files"] == [{"split": "train", "path": "lists/train-*.parquet"}]
    assert (known["license"], known["size_categories"]) == ("cc-by-4.0", ["1K<n<10K"])
    assert body.lstrip().startswith("# a_set 0.2.0\n")


def test_the_body_says_how_it_was_made_and_what_came_out() -> None:
    text, table = card(), cells(card())
    assert ["generator", "org/writer-135M", "vllm", "cafe"] in table
    assert ["graded_together", "feedfacefeedface"] in table
    assert ["3", "perfectly relevant", "dedicated to the query and holds the exact answer"] in table
    assert ["filter", "5", "4", "1", "0", "0"] in table
    assert ["generate", "unparsable", "1"] in table
    assert [
        "lists",
        "1000",
        "12345",
        "a query with its passages, their grades and the judge's readings",
    ] in table
    assert ["intended", "judged 0", "judged 1", "abstained", "agreement"] in table
    assert ["1", "2", "5", "3", "71.4 %"] in table
    assert "Exact agreement 80.0 %; Cohen's kappa 0.595, quadratic not defined." in text
    assert "45.6 % of\ncases; chance is 25.0 %" in text
    assert "The judge is independent" in text
    assert "Follows version 0.1.0." in text


def test_what_was_not_measured_is_said() -> None:
    text = card({}, judge_independent=None)
    assert "No judge read the passages." in text
    assert "No passage was judged" in text
    assert "was not measured" in text
    assert "not independent" in card(judge_independent=False)


def test_text_of_others_is_never_markup() -> None:
    evil = "<script>alert(1)</script> | [x](javascript:y) `c`\n# big ![i](z) {{ 7 * 7 }} --- **b**"
    level = Level(grade=1, name="<img src=x>", definition=evil)
    text = card(levels=[level, Level(grade=0, name="none", definition="nothing")])
    html = HTML.render(text.split("---\n", 2)[2])
    for markup in ("<script", "<img", "<a ", "<strong>b", 'javascript:y"'):
        assert markup not in html
    assert ["1", "<img src=x>", " ".join(evil.split())] in cells(text)


@given(st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1))
def test_escaped_text_reads_as_it_was_written(text: str) -> None:
    html = HTML.render(f"| x |\n|---|\n| a {_escape(text)} z |\n")
    cell = html.split("<td>")[1].split("</td>")[0]
    assert "<" not in cell
    assert " ".join(unescape(cell).split()) == " ".join(f"a {text} z".split())
