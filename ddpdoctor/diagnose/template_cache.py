"""Disk cache of compiled Jinja2 templates. To compile the texts of two findings takes an eighth of a small analysis, and those of the HTML
report a quarter of the analysis with the report.

Entries contain Python bytecode, like ``__pycache__``. They are in the user's cache folder, which is used only if no other user can write
to it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import jinja2

import ddpdoctor
from ddpdoctor.diagnose.rule_cache import CachedResult

_MAX_ENTRIES = 2048
"""Some 3 kB each. The package has 500 templates."""


class TemplateCache(jinja2.BytecodeCache):
    """The cache of one environment. Its compiler evaluates filters of constants, so entries depend on the code that :mod:`.rule_cache`
    names and on ``code_files``, paths in the package."""

    def __init__(self, *code_files: str) -> None:
        package = Path(ddpdoctor.__file__).parent
        self._code: dict[str, bytes] = {}
        with contextlib.suppress(OSError):  # installed without files, then there are no entries either
            self._code = {name: (package / name).read_bytes() for name in code_files}

    def load_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        """See :class:`jinja2.BytecodeCache`."""
        data = self._entry(bucket).read()
        if data is not None:
            bucket.bytecode_from_string(data)

    def dump_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        """See :class:`jinja2.BytecodeCache`."""
        self._entry(bucket).write(bucket.bytecode_to_string())

    def _entry(self, bucket: jinja2.bccache.Bucket) -> CachedResult[bytes]:
        contents = {**self._code, bucket.key: bucket.checksum.encode()}
        return CachedResult(bytes, contents, "templates", _MAX_ENTRIES)


def compiled(environment: jinja2.Environment, source: str) -> jinja2.Template:
    """The template with this source, from the cache of ``environment``. Raises jinja2.TemplateError."""
    # Its name is not the source, because Jinja writes the name into the code without escaping it. The environment has no loader, so the
    # template can include no other one.
    loader = jinja2.FunctionLoader(lambda _: source)
    return loader.load(environment, "rule text", environment.make_globals(None))
