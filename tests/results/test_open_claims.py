"""What is not yet run has a command that exists."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
from scoreboard import load_claims

from annotated_transformer.cli.arguments import parse_command_line
from annotated_transformer.engine.config import UsageError

PARSING = Path(__file__).parents[2] / "book" / "results" / "parsing.md"


def test_the_parser_can_be_trained() -> None:
    (block,) = re.findall(r"```sh\n(.*?)```", PARSING.read_text(encoding="utf-8"), re.DOTALL)
    words = shlex.split(block.replace("\\\n", " "))
    assert words[0] == "annotated-transformer"
    parse_command_line(words[1:])
    with pytest.raises(UsageError, match="--no-such-option"):
        parse_command_line([*words[1:], "--no-such-option", "1"])


def refused(command: str) -> str:
    """Return why a command of the scoreboard cannot be run, or nothing."""
    for words in (shlex.split(part) for part in command.split("&&")):
        if words[:2] == ["python", "-m"]:
            if find_spec(words[2]) is None:
                return f"no module {words[2]}"
        elif words[0] != "annotated-transformer":
            return f"no command {words[0]}"
        else:
            try:
                parse_command_line(words[1:])
            except UsageError as error:
                return str(error)
    return ""


def test_every_command_of_the_scoreboard_exists() -> None:
    commands = [claim.command for claim in load_claims().values() if claim.command]
    assert commands
    assert [found for found in map(refused, commands) if found] == []
    assert "--corpus nowhere" in refused("annotated-transformer train --corpus nowhere")
    assert refused("python -m benchmarks.no_such") == "no module benchmarks.no_such"
