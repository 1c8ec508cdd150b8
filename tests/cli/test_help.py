"""Help on two levels: `--help` fits a screen, `--help-all` shows every option under a heading."""

import re
from dataclasses import fields

import pytest

from hsa.baselines.options import DocumentOptions
from hsa.cli.convert import SettingOptions, TextOptions
from hsa.cli.main import COMMANDS, build_app
from hsa.models.options import ModelOptions
from hsa.research.match3.options import Match3Options
from hsa.training.options import DataOptions, LanguageOptions, Seq2SeqOptions, TrainingOptions

LONG = ("train", "compare", "convert", "finetune", "heads", "inspect")


def options(text):
    """Return the options at the beginning of the rows of a page, in order."""
    return [name.replace("[no-]", "") for name in re.findall(r"^│ (?:\*  |   )?(--[a-z\[\]-]+)", text, re.MULTILINE)]


def headings(text):
    return re.findall(r"^╭─ (.*?) ─+╮$", text, re.MULTILINE)


@pytest.fixture
def page(call):
    def show(*arguments, columns=100):
        code, out, err = call(*arguments, columns=columns)
        assert (code, err) == (0, "")
        return out

    return show


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen(page, command):
    text = page(command, "--help")
    lines = text.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith(f"Usage: hsa {command}")
    assert lines[2].endswith(".")  # the description is one line
    assert any(line.startswith("Example") for line in lines)
    assert len(page(command, "--help", columns=80).splitlines()) <= 45
    assert page(command, "-h") == text


@pytest.mark.parametrize("command", LONG)
def test_short_help_shows_common_options(page, command):
    text = page(command, "--help")
    shown, every = options(text), options(page(command, "--help-all"))
    assert headings(text) == ["Common options"]
    assert 10 <= len(shown) <= 15
    assert set(shown) < set(every)
    assert text.splitlines()[-1] == f"hsa {command} --help-all shows all {len(every)} options."
    assert sum(line.lstrip().startswith(f"hsa {command} ") for line in text.splitlines()) == 4  # three examples


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - set(LONG)))
def test_short_commands_have_one_level(page, command):
    assert page(command, "--help") == page(command, "--help-all")
    assert "--help-all" not in page(command, "--help")


@pytest.mark.parametrize("command", COMMANDS)
def test_full_help_shows_every_option_once(page, command):
    app = build_app()
    collection = app[command].assemble_argument_collection(default_parameter=app.default_parameter)
    names = [argument.names[0] for argument in collection if argument.show and argument.index is None]
    text = page(command, "--help-all")
    assert sorted(options(text)) == sorted(names)
    for argument in collection:
        if argument.index is not None:
            assert argument.names[0] in text


def test_options_of_training_stand_under_their_headings(page):
    text = page("train", "--help-all")
    groups = (
        DataOptions,
        ModelOptions,
        TrainingOptions,
        LanguageOptions,
        Seq2SeqOptions,
        Match3Options,
        DocumentOptions,
    )
    names = {f"--{field.name.replace('_', '-')}" for group in groups for field in fields(group)}
    assert names <= set(options(text))
    assert headings(text) == [
        "Arguments",
        "Run",
        "Data",
        "Pre-trained inputs",
        "Model",
        "Training",
        "Hardware",
        "Language models (--task lm)",
        "Encoder–decoders (--task seq2seq)",
        "Document models of others (--models han, hat, transformer-xl)",
        "Research: head fusion and entmax",
        "Research: three-way attention (--task match3)",
    ]
    hardware = text[text.index("╭─ Hardware") : text.index("╭─ Language models")]
    assert options(hardware) == ["--cpu", "--fsdp", "--mixed-precision"]
    assert "Language models (--task lm)" not in headings(page("compare", "--help-all"))


def test_headings_of_conversion(page):
    text = page("convert", "--help-all")
    assert headings(text) == ["Arguments", "Run", "Data", "Search (--budget)", "Converted layers", "Report"]
    names = {f"--{field.name.replace('_', '-')}" for group in (TextOptions, SettingOptions) for field in fields(group)}
    assert names <= set(options(text))


def test_defaults_are_printed_as_they_are_typed(page):
    text = " ".join(page("train", "--help-all", columns=300).split())
    assert "[default: hierarchical flat deepsets]" in text
    assert "--branching 4 4" in text
    for noise in ("[default: ()]", "[default: False]", "[default: None]", "('"):
        assert noise not in text


def test_the_task_on_the_command_line_selects_the_defaults(page):
    def epochs(*arguments):
        row = next(line for line in page("train", *arguments, "--help").splitlines() if "--epochs" in line)
        return int(re.search(r"default: (\d+)", row)[1])

    assert epochs() == epochs("--task", "classification") == TrainingOptions.epochs
    assert epochs("--task", "lm") == epochs("--task=lm") == 4
    assert "Defaults are those of --task lm with DATA." in page("train", "--task", "lm", "--help")
    rates = next(line for line in page("compare", "--help-all").splitlines() if "--learning-rate " in line)
    assert "default" not in rates  # --rates applies


def test_flags_can_be_negated(page, call):
    assert "--[no-]include-self " in page("train", "--help-all")
    assert "no-resume" not in page("train", "--help-all")
    code, _, err = call("train", "--no-include-self", "--no-quick", "--models", "nonesuch")
    assert code == 2
    assert "nonesuch" in err


def test_help_of_all_commands(page):
    text = page("--help")
    assert page("--help-all") == page("-h") == text
    assert re.findall(r"^│ ([a-z]+) ", text, re.MULTILINE) == list(COMMANDS)
    assert len(text.splitlines()) <= 40
