"""Models of the Hugging Face Hub in place of directories, ``owner/name`` or
``owner/name@revision``, and the upload of an export.

A model is downloaded once, into the cache of huggingface_hub; with HF_HUB_OFFLINE=1 it has to be
there. What exists in the file system is never looked up on the Hub.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ctrl_megatron.config import Config, Purpose
from ctrl_megatron.config.checks import model_directories
from ctrl_megatron.config.environment import read_launch
from ctrl_megatron.config.load import recorded_value
from ctrl_megatron.config.secrets import hide_credentials_in_text
from ctrl_megatron.errors import UserError

MODEL = "directory of a Hugging Face model, or its id on the Hub, owner/name[@revision]"
"""The help of a flag that names a model."""
SHAPE_FILES = ("config.json",)
_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*")
"""Weights, configurations, chat templates and tokenizers; neither pickles nor programs."""
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?")
_REPO = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_FOLDERS = ("models", "runs")
"""Folders of the examples, which a fresh checkout lacks; no owners."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_hub_id(text: str) -> bool:
    """Whether ``text`` has the form of a model's id on the Hub and of no path here: ``mine/sft``
    is a path where there is a folder ``mine``, so that no mistyped path names a stranger's model.
    """
    folder = text.partition("/")[0]
    return bool(_ID.fullmatch(text)) and folder not in _FOLDERS and not os.path.lexists(folder)


def hub_directory(text: str, key: str) -> str:
    """The directory of the model ``text``, which is downloaded if it is an id on the Hub; any other
    text as it is. UserError that names ``key`` if it cannot be downloaded.
    """
    return _downloaded(text, key, _FILES)[0] if is_hub_id(text) else text


def with_hub_models(config: Config, purpose: Purpose, files: Sequence[str] = _FILES) -> Config:
    """The configuration with directories in place of ids on the Hub, of which the ``files`` are
    downloaded. ``to_yaml`` writes the ids with their commits, and an id without a revision has the
    commit that the run's ``config.yaml`` names, unless the run starts over.

    UserError that names the key if a model cannot be downloaded.
    """
    found: dict[str, tuple[str, str]] = {}
    for key, text in model_directories(config, purpose).items():
        if not is_hub_id(text):
            continue
        if text not in found:
            found[text] = _downloaded(_recorded(config, key, text), key, files)
        directory, pinned = found[text]
        group, *below = key.split(".")
        config = config.replace_groups(**{group: _with(getattr(config, group), below, directory)})
        written = {**config.unresolved, key: (directory, pinned)}
        object.__setattr__(config, "unresolved", written)
    return config


def require_push_access(repo: str) -> None:
    """UserError if this machine has no token of the Hub, or ``repo`` is no name there."""
    from huggingface_hub import constants, get_token

    if not _REPO.fullmatch(repo):
        raise UserError(f"{repo!r} is no repository", key="--push", remedy="write OWNER/NAME")
    if constants.HF_HUB_OFFLINE:
        raise UserError("HF_HUB_OFFLINE is set", key="--push", remedy="unset it")
    if get_token() is None:
        raise UserError(
            "there is no token of the Hugging Face Hub",
            key="--push",
            remedy="run `hf auth login`, or set HF_TOKEN to a token that may write",
        )


def push_model(directory: Path, repo: str, card: str, *, private: bool) -> str:
    """Upload an export with its model card as README.md; returns the address. A repository that
    does not exist is made: private, or as the owner's settings have it, for users public. Weights
    that the repository has under other names are removed.

    UserError if the Hub refuses, and for a public repository that has to be ``private``.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        made = api.create_repo(repo, private=True if private else None, exist_ok=True)
        if private and not api.repo_info(made.repo_id).private:
            raise UserError(
                f"{made} is there and public",
                key="--private",
                remedy="name another repository, or make it private on its page",
            )
        api.upload_folder(
            repo_id=made.repo_id,
            folder_path=directory,
            delete_patterns=list(_WEIGHTS),
            commit_message="Upload the weights",
        )
        api.upload_file(
            path_or_fileobj=card.encode(),
            path_in_repo="README.md",
            repo_id=made.repo_id,
            commit_message="Upload the model card",
        )
    except UserError:
        raise
    except Exception as error:  # of the network or the server
        raise UserError(
            f"{directory} was written but not uploaded to {repo}: {_first_line(error)}",
            key="--push",
            remedy=f"try `hf upload {repo} {directory}`",
        ) from error
    return str(made)


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line]
    return hide_credentials_in_text(lines[0] if lines else type(error).__name__)


def pinned_models(config: Config) -> list[str]:
    """``key=owner/name@commit`` for every id in whose place ``with_hub_models`` put a directory."""
    return [f"{key}={text}" for key, (_, text) in config.unresolved.items() if _ID.fullmatch(text)]


def _with(part: Any, names: Sequence[str], value: str) -> Any:
    first, *below = names
    return replace(part, **{first: _with(getattr(part, first), below, value) if below else value})


def _recorded(config: Config, key: str, text: str) -> str:
    """``text`` with the commit of the run's last start, where that has the same id."""
    file = Path(config.trainer.run_dir) / "config.yaml"
    if "@" in text or config.trainer.resume_mode == "disable" or not file.is_file():
        return text
    found = recorded_value(file, key)
    return found if isinstance(found, str) and found.startswith(f"{text}@") else text


def _downloaded(text: str, key: str, files: Sequence[str]) -> tuple[str, str]:
    """The directory of the model with this id, and the id with its commit."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    launch, (name, _, revision) = read_launch(), text.partition("@")
    if launch.world_size > 1:
        disable_progress_bars()
    try:
        directory = snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=list(files),
            ignore_patterns=["*/*.safetensors", "*/*.json"],  # the same weights for others
        )
    except Exception as error:  # of the network, the server, the cache's disk
        reason = "HF_HUB_OFFLINE is set, and it was not downloaded before"
        reason = reason if constants.HF_HUB_OFFLINE else _first_line(error)
        unset = "unset HF_HUB_OFFLINE, or " if constants.HF_HUB_OFFLINE else ""
        chosen = f" --revision {revision}" if revision else ""
        raise UserError(
            f"{text} is no directory and looks like the id of a model on the Hugging Face Hub, "
            f"which cannot be downloaded: {reason}",
            key=key,
            remedy=f"{unset}name the directory DIR that `hf download {name}{chosen} --local-dir "
            "DIR` writes where there is a network",
        ) from error
    pinned = f"{name}@{Path(directory).name}"
    if launch.world_size > 1 and not _COMMIT.fullmatch(revision):
        raise UserError(
            f"each of the {launch.world_size} ranks would look up the commit of {text} itself",
            key=key,
            remedy=f"name the commit, {pinned}, or start the ranks with --nproc-per-node",
        )
    return directory, pinned
