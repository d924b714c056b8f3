"""Pushes a folder to a model hub: every file of it and nothing else, in one commit.

The token comes from HF_TOKEN alone, not from what `hf auth login` has saved; the address from HF_ENDPOINT, if set.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage] - of httpx or httpx2, whichever this version uses
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import validate_repo_id

from stillhouse.protocol.printable import printable

HUB: Final = "hub:"
TOKEN: Final = "HF_TOKEN"
_SAID_CHARS: Final = 300


class HubError(ValueError):
    """The hub has not taken the model; the message says why."""


def check_name(repository: str) -> str:
    """The token. Raises HubError for a wrong name, and without a token."""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise HubError(f"--to {HUB}{repository}: expected {HUB}OWNER/NAME or {HUB}NAME: {error}") from error
    token = os.environ.get(TOKEN, "").strip()
    if not token:
        raise HubError(f"--to {HUB}{repository}: set {TOKEN} to a token of the hub that may write; none is set")
    return token


def push(folder: Path, repository: str) -> str:
    """Commit `folder` to the repository, which is made, private, if it is not there. Files of the repository that the
    folder does not have stay. Returns the commit's address. Raises HubError, OSError."""
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=check_name(repository))
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    operations = [CommitOperationAdd(path.relative_to(folder).as_posix(), path) for path in files]
    try:
        whole_name = api.create_repo(repository, private=True, exist_ok=True).repo_id
        return api.create_commit(
            whole_name, operations, commit_message="Exported by Stillhouse", num_threads=2
        ).commit_url
    except OfflineModeIsEnabled as error:
        raise HubError("HF_HUB_OFFLINE is set; unset it to push") from error
    except (HTTPError, RuntimeError) as error:  # RuntimeError: of an upload, with what happened as its cause
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ is not None else error
        if isinstance(cause, HfHubHTTPError):
            raise HubError(_refusal(cause, repository)) from error
        said = printable(f"{type(cause).__name__}: {cause}")[:_SAID_CHARS]
        raise HubError(f"{api.endpoint} cannot be reached, or broke off: {said}") from error


def _refusal(error: HfHubHTTPError, repository: str) -> str:
    """Without the addresses of uploads, which are signed."""
    status = error.response.status_code
    said = printable(error.server_message or "nothing more")[:_SAID_CHARS]
    if status in (401, 403):
        return f"the hub refused {TOKEN} for {repository} ({status}: {said}); expected a token that may write there"
    return f"the hub did not take {repository} ({status}: {said}); try again, or write a folder with --to FOLDER"
