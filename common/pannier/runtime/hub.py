"""Models on a hub: downloaded once into the hub library's own cache, by repository and revision."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from pannier.runtime.errors import ModelError

REPOSITORY = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?$")
TEXT_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
WEIGHT_FILES = ["*.safetensors"]


@dataclass(frozen=True)
class Snapshot:
    """One commit of a repository, as a folder."""

    repository: str
    commit: str
    path: Path

    @property
    def digest(self) -> str:
        """The same wherever the same commit is used."""
        return hashlib.sha256(f"{self.repository}@{self.commit}".encode()).hexdigest()


def names_repository(specification: str) -> bool:
    """Whether it may be `OWNER/NAME` or `OWNER/NAME@REVISION`, rather than a folder."""
    return REPOSITORY.fullmatch(specification) is not None


def fetch(specification: str, *, weights: bool) -> Snapshot:
    """Make sure that a repository's files are here, those with weights only if they are wanted.

    Where the hub is, whether it may be asked, and with which token, its library's variables say: HF_ENDPOINT,
    HF_HUB_OFFLINE, HF_TOKEN, HF_HOME. Raises `ModelError`.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repository, _, revision = specification.partition("@")
    wanted = [*TEXT_FILES, *(WEIGHT_FILES if weights else [])]
    try:
        folder = snapshot_download(repository, revision=revision or None, allow_patterns=wanted)
    except GatedRepoError as error:
        reason = "it is gated: accept its terms on the hub, and set HF_TOKEN to a token of yours"
        raise _lacking(specification, reason) from error
    except RepositoryNotFoundError as error:
        raise _lacking(specification, "the hub has no such repository, or HF_TOKEN may not read it") from error
    except RevisionNotFoundError as error:
        raise _lacking(specification, f"the repository has no revision {revision!r}") from error
    except LocalEntryNotFoundError as error:
        reason = "the hub can't be reached (or HF_HUB_OFFLINE forbids it), and it was not downloaded before"
        raise _lacking(specification, reason) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise _lacking(specification, " ".join(str(error).split())[:300]) from error
    return Snapshot(repository, Path(folder).name, Path(folder))


def _lacking(specification: str, reason: str) -> ModelError:
    return ModelError(f"the model {specification!r}, which is no folder here, can't be had from the hub: {reason}")
