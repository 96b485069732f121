"""README's commands and messages: what it tells its readers to type is run here, at a tiny size."""

import csv
import re
import shlex
import shutil
import sys
from pathlib import Path

import bench_data
import bench_optim
import inspect_data
import pytest
import train_tokenizer

from nanoT5 import config, fill, main

ROOT = Path(main.__file__).parent.parent
README = (ROOT / "README.md").read_text()
LINES = re.findall(r"^    (.*)$", README.replace("\\\n", " "), re.MULTILINE)
QUOTED = re.findall(r"`((?:python|torchrun) .*?)`", re.sub(r"```.*?```", "", README, flags=re.DOTALL), re.DOTALL)
COMMANDS = [shlex.split(command, comments=True) for line in [*LINES, *QUOTED] for command in line.split("&&")]
ELSEWHERE = {  # scripts, and what runs them
    "hump.py": "test_hump.py",
    "relora.py": "test_relora_study.py",
    "kill_runs.py": "test_resume.py",
    "plot.py": "test_plot.py",
    "bench.py": "test_bench.py",
}


def arguments(program: str) -> list[list[str]]:
    """What README gives to a program, each time."""
    return [words[words.index(program) + 1 :] for words in COMMANDS if program in words]


@pytest.fixture
def workplace(tmp_path, corpus, documents, monkeypatch) -> Path:
    """A folder with the files that README names."""
    (tmp_path / "corpus").mkdir()
    shutil.copy(corpus, tmp_path / "corpus")
    (tmp_path / "my_book.txt").write_text("\n\n".join(documents))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def own_data(overrides: list[str], tiny: list[str]) -> list[str]:
    """Those of `tiny` that leave the text as the overrides have it."""
    given = any(override.startswith("data=") for override in overrides)
    return [option for option in tiny if not (given and option.startswith(("data=", "data.path=")))]


@pytest.mark.parametrize("words", [words for words in arguments("nanoT5.main") if "..." not in words], ids=" ".join)
def test_a_command_of_the_trainer(words, tiny, workplace):
    """What reads from the Hub, mixtures and more runs than one: accepted here, run by tests of their own."""
    multirun = "-m" in words
    overrides = [word.split(",")[0] if multirun else word for word in words if word != "-m"]
    cfg, _ = config.load(overrides)
    config.check(cfg)
    if cfg.data.source in ("hub", "mixture"):
        return
    assert main.run([*overrides, *own_data(overrides, tiny), "dryrun=true", "hydra.run.dir=run"])["seconds"] > 0


def test_commands_of_the_scripts(tiny, workplace, monkeypatch, capsys):
    def run(command_line, *words):
        monkeypatch.setattr(sys, "argv", ["", *words])
        command_line()
        return capsys.readouterr().out

    for words in arguments("scripts/inspect_data.py"):
        assert "target" in run(inspect_data.command_line, *words, *own_data(words, tiny))
    for words in arguments("scripts/train_tokenizer.py"):
        run(train_tokenizer.command_line, *words, "--vocab-size=512")
        assert (workplace / words[0]).exists()
    main.run([*tiny, "hydra.run.dir=run"])
    for _, *words in arguments("nanoT5.fill"):
        assert "<extra_id_0>" in run(fill.command_line, "run", *words)
    for words in arguments("scripts/bench_optim.py"):
        monkeypatch.setattr(bench_optim, "ROUNDS", 1)
        monkeypatch.setattr(sys, "argv", ["", *words, *tiny])
        assert run(lambda: bench_optim.bench(sys.argv[1:]), *words, *tiny).count("x\n") == 4
    monkeypatch.setattr(bench_data, "ROUNDS", 1)
    monkeypatch.setattr(bench_data, "BATCHES", 2)
    monkeypatch.setattr(bench_data, "FILES", 128)
    monkeypatch.setattr(bench_data.os, "sched_setaffinity", lambda *_: None)
    for words in arguments("scripts/bench_data.py"):
        said = run(bench_data.command_line, *words, "--documents=20000", *tiny)
        assert "as in 2023" in said and "first batch of 128 files" in said and said.count("documents read") == 2


def test_every_script_of_the_readme_is_run_by_a_test():
    here = Path(__file__).read_text()
    named = {Path(word).name for words in COMMANDS for word in words if word.startswith("scripts/")}
    assert {"hump.py", "bench.py"} < named <= {path.name for path in (ROOT / "scripts").iterdir()}
    for name in named:
        test = ELSEWHERE.get(name)
        assert re.search(rf"\b{name[:-3]}\b", (ROOT / "tests" / test).read_text() if test else here), name


def test_messages_are_those_of_the_code():
    table = README.split("## When something goes wrong")[1].split("\n\n")[1]
    messages = re.findall(r"^\| `(.*?)` ", table, re.MULTILINE)
    source = "".join(path.read_text() for path in (ROOT / "nanoT5").glob("*.py"))
    assert len(messages) >= 5
    for fragment in (part.strip(" ?()") for message in messages for part in message.split("...")):
        assert fragment in source, fragment


def test_defaults_are_those_of_the_configuration():
    table = README.split("| key | default |")[1].split("\n\n")[0]
    defaults = config.flat(config.load([])[0]) | {"model": "nano", "data": "docstrings"}
    columns = [line.split(" | ") for line in table.splitlines()[2:] if "hydra" not in line]
    assert len(columns) >= 10
    for keys, values, _ in columns:
        for key, value in zip(re.findall(r"`(.*?)`", keys), re.findall(r"`(.*?)`", values), strict=True):
            assert str(defaults[key]).replace("None", "null") == value, key


def test_results_are_those_of_the_study():
    table = README.split("| optimizer, RMS scaling, initialization |")[1].split("\n\n")[0]
    cells = [re.findall(r"[^| ][^|]*[^| ]", line) for line in table.splitlines()[2:]]
    study = list(csv.DictReader((ROOT / "assets" / "hump" / "table.csv").open()))
    assert [(cell[0], cell[1], cell[3], cell[5]) for cell in cells] == [
        (row["cell"], row["rate"], row["escape"], row["held-out loss"]) for row in study
    ]
