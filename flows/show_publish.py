"""What `gradeloom release publish` did, as people read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradeloom.flows.show import Page, size

if TYPE_CHECKING:
    from gradeloom.tasks.release.publish import Published


def published(done: Published) -> None:
    """The end of `release publish`, and how to go on."""
    page = Page()
    words = {"published": "published: ", "already": "already published: ", "planned": "would publish: "}
    page.path(words[done.state], done.url)
    page.line(f"release: {done.name}@{done.version}, digest {done.digest}")
    if done.commit is not None:
        page.line(f"commit: {done.commit}")
    if done.state == "planned":
        page.line(f"to send: {len(done.sent)} files, {size(done.sent_bytes)}")
        return
    if done.state == "published":
        page.line(f"sent: {len(done.sent)} files, {size(done.sent_bytes)}; all read back and compared")
    page.line()
    page.line("to load it:")
    page.path("  ", f"gradeloom release show {done.url}")
    page.path("  ", f'datasets.load_dataset({", ".join(_arguments(done))}, split="train")')


def _arguments(done: Published) -> list[str]:
    """What `load_dataset` is called with."""
    if done.url.startswith("hf://"):
        repo, _, tag = done.url.removeprefix("hf://datasets/").partition("@")
        return [f'"{repo}"', '"lists"', f'revision="{tag}"']
    if "://" in done.url:
        return ['"parquet"', f'data_files="{done.url}/lists/*.parquet"']
    return [f'"{done.url}"', '"lists"']
