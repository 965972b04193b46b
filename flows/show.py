"""Results as people read them. Text of models and files is printed, never obeyed or rendered."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradeloom.flows.progress import harmless

if TYPE_CHECKING:
    from gradeloom.flows.doctor import Check
    from gradeloom.flows.graded import GradedResult
    from gradeloom.flows.preview import Exchange, Preview, PreviewRow
    from gradeloom.flows.runs import RunSummary
    from gradeloom.schemas.manifest import StageAccount
    from gradeloom.tasks.engine.types import Sampling
    from gradeloom.tasks.release.catalog import Summary

_WIDTH = 120
"""Columns where there is no terminal to ask."""


def as_json(value: Any) -> str:
    """One line of JSON, ASCII only: no terminal can be confused by it."""
    return json.dumps(value, default=_plain, ensure_ascii=True)


def fields(record: Any) -> dict[str, Any]:
    """A dataclass instance as a mapping, one level deep."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return fields(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


class Page:
    """Lines and tables on stdout."""

    def __init__(self, console: Console | None = None) -> None:
        self._out = console or Console(highlight=False)
        if not self._out.is_terminal:
            self._out.width = _WIDTH

    def line(self, text: str = "", *, indent: int = 0, style: str = "") -> None:
        """Text, wrapped; every line of it indented."""
        width = max(self._out.width - indent, 20)
        for paragraph in harmless(text).split("\n"):
            for line in textwrap.wrap(paragraph, width, replace_whitespace=False) or [""]:
                self._out.print(Text(" " * indent + line if line else "", style=style), soft_wrap=True)

    def path(self, label: str, value: object) -> None:
        """Something to copy: never wrapped."""
        self._out.print(Text(f"{label}{harmless(str(value))}"), soft_wrap=True)

    def table(self, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """A table; numbers stand to the right."""
        cells = [list(row) for row in rows]
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for i, name in enumerate(header):
            numbers = bool(cells) and all(isinstance(row[i], int | float) for row in cells)
            table.add_column(
                Text(name, style="bold"), justify="right" if numbers else "left", overflow="fold"
            )
        for row in cells:
            table.add_row(*(Text(_cell(value)) for value in row))
        self._out.print(table)


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else harmless(str(value))


def size(n: float) -> str:
    """Bytes as `1.2 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"


# --- graded ---------------------------------------------------------------------------------


def graded_result(result: GradedResult, name: str, root: str, ui: str | None) -> None:
    """The end of `graded run`.

    Args:
        result: how it ended.
        name: the release's name.
        root: of releases, for the commands to go on with.
        ui: where Prefect shows the run, if it does.
    """
    page = Page()
    if result.already:
        page.path("already released: ", result.release)
    elif result.release is not None:
        page.path("release: ", result.release)
    page.line(f"accept rate: {_share(result.accept_rate)}")
    if result.accounting:
        page.line()
        accounting(page, result.accounting)
    _usage(page, result.usage)
    if result.sample is not None:
        page.line()
        _sample(page, result.sample)
    page.line()
    if result.already:
        page.path("next: ", _commands(name, result.version, root)[0])
        return
    page.path("this run in the Prefect UI: ", f"{ui} (if nothing answers there: `gradeloom ui`)" if ui
              else "not recorded; start `gradeloom ui` before a run")  # fmt: skip
    if result.release is None:
        page.line("no release was cut; what is finished is kept, and a run with other settings uses it")
        return
    page.line("next:")
    for command in _commands(name, result.version, root):
        page.path("  ", command)


def _commands(name: str, version: str, root: str) -> list[str]:
    where = "" if root == "releases" else f" --root {root}"
    which = f"{name}@{version}"
    return [
        f"gradeloom release show {which}{where}",
        f"gradeloom release verify {which}{where}",
        f"gradeloom release export {which} --format beir --to {name}-beir{where}",
    ]


def accounting(page: Page, stages: Sequence[StageAccount]) -> None:
    """Where every row went."""
    page.table(
        ("stage", "rows", "kept", "rejected", "failed", "unused", "reasons"),
        [
            (s.stage, s.rows, s.kept, s.rejected, s.failed, s.unused, _reasons(s.reasons))
            for s in stages
        ],
    )  # fmt: skip


def _reasons(reasons: dict[str, int]) -> str:
    return ", ".join(f"{n:,} {reason}" for reason, n in sorted(reasons.items(), key=lambda r: (-r[1], r[0])))


def _usage(page: Page, usage: dict[str, Any]) -> None:
    if "prompt_tokens_sent" not in usage:
        return
    speed = usage.get("tokens_per_second")
    page.line()
    page.line(
        f"tokens: {usage['prompt_tokens_sent']:,} prompt and {usage['completion_tokens_sent']:,} completion"
        + (f", {speed:,.1f} completion tokens per second" if speed else "")
        + f"; {usage.get('requests_sent', 0):,} requests sent, {usage.get('requests_cached', 0):,} cached"
    )


def _sample(page: Page, sample: dict[str, Any]) -> None:
    page.line("one list in full")
    page.line(f"query: {sample['query']}", style="bold")
    for passage in sorted(sample["passages"], key=lambda p: -p["grade"]):
        page.line(f"grade {passage['grade']:g} ({_reading(passage)})", indent=2, style="cyan")
        page.line(passage["text"], indent=4)


def _reading(passage: dict[str, Any]) -> str:
    """What the judge made of a passage, with the mass that its verdict or abstention rests on."""
    mass = passage.get("mass")
    seen = "" if mass is None else f", mass {mass:.2f}"
    if passage.get("abstained") is None:
        return "not judged"
    return f"judge abstains{seen}" if passage["abstained"] else f"judge says {passage['judged']}{seen}"


def preview(shown: Preview) -> None:
    """`graded preview`: what was sent, what came back, what became of it, and what to expect."""
    page = Page()
    seen: set[str] = set()
    for row in shown.rows:
        _preview_row(page, row, seen)
    page.line(
        f"all {shown.queries:,} queries at this pace: about {shown.tokens:,} tokens, "
        f"{shown.hours:,.2f} hours; accept rate here {_share(shown.accept_rate)}"
    )


def _preview_row(page: Page, row: PreviewRow, shown: set[str]) -> None:
    """One query; a system message that was `shown` before is not shown again."""
    page.line(f"=== {row.query_id}: {row.query}", style="bold")
    for sent in row.exchanges:
        exchange(page, sent, shown)
    if row.passages:
        page.line("--- the list", style="cyan")
    for passage in row.passages:
        page.line(f"grade {passage['grade']} ({_reading(passage)})", indent=2)
        page.line(passage["text"], indent=4)
    verdict = row.status if row.reason is None else f"{row.status} at {row.stage}: {row.reason}"
    page.line(f"--- {verdict}" + (f" ({row.detail})" if row.detail else ""), style="bold")
    page.line()


def exchange(page: Page, sent: Exchange, shown: set[str]) -> None:
    """A request and its completion; a system message that was `shown` before is not shown again."""
    part = f" {sent.part}" if sent.part else ""
    page.line(f"--- {sent.stage}{part}, attempt {sent.attempt + 1}", style="cyan")
    for message in sent.messages:
        again = message["role"] == "system" and message["content"] in shown
        shown.add(message["content"])
        page.line(f"{message['role']}:" + " as above" * again, indent=2, style="dim")
        if not again:
            page.line(message["content"], indent=4)
    if sent.sampling is not None:
        page.line(f"sampling: {_sampling(sent.sampling)}", indent=2, style="dim")
    page.line(
        f"completion ({sent.outcome}, {sent.prompt_tokens} + {sent.completion_tokens} tokens):",
        indent=2, style="dim",
    )  # fmt: skip
    page.line(sent.text, indent=4)
    if sent.logprobs:
        seen = ", ".join(f"{token!r} {math.exp(logprob):.3g}" for token, logprob in sent.logprobs[:5])
        page.line(f"first token: {seen}", indent=4)


def _sampling(sampling: Sampling) -> str:
    seed = "no seed" if sampling.seed is None else f"seed {sampling.seed}"
    penalty = f", frequency penalty {sampling.frequency_penalty:g}" if sampling.frequency_penalty else ""
    drawn = f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}{penalty}, {seed}"
    return f"{drawn}, at most {sampling.max_tokens:,} tokens"


# --- releases, runs, cache, doctor ------------------------------------------------------------


def releases(found: Sequence[Summary], root: str) -> None:
    page = Page()
    if not found:
        page.line(f"no releases under {root}")
        return
    page.table(
        ("release", "kind", "rows", "released", "digest", ""),
        [
            (f"{r.name}@{r.version}", r.kind, ", ".join(f"{t} {n:,}" for t, n in (r.rows or {}).items()),
             (r.released_at or "")[:19], r.digest[:12], r.problem or ("latest" if r.latest else ""))
            for r in found
        ],
    )  # fmt: skip


def release(facts: dict[str, Any]) -> None:
    """What `catalog.show` says of a release."""
    from gradeloom.schemas.manifest import StageAccount

    page = Page()
    page.line(f"{facts['name']}@{facts['version']}", style="bold")
    for key in ("path", "kind", "parent", "released_at", "digest", "recipe"):
        if facts.get(key) is not None:
            page.path(f"{key}: ", facts[key])
    page.line(f"bytes: {size(facts['bytes'])}")
    page.line("rows: " + ", ".join(f"{table} {n:,}" for table, n in facts["rows"].items()))
    page.line(f"accept rate: {_share(facts['accept_rate'])}")
    for model in facts["models"]:
        page.line(f"{model['role']}: {model['model']} ({model['kind']}, {model['identity']})")
    page.line()
    accounting(page, [StageAccount.model_validate(a) for a in facts["accounting"]])
    for title in ("quality", "observed"):
        if facts[title]:
            page.line()
            page.line(f"{title}:")
            for key, value in facts[title].items():
                _figure(page, key.replace("_", " "), value)


def _figure(page: Page, name: str, value: Any) -> None:
    """One figure; of a confusion of grades its table, too."""
    if not isinstance(value, dict):
        page.line(f"{name}: {'not measured' if value is None else value}", indent=2)
        return
    rest = {k: v for k, v in value.items() if not isinstance(v, dict | list)}
    page.line(f"{name}: " + ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in rest.items()), indent=2)
    if "matrix" in value:
        page.table(
            ("   intended", *(f"judged {grade}" for grade in value["grades"]), "abstained"),
            [
                (f"   grade {grade}", *row, abstained)
                for grade, row, abstained in zip(
                    value["grades"], value["matrix"], value["abstained"], strict=True
                )
            ],
        )


def runs(found: Sequence[RunSummary], root: str) -> None:
    page = Page()
    if not found:
        page.line(f"no runs under {root}")
        return
    page.table(
        ("run", "state", "shards", "rows", "size", "stale", "last change"),
        [
            (r.name, r.state if r.pid is None else f"{r.state} (pid {r.pid})", r.shards, r.rows,
             size(r.bytes), size(r.stale_bytes), _moment(r.changed))
            for r in found
        ],
    )  # fmt: skip


def _moment(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix))


def facts(values: dict[str, Any]) -> None:
    """`name: value` lines; a float is a Unix time."""
    page = Page()
    for name, value in values.items():
        shown = size(value) if name.endswith("bytes") and isinstance(value, int) else value
        if isinstance(shown, float):
            shown = _moment(shown)
        page.path(f"{name.replace('_', ' ')}: ", f"{shown:,}" if isinstance(shown, int) else shown)


def checks(found: Sequence[Check], *, ready: bool) -> None:
    page = Page()
    for check in found:
        page.path(f"{check.status:9}{check.name:10}", check.found)
        if check.advice:
            page.path(" " * 19 + "-> ", check.advice)
    page.path("", "ready: `make demo`, or `gradeloom graded run --config graded-demo`" if ready
              else "not ready: see what is missing above")  # fmt: skip
