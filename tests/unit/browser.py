"""A headless Chromium, where the machine has one: what a page says, asks for, how wide it is."""

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
OPTIONS = (
    "--headless",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--enable-logging=stderr",
)
NOBODY = "not an origin"
"""Who asked, in Chromium's log, where the browser itself did, for updates and the like."""
WIDTHS = (1280, 390)
FRAME = '<iframe srcdoc="{page}" style="width: {width}px; height: 900px; border: 0"></iframe>'
MEASURE = """
<script>
addEventListener("load", () => {
  const found = {};
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, width = frame.clientWidth;
    const wide = [...page.querySelectorAll("body *")].filter(
      (one) => one.getBoundingClientRect().right > width + 1 && !one.closest(".scroll, svg, pre"));
    found[width] = {
      scroll: page.documentElement.scrollWidth,
      wide: wide.map((one) => one.tagName + "." + one.className),
      cut: [...page.querySelectorAll(".scroll")].filter(
        (one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.innerText.slice(0, 60)),
    };
  }
  document.title = JSON.stringify(found);
});
</script>
"""


@dataclass(frozen=True)
class Shown:
    """output: of the browser. console: the lines that the page's console got. asked: the addresses
    that it asked a network for.
    """

    output: str
    console: list[str]
    asked: list[str]


def show(page: Path, folder: Path, *words: str) -> Shown:
    """Open `page`; `words` say what for, and `folder` takes what the browser writes."""
    assert CHROMIUM is not None
    log = folder / "net.json"
    places = (f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}")
    command = [CHROMIUM, *OPTIONS, *places, *words, page.absolute().as_uri()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    console = [line for line in ended.stderr.splitlines() if "CONSOLE" in line]
    events = (event.get("params", {}) for event in json.loads(log.read_text("utf-8"))["events"])
    asked = {e["url"] for e in events if e.get("initiator", NOBODY) != NOBODY and "url" in e}
    asked = {url for url in asked if not url.startswith(("file:", "data:"))}
    return Shown(ended.stdout, console, sorted(asked))


def measure(page: Path, folder: Path) -> tuple[dict[int, dict[str, object]], Shown]:
    """By width of the window: how wide the page is, what sticks out to the right, and tables that
    have to be scrolled; and what was said and asked for meanwhile.
    """
    text = escape(page.read_text(encoding="utf-8"))
    frames = "".join(FRAME.format(page=text, width=width) for width in WIDTHS)
    around = folder / "frames.html"
    around.write_text(f"<meta charset=utf-8>{frames}{MEASURE}", encoding="utf-8")
    shown = show(around, folder, "--dump-dom")
    title = re.search(r"<title>(.*?)</title>", shown.output)
    assert title is not None, shown.output[:500]
    return {int(w): found for w, found in json.loads(unescape(title[1])).items()}, shown
