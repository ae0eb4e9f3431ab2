"""The launcher's documents on a host's ranks that stopped, and copying them to the run directory.

They are written where the spools are, because the hang monitor must not wait for storage, and copied with the spools.
"""

from __future__ import annotations

import json
import os
from typing import Any

from .layout import ASKED_FILE, ENDS_FILE, STALL_FILE, host_directory
from .owned import (
    encoded,
    folder,
    make_private_folder,
    private_folder,
    read_file,
    read_object,
    replace_file,
)

HOST_DOCUMENTS = (STALL_FILE, ENDS_FILE, ASKED_FILE)


def host_document(root: str, name: str) -> dict[str, Any]:
    """A document that another launcher of this host has written; empty if there is none, or it is not this user's
    own. Never raises."""
    try:
        with private_folder(root) as root_fd:
            return read_object(name, root_fd) or {}
    except OSError:
        return {}


def keep_host_document(root: str, name: str, document: dict[str, Any]) -> None:
    """Write ``document`` in place of the one of that ``name``, for the host that its ``host`` names. Raises OSError."""
    make_private_folder(root)
    with private_folder(root) as root_fd:
        replace_file(name, root_fd, encoded(document))


def copy_host_documents(root: str, run: str, known: dict[str, int] | None = None) -> None:
    """Copy the documents below ``root`` to the folders of their hosts. ``known`` remembers what earlier calls
    copied. Raises OSError."""
    with private_folder(root) as root_fd:
        for name in HOST_DOCUMENTS:
            try:
                changed_ns = os.stat(name, dir_fd=root_fd, follow_symlinks=False).st_mtime_ns
                if known is not None and known.get(name) == changed_ns:
                    continue
                data = read_file(name, root_fd)
                host = json.loads(data).get("host")
            except (FileNotFoundError, ValueError, AttributeError):
                continue
            host_folder = host_directory(run, str(host))
            os.makedirs(host_folder, exist_ok=True)
            with folder(host_folder) as handle:
                replace_file(name, handle, data, mode=0o666)
            if known is not None:
                known[name] = changed_ns
