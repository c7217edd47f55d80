"""Metadata and dependencies are in pyproject.toml."""

from setuptools import setup

setup()
