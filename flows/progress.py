"""How far a run is, for people: bars on a terminal, plain lines anywhere else, always on stderr."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

_SECONDS_BETWEEN_LINES = 5.0
# C0 and C1 controls, and the marks that reorder what stands around them.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    r"""Text of a model or a file, safe to print: escape sequences and controls shown as `\x1b`, not obeyed.

    Newlines and tabs stay.
    """
    return _CONTROL.sub(lambda m: ascii(m.group())[1:-1], text.replace("\r\n", "\n"))


@dataclass
class _Stage:
    total: int | None
    started: float
    unit: str = "rows"
    done: int = 0
    numbers: dict[str, float] = field(default_factory=dict)
    last_line: float = 0.0
    last_done: int = -1
    bar: TaskID | None = None

    def figures(self, now: float) -> str:
        """`84 % kept, 1,234 tokens/s, …`: what the numbers say, in the order of their first coming."""
        parts = []
        seconds = max(now - self.started, 1e-9)
        for name, number in self.numbers.items():
            if name == "kept":
                parts.append(f"{number / self.done:.0%} kept" if self.done else "0 kept")
            elif name == "tokens":
                parts.append(f"{number / seconds:,.0f} tokens/s")
            else:
                parts.append(f"{number:,.0f} {name.replace('_', ' ')}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Snapshot:
    """How far one stage is; `figures` are its numbers in words, maybe empty."""

    name: str
    done: int
    total: int | None
    figures: str
    unit: str = "rows"


class Progress:
    """Progress of one run. A context manager: leaving it ends the bars.

    Args:
        stream: where to write, default stderr.
        quiet: write nothing but what `say` is told with `always`.
        bars: live bars instead of lines; default: when the stream is a terminal.
        clock: seconds, for tests.

    Attributes:
        listeners: called with every message given to `say` (Prefect's run log is one).
    """

    def __init__(
        self,
        *,
        stream: TextIO | None = None,
        quiet: bool = False,
        bars: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._clock = clock
        self._stages: dict[str, _Stage] = {}
        self._bars: Bars | None = None
        self._with_bars = self._stream.isatty() if bars is None else bars
        self.listeners: list[Callable[[str], None]] = []

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def stage(self, name: str, total: int | None = None, *, unit: str = "rows") -> None:
        """A stage begins (or its total, in `unit`, becomes known)."""
        if name in self._stages:
            self._stages[name].total = total
        else:
            self._stages[name] = _Stage(total, self._clock(), unit)
        self._show(name, force=True)

    def advance(self, name: str, n: int = 1, **numbers: float) -> None:
        """`n` more rows are done.

        Args:
            name: the stage; one never announced begins now.
            n: rows.
            numbers: counts to add up and show. `kept` (rows) shows as an accept rate, `tokens`
                (completion tokens) as tokens a second, others as they are.
        """
        stage = self._stages.setdefault(name, _Stage(None, self._clock()))
        stage.done += n
        for key, number in numbers.items():
            stage.numbers[key] = stage.numbers.get(key, 0) + number
        self._show(name, force=stage.total is not None and stage.done >= stage.total)

    def say(self, text: str, *, always: bool = False) -> None:
        """A message for people, on a line of its own; also with `quiet` when `always`."""
        for listener in self.listeners:
            listener(text)
        if self._quiet and not always:
            return
        text = harmless(text)
        if self._bars is not None:
            self._bars.console.print(text, markup=False, highlight=False)
        else:
            self._write(text)

    def snapshot(self) -> list[Snapshot]:
        """How far every stage is, in the order they began."""
        now = self._clock()
        return [Snapshot(name, s.done, s.total, s.figures(now), s.unit) for name, s in self._stages.items()]

    def close(self) -> None:
        """End the bars; write the last line of every stage that has moved since its last one."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
        elif not self._with_bars:
            for name in self._stages:
                self._show(name, force=True)

    def _show(self, name: str, *, force: bool) -> None:
        if self._quiet:
            return
        if self._with_bars:
            self._show_bar(name)
            return
        stage, now = self._stages[name], self._clock()
        due = force or now - stage.last_line >= _SECONDS_BETWEEN_LINES
        if not due or stage.done == stage.last_done:
            return
        stage.last_line, stage.last_done = now, stage.done
        of = f"/{stage.total:,}" if stage.total is not None else ""
        line = f"{name}: {stage.done:,}{of} {stage.unit}"
        figures = stage.figures(now)
        if figures:
            line += f", {figures}"
        telling = stage.done >= 10 or stage.done * 4 >= (stage.total or 0)  # fewer rows tell nothing
        if stage.total and 0 < stage.done < stage.total and telling:
            line += f", {_clock_time((now - stage.started) / stage.done * (stage.total - stage.done))} to go"
        self._write(line)

    def _show_bar(self, name: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        if self._bars is None:
            self._bars = Bars(
                TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}", markup=False), TimeRemainingColumn(),
                console=Console(file=self._stream), refresh_per_second=4,
            )  # fmt: skip
            self._bars.start()
        stage = self._stages[name]
        if stage.bar is None:
            stage.bar = self._bars.add_task(name, total=stage.total, figures="")
        self._bars.update(
            stage.bar, total=stage.total, completed=stage.done, figures=stage.figures(self._clock())
        )

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def following(progress: Progress, stage: str, unit: str) -> Callable[[int, int], None]:
    """What is called with (done, total) by somebody who counts, and shows it as a stage."""
    before = 0
    known: int | None = None

    def show(done: int, total: int) -> None:
        nonlocal before, known
        if total != known:
            progress.stage(stage, total, unit=unit)
            known = total
        progress.advance(stage, done - before)
        before = done

    return show


def _clock_time(seconds: float) -> str:
    """Seconds as `1 h 05 min`, `3 min 20 s` or `42 s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    if whole >= 60:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole} s"
