"""The page for raters, in a real browser: labelling by keys and clicks, what is kept, what is downloaded."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from made_stories import cut, kept

from gradeloom.tasks.release.audit import Sample, draw_sample
from gradeloom.tasks.release.sheets import read_sheets, write_sheets

HOSTILE = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>{{ 7 * 7 }}"
TEXTS = [HOSTILE, "=SUM(A1)", "two\nlines", "\u2028 & <b>bold</b>"]


@pytest.fixture(scope="module")
def sheets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sample]:
    root = tmp_path_factory.mktemp("page")
    release = cut(root, [kept(n, texts=TEXTS if n == 0 else None) for n in range(2)]).path
    sample = draw_sample(release, n=8, raters=1, seed=0)
    write_sheets(sample, root / "sheets")
    return root / "sheets", sample


@pytest.fixture
def page(browser: Any, sheets: tuple[Path, Sample], tmp_path: Path) -> Any:
    """The page in the browser, with nothing kept from another test."""
    browser.execute_cdp_cmd(
        "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)}
    )
    browser.get((sheets[0] / "rater-1.html").as_uri())
    browser.execute_script("localStorage.clear()")
    browser.refresh()
    browser.get_log("browser")
    return browser


def press(page: Any, *keys: str) -> None:
    for key in keys:
        page.switch_to.active_element.send_keys(key)


def state(page: Any) -> str:
    return str(text(page, "state"))


def text(page: Any, name: str) -> str:
    return str(page.find_element("id", name).get_property("textContent"))


def downloaded(folder: Path) -> Path:
    path = folder / "rater-1.csv"
    for _ in range(100):
        if path.exists():
            return path
        time.sleep(0.1)
    raise AssertionError("nothing was downloaded")


def test_labelling_by_keyboard_ends_in_a_csv_that_can_be_imported(
    page: Any, sheets: tuple[Path, Sample], tmp_path: Path
) -> None:
    assert state(page) == "Passage 1 of 8, 0 labelled"
    press(page, "3", "0", "7", "2")  # there is no grade 7
    assert state(page) == "Passage 4 of 8, 3 labelled"
    press(page, "\ue012", "\ue003")  # left; Backspace takes the 2 away
    assert state(page) == "Passage 3 of 8, 2 labelled"
    press(page, "1")
    page.find_element("id", "download").click()
    key = sheets[1].key
    labels = read_sheets(key, [downloaded(tmp_path)])
    assert sorted(g for label in labels for g in label.grades if g is not None) == [0, 1, 3]
    assert sum(label.grades == [None] for label in labels) == 5
    assert page.get_log("browser") == []  # no error, no warning


def test_what_was_done_is_there_after_the_page_was_closed(page: Any) -> None:
    press(page, "3", "2")
    page.refresh()
    assert state(page) == "Passage 1 of 8, 2 labelled"
    assert page.find_element("css selector", "[aria-pressed=true]").text.startswith("3: perfectly relevant")
    page.find_element("id", "gap").click()
    assert state(page) == "Passage 3 of 8, 2 labelled"
    assert not page.find_element("id", "warning").is_displayed()


def test_clicks_do_what_keys_do(page: Any) -> None:
    buttons = page.find_elements("css selector", "#levels button")
    assert [button.get_attribute("data-grade") for button in buttons] == ["3", "2", "1", "0"]
    buttons[1].click()
    assert state(page) == "Passage 2 of 8, 1 labelled"
    page.find_element("id", "back").click()
    page.find_element("id", "clear").click()
    assert state(page) == "Passage 1 of 8, 0 labelled"
    assert not page.find_element("id", "back").is_enabled()


def test_every_text_is_shown_as_it_is(page: Any, sheets: tuple[Path, Sample]) -> None:
    shown = set()
    for _ in range(8):
        shown.add((text(page, "query"), text(page, "passage")))
        press(page, "\ue014")
    assert shown == {(passage.query, passage.text) for passage in sheets[1].passages}
    assert page.title == "Sheet of rater 1"
    assert page.get_log("browser") == []


def test_it_fits_a_phone_in_the_dark(page: Any) -> None:
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 360, "height": 640, "deviceScaleFactor": 2, "mobile": True},
    )
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": dark})
    try:
        assert page.execute_script("return document.documentElement.scrollWidth") <= 360
        assert (
            page.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 27)"
        )
        page.find_elements("css selector", "#levels button")[-1].click()  # far down
        assert state(page) == "Passage 2 of 8, 1 labelled"
        assert page.execute_script("return scrollY") == 0
        heights = [button.size["height"] for button in page.find_elements("tag name", "button")]
        assert min(heights) >= 44  # what a thumb hits
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
