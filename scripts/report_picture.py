"""Generator of docs/report.webp: an annotated picture of a run's report, for the README.

    python -m scripts.report_picture runs/quickstart docs/report.webp

Takes a screenshot of some of the report's charts, with a note on each, in headless Chromium.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import tempfile
from pathlib import Path

from asyncrl.observability.report.report import write_report
from tests.support.browser import browser

#: heading of a card → the note on it
NOTES = {
    "Reward": "it learns: mean reward of the trained samples per step",
    "Staleness": "never above the bound",
    "Idle time": "both pools are busy",
    "Parameter sync": "seconds per phase, and the pause in generation",
    "Actor timelines": "all actors on one clock: a stall is a gap",
    "Group timelines": "grey: waiting for a slot, orange: generating, blue: queued, green: training",
}
ANNOTATE = """
(notes => {
  for (const card of document.querySelectorAll(".grid .card")) {
    const title = card.querySelector("h3")?.textContent;
    if (!(title in notes)) { card.remove(); continue; }
    const note = document.createElement("div");
    note.textContent = notes[title];
    note.style.cssText = "position:absolute;right:14px;top:12px;max-width:62%;background:#fff3c4;color:#4a3a00;" +
      "border:1px solid #e5c95c;border-radius:8px;padding:3px 10px;font-size:13.5px;font-weight:600";
    card.style.position = "relative";
    card.prepend(note);
  }
  for (const heading of document.querySelectorAll("h2")) {
    const grid = heading.nextElementSibling;
    if (!grid.querySelector(".card") || grid.className === "samples") { grid.remove(); heading.remove(); }
  }
  window.dispatchEvent(new Event("resize"));
})(NOTES)
"""


async def picture(report: Path, out: Path) -> None:
    with tempfile.TemporaryDirectory() as profile:
        async with browser(Path(profile)) as page:
            await page.show(report.resolve().as_uri(), width=1280)
            await page.value(ANNOTATE.replace("NOTES", json.dumps(NOTES)))
            await asyncio.sleep(1.0)
            height = await page.value("document.querySelector('main').getBoundingClientRect().height")
            clip = {"x": 0, "y": 0, "width": 1280, "height": height, "scale": 1}
            shot = await page.call(
                "Page.captureScreenshot", format="webp", quality=80, captureBeyondViewport=True, clip=clip
            )
            out.write_bytes(base64.b64decode(shot["data"]))
            assert not page.errors, page.errors


if __name__ == "__main__":
    asyncio.run(picture(write_report(sys.argv[1]), Path(sys.argv[2])))
