"""What the README says can be done."""

import re
import shlex
from pathlib import Path

import pytest

from host.cli import _parser

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    (pocketdit .*?)(?:  +#.*)?$", README, re.MULTILINE)


def test_the_two_commands_do_all_set_up_and_ci_calls_the_second():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^    make ([\w-]+)", README, re.MULTILINE):
        assert re.search(rf"^{target}: setup", makefile, re.MULTILINE), target
    assert re.search(r"^make test$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_parses(command):
    _parser().parse_args(shlex.split(command)[1:])


def test_there_are_commands_for_every_step():
    assert {shlex.split(command)[1] for command in COMMANDS} >= {"doctor", "export", "train", "generate", "report"}


def test_the_tree_names_files_that_are_there():
    tree = README.split("## Where to read")[1].split("## ")[0]
    folder = ROOT
    for line in tree.splitlines():
        if not line.startswith("    "):
            continue
        names = re.findall(r"[\w./]+(?:\.py|/)(?=\s|$)", line[4:])
        for name in names:
            if not line.startswith("      "):
                folder = ROOT / name
            assert (folder if folder == ROOT / name else folder / name).exists(), name
    assert set(re.findall(r"\((host/[\w./]+)\)", README)) <= {str(p.relative_to(ROOT)) for p in ROOT.glob("host/**/*")}
