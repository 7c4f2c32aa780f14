"""The statements that docs/privacy.md prints are those that its example gives, word for word."""

from doc_pages import ROOT, blocks
from typer.testing import CliRunner

from fedstill.cli import app

PAGE = ROOT / "docs" / "privacy.md"
SMALL = {"data.source": "digits", "model.name": "mlp", "model.hidden": "[4]", "local.epochs": "1"}


def statement(folder, method: str | None = None) -> list[str]:
    """What a run of the page's file says about privacy, or of the same with another method."""
    example = next(block.text for block in blocks(PAGE, "toml") if "dp_fedavg" in block.text)
    if method:
        example = f'{example.partition("[method]")[0]}[method]\nname = "{method}"\n'
    (folder / "page.toml").write_text(example)
    words = [f"--set={key}={value}" for key, value in SMALL.items()]
    done = CliRunner().invoke(app, ["run", str(folder / "page.toml"), "--out", str(folder / "run"), *words])
    assert done.exit_code == 0, done.output
    lines = [line.strip() for line in done.stdout.splitlines()]
    first = next(at for at, line in enumerate(lines) if line.startswith("privacy"))
    return [line for at, line in enumerate(lines[first:]) if not at or line.startswith("NOT")]


def printed(number: int) -> list[str]:
    texts = [block.text for block in blocks(PAGE, "text") if block.text.startswith("privacy ")]
    return [line.strip() for line in texts[number].splitlines()]


def test_of_a_whole_run(tmp_path):
    assert statement(tmp_path) == printed(0)


def test_of_a_run_whose_last_rounds_have_no_noise(tmp_path):
    method = "dp_fedavg(clip=0.5, noise_multiplier=4.0) until 3 then fedavg"
    assert method in PAGE.read_text()
    assert statement(tmp_path, method) == printed(1)
