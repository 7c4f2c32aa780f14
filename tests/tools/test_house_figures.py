"""The figures of the house are counted right: sources and calls small enough to count by hand."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import house_figures  # noqa: E402

SOURCE = '''"""A module.

Of three lines."""

import os  # a comment behind code is no line of its own

# a comment


class Thing:
    """One line."""

    text = """not a docstring

    because it has a name"""

    def name(self): "a docstring beside code"; return (
        1
    )
'''


def test_blank_lines_comments_and_docstrings_are_no_code():
    """import; class; the two lines of text that are not blank; def, 1 and the closing bracket."""
    assert house_figures.code_lines(SOURCE) == 7


def test_a_docstring_of_several_pieces_is_no_code():
    assert house_figures.code_lines('def f():\n    "one" \\\n    "two"\n    return "three"\n') == 2


def test_a_string_that_is_not_first_is_code():
    assert house_figures.code_lines("x = 1\n'a bare string'\n") == 2


@pytest.mark.parametrize(
    ("definition", "parameters"),
    [
        ("def f(a, /, b, *c, d=1, **e): ...", 5),
        ("async def f(a): ...", 1),
        ("class C:\n    def f(self, a): ...", 1),
        ("class C:\n    @classmethod\n    def f(cls, a): ...", 1),
        ("class C:\n    @staticmethod\n    def f(a, b): ...", 2),
        ("class C:\n    def __init__(self, a): ...", 1),
        ("if True:\n    def f(a, b): ...", 2),
    ],
)
def test_parameters_are_all_that_a_caller_may_give(definition, parameters):
    assert [function.parameters for function in house_figures.functions(definition)] == [parameters]


@pytest.mark.parametrize("decorator", ["dataclass", "dataclass(frozen=True)", "dataclasses.dataclass"])
def test_a_dataclass_may_be_made_from_many_fields(decorator):
    source = f"@{decorator}\nclass C:\n    def __init__(self, a): ...\n    def f(self): ..."
    assert [function.name for function in house_figures.functions(source)] == ["C.f"]


def test_a_kernel_is_known_by_its_decorator():
    (kernel,) = house_figures.functions("@triton.jit\ndef kernel(a): ...")
    assert kernel.on_device


def test_functions_within_functions_are_listed_with_their_place():
    (outer, inner) = house_figures.functions("@cache\ndef outer():\n    def inner(a): ...\n")
    assert outer == ("outer", 0, False)
    assert inner == ("outer.inner", 1, False)


def test_calls_are_counted_but_not_those_of_an_import(tmp_path, monkeypatch):
    """`first` is called twice in a run, once of these in a thread; `second` is entered only while it is imported."""
    (tmp_path / "first_counted.py").write_text("def first():\n    import second_counted\n")
    (tmp_path / "second_counted.py").write_text("def second(): ...\nsecond()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import first_counted

    counter = house_figures.CallCounter(tmp_path)
    before = sys.getprofile()
    threading.setprofile(counter)
    sys.setprofile(counter)
    try:
        first_counted.first()
        thread = threading.Thread(target=first_counted.first)
        thread.start()
        thread.join()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    assert counter.calls == {first_counted.first.__code__: 2}


def test_a_validation_is_counted_wherever_it_starts():
    from pydantic import BaseModel

    class Model(BaseModel):
        number: int = 0

    calls = house_figures.count_validations(Model)
    Model(number=1)
    Model.model_validate({"number": 2})
    assert Model.model_construct(number=3).model_dump() == {"number": 3}
    assert Model.__pydantic_validator__.title == "Model"
    assert len(calls) == 2


def test_check_names_each_figure_above_its_limit(monkeypatch, capsys):
    figures = [house_figures.Figure("low", 1, 2), house_figures.Figure("equal", 2, 2)]
    monkeypatch.setattr(house_figures, "measure", lambda: figures)
    monkeypatch.setattr(sys, "argv", ["house_figures.py", "--check", "--markdown"])
    house_figures.main()
    assert capsys.readouterr().out.splitlines()[2:] == ["| low | 1 | 2 |", "| equal | 2 | 2 |"]
    figures.append(house_figures.Figure("high", 3, 2))
    with pytest.raises(SystemExit, match=r"limit: high$"):
        house_figures.main()


@pytest.mark.slow
def test_one_run_is_observed():
    """The run parses and builds its method and validates its file, each at least once, and enters several modules."""
    script = ROOT / "tools" / "house_figures.py"
    printed = subprocess.run([sys.executable, script, "--markdown"], capture_output=True, text=True, check=True).stdout
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines()[2:]]
    counts = {name: int(value.replace(",", "")) for name, value, _ in rows}
    assert counts["modules that one `fedstill run` enters"] > 20
    assert all(count >= 1 for name, count in counts.items() if name.startswith("times that a run"))
