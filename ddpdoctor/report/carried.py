"""The diagnosis that an HTML report carries, as JSON."""

from __future__ import annotations

import re

from ddpdoctor.errors import UnusableInput
from ddpdoctor.report.read import GENERATOR, SCRIPT_ID

# Of a page of ours only these two places matter, and neither can stand in a text: there, "<" is escaped. A parser of HTML takes
# time that grows with the square of a page that somebody made for it.
_BEGIN = re.compile(rb'<script\s[^<>]{0,200}?\bid="%b"[^<>]{0,200}>' % SCRIPT_ID.encode())
_END = b"</script"
_REPORT = re.compile(rb'<meta\s[^<>]{0,200}?\bname="generator"\s{1,9}content="%b[ "]' % GENERATOR.encode())


def carried_in(data: bytes, name: str) -> bytes:
    """The JSON in the page ``data``, the content of ``name``. Raises UnusableInput where there is none."""
    begin = _BEGIN.search(data)
    end = -1 if begin is None else data.find(_END, begin.end())
    if begin is not None and end >= 0:
        return data[begin.end() : end].strip()
    if begin is not None or _REPORT.search(data):
        raise UnusableInput(f"{name}: the report is cut off half way; write or copy it again")
    raise UnusableInput(f"{name}: an HTML page, but not a ddpdoctor report (it carries no diagnosis)")
