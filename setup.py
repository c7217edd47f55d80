"""Metadata and dependencies are in pyproject.toml. The wheel has the examples as
``ctrl_megatron/examples``, from which ``ctrl-init`` copies them."""

from pathlib import Path

from setuptools import find_packages, setup

EXAMPLES = "ctrl_megatron.examples"
LEFT_OUT = (".svg", ".pyc")

files = [
    str(path.relative_to("examples"))
    for path in Path("examples").rglob("*")
    if path.is_file() and path.suffix not in LEFT_OUT and "transcripts" not in path.parts
]
setup(
    packages=[*find_packages(include=["ctrl_megatron*"]), EXAMPLES],
    package_dir={EXAMPLES: "examples"},
    package_data={
        EXAMPLES: files,
        "ctrl_megatron.generation": ["critic_page.html"],
        "ctrl_megatron.metrics.report": ["templates/*"],
        "ctrl_megatron.eval": ["templates/*"],
    },
)
