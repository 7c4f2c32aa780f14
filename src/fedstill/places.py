"""Where a run reads and where it writes: what one run leaves must not be data of the next."""

from __future__ import annotations

from pathlib import Path

from fedstill.config import Experiment
from fedstill.core.errors import FedstillError
from fedstill.data.files import files_of
from fedstill.data.images import IMAGE_SUFFIXES
from fedstill.data.load import is_embedded


def unlabeled_place(experiment: Experiment) -> str | None:
    """The file, folder or dataset that data.unlabeled names; None when it is a part of the run's own data."""
    choice = str(experiment.data.unlabeled)
    own = choice in ("", "none", "test", "central") or choice.lstrip("-").isdigit()
    return None if own else choice


def inside_data(asked: str, folder: Path, what: str, place: str | Path) -> FedstillError:
    """That what is to be written into a folder would be read as data; `asked` for the folder."""
    return FedstillError(f"{asked}: '{folder}' lies in {what} '{place}': give a folder outside of the data")


def check_run_folder(experiment: Experiment, folder: Path, *, asked: str) -> None:
    """A run's pictures and predictions must not be among the samples of the next run on the same data."""
    data, resolved = experiment.data, folder.resolve()
    places = {"data.source": data.source, "data.unlabeled": unlabeled_place(experiment), "data.test": data.test}
    for what, place in places.items():
        root = None if place is None else _folder_of(place)
        if place is None or root is None or not _is_seen(resolved, root):
            continue
        # one picture beside the tables of another place than the source makes it a folder of images (see files_of)
        if what != "data.source" or _reads_run(root, resolved):
            raise inside_data(asked, folder, what, place)


def _folder_of(place: str) -> Path | None:
    """The folder of this machine that is read, if a place names one; what is wrong with it the loader says."""
    try:
        root = Path(place).expanduser()
        return root.resolve() if not is_embedded(place) and root.is_dir() else None
    except (OSError, RuntimeError):
        return None


def _is_seen(folder: Path, root: Path) -> bool:
    """Whether a folder is or lies in another one, and is not hidden there: loaders pass over what is."""
    return folder.is_relative_to(root) and not any(part.startswith(".") for part in folder.relative_to(root).parts)


def _reads_run(source: Path, folder: Path) -> bool:
    """Whether reading `source` finds the pictures of a run in `folder`, or the tables that `predict` leaves there.

    Images are found however deep, tables in the source and one folder below, parquet files of the source itself first.
    """
    try:
        first = files_of(source)[0]
    except (FedstillError, OSError):
        return False  # the loader says it
    if first.suffix.lower() in IMAGE_SUFFIXES:
        return True
    found_first = first.suffix.lower() == ".parquet" and first.parent == source
    return len(folder.relative_to(source).parts) < (1 if found_first else 2)
