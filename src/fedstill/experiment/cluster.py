"""The workers of a run by its section [cluster], and the recipe by which each of them builds the run."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedstill.core.errors import FedstillError
from fedstill.core.types import Federation, Model
from fedstill.experiment.code_names import code_names
from fedstill.experiment.config import CREWS, Experiment
from fedstill.experiment.run_folder import with_full_paths
from fedstill.loop.federate import Built, MakePopulation
from fedstill.methods.own_code import let_import, own_files
from fedstill.storage import toml as toml_io
from fedstill.storage.files import write_whole


def population_of(experiment: Experiment, network: Model | None) -> MakePopulation | None:
    """Return what makes the population of a run whose clients are trained by workers; None: this process trains them.

    network: was handed over in Python and takes the place of [model].
    """
    engine, cluster = experiment.engine, experiment.cluster
    if engine.name not in CREWS:
        return None
    from fedstill.population.scattered import MakeCrew, scattered

    if engine.name == "ray":
        from fedstill.population.on_ray import Share, ray_crew

        share = Share(cluster.cpus, cluster.gpus)
        crew: MakeCrew = partial(ray_crew, count=cluster.actors, address=cluster.address, share=share)
    else:
        from fedstill.population.spawned import spawned_crew

        crew = partial(spawned_crew, count=cluster.actors, use_gpus=cluster.gpus != 0)
    threads = engine.threads or max(1, int(cluster.cpus))
    recipe = recipe_of(experiment, network)
    return partial(scattered, crew=crew, recipe=recipe, device=engine.device, threads=threads)


def in_one_process(experiment: Experiment) -> Experiment:
    """Return the experiment with its clients trained by this process, with the engine that its workers have."""
    if experiment.engine.name not in CREWS:
        return experiment
    engine = experiment.engine.model_copy(update={"name": experiment.cluster.engine})
    return experiment.model_copy(update={"engine": engine})


def recipe_of(experiment: Experiment, network: Model | None = None) -> Recipe:
    """Return the recipe of an experiment, with the content of the Python files that it names."""
    if network is not None and network.recipe is None:
        raise FedstillError(
            f"the network '{network.name}' was made by hand and cannot be built in another process: hand over the "
            "function that builds it, or name it in model.name as FILE.py:function"
        )
    alone = with_full_paths(in_one_process(experiment))
    alone = alone.model_copy(update={"model": alone.model.model_copy(update={"start": None})})  # it comes with orders
    used = {**alone.model_dump(), "compare": {}}  # methods that a comparison runs beside this one are not built here
    files = tuple((path, Path(path).read_bytes()) for path in own_files(code_names(used)))
    return Recipe(alone.to_toml(), files, os.getcwd(), None if network is None else network.recipe)


@dataclass(frozen=True)
class Recipe:
    """An experiment as text, with its Python files; it builds the run on a machine that has neither."""

    text: str
    files: tuple[tuple[str, bytes], ...]  # (full path at the driver, content)
    folder: str  # in which the driver works: modules are found from there
    network: Callable[[], Model] | None

    def __call__(self, federation: Federation, device: str) -> Built:
        from fedstill.experiment.build import build

        table = toml_io.loads(self._text_here(), where="the driver's experiment")
        table["engine"]["device"] = device
        return build(Experiment.model_validate(table), federation, None if self.network is None else self.network())

    def _text_here(self) -> str:
        """Return the text with the paths of this machine, on which files that are missing or differ are written."""
        if all(Path(path).is_file() and Path(path).read_bytes() == content for path, content in self.files):
            let_import((path for path, _ in self.files), Path(self.folder))
            return self.text
        digest, text = hashlib.sha256(repr(self.files).encode()).hexdigest()[:16], self.text
        root = Path(tempfile.gettempdir()) / f"fedstill-{os.getuid()}-{digest}"
        root.mkdir(mode=0o700, exist_ok=True)
        if root.lstat().st_uid != os.getuid():  # of a link too, because it may lead anywhere
            raise FedstillError(f"'{root}' is somebody else's: the files of the experiment cannot be written there")
        for path, content in self.files:
            place = root / path.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            write_whole(place, content)
            text = text.replace(path, str(place))
        let_import((str(root / path.lstrip("/")) for path, _ in self.files), root / self.folder.lstrip("/"))
        return text
