"""The languages that a machine in a cloud runs, by shell commands in the program's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BUILD_SECONDS = 60.0
"""Limit of a compiler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptLanguage:
    """How the program of a file is built and run."""

    source: str
    """Name of the file."""
    run: str
    """Command that runs the program."""
    build: str = ""
    """Command that builds it before; empty where nothing is built."""

    @property
    def tools(self) -> str:
        """The programs that a machine must have, as words."""
        commands = (self.build, self.run) if self.build else (self.run,)
        first = (command.split()[0] for command in commands)
        return " ".join(name for name in first if not name.startswith("./"))


LANGUAGES: Mapping[str, ScriptLanguage] = {
    "python": ScriptLanguage(source="main.py", run="python3 main.py"),
    "cpp": ScriptLanguage(
        source="main.cpp", build="g++ -std=c++17 -O2 -o main main.cpp", run="./main"
    ),
    "java": ScriptLanguage(source="Main.java", build="javac Main.java", run="java -cp . Main"),
    "javascript": ScriptLanguage(source="main.js", run="node main.js"),
    "r": ScriptLanguage(source="main.R", run="Rscript main.R"),
    "bash": ScriptLanguage(source="main.sh", run="bash main.sh"),
}
"""Name in a request -> the language. A Java program's class is called Main."""


def compiler_complaint(said: str) -> str:
    """The line of a compiler's output that names the first error, or its last line."""
    lines = said.strip().splitlines() or ["the compiler said nothing"]
    return f"does not compile: {next((line for line in lines if 'error' in line), lines[-1])}"
