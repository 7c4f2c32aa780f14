"""Rules of the house that a reader would otherwise have to check by eye."""

from __future__ import annotations

import ast
import importlib
import sys
import tomllib

import pytest
from source_files import SOURCE, calls, files, imported_at_once, imports, keywords, unit_of

MAY_IMPORT = {
    "core": set(),
    "storage": {"core"},
    "compose": {"core"},
    "attack": {"core"},
    "partition": {"core", "storage"},
    "data": {"core", "storage"},
    **{room: {"core", "compose"} for room in ("local", "server", "privacy", "models", "engine")},
    "methods": {"core", "attack", "compose", "local", "server", "privacy", "models", "partition", "storage"},
    "loop": {"core", "attack", "compose", "privacy", "engine", "storage"},
    "population": {"core", "compose", "loop", "storage"},
    "report": {"core", "loop", "engine", "privacy", "storage", "partition"},
}
PRIVATE_STREAMS = {"default_rng", "Generator", "PCG64", "RandomState", "SeedSequence"}  # of numpy.random, with a seed
TORCH_DRAWS = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"}
TORCH_DRAWS |= {"rand_like", "randn_like", "randint_like"}
IN_PLACE_DRAWS = {
    "normal_",
    "uniform_",
    "random_",
    "bernoulli_",
    "exponential_",
    "geometric_",
    "cauchy_",
    "log_normal_",
}
UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
BRINGS = {
    "scikit-learn": ("sklearn",),
    "pydantic": ("pydantic", "pydantic_core", "typing_extensions", "annotated_types"),
}


def package_imports(path: str) -> set[str]:
    """Other units of fedstill that a file imports, inside functions too."""
    found = {name.split(".")[1] for name in imports(files()[path]) if name.startswith("fedstill.")}
    return found - {unit_of(path), "__version__"}


@pytest.mark.parametrize("unit", MAY_IMPORT)
def test_imports_point_one_way(unit):
    for path in files():
        if unit_of(path) == unit:
            assert package_imports(path) <= MAY_IMPORT[unit], path


def test_nothing_but_the_entry_point_imports_the_command_line():
    assert {unit_of(path) for path in files() if "cli" in package_imports(path)} <= {"__main__"}


def test_nothing_but_the_command_line_imports_the_benchmarks_of_papers():
    assert {unit_of(path) for path in files() if "bench" in package_imports(path)} <= {"cli"}


def test_nothing_but_the_command_line_imports_the_deployments():
    assert {unit_of(path) for path in files() if "deploy" in package_imports(path)} <= {"cli"}


def test_no_module_imports_itself_through_others():
    modules = {_module_name(path): path for path in files()}
    edges = {
        name: {target for found in imported_at_once(files()[path]) if (target := _nearest(found, modules))} - {name}
        for name, path in modules.items()
    }
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above, name))
        if name not in done:
            for target in sorted(edges[name]):
                visit(target, (*above, name))
            done.add(name)

    for name in modules:
        visit(name, ())


def _module_name(path: str) -> str:
    return "fedstill." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _nearest(name: str, modules: dict[str, str]) -> str | None:
    """The module that an imported name lives in: fedstill.core.tree.clone -> fedstill.core.tree."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def test_only_declared_packages_are_imported_when_fedstill_is():
    """Optional packages (data, plots, trackers) are imported by the function that needs them."""
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]
    declared = {word.split(">")[0] for word in project["dependencies"]}
    assert set(BRINGS) <= declared
    brought = {name for package in declared for name in BRINGS.get(package, (package,))}
    for path, tree in files().items():
        outside = {name.split(".")[0] for name in imported_at_once(tree)} - brought - sys.stdlib_module_names
        assert outside <= {"fedstill", "triton" if path == "models/stacked/triton_kernels.py" else "fedstill"}, path


def draws_from_a_global_stream(name: str, call: ast.Call) -> bool:
    module, _, function = name.rpartition(".")
    if module == "random":
        return not (function == "Random" and call.args)
    if module == "numpy.random":
        return function not in PRIVATE_STREAMS or not call.args
    if module in ("torch", "torch.random", "torch.cuda", "torch.cuda.random"):
        seeds = function in ("seed", "manual_seed", "manual_seed_all", "set_rng_state", "fork_rng")
        return seeds or (function in TORCH_DRAWS and "generator" not in keywords(call))
    if module == "torch.nn.init":
        return False  # layers are built inside torch_stream
    return (function in IN_PLACE_DRAWS and "generator" not in keywords(call)) or name.endswith("functional.dropout")


def test_nothing_outside_the_seeds_module_touches_a_global_random_stream():
    for path, tree in files().items():
        if path != "core/seeds.py":
            guilty = [
                f"{name} in line {call.lineno}" for name, call in calls(tree) if draws_from_a_global_stream(name, call)
            ]
            assert not guilty, f"{path}: {guilty}"


@pytest.mark.parametrize(
    "line",
    [
        "import numpy as np; np.random.seed(0)",
        "import numpy as np; np.random.rand(3)",
        "from numpy import random as r; r.permutation(3)",
        "import numpy; numpy.random.default_rng()",
        "import random; random.shuffle(rows)",
        "from random import choice; choice(rows)",
        "import torch; torch.manual_seed(0)",
        "from torch import randn; randn(3)",
        "import torch; torch.randperm(3)",
        "x.normal_()",
        "torch.empty(3).uniform_(0, 1)",
        "import torch.nn.functional as F; F.dropout(x, 0.5)",
        "from torch import nn; nn.functional.dropout(x)",
    ],
)
def test_the_rule_about_random_streams_catches(line):
    assert any(draws_from_a_global_stream(name, call) for name, call in calls(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        "import numpy as np; np.random.Generator(np.random.PCG64(seed))",
        "import random; random.Random(seed)",
        "import torch; torch.rand(3, generator=torch_generator(0))",
        "from torch import nn; nn.init.normal_(w, std=0.01)",
        "import torch; torch.random.get_rng_state()",
    ],
)
def test_the_rule_about_random_streams_lets_pass(line):
    assert not any(draws_from_a_global_stream(name, call) for name, call in calls(ast.parse(line)))


def runs_foreign_code(name: str, call: ast.Call) -> bool:
    if name in ("torch.load", "torch.save", "eval", "exec", "pandas.read_pickle"):
        return True
    loads = name in ("numpy.load", "numpy.save", "numpy.lib.format.read_array")
    return loads and keywords(call).get("allow_pickle") is not False


def test_nothing_is_pickled_or_read_from_a_pickle():
    for path, tree in files().items():
        assert not UNSAFE & {name.split(".")[0] for name in imports(tree)}, path
        guilty = [f"{name} in line {call.lineno}" for name, call in calls(tree) if runs_foreign_code(name, call)]
        assert not guilty, f"{path}: {guilty}"


@pytest.mark.parametrize(
    ("line", "caught"),
    [
        ("import torch; torch.load(path)", True),
        ("from torch import load; load(path)", True),
        ("import numpy as np; np.load(path)", True),
        ("import numpy as np; np.load(path, allow_pickle=True)", True),
        ("import numpy as np; np.load(path, allow_pickle=False)", False),
        ("import safetensors.torch; safetensors.torch.load(data)", False),
        ("model.eval()", False),
    ],
)
def test_the_rule_about_pickles_tells_them_apart(line, caught):
    assert any(runs_foreign_code(name, call) for name, call in calls(ast.parse(line))) == caught


@pytest.mark.parametrize(
    "path", [path for path in files() if path.endswith("__init__.py") and "__all__" in (SOURCE / path).read_text()]
)
def test_a_package_exports_what_it_says_and_says_all_it_exports(path):
    module = importlib.import_module(_module_name(path))
    exported = module.__all__
    assert len(exported) == len(set(exported))
    for name in exported:
        assert getattr(module, name) is not None
    assert handed_on(files()[path], own=_module_name(path)) <= set(exported), "imported here, unused and not in __all__"


def handed_on(tree: ast.Module, *, own: str) -> set[str]:
    """Public names that a package imports from its own modules without using them itself."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {a.asname or a.name for node in nodes if (node.module or "").startswith(f"{own}.") for a in node.names}
    return {name for name in names - used if not name.startswith("_")}


def test_modules_begin_with_one_line_that_says_what_they_are():
    for path, tree in files().items():
        if tree.body:
            told = ast.get_docstring(tree)
            assert told, path
            assert told.splitlines()[0].strip(), path


ROOMS = sorted({unit_of(path) for path in files() if "/" in path} - {"bench", "data"})


@pytest.mark.parametrize("room", ROOMS)
def test_a_test_file_is_named_after_the_module_that_it_tests(room):
    """tests/<room>/test_<module>.py, or test_<module>_<aspect>.py where one file would be too long."""
    tests = SOURCE.parents[1] / "tests"
    for path in (tests / room).rglob("test_*.py"):
        folder = path.parent.relative_to(tests)
        modules = {file.stem for file in (SOURCE / folder).glob("*.py")} | {folder.name}
        modules |= {package.parent.name for package in (SOURCE / folder).glob("*/__init__.py")}
        named = path.stem.removeprefix("test_")
        assert any(named == module or named.startswith(f"{module}_") for module in modules), path.relative_to(tests)
