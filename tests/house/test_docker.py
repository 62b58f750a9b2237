"""The Dockerfile, as far as it can be checked without Docker."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import tomli
from environments import build, content, copy_project
from house import ROOT

from annotated_transformer.cli.arguments import parse_command_line
from annotated_transformer.cli.options import Serve
from tests.serving.servers import running

TEXT = (ROOT / "Dockerfile").read_text("utf-8")


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions with their arguments, in order."""
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined) if name]


def of(name: str) -> list[str]:
    """Return the arguments of all instructions with a name."""
    return [rest for each, rest in instructions(TEXT) if each == name]


def test_it_knows_its_instructions() -> None:
    known = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "USER", "ENV", "EXPOSE", "HEALTHCHECK",
             "ENTRYPOINT"}  # fmt: skip
    assert {name for name, _ in instructions(TEXT)} == known
    assert re.fullmatch(r"python:3\.\d+-slim", of("FROM")[0])


def test_the_user_is_not_root() -> None:
    names = [name for name, _ in instructions(TEXT)]
    (user,) = of("USER")
    assert int(user) > 0
    assert f"useradd --uid {user} " in of("RUN")[-1]
    assert "RUN" not in names[names.index("USER") :]


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    rules = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    rules = [rule for rule in rules if rule and not rule.startswith("#")]
    copied = [source for rest in of("COPY") for source in rest.split()[:-1]]
    for source in copied:
        assert (ROOT / source).exists()
        assert [rule[0] != "!" for rule in rules if fnmatch(source, rule.lstrip("!"))][-1] is False
    assert {rule[1:] for rule in rules if rule[0] == "!"} == set(copied)
    project = tomli.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needed = {project["readme"], *project["license-files"], "pyproject.toml"}
    assert needed <= set(copied)
    (extras,) = re.findall(r'"\.\[(.*?)\]"', of("RUN")[0])
    assert set(extras.split(",")) <= set(project["optional-dependencies"])


def test_what_is_copied_builds_the_whole_wheel(built: dict[str, Path], tmp_path: Path) -> None:
    project, image = copy_project(tmp_path / "project"), tmp_path / "image"
    image.mkdir()
    for *sources, target in map(str.split, of("COPY")):
        for source in sources:  # a folder's content goes to the target, a file into it
            if (project / source).is_dir():
                shutil.copytree(project / source, image / target)
            else:
                shutil.copy(project / source, image / target)
    found, whole = content(build(image, tmp_path)), content(built["build_wheel"])
    assert sorted(found) == sorted(whole)
    assert found == whole


def test_its_command_is_one_of_ours() -> None:
    program, *words = json.loads(of("ENTRYPOINT")[0])
    assert program == "annotated-transformer"
    command = parse_command_line([*words, "/system"])
    assert isinstance(command, Serve)
    assert [str(command.port)] == of("EXPOSE")
    assert command.host == "0.0.0.0"


def test_its_health_check_sees_whether_the_server_lives() -> None:
    words = json.loads(re.findall(r"CMD (.*)", of("HEALTHCHECK")[0])[0])
    assert shlex.join(words).startswith("python -c")
    with running() as server:
        program = words[2].replace(":8000/", f":{server.port}/")
        assert program != words[2]
        command = [sys.executable, "-c", program]
        assert subprocess.run(command, capture_output=True).returncode == 0
    assert subprocess.run(command, capture_output=True).returncode == 1
