"""Draw sections of a page of `fedstill report` or `watch` for the documentation: PICTURE.png and PICTURE_dark.png.

    python tools/picture_of_report.py PAGE.html docs/images/report.png answer curves
    python tools/picture_of_report.py http://127.0.0.1:PORT/TOKEN/ docs/images/watch.png under_way curves

It needs chromium, chromedriver and selenium. The colours are reduced to 200, which makes a third of the bytes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from browser import browser

WIDTH, HEIGHT = 860, 9000  # of the window: all of a page, so that nothing moves while it is drawn


def main(page: str | Path, picture: str | Path, *sections: str) -> None:
    light = Path(picture)
    for file, dark in (light, False), (light.with_stem(f"{light.stem}_dark"), True):
        with tempfile.TemporaryDirectory() as folder, browser(Path(folder)) as opened:
            opened.open(page if "://" in str(page) else Path(page), width=WIDTH, height=HEIGHT, dark=dark)
            opened.wait(f"{list(sections)!r}.every((name) => document.querySelector('#' + name + ' h2'))")
            boxes = [
                opened.value(f"document.getElementById({name!r}).getBoundingClientRect().toJSON()") for name in sections
            ]
            opened.picture(Path(folder) / "all.png")
            drawn = Image.open(Path(folder) / "all.png").convert("RGB")
        tops = [
            0 if name in ("answer", "under_way") else int(box["top"]) for name, box in zip(sections, boxes, strict=True)
        ]  # 0: the title
        parts = [drawn.crop((0, top, drawn.width, int(box["bottom"]))) for top, box in zip(tops, boxes, strict=True)]
        joined, place = Image.new("RGB", (drawn.width, sum(part.height for part in parts))), 0
        for part in parts:
            joined.paste(part, (0, place))
            place += part.height
        joined.quantize(200, kmeans=3).save(file, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
