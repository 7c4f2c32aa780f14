"""Charts of a report as Vega-Lite specifications. Names of people's data are values in them, never code or keys."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from fedstill.report import shortened

Spec = dict[str, Any]
T = TypeVar("T")

# Of Okabe & Ito (2008), the four that stand out on white; further lines are grey, because more than a few colours
# cannot be told apart.
LINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
ON_DARK = ("#4aa8e8", "#ff8a3d", "#2fce9f", "#f0a6cf")  # the same on a dark page
LINE_DASHES = ([1, 0], [8, 3], [2, 2], [8, 3, 2, 3])
GREY = "#8c9196"
MOST_POINTS, ALL_POINTS = 200, 1600  # of a line; of all lines of a chart
BANDS = 2  # lines with a band: bands of more lines cover each other
LONGEST_NAME = 36
HOVER = "hover"  # the layer of invisible points that a reader points at; static pictures leave it out
# A wheel scrolls the page; with the control key it zooms, and so does a pinch on a trackpad.
ZOOM: Spec = {
    "name": "zoom",
    "bind": "scales",
    "select": {"type": "interval", "encodings": ["x"], "zoom": "wheel![event.ctrlKey]"},
}


@dataclass(frozen=True)
class Chart:
    """A picture of a panel: a Vega-Lite specification without width and colours of the page, and its text for readers
    who cannot see it.

    toggles: names of the series that a reader can switch off; the specification has a parameter "shown" with their
        places.
    """

    spec: Spec
    alt: str
    toggles: tuple[str, ...] = ()


class Point(NamedTuple):
    x: float
    y: float
    low: float
    high: float


def plain_names(names: Iterable[str], letters: int = LONGEST_NAME) -> list[str]:
    """Return names for a chart: one line, no invisible signs, not too long, and no two alike.

    >>> plain_names(["a\\u202eb", "ab", "c\\nd"])
    ['ab', 'ab (2)', 'c d']
    """
    made: list[str] = []
    for name in names:
        visible = "".join(" " if sign.isspace() else sign for sign in name if sign.isspace() or _is_visible(sign))
        short = shortened(" ".join(visible.split()) or "(no name)", letters)
        unique, count = short, 1
        while unique in made:
            count += 1
            unique = f"{short} ({count})"
        made.append(unique)
    return made


def _is_visible(sign: str) -> bool:
    return unicodedata.category(sign) not in ("Cc", "Cf", "Cs", "Co", "Cn")


def thin(places: Sequence[T], most: int = MOST_POINTS) -> list[T]:
    """Return at most so many of some places, evenly spaced, the first and the last among them.

    >>> thin(range(1, 11), 4)
    [1, 4, 7, 10]
    """
    if len(places) <= most:
        return list(places)
    step = (len(places) - 1) / (most - 1)
    return [places[round(step * i)] for i in range(most)]


def line_chart(
    series: Mapping[str, Sequence[Point]],
    *,
    x: str,
    y: str,
    alt: str,
    levels: Mapping[str, float] | None = None,
    title: str = "",
    height: int = 300,
    log: bool = False,
) -> Chart:
    """Return lines, the first four in colours and the others grey, the first two with bands.

    levels: dashed lines across, by their names.
    log: draw x on a logarithmic scale.
    title: stands above a low chart, beside which the words of `y` find no room.
    """
    names = plain_names(series)
    colours = [*LINE_COLOURS[: len(names)], *[GREY] * (len(names) - len(LINE_COLOURS))]
    dashes = [*LINE_DASHES[: len(names)], *[LINE_DASHES[0]] * (len(names) - len(LINE_DASHES))]
    values = [
        {"s": place, "n": name, "x": _short(p.x), "y": _short(p.y), "lo": _short(p.low), "hi": _short(p.high)}
        for place, (name, points) in enumerate(zip(names, series.values(), strict=True))
        for p in thin(points, max(2, ALL_POINTS // len(names)))
    ]
    colour = {"field": "n", "type": "nominal", "title": None, "scale": {"domain": names, "range": colours}}
    shown = min(len(names), len(LINE_COLOURS))
    dash = {"field": "n", "type": "nominal", "title": None, "scale": {"domain": names, "range": dashes}}
    legend = {"values": names[:shown], "symbolType": "stroke", "symbolSize": 400, "columns": 2}
    along: Spec = {"field": "x", "type": "quantitative", "title": x, "axis": {"grid": False, "tickCount": 6}}
    if x == "round":
        along["axis"]["tickMinStep"] = 1
    along["scale"] = {"nice": False, **({"type": "log"} if log else {})}
    beside = None if title else y
    up: Spec = {"field": "y", "type": "quantitative", "title": beside, "scale": {"zero": False, "padding": 6}}
    tips = [
        {"field": "n", "type": "nominal", "title": "line"},
        {"field": "x", "type": "quantitative", "title": x, "format": ",.4~r"},
        {"field": "y", "type": "quantitative", "title": y, "format": ".2f"},
    ]
    coloured = f"datum.s < {len(LINE_COLOURS)}"
    layers: list[Spec] = []
    if any(p.low != p.high for points in list(series.values())[:BANDS] for p in points):
        layers.append(
            {
                "transform": [{"filter": f"datum.s < {BANDS}"}],
                "mark": {"type": "area", "opacity": 0.14, "clip": True},
                "encoding": {
                    "x": along,
                    "y": {"field": "lo", "type": "quantitative", "title": beside},
                    "y2": {"field": "hi"},
                    "color": {**colour, "legend": None},
                },
            }
        )
    layers.append(
        {
            "params": [ZOOM],
            "mark": {"type": "line", "clip": True},
            "encoding": {
                "x": along,
                "y": up,
                "detail": {"field": "s", "type": "nominal"},
                # grey lines are thin and pale, because to colour-blind eyes some colours are grey, too
                "strokeWidth": {"condition": {"test": coloured, "value": 2.4}, "value": 1},
                "strokeOpacity": {"condition": {"test": coloured, "value": 1}, "value": 0.6},
                "color": {**colour, "legend": legend if len(names) > 1 else None},
                "strokeDash": {**dash, "legend": legend if len(names) > 1 else None},
            },
        }
    )
    dots_shown = all(len(points) == 1 for points in series.values())
    layers.append(
        {
            **({} if dots_shown else {"name": HOVER}),
            "mark": {"type": "point", "filled": True, "size": 70, "clip": True},
            "encoding": {
                "x": along,
                "y": up,
                "color": {**colour, "legend": None},
                "opacity": {"value": 1 if dots_shown else 0},
                "tooltip": tips,
            },
        }
    )
    for name, value in (levels or {}).items():
        at: Spec = {"field": "v", "type": "quantitative"}
        data: Spec = {"values": [{"v": _short(value)}]}
        rule = {"type": "rule", "strokeDash": [3, 3], "color": GREY}
        words = {"type": "text", "align": "left", "baseline": "bottom", "dx": 4, "style": "level", "text": name}
        layers.append({"data": data, "mark": rule, "encoding": {"y": at}})
        layers.append({"data": data, "mark": words, "encoding": {"y": at, "x": {"value": 0}}})
    spec: Spec = {
        **({"title": title} if title else {}),
        "height": height,
        "params": [{"name": "shown", "value": list(range(len(names)))}],
        "data": {"values": values},
        "transform": [{"filter": "indexof(shown, datum.s) >= 0"}],
        "layer": layers,
    }
    return Chart(spec, alt, tuple(names) if len(names) > 1 else ())


def heat_map(
    cells: Iterable[tuple[str, str, float | None]],
    *,
    columns: Sequence[str],
    rows: Sequence[str],
    x: str,
    y: str,
    value: str,
    title: str,
    numbers: tuple[float, float] | None = None,
) -> Chart:
    """Return cells (column, row, percentage) in colours. A percentage of None leaves its cell empty.

    numbers: write the values into the cells; the colours go from the first of these two numbers to the second.
    """
    known = [(column, row, _short(v)) for column, row, v in cells if v is not None]
    values = [{"c": column, "r": row, "v": v} for column, row, v in known]
    labels = _labels(columns)
    along: Spec = {"field": "c", "type": "ordinal", "title": x, "scale": {"domain": list(columns)}, "axis": labels}
    up: Spec = {"field": "r", "type": "ordinal", "title": y, "scale": {"domain": list(rows)}}
    low, high = numbers or (0, 100)
    scale = {"domain": [low, high]}  # the page's theme has the colours
    bar = {"orient": "bottom", "gradientLength": 160, "titleLimit": 300, "direction": "horizontal"}
    cell: Spec = {
        "mark": {"type": "rect", "tooltip": True},
        "encoding": {
            "x": along,
            "y": up,
            "color": {"field": "v", "type": "quantitative", "title": value, "scale": scale, "legend": bar},
            "tooltip": [
                {"field": "c", "type": "ordinal", "title": x},
                {"field": "r", "type": "ordinal", "title": y},
                {"field": "v", "type": "quantitative", "title": value, "format": ",.4~r"},
            ],
        },
    }
    written: list[Spec] = [
        {
            "transform": [{"filter": f"datum.v {side} {(low + high) / 2}"}],
            "mark": {"type": "text", "style": style},
            "encoding": {"x": along, "y": up, "text": {"field": "v", "type": "quantitative", "format": ",.3~r"}},
        }
        for side, style in (("<=", "in-low"), (">", "in-high"))
    ]
    height = max(60, min(22 * len(rows), 560))
    layers = [cell, *(written if numbers else [])]
    spec = {"title": plain_names([title], 70)[0], "height": height, "data": {"values": values}, "layer": layers}
    return Chart(spec, f"Heat map: {title}.")


def dots(lines: Sequence[tuple[str, Mapping[str, float]]], *, kinds: Sequence[str], x: str, y: str, alt: str) -> Chart:
    """Return one line a name with a dot for each kind of number, and a grey line from the lowest to the highest."""
    names = plain_names(name for name, _ in lines)
    values = [
        {"r": name, "k": kind, "v": _short(numbers[kind])}
        for name, (_, numbers) in zip(names, lines, strict=True)
        for kind in kinds
        if kind in numbers
    ]
    up: Spec = {"field": "r", "type": "nominal", "title": y, "scale": {"domain": names}}
    along: Spec = {"field": "v", "type": "quantitative", "title": x, "axis": {"tickCount": 6, "format": ",~f"}}
    along["scale"] = {"zero": False, "padding": 12, "nice": False}
    kind: Spec = {"field": "k", "type": "nominal", "title": None, "scale": {"domain": list(kinds)}}
    colour = {**kind, "scale": {"domain": list(kinds), "range": list(LINE_COLOURS[: len(kinds)])}}
    shape = {**kind, "scale": {"domain": list(kinds), "range": ["circle", "square", "diamond", "cross"][: len(kinds)]}}
    # rings of growing size, because equal numbers lie on one point
    size = {**kind, "type": "ordinal", "scale": {"domain": list(kinds), "range": [40, 150, 320, 480][: len(kinds)]}}
    spec: Spec = {
        "height": 24 * max(1, len(names)),
        "data": {"values": values},
        "layer": [
            {
                "mark": {"type": "rule", "color": GREY, "opacity": 0.6},
                "transform": [
                    {
                        "aggregate": [{"op": "min", "field": "v", "as": "lo"}, {"op": "max", "field": "v", "as": "hi"}],
                        "groupby": ["r"],
                    }
                ],
                "encoding": {"y": up, "x": {**along, "field": "lo"}, "x2": {"field": "hi"}},
            },
            {
                "mark": {"type": "point", "strokeWidth": 2.5, "opacity": 1},
                "encoding": {
                    "y": up,
                    "x": along,
                    "color": colour,
                    "shape": shape,
                    "size": size,
                    "tooltip": [
                        {"field": "r", "type": "nominal", "title": y},
                        {"field": "k", "type": "nominal", "title": "model"},
                        {"field": "v", "type": "quantitative", "title": x, "format": ".2f"},
                    ],
                },
            },
        ],
    }
    return Chart(spec, alt)


def bars(values: Sequence[tuple[str, float]], *, x: str, y: str, alt: str, height: int = 160) -> Chart:
    """Return one bar a name, in the order given."""
    names = plain_names((name for name, _ in values), 20)
    data = [{"c": name, "v": _short(value)} for name, (_, value) in zip(names, values, strict=True)]
    labels = _labels(names)
    spec: Spec = {
        "height": height,
        "data": {"values": data},
        "mark": {"type": "bar", "color": LINE_COLOURS[0], "tooltip": True},
        "encoding": {
            "x": {"field": "c", "type": "ordinal", "title": x, "scale": {"domain": names}, "axis": labels},
            "y": {"field": "v", "type": "quantitative", "title": y},
            "tooltip": [
                {"field": "c", "type": "ordinal", "title": x},
                {"field": "v", "type": "quantitative", "title": y, "format": ",.4~r"},
            ],
        },
    }
    return Chart(spec, alt)


def _labels(names: Sequence[str]) -> Spec:
    """Return the look of names below columns: slanted where they find no room beside each other on a phone."""
    slanted = sum(map(len, names)) > 40 and max(map(len, names)) > 4
    return {"labelOverlap": "greedy", "labelSeparation": 5, "labelAngle": -40 if slanted else 0}


def _short(value: float) -> float:
    """Return a number with five digits, because more cannot be seen and would fill the page."""
    return float(f"{value:.5g}")
