"""Traces at a URL that fsspec knows: s3://, gs://, hf://, http:// and so on; read as a stream, never stored."""

from __future__ import annotations

from typing import Any, BinaryIO, cast

from ddpdoctor.errors import UnusableInput

_BLOCK_BYTES = 4 << 20
"""Read ahead at a time, about fsspec's own default: a request to a store takes as long as some megabytes of its answer."""
_MOST_FILES = 100_000
"""Files below one folder: a trace for each rank of the largest job, and ten times more."""
_CONTENT_KEYS = ("ETag", "etag", "md5Hash", "content_md5", "blob_id")
"""Names under which fsspec's file systems pass on what identifies an object's content: S3 and HTTP, GCS, Azure,
Hugging Face."""


def shown(url: str) -> str:
    """``url`` without the passwords and tokens that it may hold, for notes and reports."""
    if not is_url(url):
        return url
    return _masked(url)


def _masked(text: str) -> str:
    # Its patterns take as long to compile as a small trace to read.
    from ddpdoctor.rundir.privacy import mask_text

    return mask_text(text)


def is_url(path: str) -> bool:
    """Whether ``path`` is a URL and not a local path."""
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme.replace("+", "").replace("-", "").isalnum() and len(scheme) > 1


def open_url(url: str, *, ahead: bool) -> BinaryIO:
    """The object at ``url``, for reading from front to back; unless ``ahead``, no more is fetched than is read. Raises ``OSError``
    or :class:`UnusableInput`."""
    filesystem, inside = _filesystem(url)
    try:
        cache_type = "readahead" if ahead else "none"
        return cast(BinaryIO, filesystem.open(inside, "rb", block_size=_BLOCK_BYTES, cache_type=cache_type))
    except (OSError, UnusableInput):
        raise
    except Exception as error:  # each file system has its own for "no such key", "no access", "no network"
        raise UnusableInput(f"{shown(url)} cannot be opened: {_first_line(error)}") from None


def content_tag(url: str) -> str | None:
    """What changes whenever the object at ``url`` does, as its store says: an entity tag or a checksum.

    None where it says nothing that strong, such as a time alone.
    """
    try:
        filesystem, inside = _filesystem(url)
        known = filesystem.info(inside)
    except Exception:  # reading the object will say what is wrong
        return None
    for key in _CONTENT_KEYS:
        value = known.get(key)
        if isinstance(value, str) and value and not value.startswith("W/"):
            return f"{url} {known.get('size')} {key} {value}"
    return None


def expand_url(url: str) -> list[str]:
    """The files that ``url`` stands for: itself, the matches of a pattern, or all files below a folder."""
    filesystem, inside = _filesystem(url)
    try:
        if any(c in inside for c in "*?["):
            names = filesystem.glob(inside)
        elif filesystem.isfile(inside):
            return [url]
        else:
            names = filesystem.find(inside)
            if not names:
                filesystem.info(inside)  # raises where the store cannot be reached, or has nothing there
    except Exception as error:
        raise UnusableInput(
            f"{shown(url)} cannot be opened: {_first_line(error.__cause__ or error)}."
        ) from None
    if len(names) > _MOST_FILES:
        raise UnusableInput(f"{shown(url)} holds {len(names)} files: name a folder with fewer of them.")
    # Whatever names a store lists: each becomes a URL of the same store.
    return sorted(filesystem.unstrip_protocol(name) for name in names)


def _filesystem(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        filesystem, inside = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UnusableInput(f"{shown(url)} cannot be read: {_first_line(error)}") from None
    return filesystem, inside


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return _masked(text[0]) if text else type(error).__name__
