"""The data set card: README.md of a release. A function of what is released, so that it can be digested.

Everything that comes from a configuration, a model or a prompt is escaped: in the card it is text, never
markup.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import yaml
from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment
from markupsafe import Markup

from gradeloom.schemas.config import ReleaseConfig
from gradeloom.schemas.manifest import accept_rate, rows_worked_on
from gradeloom.tasks.release.tables import TABLES

if TYPE_CHECKING:
    from gradeloom.tasks.release.write import Facts

_TABLE_WORDS = {
    "lists": "a query with its passages, their grades and the judge's readings",
    "queries": "a query",
    "corpus": "a passage",
    "qrels": "the grade of a passage for a query",
    "rejects": "a query whose list was rejected or failed, with the reason",
}
_POLICY_WORDS = {
    "intended": "the level that a passage was written for.",
    "judged": "the grade that the judge read; lists with one distinct grade were dropped.",
    "agreed": "the level that a passage was written for, in lists whose order the judge did not contradict.",
    "expected": "the judge's expected grade, a fraction in `lists`, rounded half up in `qrels`.",
}
_SIZES = (("n<1K", 1_000), ("1K<n<10K", 10_000), ("10K<n<100K", 100_000), ("100K<n<1M", 1_000_000),
          ("1M<n<10M", 10_000_000), ("10M<n<100M", 100_000_000))  # fmt: skip


def render(
    release: ReleaseConfig, facts: Facts, sizes: dict[str, tuple[int, int]], quality: dict[str, Any]
) -> str:
    """The card as Markdown with a YAML header that `datasets` and the Hub read.

    Args:
        release: name, version, licence, parent.
        facts: how the release was made.
        sizes: table -> (rows, bytes).
        quality: the figures of `tasks.evaluate.grades.quality`; a missing one is told as not measured.
    """
    environment = SandboxedEnvironment(  # the finalizer escapes for Markdown and HTML
        undefined=StrictUndefined, finalize=_escape, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    environment.filters |= {"percent": _percent, "figure": _figure}
    source = files("gradeloom.data").joinpath("cards/graded.md.j2").read_text(encoding="utf-8")
    unused = sum(account.unused for account in facts.accounting)
    decided = rows_worked_on(facts.accounting)
    kept = sizes["queries"][0]
    text = environment.from_string(source).render(
        header=Markup(_header(release, sizes)),  # noqa: S704 : YAML by its own library
        name=Markup(release.name),  # noqa: S704 : letters, digits, `.`, `_`, `-` only
        version=Markup(release.version),  # noqa: S704 : likewise
        parent=release.parent,
        levels=sorted(facts.levels, key=lambda level: -level.grade),
        models=[
            {"role": m.role, "name": m.model, "kind": m.kind, "identity": m.identity} for m in facts.models
        ],
        prompts=sorted(facts.prompts.items()),
        recipe=facts.recipe,
        steps=sorted(facts.steps.items()),
        policy=facts.policy,
        policy_words=_POLICY_WORDS[facts.policy],
        judge_words=_judge_words(facts.judge_independent),
        rows={table: rows for table, (rows, _) in sizes.items()},
        tables=[
            {"name": t, "rows": sizes[t][0], "bytes": sizes[t][1], "words": _TABLE_WORDS[t]} for t in TABLES
        ],
        kept=kept,
        decided=decided,
        unused=unused,
        accept_rate=_percent(accept_rate(facts.accounting)),
        accounting=facts.accounting,
        reasons=[
            (account.stage, reason, count)
            for account in facts.accounting
            for reason, count in sorted(account.reasons.items(), key=lambda item: (-item[1], item[0]))
        ],
        agreement=quality.get("agreement"),
        query_blind=quality.get("query_blind"),
    )
    return re.sub(r"\n{3,}", "\n\n", text)


def _header(release: ReleaseConfig, sizes: dict[str, tuple[int, int]]) -> str:
    rows = sizes["lists"][0]
    header = {
        "license": release.licence,
        "pretty_name": f"{release.name} {release.version}",
        "task_categories": ["text-retrieval", "text-ranking"],
        "size_categories": [next((name for name, below in _SIZES if rows < below), "n>100M")],
        "tags": ["synthetic", "graded-relevance", "gradeloom"],
        "configs": [
            {
                "config_name": table,
                "data_files": [{"split": "train", "path": f"{table}/train-*.parquet"}],
                **({"default": True} if table == next(iter(TABLES)) else {}),
            }
            for table in TABLES
        ],
    }
    return f"---\n{yaml.safe_dump(header, sort_keys=False, allow_unicode=True)}---\n"


def _judge_words(independent: bool | None) -> str:
    if independent is None:
        return "No judge read the passages."
    if independent:
        return "The judge is independent: another model than the generator."
    return "The judge is not independent: the generator read its own passages."


def _percent(share: float | None) -> str:
    return "not defined" if share is None else f"{100 * share:.1f} %"


def _figure(value: float | None) -> str:
    return "not defined" if value is None else f"{value:.3f}"


_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def _escape(value: Any) -> Any:
    """Text of others as one line of plain text in Markdown: no HTML, no links, no cells, no headings."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    line = re.sub(r"\s+", " ", value)
    line = re.sub(r"[\\`*_{}\[\]#|~$!]", r"\\\g<0>", line)
    return re.sub(r"[&<>]", lambda match: _HTML[match.group()], line)
