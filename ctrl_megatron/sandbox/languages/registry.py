"""The languages that this sandbox runs."""

from __future__ import annotations

from dataclasses import dataclass

from ctrl_megatron.sandbox.jail.native import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """One language. ``profile`` is None for Python, which the worker itself runs."""

    name: str
    aliases: frozenset[str]
    """Names in requests and behind code fences, in lower case."""
    source: str
    """File name of the program."""
    profile: Profile | None = None
    command: tuple[str, ...] = ()
    """What starts the program; its arguments follow."""
    compiled: bool = False


PYTHON = Language(name="python", aliases=frozenset({"python", "py", "python3"}), source="main.py")
CPP = Language(
    name="cpp",
    aliases=frozenset({"cpp", "c++", "cc", "cxx"}),
    source="main.cpp",
    profile="binary",
    command=("./main",),
    compiled=True,
)
BASH = Language(
    name="bash",
    aliases=frozenset({"bash", "sh", "shell"}),
    source="main.sh",
    profile="shell",
    command=("bash", "main.sh"),
)
LANGUAGES = (PYTHON, CPP, BASH)


def language_named(name: str | None) -> Language:
    """The language of a request's ``language``.

    Raises ``ValueError`` for one that is not run here.
    """
    for language in LANGUAGES:
        if name is not None and name.lower() in language.aliases:
            return language
    known = ", ".join(language.name for language in LANGUAGES)
    if not name:
        raise ValueError(f"language is missing; this sandbox runs {known}")
    raise ValueError(
        f"language {name!r} is not supported; this sandbox runs {known}. For others point "
        "sandbox.endpoint at an external SandboxFusion service"
    )


def require_isolation(language: Language, tier: str) -> None:
    """Raise ``ValueError`` where programs of ``language`` cannot be confined.

    Compilers and shells start processes, which only a pid namespace holds together; without any
    isolation (tier ``limits``) nothing is promised for Python either.
    """
    if language.profile is not None and tier == "landlock":
        raise ValueError(
            f"language {language.name!r} needs namespaces, which this kernel does not give "
            "(tier landlock); enable unprivileged user namespaces or use python"
        )
