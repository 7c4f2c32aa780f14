"""A report as one HTML file: the panels, their charts, and everything that draws them, so that no network is needed."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from fedstill.core.errors import FedstillError, in_one_line
from fedstill.report import counted
from fedstill.report.charts import GREY, HOVER, LINE_COLOURS, LINE_DASHES, ON_DARK, Chart
from fedstill.report.panels import Panel, Table, panel_makers
from fedstill.report.runs import Runs, read_runs
from fedstill.storage.files import write_whole

REPORT_FILE = "report.html"
CANNOT = "The files of these runs hold something that this section cannot show."
STATIC_WIDTH = 680  # points
LARGEST_SVG = 60_000  # bytes: a static picture with more is a PNG, which does not grow with the number of its marks
HEAT, HEAT_DARK = ("#eef2f6", "#9ecae1", "#2f7fbc", "#08306b"), ("#1c232c", "#1f4e79", "#4a90c2", "#d3eaff")
_log = logging.getLogger("fedstill.report")


def _theme(*, dark: bool) -> dict[str, Any]:
    """Return the colours and letters of charts as a configuration of Vega-Lite."""
    ink, quiet, line = ("#e6edf3", "#b3bcc6", "#343c46") if dark else ("#1b1f24", "#57606a", "#d9dee3")
    words = {
        "labelColor": ink,
        "titleColor": ink,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
    }
    return {
        "background": "transparent",
        "font": "system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif",
        "view": {"stroke": None},
        "axis": {**words, "gridColor": line, "domainColor": line, "tickColor": line},
        "legend": {**words, "orient": "bottom", "labelLimit": 260},
        "title": {"color": ink, "fontSize": 13, "fontWeight": "normal", "anchor": "start"},
        "range": {"heatmap": HEAT_DARK if dark else HEAT},
        "style": {
            "level": {"color": quiet, "fontSize": 12},
            "in-low": {"color": "#ffffff" if dark else "#111111", "fontSize": 11},
            "in-high": {"color": "#111111" if dark else "#ffffff", "fontSize": 11},
        },
    }


# one text stands for a whole static picture, and a text for each of its marks would fill the page
STATIC = {**_theme(dark=False), "background": "white", "font": "sans-serif", "aria": False}


def write_report(
    folders: Sequence[str | Path],
    out: str | Path | None = None,
    *,
    reveals: Mapping[str, Sequence[str]] | None = None,
    runs: Runs | None = None,
) -> Path:
    """Write the report of some run folders and return its path; by default report.html in the first folder.

    reveals: everything that leaves a client, by the method's name as the runs have it.
    runs: the runs in these folders, where they were read already.
    """
    runs = read_runs(folders) if runs is None else runs
    page = make_page(replace(runs, reveals=reveals or {}))
    path = Path(folders[0]) / REPORT_FILE if out is None else Path(out)
    if path.is_dir():
        raise FedstillError(f"--out '{path}' is a folder: name the file, e.g. {path / REPORT_FILE}")
    try:
        write_whole(path, page)
    except OSError as error:
        raise FedstillError(f"cannot write '{path}' ({error.strerror or error}): give another file as --out") from None
    return path


class Section(NamedTuple):
    """A section of the page."""

    title: str
    html: str


def make_page(runs: Runs) -> str:
    """Return the page of some runs."""
    _vega()  # so that a missing package is reported before the sections are made
    sections = make_sections(runs)
    links = "".join(f'<li><a href="#{name}">{_text(section.title)}</a></li>' for name, section in sections.items())
    title = page_title(runs)
    header = f"""<h1><bdi>{_text(title)}</bdi></h1>
<p class="by">{page_size(runs)}</p>
<nav aria-label="Sections"><ul>{links}</ul></nav>"""
    main = "".join(section.html for section in sections.values())
    return _document(f"{title}: report", header, main, "The page needs no network.").html


def make_live_page() -> Document:
    """Return the page of `fedstill watch`: it has no section yet, because its script fetches them from its server."""
    header = """<h1><bdi>fedstill watch</bdi></h1>
<p class="by"></p>
<p id="connection" role="status">Connecting.</p>
<div id="progress"><progress max="1" aria-label="Rounds played" hidden></progress> <span></span></div>
<nav aria-label="Sections"><ul></ul></nav>
<noscript><p>This page needs JavaScript. The page that <code>fedstill report</code> writes needs none.</p></noscript>"""
    return _document("fedstill watch", header, "", "New rounds arrive by themselves.", live=True)


def make_sections(runs: Runs, *, static: bool = True) -> dict[str, Section]:
    """Return the sections of some runs. A panel that fails says so in its place, because the others are worth showing.

    static: put a static picture beneath each chart. A live page has none, because drawing them takes seconds.
    """
    sections = {}
    for name, make in panel_makers().items():
        try:
            made = make(runs)
            section = None if made is None else make_section(name, made, static=static)
        except Exception as error:
            _log.warning("no panel '%s': %s", name, in_one_line(error))
            section = make_section(name, Panel(name.replace("_", " ").capitalize(), [CANNOT]))
        if section is not None:
            sections[name] = section
    return sections


def page_title(runs: Runs) -> str:
    return ", ".join(dict.fromkeys(str(run.config.get("name") or run.folder.name) for run in runs.all[:3]))


def page_size(runs: Runs) -> str:
    return f"{counted(len(runs.all), 'run')} of {counted(len(runs.by_method), 'method')}"


class Document(NamedTuple):
    """A whole page, and the content security policy in it."""

    html: str
    policy: str


def _document(title: str, header: str, main: str, about: str, *, live: bool = False) -> Document:
    """Return a page around its sections.

    live: with the script that fetches sections from the server of the page.
    """
    here = Path(__file__)
    files = ("page.js", "live.js") if live else ("page.js",)
    script = "\n".join([_vega().javascript_bundle(), *(here.with_name(f).read_text(encoding="utf-8") for f in files)])
    script = script.replace("</script", "<\\/script").replace("<!--", "<\\!--")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # no script but this one runs, and nothing is fetched, whatever the names in the runs are
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data: blob:"
    policy += "; connect-src 'self'" if live else ""
    themes = {
        "light": _theme(dark=False),
        "dark": _theme(dark=True),
        "onDark": dict(zip(LINE_COLOURS, ON_DARK, strict=True)),
    }
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(title)}</title>
<link rel="icon" href="data:,">
<style>
{here.with_name("page.css").read_text(encoding="utf-8")}{_line_styles()}</style>
</head>
<body{' class="arriving"' if live else ""}>
<header>
{header}
</header>
<main>
{main}
</main>
<footer><p>Written by fedstill {_text(version("fedstill"))}. {about} Hold the control key and turn
the wheel to zoom into a chart; a double click shows all of it again.</p></footer>
<script type="application/json" id="themes">{in_json(themes)}</script>
<script>{script}</script>
</body>
</html>
"""
    return Document(page, policy)


def _vega() -> Any:
    try:
        import vl_convert
    except ImportError:
        raise FedstillError("a report needs vl-convert-python: pip install 'fedstill[report]'") from None
    return vl_convert


def _text(words: object) -> str:
    """Return text for HTML: markup is shown, not obeyed, and signs that no file can hold are replaced."""
    clean = str(words).encode("utf-8", "replace").decode().replace("\x00", "\N{REPLACEMENT CHARACTER}")
    return html.escape(clean, quote=True)


def in_json(tree: Any) -> str:
    """Return JSON in ASCII without any sign that ends a script or begins a tag."""
    text = json.dumps(tree, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _line_styles() -> str:
    """Return the colours of lines for the boxes below charts, on white and on black."""
    light, dark = (
        "".join(f".line-{place} {{ stroke: {colour}; }} " for place, colour in enumerate(colours))
        for colours in (LINE_COLOURS, ON_DARK)
    )
    return f"{light}.line-other {{ stroke: {GREY}; }}\n@media (prefers-color-scheme: dark) {{ {dark}}}\n"


def _isolated(words: object) -> str:
    """Return text whose right-to-left marks do not reach its neighbours."""
    return f"<bdi>{_text(words)}</bdi>"


def make_section(name: str, panel: Panel, *, static: bool = True) -> Section:
    """Return the section of a panel; without `static` it has no pictures beneath its charts."""
    parts = [f'<section id="{name}" class="{name}" aria-labelledby="{name}-title">']
    parts.append(f'<h2 id="{name}-title">{_text(panel.title)}</h2>')
    parts += [f"<p>{_isolated(sentence)}</p>" for sentence in panel.sentences]
    parts += [_figure(chart, static=static) for chart in panel.charts]
    for content, alt in panel.pictures:
        address = f"data:image/png;base64,{base64.b64encode(content).decode()}"
        parts.append(f'<p><img class="static" src="{address}" alt="{_text(alt)}"></p>')
    if panel.table is not None:
        parts.append(_table(panel.table))
    parts += [f"<p>{_isolated(caption)}</p>\n<pre tabindex=0>{_text(text)}</pre>" for caption, text in panel.texts]
    return Section(panel.title, "\n".join([*parts, "</section>\n"]))


def _table(table: Table) -> str:
    def row(cells: Sequence[str], kind: str) -> str:
        looks = [' class="left"' if place < table.left else "" for place in range(len(cells))]
        scope = ' scope="col"' if kind == "th" else ""
        return "".join(
            f"<{kind}{scope}{look}>{_isolated(cell)}</{kind}>" for cell, look in zip(cells, looks, strict=True)
        )

    body = "\n".join(f"<tr>{row(cells, 'td')}</tr>" for cells in table.rows)
    return (
        f'<div class="scroll" tabindex=0 role="region" aria-label="{_text(table.caption)}"><table>'
        f"<caption>{_text(table.caption)}</caption>\n"
        f"<thead><tr>{row(table.head, 'th')}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _figure(chart: Chart, *, static: bool) -> str:
    boxes = ""
    if chart.toggles:
        lines = "".join(
            f'<label><input type="checkbox" value="{place}" checked>{_swatch(place)}<bdi>{_text(name)}</bdi></label>'
            for place, name in enumerate(chart.toggles)
        )
        boxes = f'<fieldset class="toggles"><legend>Lines:</legend>{lines}</fieldset>'
    picture = ""
    if static:
        picture = f'<img class="static" src="{_static(chart)}" alt="{_text(chart.alt)}" width="{STATIC_WIDTH}">'
    return (
        f"<figure>{picture}"
        f'<div class="live" role="group" aria-label="{_text(chart.alt)}"></div>{boxes}'
        f'<script type="application/json">{in_json(chart.spec)}</script></figure>'
    )


def _swatch(place: int) -> str:
    """Return a piece of the line at this place of a chart; the style sheet has its colour."""
    coloured = place < len(LINE_COLOURS)
    look = f"line-{place}" if coloured else "line-other"
    dash = " ".join(map(str, LINE_DASHES[place])) if 0 < place < len(LINE_DASHES) else "none"
    return (
        f'<svg class="swatch {look}" width="28" height="6" aria-hidden="true"><line x1="0" y1="3" x2="28" y2="3" '
        f'stroke-width="{3 if coloured else 1.2}" stroke-dasharray="{dash}"/></svg>'
    )


def _static(chart: Chart) -> str:
    """Return the picture for readers without JavaScript and for paper, as a data address."""
    vega = _vega()
    spec = {**chart.spec, "width": STATIC_WIDTH - 40, "autosize": {"type": "fit-x", "contains": "padding"}}
    spec["config"] = STATIC
    if "layer" in spec:
        spec["layer"] = [layer for layer in spec["layer"] if layer.get("name") != HOVER]
    svg = vega.vegalite_to_svg(spec)
    if len(svg) <= LARGEST_SVG:
        return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
    return f"data:image/png;base64,{base64.b64encode(_repacked(vega.vegalite_to_png(spec, scale=2))).decode()}"


def _repacked(png: bytes) -> bytes:
    """Return the same picture in fewer bytes, an eighth for a heat map; vl-convert packs for speed."""
    head, place, packed, after = png[:8], 8, b"", b""
    while place < len(png):
        size = int.from_bytes(png[place : place + 4])
        chunk = png[place : place + 12 + size]
        if chunk[4:8] == b"IDAT":
            packed += chunk[8:-4]
        elif packed:
            after += chunk
        else:
            head += chunk
        place += len(chunk)
    body = b"IDAT" + zlib.compress(zlib.decompress(packed), 9)
    return head + (len(body) - 4).to_bytes(4) + body + zlib.crc32(body).to_bytes(4) + after
