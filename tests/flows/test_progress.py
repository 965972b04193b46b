"""What progress looks like: plain lines by a clock that tests turn, bars on a terminal."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st

from gradeloom.flows.progress import Progress, Snapshot, following, harmless


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plain_progress(*, quiet: bool = False) -> tuple[Progress, io.StringIO, Clock]:
    stream, clock = io.StringIO(), Clock()
    return Progress(stream=stream, quiet=quiet, clock=clock), stream, clock


def test_lines_come_at_start_then_every_five_seconds_then_at_the_end() -> None:
    progress, stream, clock = plain_progress()
    progress.stage("generate", 10)
    for _ in range(9):
        clock.now += 2
        progress.advance("generate", 1, kept=1, tokens=50)
    clock.now += 2
    progress.advance("generate", 1, kept=0, tokens=50)
    progress.close()
    assert stream.getvalue().splitlines() == [
        "generate: 0/10 rows",
        "generate: 3/10 rows, 100% kept, 25 tokens/s, 14 s to go",
        "generate: 6/10 rows, 100% kept, 25 tokens/s, 8 s to go",
        "generate: 9/10 rows, 100% kept, 25 tokens/s, 2 s to go",
        "generate: 10/10 rows, 90% kept, 25 tokens/s",
    ]


def test_a_stage_that_stops_early_has_a_last_line() -> None:
    progress, stream, clock = plain_progress()
    progress.stage("judge", 4000)
    clock.now += 1
    progress.advance("judge", 1000, abstained=3)
    progress.close()
    assert stream.getvalue().splitlines()[-1] == "judge: 1,000/4,000 rows, 3 abstained, 3 s to go"


def test_quiet_says_only_what_must_be_said() -> None:
    progress, stream, _ = plain_progress(quiet=True)
    heard: list[str] = []
    progress.listeners.append(heard.append)
    progress.stage("generate", 1)
    progress.advance("generate")
    progress.say("one")
    progress.say("two", always=True)
    progress.close()
    assert stream.getvalue() == "two\n"
    assert heard == ["one", "two"]


def test_snapshot() -> None:
    progress, _, clock = plain_progress()
    progress.stage("generate", 4)
    clock.now += 1
    progress.advance("generate", 2, kept=1)
    progress.advance("judge", 1)
    assert progress.snapshot() == [Snapshot("generate", 2, 4, "50% kept"), Snapshot("judge", 1, None, "")]


def test_bars_show_rows_and_figures_and_leave_messages_whole() -> None:
    stream = io.StringIO()
    with Progress(stream=stream, bars=True) as progress:
        progress.stage("generate", 4)
        progress.advance("generate", 2, kept=1)
        progress.say("[red]not markup[/red] \x1b[2J")
    shown = stream.getvalue()
    assert "generate" in shown
    assert "2/4" in shown
    assert "50% kept" in shown
    assert "[red]not markup[/red] \\x1b[2J" in shown
    assert "\x1b[2J" not in shown


@given(st.text())
def test_harmless_text_has_no_controls_and_loses_nothing_else(text: str) -> None:
    shown = harmless(text)
    assert not [c for c in shown if c not in "\n\t" and (ord(c) < 32 or 127 <= ord(c) < 160)]
    assert harmless(shown) == shown
    if text.isprintable():
        assert shown == text


def test_harmless_shows_what_it_disarms() -> None:
    assert harmless("a\x1b[31mred\x07\r\nb\u202ec") == "a\\x1b[31mred\\x07\nb\\u202ec"


def test_a_count_kept_elsewhere_is_followed_in_its_unit() -> None:
    progress, stream, clock = plain_progress()
    show = following(progress, "train", "steps")
    for done in (3, 4, 9, 10):  # a training that goes on from step 3
        clock.now += 3
        show(done, 10)
    progress.close()
    assert stream.getvalue().splitlines() == [
        "train: 0/10 steps",
        "train: 9/10 steps, 1 s to go",
        "train: 10/10 steps",
    ]
