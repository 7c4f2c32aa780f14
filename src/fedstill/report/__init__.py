"""Tables and pictures; here the words and colours that they share."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.core.errors import FedstillError, in_one_line, printable
from fedstill.storage.files import temporary_beside

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_log = logging.getLogger("fedstill.run")

# Okabe & Ito (2008): eight colours that stay apart for colour-blind readers; yellow last (weak on white).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#B8A900")
_DASHES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (1, 1.1)), (0, (4, 1.4, 1, 1.4)))
TITLE_WIDTH = 92  # letters a line, in a picture of eight inches

Style = tuple[str, Any]  # colour, dash


def style(place: int) -> Style:
    """Return colour and dash of the method at this place of a comparison, the same in all its pictures."""
    return COLOURS[place % len(COLOURS)], _DASHES[place // len(COLOURS) % len(_DASHES)]


def imported_matplotlib() -> Any:
    """Return matplotlib, without the settings that it takes from a file `matplotlibrc` of the working folder.

    Such a file may be somebody else's, and can have every text of a picture run through LaTeX.
    """
    first = "matplotlib" not in sys.modules
    try:
        import matplotlib.figure
    except ImportError:
        raise FedstillError("pictures need matplotlib: pip install 'fedstill[plots]'") from None
    if first and Path(matplotlib.matplotlib_fname()).resolve().parent == Path.cwd():
        matplotlib.rcdefaults()
    return matplotlib


def new_figure(width: float, height: float, title: str = "", *, letters: int = TITLE_WIDTH, size: float = 11) -> Figure:
    """Return an empty figure of so many inches, with its title at the left in lines of at most `letters`."""
    imported_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(wrapped(printable(title), letters), x=0.01, ha="left", fontsize=size, parse_math=False)
    return figure


def draw_all(pictures: Mapping[str, Callable[[Path], Any]], folder: Path) -> list[Path]:
    """Call each function with the path of its picture, and return the paths that were drawn.

    A picture that fails is a warning, because the result of a run is worth more. Each reason is given once.
    """
    drawn, reasons = [], set()
    for name, draw in pictures.items():
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Glyph .* missing from")  # a box stands for a letter without a font
                draw(unfinished := temporary_beside(folder / name))
            os.replace(unfinished, folder / name)
            drawn.append(folder / name)
        except Exception as error:
            if (reason := in_one_line(error)) not in reasons:
                _log.warning("no %s: %s", name, reason)
            reasons.add(reason)
            temporary_beside(folder / name)  # removes what was begun
    return drawn


def quiet(axes: Axes, grid: str = "y") -> None:
    """Draw grey lines along one axis below the data, and no frame above and at the right."""
    axes.grid(axis=grid, color="0.9", linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def whole_rounds(axes: Axes) -> None:
    """Mark whole rounds only."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))


def wrapped(text: str, width: int) -> str:
    """Break a text into lines of at most `width` letters, behind a comma, a plus, a semicolon or a space.

    >>> wrapped("fedaux(form='mean', epsilon=0.5)+simclr(epochs=100)", 34)
    "fedaux(form='mean', epsilon=0.5)+\\nsimclr(epochs=100)"
    """
    lines = [""]
    for piece in re.findall(r"[^,+; ]*[,+; ]*", text):
        if piece and lines[-1] and len(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def drawn(name: str) -> str:
    """Return a name for matplotlib, which draws it as it is: a dollar sign begins no formula.

    >>> drawn("$a^b^c$")
    '\\\\$a^b^c\\\\$'
    """
    return printable(name, keep="\n").replace("$", r"\$")


def shortened(name: str, letters: int) -> str:
    """Cut a name that is longer than so many letters."""
    return name if len(name) <= letters else f"{name[: letters - 1]}…"


def human_bytes(count: float) -> str:
    """Bytes in the largest decimal unit that leaves a number of at least one.

    >>> human_bytes(1_234_000)
    '1.2 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def counted(number: int, thing: str) -> str:
    """
    >>> counted(1, "run"), counted(2, "run")
    ('1 run', '2 runs')
    """
    return f"{number} {thing}{'' if number == 1 else 's'}"
